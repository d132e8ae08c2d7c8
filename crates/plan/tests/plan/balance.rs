//! Tests how even the writing is, against a bound that no plan can beat.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Region};
use shardfast_plan::{Write, save, tiles};

const BLOCK: u64 = 64 << 10;

/// A tensor of `rows` rows of `row` bytes on the ranks of a bit mask, under a key of its own kind.
#[derive(Debug, Clone)]
struct Tensor {
    rows: u64,
    row: u64,
    mask: u32,
    /// `true` for the lower half of a tensor of which each rank alone holds the upper half's single row.
    whole: bool,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        self.rows * self.row
    }

    fn shape(&self) -> [u64; 2] {
        [self.rows + u64::from(!self.whole), self.row]
    }

    fn leaf(&self, index: usize, rank: u32) -> Leaf {
        let mut parts = vec![Region::new(&[0, 0], &[self.rows, self.row])];
        if !self.whole && rank == self.mask.trailing_zeros() {
            parts.push(Region::new(&[self.rows, 0], &[1, self.row]));
        }
        let body = LeafBody::Tensor { dtype: DType::U8, shape: self.shape().as_slice().into(), parts };
        let key = if self.whole { "model" } else { "optimizer" };
        Leaf { name: LeafName::new(key, format!("t{index}")), body, layout: String::new() }
    }
}

fn job() -> impl Strategy<Value = (u32, Vec<Tensor>)> {
    let tensor = |world: u32| {
        ((0..22u32, 1..100u64), 0..10u32, 0..1u32 << world, any::<bool>()).prop_map(
            |((scale, rows), row, mask, whole)| Tensor {
                rows: (rows << scale) / 16 + 1,
                row: 1 << row,
                mask: mask.max(1),
                whole,
            },
        )
    };
    // Few sets of holders, as in real jobs, or one for each tensor.
    (1..9u32).prop_flat_map(move |world| {
        let masks = vec(0..1u32 << world, 1..4);
        (Just(world), vec(tensor(world), 1..24), masks, any::<bool>()).prop_map(|(world, mut tensors, masks, few)| {
            for (tensor, mask) in tensors.iter_mut().zip(masks.iter().cycle()).filter(|_| few) {
                tensor.mask = (*mask).max(1);
            }
            (world, tensors)
        })
    })
}

fn catalogs(world: u32, tensors: &[Tensor]) -> Vec<Catalog> {
    let leaves = |rank: u32| {
        let held = tensors.iter().enumerate().filter(move |(_, tensor)| tensor.mask >> rank & 1 == 1);
        held.map(|(i, tensor)| tensor.leaf(i, rank)).collect()
    };
    (0..world).map(|rank| Catalog { leaves: leaves(rank) }).collect()
}

fn region(catalog: &Catalog, write: &Write) -> Region {
    match &catalog.leaves[write.leaf as usize].body {
        LeafBody::Tensor { parts, .. } => write.region(&parts[write.part as usize]).unwrap(),
        body => panic!("{body:?}"),
    }
}

fn heaviest(catalogs: &[Catalog], plan: &[Vec<Write>]) -> u64 {
    let load = |rank: usize| plan[rank].iter().map(|write| region(&catalogs[rank], write).numel()).sum::<u64>();
    (0..catalogs.len()).map(load).max().unwrap()
}

/// Returns the bytes that each rank writes alone, and the shared ones as (bytes, mask).
fn pieces(tensors: &[Tensor]) -> Vec<(u64, u32)> {
    let lone = |tensor: &Tensor| (!tensor.whole).then(|| (tensor.row, 1 << tensor.mask.trailing_zeros()));
    tensors.iter().flat_map(|tensor| [Some((tensor.bytes(), tensor.mask)), lone(tensor)]).flatten().collect()
}

