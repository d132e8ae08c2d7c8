//! Makes well-formed files of every kind, from which the hostile ones are derived.

use std::collections::BTreeMap;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use shardfast_format::{
    BLOCK_BYTES, Columns, DType, Dims, EntrySpec, FileLayout, ManifestBuilder, Tag, Value, crc64, object,
};

use crate::sample;
use crate::values::{int, payload, tagged, text};

/// Returns whole data files.
pub(crate) fn headers() -> Vec<Vec<u8>> {
    let entry =
        |name: &str, dtype, shape: &[u64]| EntrySpec { name: name.to_owned(), dtype, shape: Dims::from_slice(shape) };
    let every = DType::ALL.map(|dtype| entry(dtype.name(), dtype, &[2, 3]));
    let odd = [
        entry("layers.0.weight[0:4, 8:16]", DType::BF16, &[4, 8]),
        entry("\u{fc}\"\\\n", DType::F32, &[]),
        entry("empty", DType::I64, &[0, 7]),
        entry("pairs", DType::F4x2, &[]),
        entry("", DType::U8, &[BLOCK_BYTES + 5]),
    ];
    let metadata = BTreeMap::from([("note".to_owned(), "x\u{1f600}".to_owned())]);
    [(&[][..], BTreeMap::new()), (&every[..], BTreeMap::new()), (&odd[..], metadata)]
        .into_iter()
        .map(|(entries, metadata)| {
            let layout = FileLayout::new(entries, &metadata).expect("a sound layout");
            let data = vec![0x5a; layout.data_bytes as usize];
            let crcs: Vec<u64> = data.chunks(BLOCK_BYTES as usize).map(crc64).collect();
            let mut file = layout.header(&crcs).expect("one checksum per block");
            file.extend_from_slice(&data);
            file
        })
        .collect()
}

/// Returns encoded manifests.
pub(crate) fn manifests() -> Vec<Vec<u8>> {
    let empty = ManifestBuilder::new(sample::info()).finish().expect("nothing is sound");
    let bytes = sample::manifest().encode();
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a manifest is a safetensors file");
    let mut metadata = header.metadata().clone().expect("it has metadata");
    metadata.insert("shardfast.format".to_owned(), "1.7".to_owned());
    metadata.insert("shardfast.mood".to_owned(), "good".to_owned());
    let tensors = SafeTensors::deserialize(&bytes).expect("a manifest is a safetensors file");
    let mut columns = tensors.tensors();
    let colours = TensorView::new(safetensors::Dtype::U8, vec![3], &[1, 2, 3]).expect("three bytes");
    columns.push(("info.colour".to_owned(), colours));
    let later = safetensors::serialize(columns, Some(metadata)).expect("a manifest with one column more");
    vec![bytes, empty.encode(), later]
}

/// Returns encoded commit records.
pub(crate) fn commits() -> Vec<Vec<u8>> {
    let record = sample::commit(&sample::manifest().encode()).encode();
    let text = String::from_utf8(record.clone()).expect("a record is text");
    let body = text[..text.len() - "crc64 0123456789abcdef\n".len()].replace("1.0", "1.7") + "colour blue\n";
    let later = format!("{body}crc64 {:016x}\n", crc64(body.as_bytes()));
    vec![record, later.into_bytes()]
}

/// Returns encoded values.
pub(crate) fn objects() -> Vec<Vec<u8>> {
    let nested = (0..object::DEPTH_MAX).fold(Value::None, |inner, _| Value::List(vec![inner]));
    let plain = Value::Dict(vec![
        (text("step"), int(1000)),
        (int(-3), Value::Float(f64::NAN)),
        (tagged(Tag::Tuple, Value::List(vec![Value::Bool(true)])), Value::Bytes(vec![7; 40])),
        (Value::None, Value::Int(shardfast_format::Int::new(true, &[3; 12]))),
    ]);
    let tags = Tag::ALL.map(|tag| tagged(tag, payload(tag)));
    let all = Value::List(tags.to_vec());
    let values = [nested, plain, all].into_iter().chain(tags);
    values.map(|value| object::encode(&value).expect("a sound value")).collect()
}

/// Returns columns with notes, of every type of number, with and without rows.
pub(crate) fn columns() -> Vec<Vec<u8>> {
    let mut columns = Columns::default();
    columns.notes.insert("shardfast.telemetry".to_owned(), "1".to_owned());
    columns.notes.insert("text".to_owned(), "\"a\" \u{e4}".to_owned());
    let empty = columns.clone();
    columns.add("bytes", 1, &[1_u64, u64::MAX, 0]).expect("whole rows");
    columns.add("by_duration", 2, &[1_u16, 2, 3, 4, 5, 6]).expect("whole rows");
    columns.add("files", 3, &[7_u32; 9]).expect("whole rows");
    columns.add("said", 1, &[0_u8, 1, 1]).expect("whole rows");
    vec![empty.encode(), columns.encode()]
}
