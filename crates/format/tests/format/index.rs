use serde_json::{Value, json};
use shardfast_format::{DType, LeafName, ManifestBuilder, Region, hugging_face_index};

use crate::sample::{extent, file, info, manifest};

#[test]
fn whole_tensors_are_listed_with_their_file() {
    let mut builder = ManifestBuilder::new(info());
    let first = builder.file(file("model/00000-000-0123456789abcdef.safetensors", 8192));
    let second = builder.file(file("model/00001-000-0123456789abcdef.safetensors", 8192));
    let other = builder.file(file("optimizer/00000-000-0123456789abcdef.safetensors", 8192));
    let whole = Region::whole(&[2, 3]);
    let model = |name: &str| LeafName::new("model", name);
    builder.tensor(&model("b"), DType::F32, &[2, 3], "", &[(whole.clone(), extent(first, 4096, 24))]);
    builder.tensor(&model("a"), DType::BF16, &[2, 3], "", &[(whole.clone(), extent(second, 4096, 12))]);
    builder.tensor(&model("empty"), DType::F32, &[0], "", &[]);
    builder.alias(&model("tied"), &model("a"));
    let cut = [(Region::new(&[0], &[1]), extent(other, 4096, 1)), (Region::new(&[1], &[1]), extent(other, 4097, 1))];
    builder.tensor(&LeafName::new("optimizer", "m"), DType::U8, &[2], "", &cut);
    let with_value = LeafName::new("with_value", "m");
    builder.tensor(&with_value, DType::F32, &[2, 3], "", &[(whole.clone(), extent(other, 4096, 24))]);
    builder.object(&LeafName::new("with_value", "n"), "", &[(vec![0..2], extent(other, 4096, 1))]);
    builder.tensor(&LeafName::new("stray", "m"), DType::F32, &[2, 3], "", &[(whole, extent(other, 4096, 24))]);
    let manifest = builder.finish().unwrap();

    let index = hugging_face_index(&manifest, "model").unwrap();
    let expected = json!({
        "metadata": { "total_size": 36 },
        "weight_map": {
            "a": "00001-000-0123456789abcdef.safetensors",
            "b": "00000-000-0123456789abcdef.safetensors",
        },
    });
    assert_eq!(serde_json::from_slice::<Value>(&index).unwrap(), expected);
    assert_eq!(hugging_face_index(&manifest, "optimizer"), None, "its tensor is cut");
    assert_eq!(hugging_face_index(&manifest, "with_value"), None, "a loader of weights would not know the value");
    assert_eq!(hugging_face_index(&manifest, "stray"), None, "its file lies in another directory");
    assert_eq!(hugging_face_index(&manifest, "missing"), None);
}

#[test]
fn a_cut_tensor_or_no_tensor_makes_no_index() {
    assert_eq!(hugging_face_index(&manifest(), "model"), None);
    assert_eq!(hugging_face_index(&manifest(), "extra"), None);
}
