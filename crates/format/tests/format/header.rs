use std::collections::BTreeMap;

use proptest::prelude::*;
use safetensors::SafeTensors;
use shardfast_format::{BLOCK_BYTES, DType, DataHeader, Dims, EntrySpec, Error, FileLayout, crc64};

fn entry(name: &str, dtype: DType, shape: &[u64]) -> EntrySpec {
    EntrySpec { name: name.to_owned(), dtype, shape: Dims::from_slice(shape) }
}

/// Returns the whole file of these entries, its data filled with a pattern.
fn file_of(entries: &[EntrySpec], metadata: &BTreeMap<String, String>) -> (FileLayout, Vec<u8>) {
    let layout = FileLayout::new(entries, metadata).unwrap();
    let data: Vec<u8> = (0..layout.data_bytes).map(|i| (i * 7 + i / 251) as u8).collect();
    let crcs: Vec<u64> = data.chunks(BLOCK_BYTES as usize).map(crc64).collect();
    let mut file = layout.header(&crcs).unwrap();
    file.extend_from_slice(&data);
    (layout, file)
}

/// Returns a file of that JSON, padded as ours are, followed by `data_bytes` bytes of data.
fn file_of_json(json: &str, data_bytes: usize) -> (Vec<u8>, u64) {
    let data_start = (8 + json.len()).next_multiple_of(4096);
    let mut header = ((data_start - 8) as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header.resize(data_start, b' ');
    let file_bytes = (data_start + data_bytes) as u64;
    (header, file_bytes)
}

/// Parses a file of [`file_of_json`] with these tensors, and with metadata that fit `data_bytes`.
fn parse_tensors(tensors: &str, data_bytes: usize) -> Result<DataHeader, Error> {
    let crc = "0".repeat(16 * data_bytes.div_ceil(65_536));
    let metadata = format!(r#"{{"shardfast.blocks":"{crc}","shardfast.block_bytes":"65536","format":"pt"}}"#);
    let (header, file_bytes) = file_of_json(&format!(r#"{{"__metadata__":{metadata}{tensors}}}"#), data_bytes);
    DataHeader::parse(&header, file_bytes)
}

fn arbitrary_entries() -> impl Strategy<Value = Vec<EntrySpec>> {
    let dtype = proptest::sample::select(DType::ALL.to_vec());
    let shape = proptest::collection::vec(prop_oneof![4 => 1u64..6, 1 => Just(0), 1 => 30u64..90], 0..4);
    let name =
        prop_oneof!["[a-z.0-9]{0,12}", "\\PC{0,6}", Just("w[0:4, 8:16]".to_owned()), Just("rng@rank3".to_owned())];
    proptest::collection::vec((name, dtype, shape), 0..12).prop_map(|entries| {
        let mut specs: Vec<EntrySpec> =
            entries.into_iter().map(|(name, dtype, shape)| entry(&name, dtype, &shape)).collect();
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        specs.dedup_by(|a, b| a.name == b.name);
        specs.sort_by_key(|spec| std::cmp::Reverse(spec.dtype.size_bytes()));
        specs
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn what_we_write_opens_with_the_safetensors_crate(
        entries in arbitrary_entries(),
        metadata in proptest::collection::btree_map("[a-z\"\\\\]{1,8}", "\\PC{0,20}", 0..4),
    ) {
        let mut metadata = metadata;
        metadata.remove("format");
        let (layout, file) = file_of(&entries, &metadata);
        prop_assert_eq!(layout.data_start % 4096, 0);
        prop_assert_eq!(layout.file_bytes(), file.len() as u64);

        let theirs = SafeTensors::deserialize(&file).unwrap();
        prop_assert_eq!(theirs.len(), entries.len());
        for (spec, &offset) in entries.iter().zip(&layout.offsets) {
            let tensor = theirs.tensor(&spec.name).unwrap();
            let mut shape: Vec<usize> = spec.shape.iter().map(|&n| n as usize).collect();
            if spec.dtype == DType::F4x2 {
                match shape.last_mut() {
                    Some(last) => *last *= 2,
                    None => shape.push(2),
                }
            }
            prop_assert_eq!(tensor.shape(), &shape[..]);
            prop_assert_eq!(tensor.dtype().to_string(), spec.dtype.name());
            prop_assert_eq!(tensor.data(), &file[offset as usize..offset as usize + tensor.data().len()]);
        }
        let (_, theirs) = SafeTensors::read_metadata(&file).unwrap();
        let mut theirs: BTreeMap<String, String> = theirs.metadata().clone().unwrap().into_iter().collect();
        let own = ["format", "shardfast.blocks", "shardfast.block_bytes"].map(|key| theirs.remove(key));
        prop_assert_eq!(own[0].as_deref(), Some("pt"));
        prop_assert_eq!(own[2].as_deref(), Some("65536"));
        prop_assert_eq!(&theirs, &metadata);

        let ours = DataHeader::parse(&file[..layout.data_start as usize], file.len() as u64).unwrap();
        prop_assert_eq!((ours.data_start, ours.data_bytes), (layout.data_start, layout.data_bytes));
        prop_assert_eq!(ours.metadata, metadata);
        let data = &file[layout.data_start as usize..];
        prop_assert_eq!(ours.block_crcs, data.chunks(BLOCK_BYTES as usize).map(crc64).collect::<Vec<_>>());
        for (spec, found) in entries.iter().zip(&ours.entries) {
            let whole_f4 = spec.dtype == DType::F4x2 && spec.shape.is_empty();
            prop_assert_eq!((&spec.name, spec.dtype), (&found.name, found.dtype));
            prop_assert_eq!(if whole_f4 { &[1][..] } else { &spec.shape[..] }, &found.shape[..]);
        }
        prop_assert_eq!(layout.offsets, ours.entries.iter().map(|entry| entry.offset).collect::<Vec<_>>());
    }
}

#[test]
fn every_dtype_is_one_of_safetensors() {
    for dtype in DType::ALL {
        let (layout, file) = file_of(&[entry("t", dtype, &[3, 2])], &BTreeMap::new());
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let tensor = tensors.tensor("t").unwrap();
        assert_eq!(tensor.dtype().to_string(), dtype.name());
        assert_eq!(tensor.data().len() as u64, 6 * dtype.size_bytes());
        assert_eq!(layout.data_bytes, 6 * dtype.size_bytes());
    }
}

#[test]
fn the_header_is_as_long_whatever_the_checksums() {
    let layout = FileLayout::new(&[entry("t", DType::U8, &[3 * BLOCK_BYTES + 1])], &BTreeMap::new()).unwrap();
    assert_eq!(layout.blocks, 4);
    let low = layout.header(&[0; 4]).unwrap();
    let high = layout.header(&[u64::MAX, 1, 2, 3]).unwrap();
    assert_eq!((low.len(), high.len()), (layout.data_start as usize, layout.data_start as usize));
    let parsed = DataHeader::parse(&high, layout.file_bytes()).unwrap();
    assert_eq!(parsed.block_crcs, [u64::MAX, 1, 2, 3]);
    assert!(matches!(layout.header(&[0; 3]), Err(Error::Invalid(_))));
}

#[test]
fn a_huge_file_is_laid_out_without_its_data() {
    let layout = FileLayout::new(&[entry("t", DType::F32, &[1 << 30, 4])], &BTreeMap::new()).unwrap();
    assert_eq!(layout.data_bytes, 16 << 30);
    assert_eq!(layout.blocks, 262_144);
    let header = layout.header(&vec![7; layout.blocks]).unwrap();
    assert_eq!(DataHeader::parse(&header, layout.file_bytes()).unwrap().block_crcs.len(), layout.blocks);
}

#[test]
fn an_entry_takes_no_more_of_a_header_than_it_says() {
    let json_bytes = |entries: &[EntrySpec]| {
        let header = FileLayout::new(entries, &BTreeMap::new()).unwrap().header(&[]).unwrap();
        header[8..].trim_ascii_end().len() as u64
    };
    let names = ["", "w", "layers.0[0:4]", "\"\\", "\0\n\t\u{1f}\u{7f}", "\u{fc}\u{1f600}"];
    for (name, dtype) in names.into_iter().flat_map(|name| DType::ALL.map(|dtype| (name, dtype))) {
        let longest = if dtype == DType::F4x2 { u64::MAX / 2 } else { u64::MAX };
        for shape in [&[0][..], &[0, longest], &[0, 1, 1], &[0; 64]] {
            let spec = entry(name, dtype, shape);
            let found = json_bytes(std::slice::from_ref(&spec)) - json_bytes(&[]);
            // Its offsets are 0 and 0 here; 38 digits more at worst.
            assert!(found + 38 <= spec.header_bytes_max(), "{spec:?}: {found} bytes");
        }
    }
}

#[test]
fn one_block_more_than_a_header_has_room_for_is_refused() {
    let layout = |blocks: u64| FileLayout::new(&[entry("t", DType::U8, &[blocks * BLOCK_BYTES])], &BTreeMap::new());
    // 16 digits for each block in 24,414 pages of header, less the rest of the JSON.
    let most = (24_414 * 4096 - 8 - 160) / 16;
    for blocks in [most + 1, 6_250_001, 1 << 40] {
        let expected =
            format!("data file: {} bytes of data need a header beyond 100000000 bytes", blocks * BLOCK_BYTES);
        match layout(blocks) {
            Err(Error::Invalid(message)) => assert!(message.starts_with(&expected), "{message}"),
            Err(other) => panic!("{blocks} blocks: {other}"),
            Ok(_) => panic!("{blocks} blocks are laid out"),
        }
    }
}

#[test]
fn what_cannot_be_written_is_invalid() {
    let none = BTreeMap::new();
    let twice = [entry("t", DType::U8, &[1]), entry("u", DType::U8, &[1]), entry("t", DType::U8, &[2])];
    let wide = [entry("t", DType::U8, &[1; 65])];
    let overflow = [entry("t", DType::F64, &[1 << 61])];
    let sum = [entry("t", DType::U8, &[u64::MAX]), entry("u", DType::U8, &[1])];
    let large = [entry("t", DType::U8, &[1 << 40])];
    let reserved = [entry("__metadata__", DType::U8, &[1])];
    let pairs = [entry("t", DType::F4x2, &[0, u64::MAX])];
    let cases: [(&[EntrySpec], &str); 7] = [
        (&twice, "\"t\""),
        (&wide, "64 dimensions"),
        (&overflow, "2^64"),
        (&sum, "2^64"),
        (&large, "more files"),
        (&reserved, "__metadata__"),
        (&pairs, "2^64"),
    ];
    for (entries, word) in cases {
        match FileLayout::new(entries, &none) {
            Err(Error::Invalid(message)) => assert!(message.contains(word), "{message}"),
            other => panic!("{word}: {other:?}"),
        }
    }
    for key in ["format", "shardfast.blocks", "shardfast.block_bytes"] {
        let metadata = BTreeMap::from([(key.to_owned(), String::new())]);
        assert!(matches!(FileLayout::new(&[], &metadata), Err(Error::Invalid(_))));
    }
}

#[test]
fn hostile_headers_are_corrupt() {
    let one = |info: &str| parse_tensors(&format!(r#","t":{info}"#), 4);
    assert!(one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#).is_ok());
    let u8s =
        |[from, to]: [u64; 2]| format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from);
    let two = |a: &str, at_a, b: &str, at_b| parse_tensors(&format!(",{a}:{},{b}:{}", u8s(at_a), u8s(at_b)), 4);
    assert!(two(r#""t""#, [0, 2], r#""u""#, [2, 4]).is_ok());
    let cases = [
        ("a hole", one(r#"{"dtype":"U8","shape":[3],"data_offsets":[1,4]}"#)),
        ("backwards", one(r#"{"dtype":"U8","shape":[3],"data_offsets":[4,1]}"#)),
        ("short of the end", one(r#"{"dtype":"U8","shape":[3],"data_offsets":[0,3]}"#)),
        ("beyond the end", one(r#"{"dtype":"U8","shape":[5],"data_offsets":[0,5]}"#)),
        ("a lying shape", one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#)),
        ("an overflowing shape", one(r#"{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#)),
        (
            "a shape that wraps to the right size",
            one(r#"{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}"#),
        ),
        ("half a byte", one(r#"{"dtype":"F4","shape":[7],"data_offsets":[0,4]}"#)),
        ("pairs across rows", one(r#"{"dtype":"F4","shape":[8,1],"data_offsets":[0,4]}"#)),
        ("a zero-dimensional half", one(r#"{"dtype":"F4","shape":[],"data_offsets":[0,4]}"#)),
        ("a negative offset", one(r#"{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}"#)),
        ("a negative length", one(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#)),
        ("a fraction", one(r#"{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}"#)),
        ("beyond u64", one(r#"{"dtype":"F32","shape":[18446744073709551617],"data_offsets":[0,4]}"#)),
        ("three offsets", one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}"#)),
        ("no dtype", one(r#"{"shape":[1],"data_offsets":[0,4]}"#)),
        ("an extra field", one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":0}"#)),
        ("a field twice", one(r#"{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}"#)),
        ("65 dimensions", one(&format!(r#"{{"dtype":"F32","shape":[{}1],"data_offsets":[0,4]}}"#, "1,".repeat(64)))),
        ("a name twice", two(r#""t""#, [0, 2], r#""t""#, [2, 4])),
        ("a name twice, escaped", two(r#""t""#, [0, 2], r#""\u0074""#, [2, 4])),
        ("an overlap", two(r#""t""#, [0, 4], r#""u""#, [2, 4])),
        ("metadata twice", parse_tensors(r#","__metadata__":{}"#, 0)),
        ("deep nesting", one(&format!("{}{}", "[".repeat(50_000), "]".repeat(50_000)))),
        ("deep nesting without an end", one(&"{\"a\":".repeat(50_000))),
        ("something after the object", parse_tensors("}{", 0)),
        ("something after the object", parse_tensors("}\u{0}", 0)),
    ];
    for (what, found) in cases {
        assert!(matches!(found, Err(Error::Corrupt(_))), "{what}: {found:?}");
    }
    let future = one(r#"{"dtype":"F7_E9","shape":[1],"data_offsets":[0,4]}"#).unwrap_err();
    assert!(matches!(&future, Error::Unsupported(m) if m.contains("F7_E9") && m.contains("upgrade")), "{future}");
}

#[test]
fn a_frame_that_lies_is_corrupt() {
    let (layout, file) = file_of(&[entry("t", DType::U8, &[100])], &BTreeMap::new());
    let (start, bytes) = (layout.data_start as usize, file.len() as u64);
    let parse = |header: &[u8], bytes: u64| DataHeader::parse(header, bytes);
    parse(&file[..start], bytes).unwrap();
    for length in [0, 1, 7, 8, 9, 100, start - 1] {
        assert!(matches!(parse(&file[..length], bytes), Err(Error::Corrupt(_))), "{length} bytes");
    }
    assert!(parse(&file[..start + 1], bytes).is_err(), "more than the header");
    assert!(parse(&file[..start], bytes - 1).is_err(), "a file cut short");
    assert!(parse(&file[..start], bytes + 1).is_err(), "a file too long");
    assert!(parse(&file[..start], 0).is_err(), "a file without its header");
    for length in [0, 1, start as u64 - 9, start as u64 - 7, 100_000_001, 1 << 40, u64::MAX, u64::MAX - 8] {
        let mut lying = file[..start].to_vec();
        lying[..8].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(parse(&lying, bytes), Err(Error::Corrupt(_))), "a length of {length}");
    }
    let mut spaced = file[..start].to_vec();
    spaced.copy_within(8..start - 1, 9);
    spaced[8] = b' ';
    assert!(parse(&spaced, bytes).is_err(), "a space before the JSON");
}

#[test]
fn the_metadata_of_the_format_are_required() {
    let parse = |metadata: &str| {
        let json = format!(r#"{{"__metadata__":{metadata},"t":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#);
        let (header, file_bytes) = file_of_json(&json, 1);
        DataHeader::parse(&header, file_bytes)
    };
    parse(r#"{"shardfast.blocks":"0123456789abcdef","shardfast.block_bytes":"65536","format":"pt","x":"y"}"#).unwrap();
    for metadata in [
        r#"{}"#,
        r#"{"shardfast.blocks":"0123456789abcdef","shardfast.block_bytes":"65536"}"#,
        r#"{"shardfast.blocks":"0123456789abcdef","format":"pt"}"#,
        r#"{"shardfast.block_bytes":"65536","format":"pt"}"#,
        r#"{"shardfast.blocks":"0123456789ABCDEF","shardfast.block_bytes":"65536","format":"pt"}"#,
        r#"{"shardfast.blocks":"0123456789abcde","shardfast.block_bytes":"65536","format":"pt"}"#,
        r#"{"shardfast.blocks":"0123456789abcdef0123456789abcdef","shardfast.block_bytes":"65536","format":"pt"}"#,
        r#"{"shardfast.blocks":"0123456789abcdef","shardfast.block_bytes":"065536","format":"pt"}"#,
        r#"{"shardfast.blocks":"0123456789abcdef","shardfast.block_bytes":"65536","format":"pt","format":"pt"}"#,
        r#"{"shardfast.blocks":"0123456789abcdef","shardfast.block_bytes":65536,"format":"pt"}"#,
    ] {
        let found = parse(metadata);
        assert!(matches!(found, Err(Error::Corrupt(_))), "{metadata}: {found:?}");
    }
    let empty = r#"{"__metadata__":{"shardfast.block_bytes":"65536","format":"pt"}}"#;
    let (header, file_bytes) = file_of_json(empty, 0);
    assert!(matches!(DataHeader::parse(&header, file_bytes), Err(Error::Corrupt(m)) if m.contains("missing")));
    let other = parse(r#"{"shardfast.blocks":"0123456789abcdef","shardfast.block_bytes":"131072","format":"pt"}"#);
    assert!(matches!(other, Err(Error::Unsupported(_))), "{other:?}");
}

#[test]
fn a_file_of_the_safetensors_crate_is_not_one_of_ours() {
    let bytes = [1u8; 4];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![4], &bytes).unwrap();
    let file = safetensors::serialize([("t", view)], None).unwrap();
    let found = DataHeader::parse(&file[..file.len() - 4], file.len() as u64);
    assert!(matches!(found, Err(Error::Corrupt(_))), "{found:?}");
}
