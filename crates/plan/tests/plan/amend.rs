//! Tests plans around writes that have begun.

use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Region};
use shardfast_plan::{Error, Rows, Write, amend, save};

fn catalog(tensors: &[(&str, u64, u64)]) -> Catalog {
    let leaf = |&(name, first, count): &(&str, u64, u64)| Leaf {
        name: LeafName::new("model", name),
        body: LeafBody::Tensor {
            dtype: DType::F32,
            shape: [8, 2][..].into(),
            parts: vec![Region::new(&[first, 0], &[count, 2])],
        },
        layout: String::new(),
    };
    Catalog { leaves: tensors.iter().map(leaf).collect() }
}

fn rows(leaf: u32, first: u64, count: u64) -> Write {
    Write { leaf, part: 0, rows: Some(Rows { first, count }) }
}

fn problems(catalogs: &[Catalog], drafted: &[Option<Vec<Write>>]) -> Vec<String> {
    match amend(catalogs, drafted).unwrap_err() {
        Error::Invalid(problems) => problems.0,
        error => panic!("{error:?}"),
    }
}

#[test]
fn what_is_begun_stands_and_the_free_take_the_rest() {
    let old = catalog(&[("a", 0, 8), ("b", 0, 8)]);
    let new = catalog(&[("a", 0, 8), ("b", 0, 8), ("c", 0, 8)]);
    // Rank 0 goes on as before; rank 1 has a new tensor and asks.
    let writes = amend(&[old.clone(), new.clone()], &[Some(vec![Write::whole(0, 0)]), None]).unwrap();
    assert_eq!(writes, [vec![Write::whole(0, 0)], vec![Write::whole(1, 0), Write::whole(2, 0)]]);
    // Of what is begun in part, the rest.
    let writes = amend(&[old.clone(), new], &[Some(vec![rows(0, 2, 3), Write::whole(1, 0)]), None]).unwrap();
    assert_eq!(writes[1], [rows(0, 0, 2), rows(0, 5, 3), Write::whole(2, 0)]);
    // Where nothing is begun the plan covers all, as a new one does.
    let free = amend(&[old.clone(), old.clone()], &[None, None]).unwrap();
    assert_eq!(free.concat().len(), save(&[old.clone(), old]).unwrap().concat().len());
}

#[test]
fn what_cannot_be_one_plan_is_named() {
    let ab = catalog(&[("a", 0, 8), ("b", 0, 8)]);
    let both = [ab.clone(), ab.clone()];
    let whole = |leaf| Write::whole(leaf, 0);
    assert_eq!(
        problems(&both, &[Some(vec![whole(0)]), Some(vec![whole(0)])]),
        [
            "model/a: ranks 0-1 write the same of [0:8, 0:2]",
            "model/b: no rank writes [0:8, 0:2]: other ranks changed what they hold, and the ranks that hold it had \
             begun to write without it; save again, which makes a new plan"
        ]
    );
    let overlap = problems(&both, &[Some(vec![rows(0, 0, 5), whole(1)]), Some(vec![rows(0, 4, 4)])]);
    assert_eq!(overlap, ["model/a: ranks 0-1 write the same of [0:8, 0:2]"]);
    // What the catalogs say wrongly is said as for any plan.
    assert!(problems(&[catalog(&[("a", 0, 5)])], &[None])[0].contains("no rank holds [5:8, 0:2]"));
}