/// Returns the lowest highest load of any sharing, however fine: ranks together have at least the bytes that only they
/// hold.
fn least(world: u32, tensors: &[Tensor]) -> u64 {
    let within =
        |set: u32| -> u64 { pieces(tensors).iter().filter(|(_, mask)| mask & !set == 0).map(|(n, _)| n).sum() };
    (1..1u32 << world).map(|set| within(set).div_ceil(u64::from(set.count_ones()))).max().unwrap()
}

/// Computes Worst-Fit decreasing directly.
fn worst_fit(world: u32, tensors: &[Tensor]) -> u64 {
    let mut loads = vec![0u64; world as usize];
    let (lone, mut shared): (Vec<_>, Vec<_>) =
        pieces(tensors).into_iter().partition(|(_, mask)| mask.count_ones() == 1);
    lone.iter().for_each(|(bytes, mask)| loads[mask.trailing_zeros() as usize] += bytes);
    // Of equal size, the order of the plan: by key and name, the first part first.
    shared.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    for (bytes, mask) in shared {
        let holders = (0..world as usize).filter(|rank| mask >> rank & 1 == 1);
        let rank = holders.min_by_key(|&rank| loads[rank]).unwrap();
        loads[rank] += bytes;
    }
    loads.into_iter().max().unwrap()
}

/// Returns the most bytes of small parts that stay together: a block, or all below one name, of one key and one set of
/// holders. The names here have no dots, so all of a key are below one.
fn together(tensors: &[Tensor]) -> u64 {
    let mut below: BTreeMap<(bool, u32), u64> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.bytes() <= BLOCK / 4 && tensor.mask.count_ones() > 1) {
        *below.entry((tensor.whole, tensor.mask)).or_default() += tensor.bytes();
    }
    below.into_values().fold(BLOCK, u64::max)
}

/// Checks that the plan of these tensors writes everything once and as evenly as promised.
fn check(world: u32, tensors: &[Tensor]) -> Result<(), TestCaseError> {
    let catalogs = catalogs(world, tensors);
    let plan = save(&catalogs).unwrap();
    prop_assert_eq!(&plan, &save(&catalogs).unwrap());

    let mut written: BTreeMap<&LeafName, Vec<Region>> = BTreeMap::new();
    let mut cuts = 0;
    for (catalog, writes) in catalogs.iter().zip(&plan) {
        for write in writes {
            let name = &catalog.leaves[write.leaf as usize].name;
            written.entry(name).or_default().push(region(catalog, write));
            cuts += usize::from(write.rows.is_some());
        }
    }
    for leaf in catalogs.iter().flat_map(|catalog| &catalog.leaves) {
        let LeafBody::Tensor { shape, .. } = &leaf.body else { continue };
        prop_assert_eq!(tiles(shape, &written[&leaf.name]), Ok(()));
    }

    let found = heaviest(&catalogs, &plan);
    let (least, uncut) = (least(world, tensors), worst_fit(world, tensors));
    let row = tensors.iter().map(|tensor| tensor.row).max().unwrap();
    let together = together(tensors);
    let near = least + (least / 50).max(together) + row;
    prop_assert!(found >= least && found <= uncut + together, "{found} where {least} can be had, and {uncut} uncut");
    prop_assert!(found <= near, "{found} where {least} can be had, and {uncut} uncut");
    if uncut <= least + (least / 50).max(BLOCK) {
        prop_assert_eq!(cuts, 0);
    }
    prop_assert!(cuts <= 2 * tensors.len() + world as usize * 4, "{cuts} pieces");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_heaviest_rank_is_as_light_as_replicas_allow((world, mut tensors) in job()) {
        tensors.sort_by_key(|tensor| !tensor.whole);
        check(world, &tensors)?;
    }
}

