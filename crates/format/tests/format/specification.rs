//! Compares `docs/format.md` with the code: its tables, and its worked example byte by byte.

use std::collections::BTreeMap;

use shardfast_format::object::encode;
use shardfast_format::{
    COMMIT, Commit, DType, Dims, EntrySpec, Extent, FileEntry, FileLayout, LeafName, Manifest, ManifestBuilder, Region,
    SaveInfo, Tag, Value, crc64, data_file, manifest_name, part_name, sha256,
};

use crate::sample::{self, ATTEMPT};
use crate::values::{tagged, text};

const SPECIFICATION: &str = include_str!("../../../../docs/format.md");

/// Returns the rows of the table that follows a heading, cell by cell, without back quotes.
fn table(heading: &str) -> Vec<Vec<String>> {
    let (_, section) = SPECIFICATION.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    let rows = section.lines().skip_while(|line| !line.starts_with("|--")).skip(1);
    rows.take_while(|line| line.starts_with('|'))
        .map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().replace('`', "")).collect())
        .collect()
}

/// Returns the blocks of the worked example: their names, which follow their language, and their texts.
fn blocks() -> BTreeMap<&'static str, &'static str> {
    let (_, example) = SPECIFICATION.split_once("\n## 12. A worked example\n").unwrap();
    let mut blocks = BTreeMap::new();
    for block in example.split("\n```").skip(1).step_by(2) {
        let (head, body) = block.split_once('\n').unwrap();
        let (_, name) = head.split_once(' ').unwrap();
        assert_eq!(blocks.insert(name, body), None, "{name} stands twice");
    }
    blocks
}

fn unhex(block: &str) -> Vec<u8> {
    let bytes = block.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap());
    bytes.collect()
}

fn hex(bytes: &[u8]) -> String {
    let lines =
        bytes.chunks(32).map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns a file as the example shows it: its JSON, its total header length, and the rest.
fn shown_file(json: &str, data_start: usize, data: &str) -> Vec<u8> {
    let json = json.replace('\n', "");
    let mut file = ((data_start - 8) as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    assert!(file.len() <= data_start);
    file.resize(data_start, b' ');
    file.extend(unhex(data));
    file
}

/// Makes the example with the code: its files by name.
fn example() -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut builder = ManifestBuilder::new(SaveInfo {
        attempt: ATTEMPT.to_owned(),
        step: Some(1000),
        world: 2,
        created_unix_ms: 1_763_596_800_123,
        writer: "shardfast 0.1.0".to_owned(),
        user: BTreeMap::from([("note".to_owned(), "an example".to_owned())]),
    });
    let mut data_file = |path: String, spec: EntrySpec, data: &[u8]| {
        let layout = FileLayout::new(&[spec], &BTreeMap::new()).unwrap();
        let header = layout.header(&[crc64(data)]).unwrap();
        let (data_start, header_crc) = (layout.data_start, crc64(&header));
        files.insert(path.clone(), [&header[..], data].concat());
        let file = builder.file(FileEntry { path, bytes: layout.file_bytes(), data_start, header_crc });
        Extent { file, offset: data_start, bytes: data.len() as u64 }
    };
    let mut rows = Vec::new();
    for rank in 0..2u32 {
        let region = Region::new(&[u64::from(rank), 0], &[1, 3]);
        let values = (0..3).map(|column| (3 * rank + column) as f32);
        let data: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        let spec =
            EntrySpec { name: part_name("w", &region, &[2, 3]), dtype: DType::F32, shape: Dims::from_slice(&[1, 3]) };
        let path = shardfast_format::data_file("model", ATTEMPT, rank, 0).unwrap();
        rows.push((region, data_file(path, spec, &data)));
    }
    let betas = Value::List(vec![Value::Float(0.5), Value::Float(1.0)]);
    let args = Value::Dict(vec![(text("lr"), Value::Float(0.1)), (text("betas"), tagged(Tag::Tuple, betas))]);
    let args = encode(&args).unwrap();
    let shape = Dims::from_slice(&[args.len() as u64]);
    let path = shardfast_format::data_file("extra", ATTEMPT, 0, 0).unwrap();
    let extent = data_file(path, EntrySpec { name: "args".to_owned(), dtype: DType::U8, shape }, &args);
    let weight = LeafName::new("model", "w");
    builder.tensor(&weight, DType::F32, &[2, 3], "mesh(dp=2) [Shard(0)]", &rows);
    builder.alias(&LeafName::new("model", "tied"), &weight);
    builder.object(&LeafName::new("extra", "args"), "", &[(vec![0..2], extent)]);
    let manifest = builder.finish().unwrap().encode();
    let commit = Commit {
        major: 1,
        minor: 0,
        attempt: ATTEMPT.to_owned(),
        manifest: manifest_name(ATTEMPT),
        manifest_bytes: manifest.len() as u64,
        manifest_sha256: sha256(&manifest),
    };
    files.insert(COMMIT.to_owned(), commit.encode());
    files.insert(commit.manifest, manifest);
    files
}

#[test]
fn the_worked_example_is_what_the_code_writes() {
    let (blocks, files) = (blocks(), example());
    assert_eq!(files.len(), 5);
    for (name, file) in &files {
        if name == COMMIT {
            assert_eq!(blocks[name.as_str()], String::from_utf8_lossy(file).trim_end(), "{name}");
            continue;
        }
        let data_start = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let json = String::from_utf8_lossy(&file[8..data_start]).trim_end().to_owned();
        let part = |what| blocks.get(format!("{name} {what}").as_str()).copied().unwrap_or_default();
        let (shown_json, shown_data) = (part("header"), part("data"));
        assert_eq!(shown_json.replace('\n', ""), json, "{name}\n{json}");
        assert_eq!(shown_data, hex(&file[data_start..]), "{name}\n{}", hex(&file[data_start..]));
        assert_eq!(shown_file(shown_json, data_start, shown_data), *file, "{name}");
    }
}

#[test]
fn the_table_of_dtypes_is_the_codes() {
    let expected: Vec<Vec<String>> = DType::ALL
        .into_iter()
        .map(|dtype| vec![dtype.code().to_string(), dtype.name().to_owned(), dtype.size_bytes().to_string()])
        .collect();
    let found: Vec<Vec<String>> = table("### 8.2 Element types").into_iter().map(|row| row[..3].to_vec()).collect();
    assert_eq!(found, expected);
}

#[test]
fn the_table_of_tags_is_the_codes() {
    let expected: Vec<Vec<String>> =
        Tag::ALL.into_iter().map(|tag| vec![tag.number().to_string(), tag.name().to_owned()]).collect();
    let found: Vec<Vec<String>> = table("### 9.2 Tags").into_iter().map(|row| row[..2].to_vec()).collect();
    assert_eq!(found, expected);
}

#[test]
fn the_table_of_columns_is_the_codes() {
    let bytes = sample::manifest().encode();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut expected: Vec<(String, String)> =
        tensors.tensors().into_iter().map(|(name, view)| (name, view.dtype().to_string())).collect();
    expected.sort();
    let mut found: Vec<(String, String)> =
        table("### 7.3 Columns").into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    found.sort();
    assert_eq!(found, expected);
}

#[test]
fn the_example_reads_back() {
    let files = example();
    let commit = Commit::decode(&files[COMMIT]).unwrap();
    let manifest = &files[&commit.manifest];
    commit.verify(manifest).unwrap();
    let manifest = Manifest::decode(manifest).unwrap();
    assert_eq!(manifest.len(), 3);
    assert_eq!(manifest.files()[2].path, data_file("extra", ATTEMPT, 0, 0).unwrap());
}
