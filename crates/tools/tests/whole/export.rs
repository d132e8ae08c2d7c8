//! Tests that the safetensors package reads exported files, and that they hold the saved tensors.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use shardfast_engine::Kind;
use shardfast_format::{DType, Region};
use shardfast_tools::{Exported, export, export_to};

use crate::checkpoints::*;
use crate::stores::Faulty;

/// Returns every tensor of the exported files as the safetensors package reads it: dtype, shape, bytes, and file.
fn read_back(dir: &Path, exported: &Exported) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>, String)> {
    let mut tensors = BTreeMap::new();
    for file in &exported.files {
        let bytes = std::fs::read(dir.join(&file.name)).unwrap();
        assert_eq!(bytes.len() as u64, file.bytes);
        let parsed = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(parsed.len() as u64, file.tensors);
        for (name, view) in parsed.tensors() {
            let shape = view.shape().iter().map(|&n| n as u64).collect();
            let found = (format!("{:?}", view.dtype()), shape, view.data().to_vec(), file.name.clone());
            assert!(tensors.insert(name.clone(), found).is_none(), "{name} stands twice");
        }
    }
    tensors
}

fn assert_same(found: &(String, Vec<u64>, Vec<u8>, String), expected: &Tensor) {
    assert_eq!((&found.0, &found.1), (&expected.dtype.name().to_owned(), &expected.shape));
    assert!(found.2 == expected.bytes, "other bytes");
}

fn rows(tensor: &Tensor, name: &str, rank: u64, of: u64) -> Held {
    let (start, stop) = (tensor.shape[0] * rank / of, tensor.shape[0] * (rank + 1) / of);
    let (mut offsets, mut lengths) = (vec![0; tensor.shape.len()], tensor.shape.clone());
    (offsets[0], lengths[0]) = (start, stop - start);
    tensor.held("model", name, &[Region::new(&offsets, &lengths)])
}

#[test]
fn one_file_is_enough_for_a_small_model() {
    let dir = tempfile::tempdir().unwrap();
    let w = Tensor::random(1, DType::F32, &[301, 7]);
    let url = save_ranks(
        "memory://export-one",
        None,
        (0..3)
            .map(|rank| {
                vec![
                    rows(&w, "w", rank, 3),
                    alias("model", "head", ("model", "w")),
                    object("model", "config", &int(3)),
                    object("extra", "args", &int(4)),
                    Tensor::random(9, DType::U8, &[5]).whole("ema", "w"),
                ]
            })
            .collect(),
    );
    let exported = export(&opened(&url), dir.path().to_str().unwrap(), "model", 5_000_000_000).unwrap();
    let names: Vec<String> =
        dir.path().read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(names, ["model.safetensors"]);
    let found = read_back(dir.path(), &exported);
    assert_eq!(found.len(), 1);
    assert_same(&found["w"], &w);
    assert_eq!(exported.tied, BTreeMap::from([("head".to_owned(), "w".to_owned())]));
    assert_eq!((exported.objects_left_out, exported.index), (vec!["model/config".to_owned()], None));

    // Another key beside it, but not the same again.
    export(&opened(&url), dir.path().to_str().unwrap(), "ema", 5_000_000_000).unwrap();
    assert!(dir.path().join("ema.safetensors").exists());
    let again = export(&opened(&url), dir.path().to_str().unwrap(), "model", 100).unwrap_err();
    assert_eq!(again.kind, Kind::Conflict);
    assert_eq!(dir.path().read_dir().unwrap().count(), 2);
    let nothing = export(&opened(&url), dir.path().to_str().unwrap(), "extra", 100).unwrap_err();
    assert_eq!(nothing.kind, Kind::NotFound);
    assert!(nothing.message.contains("ema") && nothing.message.contains("model"), "{nothing}");
}

#[test]
fn shards_stay_below_their_size_and_the_index_finds_every_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let tensors: Vec<(String, Tensor)> = (0..12u64)
        .map(|i| {
            let dtype = [DType::F32, DType::BF16, DType::F64, DType::U8][i as usize % 4];
            // One of them is larger than a shard may be.
            let shape = if i == 5 { vec![2_000, 5] } else { vec![20 + 3 * i, 9] };
            (format!("layers.{i}.weight"), Tensor::random(i, dtype, &shape))
        })
        .collect();
    let held = |rank| tensors.iter().map(|(name, tensor)| rows(tensor, name, rank, 2)).collect();
    let url = save_ranks("memory://export-shards", None, vec![held(0), held(1)]);
    let most = 4_000;
    let exported = export(&opened(&url), dir.path().to_str().unwrap(), "model", most).unwrap();
    let found = read_back(dir.path(), &exported);
    assert_eq!(found.len(), tensors.len());
    let mut bytes_in: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for (name, tensor) in &tensors {
        assert_same(&found[name], tensor);
        let sum = bytes_in.entry(&found[name].3).or_default();
        *sum = (sum.0 + tensor.bytes.len() as u64, sum.1 + 1);
    }
    let n = exported.files.len();
    assert!(n > 3 && bytes_in.values().all(|&(bytes, tensors)| bytes <= most || tensors == 1), "{bytes_in:?}");
    for (i, file) in exported.files.iter().enumerate() {
        assert_eq!(file.name, format!("model-{:05}-of-{n:05}.safetensors", i + 1));
    }
    let total: usize = tensors.iter().map(|(_, tensor)| tensor.bytes.len()).sum();
    let index = std::fs::read(dir.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let map: serde_json::Map<String, serde_json::Value> =
        found.iter().map(|(name, (_, _, _, file))| (name.clone(), file.clone().into())).collect();
    assert_eq!(index, serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map }));
    assert_eq!(exported.tensor_bytes, total as u64);
}