/// Tests large shared tensors, some of whose ranks also share a small one, which is not cut. The planner once gave the
/// small one to a rank whose tolerance the large ones had used up.
#[test]
fn a_small_tensor_does_not_come_on_top_of_the_tolerance() {
    let tensor = |rows, row, mask, whole| Tensor { rows, row, mask, whole };
    // A case of the random test. The tolerance is a block, and the heaviest rank was 5,955 bytes above it.
    check(7, &[tensor(40_961, 8, 0b101_1101, true), tensor(11_137, 1, 0b101_0100, false)]).unwrap();
    // The tolerance is 2 %, and the heaviest rank was 1,912 bytes above it.
    let rows = [(1_273_750, 0b0011), (1_226_250, 0b0011), (2_500_000, 0b1100), (2000, 0b0101)];
    check(4, &rows.map(|(rows, mask)| tensor(rows, 8, mask, true))).unwrap();
}

/// Tests that any sharing is even if every rank holds everything: the DDP of a large model, and of a larger job.
#[test]
fn replicas_on_every_rank_are_cut_little_and_level() {
    let tensors: Vec<Tensor> = (0..1024u64)
        .map(|i| Tensor { rows: 64 + i * 7 % 4096, row: 4096 << (i % 3), mask: u32::MAX, whole: i % 2 == 0 })
        .collect();
    const WORLD: u32 = 1024;
    let catalogs: Vec<Catalog> = (0..WORLD)
        .map(|rank| {
            let leaf = |(i, tensor): (usize, &Tensor)| tensor.leaf(i, rank);
            Catalog { leaves: tensors.iter().enumerate().map(leaf).collect() }
        })
        .collect();
    let plan = save(&catalogs).unwrap();
    let total: u64 = tensors.iter().map(|tensor| tensor.shape()[0] * tensor.row).sum();
    let mean = total / u64::from(WORLD);
    let found = heaviest(&catalogs, &plan);
    assert!(found <= mean + mean / 50 + 16384, "{found} of {mean}");
    let pieces = plan.iter().flatten().filter(|write| write.rows.is_some()).count();
    assert!(pieces <= 2 * WORLD as usize, "{pieces} pieces");
}

/// Tests data parallel replicas of a model and its optimizer: the weights stay whole, so that other programs can open
/// them.
#[test]
fn weights_stay_whole_while_optimizer_states_can_be_cut() {
    let leaf = |key: &str, name: &str, rows: u64| {
        let shape = [rows, 4096];
        let body =
            LeafBody::Tensor { dtype: DType::U8, shape: shape.as_slice().into(), parts: vec![Region::whole(&shape)] };
        Leaf { name: LeafName::new(key, name), body, layout: String::new() }
    };
    let sizes = [("embedding", 40_000), ("layer", 7000), ("norm", 1)];
    // By the name of the key, the embedding would be the one to be cut.
    let weights = sizes.map(|(name, rows)| leaf("weights", name, rows));
    let moments = sizes.iter().flat_map(|(name, rows)| {
        ["exp_avg", "exp_avg_sq"].map(|moment| leaf("optimizer", &format!("{name}.{moment}"), *rows))
    });
    let catalog = Catalog { leaves: moments.chain(weights).collect() };
    let plan = |world: usize| {
        let catalogs = vec![catalog.clone(); world];
        let plan = save(&catalogs).unwrap();
        let cut = plan.iter().flatten().filter(|write| write.rows.is_some());
        let mut keys: Vec<&str> = cut.map(|write| catalog.leaves[write.leaf as usize].name.key.as_str()).collect();
        keys.sort_unstable();
        keys.dedup();
        (heaviest(&catalogs, &plan), keys.join(" "))
    };
    let total = 3 * 47_001 * 4096;
    assert_eq!(plan(1), (total, String::new()));
    let (heaviest, cut) = plan(2);
    assert!(heaviest <= total / 2 + total / 100 && cut == "optimizer", "{heaviest} of {total}: {cut}");
    // The embedding alone is more than a rank's share.
    let (heaviest, cut) = plan(8);
    assert!(heaviest <= total / 8 + total / 400 && cut == "optimizer weights", "{heaviest} of {total}: {cut}");
}
