//! Tests that checkpoints and runs are summarized without reading tensors, and which checkpoint a URL means.

use shardfast_engine::{Kind, Timeout, locate, locate_all};
use shardfast_format::{DType, Value};
use shardfast_tools::inspect::{KindSummary, Status};
use shardfast_tools::{history, summary};

use crate::checkpoints::*;

#[test]
fn every_leaf_is_described() {
    let url = save_ranks("memory://inspect/step-00000007", Some(7), two_ranks());
    let found = summary(&opened(&url), None, true).unwrap();
    assert_eq!((found.step, found.holds.world, found.holds.leaves, found.holds.files), (Some(7), 2, 9, 6));
    assert_eq!(found.user["note"], "a test");
    let keys: Vec<_> = found.keys.iter().map(|k| (k.key.as_str(), k.tensors, k.objects, k.aliases)).collect();
    assert_eq!(keys, [("extra", 0, 2, 0), ("model", 4, 0, 1), ("optimizer", 2, 0, 0)]);
    let bytes = 1000 * 70 * 4 + 64 * 257 * 2 + 70 * 4;
    assert_eq!(found.keys[1].tensor_bytes, bytes);
    let leaf = |name: &str| &found.leaves.iter().find(|leaf| leaf.leaf == name).unwrap().kind;
    match leaf("model/embed") {
        KindSummary::Tensor { dtype: "F32", shape, bytes: 280_000, regions: 2, files: 2 } => {
            assert_eq!(shape, &[1000, 70]);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(leaf("model/norm"), KindSummary::Tensor { regions: 1, files: 1, .. }));
    assert!(matches!(leaf("model/tied"), KindSummary::Alias { of } if of == "model/embed"));
    match leaf("extra/args") {
        KindSummary::Object { values, .. } => {
            assert_eq!(values[0].text.as_deref(), Some(r#"{"lr": 0.001, "betas": [0.9, 0.95]}"#));
            assert_eq!(format!("{:?}", values.iter().map(|value| &value.ranks).collect::<Vec<_>>()), "[[0..2]]");
        }
        other => panic!("{other:?}"),
    }
    match leaf("extra/rng") {
        KindSummary::Object { values, .. } => {
            assert_eq!(
                format!("{:?}", values.iter().map(|value| &value.ranks).collect::<Vec<_>>()),
                "[[0..1], [1..2]]"
            );
            assert!(values[1].text.as_ref().unwrap().ends_with("(5000 bytes)"));
        }
        other => panic!("{other:?}"),
    }
    let chosen = summary(&opened(&url), Some("*/?or?"), false).unwrap();
    assert_eq!(chosen.leaves.iter().map(|leaf| leaf.leaf.as_str()).collect::<Vec<_>>(), ["model/norm"]);
    assert_eq!(chosen.keys.len(), 3);
}

#[test]
fn shapes_whose_product_overflows_before_its_zero_are_described() {
    let huge = [1 << 40, 1 << 40, 0];
    let tensor = Tensor { dtype: DType::F32, shape: huge.to_vec(), bytes: Vec::new() };
    let leaf = tensor.held("model", "w", &[]);
    let url = save_ranks("memory://inspect-huge", None, vec![vec![leaf]]);
    let found = summary(&opened(&url), None, false).unwrap();
    assert!(matches!(found.leaves[0].kind, KindSummary::Tensor { bytes: 0, regions: 0, .. }));
}

#[test]
fn a_damaged_value_does_not_hide_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("ckpt");
    // Far enough apart that they share no block.
    let values = [("a", 1), ("b", 2), ("c", 3)]
        .map(|(name, n)| object("extra", name, &Value::List(vec![int(n), Value::Bytes(vec![0; 100_000])])));
    let url = save_ranks(place.to_str().unwrap(), None, vec![values.to_vec()]);
    let file = opened(&url).manifest().files()[0].clone();
    let path = place.join(&file.path);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[file.data_start as usize + 150_000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let found = summary(&opened(&url), None, true).unwrap();
    let shown: Vec<_> = found
        .leaves
        .iter()
        .map(|leaf| match &leaf.kind {
            KindSummary::Object { values, .. } => (values[0].text.is_some(), values[0].error.is_some()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(shown, [(true, false), (false, true), (true, false)]);
}

#[test]
fn a_run_is_told_step_by_step() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().to_str().unwrap().to_owned();
    let error = locate(&run, &Timeout::default()).unwrap_err();
    assert_eq!(error.kind, Kind::NotFound, "{error}");
    assert_eq!(history(&format!("{run}/nothing"), &Timeout::default()).unwrap_err().kind, Kind::NotFound);

    let job = || vec![vec![Tensor::random(1, DType::F32, &[10]).whole("model", "w")]];
    let step = |n: u64| format!("{run}/step-{n:08}");
    std::fs::create_dir_all(dir.path().join("step-00000030/model")).unwrap();
    let error = locate(&run, &Timeout::default()).unwrap_err();
    assert_eq!(error.kind, Kind::NotFound);
    assert!(error.message.contains("committed"), "{error}");

    save_ranks(&step(10), Some(10), job());
    save_ranks(&step(20), Some(20), job());
    let found = history(&run, &Timeout::default()).unwrap();
    let lines: Vec<_> = found.checkpoints.iter().map(|line| (line.step, line.status)).collect();
    let (committed, incomplete) = (Status::Committed, Status::Incomplete);
    assert_eq!(lines, [(Some(10), committed), (Some(20), committed), (Some(30), incomplete)]);
    assert!(found.is_run && found.checkpoints[0].holds.as_ref().unwrap().bytes > 4096);
    let located = locate(&run, &Timeout::default()).unwrap();
    assert_eq!((located.url, located.run, located.passed_over), (step(20), Some(run.clone()), vec![30]));
    assert_eq!(locate_all(&run, &Timeout::default()).unwrap(), [step(10), step(20)]);

    // A committed checkpoint that is broken is still the newest.
    std::fs::write(dir.path().join("step-00000020/COMMIT"), b"rubbish").unwrap();
    assert_eq!(locate(&run, &Timeout::default()).unwrap().url, step(20));
    assert_eq!(locate_all(&run, &Timeout::default()).unwrap(), [step(10), step(20)]);
    let broken = &history(&run, &Timeout::default()).unwrap().checkpoints[1];
    assert!(broken.status == Status::Unreadable && broken.error.is_some());

    let one = history(&step(10), &Timeout::default()).unwrap();
    assert_eq!((one.is_run, one.checkpoints.len(), one.checkpoints[0].step), (false, 1, Some(10)));
    assert_eq!(locate(&step(10), &Timeout::default()).unwrap().run, None);
    assert_eq!(locate(&step(30), &Timeout::default()).unwrap_err().kind, Kind::NotFound);
}
