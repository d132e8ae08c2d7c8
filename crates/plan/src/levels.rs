//! Computes the most even loads if the shared bytes were arbitrarily divisible.

/// A sharing of classes of bytes among their holders, whose highest load is nearly the lowest possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Levels {
    /// Quota of each member, per class, in bytes.
    pub(crate) quotas: Vec<Vec<u64>>,
    /// Sum of all quotas, per rank, in bytes.
    pub(crate) loads: Vec<u64>,
    /// Lower bound of the highest load of any sharing.
    pub(crate) least: u64,
}

/// Maximum number of sweeps over all classes.
const SWEEPS_MAX: usize = 200;

/// Maximum work, in members of classes.
const STEPS_MAX: usize = 1 << 25;

/// Gap to the lower bound that ends the search: 1/400 of it.
const GAP: u64 = 400;

/// Computes the levels of classes of `amounts` bytes, each of which all of its members hold. The sum may be at most
/// 2^62.
///
/// Each class in turn is divided among its members to one level, on top of their loads of other classes, until the
/// loads converge. The smallest sets come first: if sets of holders are nested or disjoint, as those of a mesh mostly
/// are, one sweep is enough. In general the sweeps are a coordinate descent on the sum of squared loads, whose minimum
/// also has the lowest highest load.
pub(crate) fn levels(world: usize, classes: &[Vec<u32>], amounts: &[u64]) -> Levels {
    let mut levels = Levels {
        quotas: classes.iter().map(|members| vec![0; members.len()]).collect(),
        loads: vec![0; world],
        least: 0,
    };
    let mut order: Vec<usize> = (0..classes.len()).collect();
    order.sort_by_key(|&class| classes[class].len());
    let members: usize = classes.iter().map(Vec::len).sum();
    let sweeps = SWEEPS_MAX.min(STEPS_MAX / members.max(1)).max(1);
    for _ in 0..sweeps {
        for &class in &order {
            distribute(&mut levels.loads, &mut levels.quotas[class], &classes[class], amounts[class]);
        }
        levels.least = levels.least.max(provable(&levels.loads, classes, amounts));
        let highest = levels.loads.iter().copied().max().unwrap_or(0);
        if highest - levels.least.min(highest) <= levels.least / GAP {
            break;
        }
    }
    levels
}

/// Takes a class's quotas back and divides the class again, to one level over the loads of its members.
fn distribute(loads: &mut [u64], quotas: &mut [u64], members: &[u32], amount: u64) {
    for (&rank, quota) in members.iter().zip(&mut *quotas) {
        loads[rank as usize] -= std::mem::take(quota);
    }
    let mut order: Vec<(u64, usize)> = members.iter().map(|&rank| loads[rank as usize]).zip(0..).collect();
    order.sort_unstable();
    // The lowest `wet` members get a share: those whose load is below the level that the amount raises them to.
    let (mut wet, mut below) = (0, 0u128);
    while let Some(&(load, _)) = order.get(wet)
        && u128::from(load) * (wet as u128) < below + u128::from(amount)
    {
        below += u128::from(load);
        wet += 1;
    }
    if wet == 0 {
        return;
    }
    let sum = below + u128::from(amount);
    let (level, over) = ((sum / wet as u128) as u64, (sum % wet as u128) as usize);
    for (i, &(load, member)) in order[..wet].iter().enumerate() {
        quotas[member] = (level + u64::from(i < over)).saturating_sub(load);
        loads[members[member] as usize] = load + quotas[member];
    }
}

/// Returns a lower bound of the highest load: the ranks with high loads together have at least the bytes that only they
/// hold. The loads show which ranks to take together: at the best levels, no rank below holds the bytes that make the
/// highest loads.
fn provable(loads: &[u64], classes: &[Vec<u32>], amounts: &[u64]) -> u64 {
    let mut confined: Vec<(u64, u64)> = classes
        .iter()
        .zip(amounts)
        .filter_map(|(members, &amount)| Some((members.iter().map(|&rank| loads[rank as usize]).min()?, amount)))
        .collect();
    confined.sort_unstable_by(|a, b| b.cmp(a));
    let mut sorted = loads.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let (mut least, mut held, mut next) = (0, 0u128, 0);
    for (i, &load) in sorted.iter().enumerate() {
        if sorted.get(i + 1) == Some(&load) {
            continue;
        }
        while next < confined.len() && confined[next].0 >= load {
            held += u128::from(confined[next].1);
            next += 1;
        }
        least = least.max(held.div_ceil(i as u128 + 1) as u64);
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_and_separate_sets_level_out_at_once() {
        let classes = [vec![0, 1, 2, 3], vec![0, 1], vec![0], vec![2, 3]];
        let found = levels(4, &classes, &[100, 10, 30, 200]);
        assert_eq!(found.loads, [70, 70, 100, 100]);
        assert_eq!((found.quotas[2].clone(), found.quotas[3].clone(), found.least), (vec![30], vec![100, 100], 100));
        assert_eq!(
            found.quotas.iter().map(|quotas| quotas.iter().sum::<u64>()).collect::<Vec<_>>(),
            [100, 10, 30, 200]
        );
    }

    #[test]
    fn sets_that_cross_level_out_too() {
        // After one sweep: 500, 750, 750.
        let found = levels(3, &[vec![0, 1], vec![1, 2]], &[1000, 1000]);
        assert!(found.loads.iter().all(|load| (660..=670).contains(load)), "{found:?}");
        assert!((664..=667).contains(&found.least), "{found:?}");
        // What two of them hold cannot be given to ranks that do not hold it.
        let found = levels(5, &[vec![0, 1], vec![1, 2], vec![2, 3], vec![4]], &[4000, 0, 9, 7]);
        assert_eq!((found.loads, found.least), (vec![2000, 2000, 5, 4, 7], 2000));
    }

    #[test]
    fn a_remainder_goes_to_the_first() {
        let found = levels(3, &[vec![0, 1, 2]], &[11]);
        assert_eq!((found.loads, found.least), (vec![4, 4, 3], 4));
        assert_eq!(levels(2, &[vec![0, 1]], &[0]).loads, [0, 0]);
        assert_eq!(levels(0, &[], &[]), Levels { quotas: vec![], loads: vec![], least: 0 });
    }
}