#[test]
fn every_dtype_scalars_and_tensors_without_elements_survive() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors: Vec<(String, Tensor)> =
        DType::ALL.iter().map(|&dtype| (dtype.name().to_owned(), Tensor::random(7, dtype, &[3, 4]))).collect();
    tensors.push(("scalar".into(), Tensor::random(8, DType::F64, &[])));
    tensors.push(("empty".into(), Tensor::random(9, DType::F16, &[4, 0])));
    let url = save_ranks(
        "memory://export-dtypes",
        None,
        vec![tensors.iter().map(|(name, tensor)| tensor.whole("model", name)).collect()],
    );
    let exported = export(&opened(&url), dir.path().to_str().unwrap(), "model", 1 << 20).unwrap();
    let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let parsed = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!((parsed.len(), exported.tensors), (tensors.len(), tensors.len() as u64));
    for (name, tensor) in &tensors {
        let found = parsed.tensor(name).unwrap();
        assert!(found.data() == tensor.bytes, "{name}");
        if tensor.dtype != DType::F4x2 {
            assert_eq!(found.shape().iter().map(|&n| n as u64).collect::<Vec<_>>(), tensor.shape, "{name}");
        }
    }
}

#[test]
fn names_tied_to_a_tensor_of_another_key_are_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let w = Tensor::random(1, DType::F32, &[5]);
    let url = save_ranks(
        "memory://export-tied",
        None,
        vec![vec![
            w.whole("ema", "w"),
            alias("model", "b", ("ema", "w")),
            alias("model", "a", ("ema", "w")),
            Tensor::random(2, DType::U8, &[3]).whole("model", "c"),
        ]],
    );
    let exported = export(&opened(&url), dir.path().to_str().unwrap(), "model", 1 << 20).unwrap();
    let found = read_back(dir.path(), &exported);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "c"]);
    assert_same(&found["a"], &w);
    assert_eq!(exported.tied, BTreeMap::from([("b".to_owned(), "a".to_owned())]));
}

#[test]
fn the_smallest_staging_budget_is_enough_for_a_tensor_that_is_larger() {
    let dir = tempfile::tempdir().unwrap();
    // Slots cut its rows.
    let w = Tensor::random(1, DType::F32, &[1_000_001, 5]);
    let ranks = (0..2).map(|rank| {
        let run = if rank == 0 { 0..1_999_999 } else { 1_999_999..5_000_005 };
        vec![w.held("model", "w", &Region::flat_run(&w.shape, run.start, run.end).collect::<Vec<_>>())]
    });
    let url = save_ranks("memory://export-budget", None, ranks.collect());
    let exported = export(
        &opened_within(&url, shardfast_engine::staging::STAGING_BYTES_MIN),
        dir.path().to_str().unwrap(),
        "model",
        1 << 20,
    )
    .unwrap();
    assert_same(&read_back(dir.path(), &exported)["w"], &w);
}

#[test]
fn damage_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("ckpt");
    let held = (0..6).map(|i| Tensor::random(i, DType::F32, &[1000]).whole("model", &format!("w{i}"))).collect();
    let url = save_ranks(place.to_str().unwrap(), None, vec![held]);
    let file = opened(&url).manifest().files()[0].clone();
    let mut bytes = std::fs::read(place.join(&file.path)).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(place.join(&file.path), bytes).unwrap();
    let out = dir.path().join("out");
    let error = export(&opened(&url), out.to_str().unwrap(), "model", 4000).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt);
    assert!(error.message.contains("model/w5"), "{error}");
    assert_eq!(out.read_dir().unwrap().count(), 0);
}

#[test]
fn a_failure_at_the_end_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let held = (0..6).map(|i| Tensor::random(i, DType::F32, &[1000]).whole("model", &format!("w{i}"))).collect();
    let url = save_ranks("memory://export-failure", None, vec![held]);
    let store = shardfast_store::open(dir.path().to_str().unwrap()).unwrap();
    let store = Faulty { sync_fails: true, ..Faulty::over(store) };
    assert_eq!(export_to(&opened(&url), &store, "model", 4000).unwrap_err().kind, Kind::Exhausted);
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
}
