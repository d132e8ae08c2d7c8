use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use shardfast_format::name::data_file;
use shardfast_format::{DType, Error, Extent, LeafKind, LeafName, Manifest, ManifestBuilder, Region, SaveInfo};

use crate::promises;
use crate::sample::{builder, extent, file, info, manifest};

fn name(key: &str, name: &str) -> LeafName {
    LeafName::new(key, name)
}

fn regions(manifest: &Manifest, leaf: usize) -> Vec<(Region, Extent)> {
    manifest.regions(leaf).collect()
}

fn values(manifest: &Manifest, leaf: usize) -> Vec<(Vec<Range<u32>>, Extent)> {
    manifest.values(leaf).collect()
}

#[test]
fn leaves_are_sorted_and_found() {
    let manifest = Manifest::decode(&manifest().encode()).unwrap();
    let names: Vec<String> =
        (0..manifest.len()).map(|i| format!("{}/{}", manifest.leaf(i).key, manifest.leaf(i).name)).collect();
    assert_eq!(names, ["extra/rng", "model/none", "model/step", "model/tied", "model/w"]);
    for i in 0..manifest.len() {
        let leaf = manifest.leaf(i);
        assert_eq!(manifest.find(&name(leaf.key, leaf.name)), Some(i));
    }
    for other in ["", "a", "x", "st", "steps", "tied0", "zz"] {
        assert_eq!(manifest.find(&name("model", other)), None, "{other}");
        assert_eq!(manifest.find(&name(other, "w")), None, "{other}");
    }
    assert_eq!(manifest.info, info());
    assert_eq!(manifest.files().len(), 2);
    assert_eq!(manifest.files()[1], file("extra/00001-000-0123456789abcdef.safetensors", 4108));
}

#[test]
fn each_kind_of_leaf_comes_back() {
    let manifest = Manifest::decode(&manifest().encode()).unwrap();
    let leaf = manifest.leaf(4);
    assert_eq!(leaf.kind, LeafKind::Tensor { dtype: DType::F32, shape: &[4, 6] });
    assert_eq!(leaf.layout, "mesh(dp=2) [Shard(0)]");
    let halves = [
        (Region::new(&[0, 0], &[2, 6]), extent(0, 4096, 48)),
        (Region::new(&[2, 0], &[2, 6]), extent(0, 4096 + 48, 48)),
    ];
    assert_eq!(regions(&manifest, 4), halves);
    assert_eq!(manifest.leaf(1).kind, LeafKind::Tensor { dtype: DType::BF16, shape: &[0, 3] });
    assert_eq!(manifest.leaf(2).kind, LeafKind::Tensor { dtype: DType::I64, shape: &[] });
    assert_eq!(regions(&manifest, 2), [(Region::whole(&[]), extent(0, 4192, 8))]);
    assert_eq!(manifest.leaf(3).kind, LeafKind::Alias { of: 4 });
    assert_eq!(manifest.leaf(0).kind, LeafKind::Object);
    let copies = [(vec![0..1, 2..4], extent(1, 4096, 9)), (vec![1..2], extent(1, 4105, 3))];
    assert_eq!(values(&manifest, 0), copies);
    for i in 0..manifest.len() {
        assert_eq!(manifest.regions(i).len(), if i == 4 { 2 } else { usize::from(i == 2) });
        assert_eq!(manifest.values(i).len(), if i == 0 { 2 } else { 0 });
    }
}

#[test]
fn a_manifest_without_anything_is_one() {
    let empty = ManifestBuilder::new(SaveInfo { step: None, user: BTreeMap::new(), ..info() }).finish().unwrap();
    let decoded = Manifest::decode(&empty.encode()).unwrap();
    assert_eq!(decoded, empty);
    assert!(decoded.is_empty());
    assert_eq!(decoded.info.step, None);
    assert_eq!(decoded.find(&name("model", "w")), None);
}

#[test]
fn the_file_is_safetensors_and_its_columns_aligned() {
    let bytes = manifest().encode();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for (column, view) in tensors.tensors() {
        assert_eq!(view.shape().len(), 1, "{column}");
        let offset = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(offset % (view.dtype().bitsize() / 8), 0, "{column} at {offset}");
    }
}

fn arbitrary_manifest() -> impl Strategy<Value = Manifest> {
    let shape = proptest::collection::vec(0u64..5, 0..4);
    let tensor = (proptest::sample::select(DType::ALL.to_vec()), shape, 1u64..4, "\\PC{0,8}");
    let leaf = ("[ab]{1,2}", "\\PC{0,6}", tensor, 0u32..4);
    proptest::collection::vec(leaf, 0..20).prop_map(|leaves| {
        let mut builder = ManifestBuilder::new(info());
        let files = [builder.file(file("a/0", 1 << 20)), builder.file(file("ü/1", 1 << 20))];
        let mut seen = HashMap::new();
        let mut position = 4096;
        for (i, (key, leaf, (dtype, shape, cuts, layout), kind)) in leaves.into_iter().enumerate() {
            let leaf = name(&key, &leaf);
            if seen.contains_key(&leaf) {
                continue;
            }
            seen.insert(leaf.clone(), kind);
            let mut take = |bytes: u64| {
                position += bytes;
                extent(files[i % 2], position - bytes, bytes)
            };
            let target = seen.iter().find(|(_, kind)| **kind == 0).map(|(target, _)| target.clone());
            match (kind, target) {
                (1, _) => builder.object(&leaf, &layout, &[(vec![1..2, 3..4], take(7)), (vec![0..1], take(1))]),
                (2, Some(target)) => builder.alias(&leaf, &target),
                _ => {
                    seen.insert(leaf.clone(), 0);
                    let rows = shape.first().copied();
                    let bounds: Vec<Range<u64>> = match rows {
                        None => std::iter::once(0..1).collect(),
                        Some(rows) => (0..cuts)
                            .map(|c| rows * c / cuts..rows * (c + 1) / cuts)
                            .filter(|r| !r.is_empty())
                            .collect(),
                    };
                    let mut parts = Vec::new();
                    for rows in bounds {
                        let mut region = Region::whole(&shape);
                        if !shape.is_empty() {
                            (region.offsets[0], region.lengths[0]) = (rows.start, rows.end - rows.start);
                        }
                        if !region.is_empty() {
                            let bytes = region.numel() * dtype.size_bytes();
                            parts.push((region, take(bytes)));
                        }
                    }
                    parts.reverse();
                    builder.tensor(&leaf, dtype, &shape, &layout, &parts);
                }
            }
        }
        builder.finish().unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn every_manifest_comes_back(manifest in arbitrary_manifest()) {
        let bytes = manifest.encode();
        let decoded = Manifest::decode(&bytes).unwrap();
        prop_assert_eq!(&decoded, &manifest);
        prop_assert_eq!(decoded.encode(), bytes);
        for i in 0..manifest.len() {
            let leaf = decoded.leaf(i);
            prop_assert_eq!(decoded.find(&name(leaf.key, leaf.name)), Some(i));
        }
    }
}

#[test]
fn a_hundred_thousand_regions_come_back() {
    let mut builder = ManifestBuilder::new(info());
    let data = builder.file(file("model/0", 4096 + 100_000 * 16));
    for leaf in 0..100u64 {
        let parts: Vec<(Region, Extent)> = (0..1000u64)
            .map(|row| (Region::new(&[row, 0], &[1, 4]), extent(data, 4096 + (leaf * 1000 + row) * 16, 16)))
            .collect();
        builder.tensor(&name("model", &format!("layers.{leaf}.weight")), DType::F32, &[1000, 4], "", &parts);
    }
    let bytes = builder.finish().unwrap().encode();
    assert!(bytes.len() < 100_000 * 60 + 20_000, "{} bytes", bytes.len());
    let decoded = Manifest::decode(&bytes).unwrap();
    let sizes: Vec<usize> = (0..decoded.len()).map(|i| decoded.regions(i).len()).collect();
    assert_eq!(sizes, vec![1000; 100]);
    let leaf = decoded.find(&name("model", "layers.57.weight")).unwrap();
    let last = decoded.regions(leaf).last().unwrap();
    assert_eq!(last, (Region::new(&[999, 0], &[1, 4]), extent(data, 4096 + 57_999 * 16, 16)));
}

#[test]
fn the_builder_refuses_what_a_reader_would() {
    type Change = dyn Fn(&mut ManifestBuilder);
    fn whole(bytes: u64) -> [(Region, Extent); 1] {
        [(Region::whole(&[4]), extent(0, 4096, bytes))]
    }
    let cases: [(&str, &Change); 12] = [
        ("model/w", &|b| b.tensor(&name("model", "w"), DType::U8, &[0], "", &[])),
        ("no leaf model/gone", &|b| b.alias(&name("model", "x"), &name("model", "gone"))),
        ("is no tensor", &|b| b.alias(&name("model", "x"), &name("model", "tied"))),
        ("is no tensor", &|b| b.alias(&name("model", "x"), &name("extra", "rng"))),
        ("expected 16 bytes of F32, found 15", &|b| b.tensor(&name("model", "x"), DType::F32, &[4], "", &whole(15))),
        ("4 elements in all, found 0", &|b| b.tensor(&name("model", "x"), DType::F32, &[4], "", &[])),
        ("expected 2 dimensions, found 1", &|b| b.tensor(&name("model", "x"), DType::F32, &[4, 1], "", &whole(16))),
        ("key \"..\"", &|b| b.tensor(&name("..", "x"), DType::F32, &[4], "", &whole(16))),
        ("has no value", &|b| b.object(&name("model", "x"), "", &[])),
        ("saved by no rank", &|b| b.object(&name("model", "x"), "", &[(vec![], extent(0, 4096, 1))])),
        ("outside a world of 4", &|b| b.object(&name("model", "x"), "", &[(vec![0..5], extent(0, 4096, 1))])),
        ("rank 1 has two values", &|b| {
            b.object(&name("model", "x"), "", &[(vec![0..3], extent(0, 4096, 1)), (vec![1..2], extent(0, 4096, 1))]);
        }),
    ];
    for (expected, change) in cases {
        let mut builder = builder();
        change(&mut builder);
        match builder.finish() {
            Err(Error::Invalid(message)) => assert!(message.contains(expected), "{expected}: {message}"),
            other => panic!("{expected}: {other:?}"),
        }
    }
    for info in [
        SaveInfo { world: 0, ..info() },
        SaveInfo { attempt: "../../etc".to_owned(), ..info() },
        SaveInfo { user: BTreeMap::from([("note".to_owned(), "x".repeat(1 << 20))]), ..info() },
    ] {
        assert!(matches!(ManifestBuilder::new(info).finish(), Err(Error::Invalid(_))));
    }
}

/// Columns and metadata of a manifest, to be modified.
#[derive(Clone)]
struct Table {
    columns: BTreeMap<String, (safetensors::Dtype, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

impl Table {
    fn sample() -> Table {
        Table::of(&manifest().encode())
    }

    fn of(bytes: &[u8]) -> Table {
        let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
        let tensors = SafeTensors::deserialize(bytes).unwrap();
        let columns =
            tensors.tensors().into_iter().map(|(column, view)| (column, (view.dtype(), view.data().to_vec())));
        Table { columns: columns.collect(), metadata: header.metadata().clone().unwrap() }
    }

    fn encode(&self) -> Vec<u8> {
        let views = self.columns.iter().map(|(column, (dtype, data))| {
            (column, TensorView::new(*dtype, vec![data.len() * 8 / dtype.bitsize()], data).unwrap())
        });
        safetensors::serialize(views, Some(self.metadata.clone())).unwrap()
    }

    fn decode(&self) -> Result<Manifest, Error> {
        Manifest::decode(&self.encode())
    }

    /// Replaces one row of a column.
    fn set(&mut self, column: &str, row: usize, value: u64) -> &mut Table {
        let (dtype, data) = self.columns.get_mut(column).unwrap_or_else(|| panic!("no column {column}"));
        let width = dtype.bitsize() / 8;
        data[row * width..(row + 1) * width].copy_from_slice(&value.to_le_bytes()[..width]);
        self
    }

    fn rows(&self, column: &str) -> usize {
        let (dtype, data) = &self.columns[column];
        data.len() * 8 / dtype.bitsize()
    }
}

#[test]
fn information_of_a_later_minor_version_is_ignored() {
    let mut table = Table::sample();
    assert_eq!(table.decode().unwrap(), manifest());
    table.columns.insert("info.colour".to_owned(), (safetensors::Dtype::F6_E2M3, vec![1; 3]));
    table.columns.insert("info.".to_owned(), (safetensors::Dtype::U64, vec![]));
    table.metadata.insert("shardfast.format".to_owned(), "1.9".to_owned());
    table.metadata.insert("shardfast.mood".to_owned(), "good".to_owned());
    assert_eq!(table.decode().unwrap(), manifest());
}

/// Tests that a note that looks like the metadata, and one that names the attempt, must stay as they are.
#[test]
fn under_the_name_of_another_attempt_everything_else_is_the_same() {
    const OTHER: &str = "fedcba9876543210";
    let own = info().attempt;
    let paths = [
        data_file("model", &own, 0, 0).unwrap(),
        data_file(&own, &own, 123_456, 1_000).unwrap(),
        data_file("ü", "00000000000000aa", 1, 2).unwrap(),
        format!("{own}/{own}.bin"),
    ];
    let mut with_notes = info();
    with_notes.user.insert("a".to_owned(), format!("\"shardfast.attempt\":\"{own}\""));
    with_notes.user.insert(format!("\"shardfast.attempt\":\"{own}\""), own.clone());
    let mut builder = ManifestBuilder::new(with_notes.clone());
    for path in &paths {
        builder.file(file(path, 1 << 20));
    }
    let mut table = Table::of(&builder.finish().unwrap().encode());
    table.columns.insert("info.colour".to_owned(), (safetensors::Dtype::U8, own.clone().into_bytes()));
    table.metadata.insert("shardfast.format".to_owned(), "1.9".to_owned());
    let bytes = table.encode();
    let renamed = Manifest::under_attempt(&bytes, OTHER).unwrap();
    let decoded = Manifest::decode(&renamed).unwrap();
    let names: Vec<&str> = decoded.files().iter().map(|file| file.path.as_str()).collect();
    let expected = [
        data_file("model", OTHER, 0, 0).unwrap(),
        data_file(&own, OTHER, 123_456, 1_000).unwrap(),
        data_file("ü", OTHER, 1, 2).unwrap(),
        paths[3].clone(),
    ];
    assert_eq!(names, expected);
    assert_eq!(decoded.info, SaveInfo { attempt: OTHER.to_owned(), ..with_notes });
    let changed = bytes.iter().zip(&renamed).filter(|(a, b)| a != b).count();
    assert!(bytes.len() == renamed.len() && changed <= 4 * 16, "{changed}");
    assert_eq!(Table::of(&renamed).columns["info.colour"].1, own.as_bytes());
    // Two are of the same checkpoint if they are equal under one name.
    assert_eq!(Manifest::under_attempt(&renamed, OTHER).unwrap(), renamed);
    assert!(matches!(Manifest::under_attempt(&bytes, "not one"), Err(Error::Invalid(_))));
}

#[test]
fn other_columns_of_a_later_minor_version_are_unsupported() {
    for (column, rows) in [("regions.codec", vec![1; 3]), ("zzz", vec![]), ("information", vec![0; 8]), ("", vec![])] {
        let mut table = Table::sample();
        table.columns.insert(column.to_owned(), (safetensors::Dtype::U8, rows));
        table.columns.insert("info.colour".to_owned(), (safetensors::Dtype::U8, vec![1]));
        let found = table.decode();
        assert!(matches!(&found, Err(Error::Unsupported(m)) if m.contains(&format!("{column:?}"))), "{found:?}");
    }
}

#[test]
fn required_features_are_named_before_anything_else_is_looked_at() {
    let mut table = Table::sample();
    table.columns.clear();
    table.metadata.retain(|key, _| key == "shardfast.writer");
    table.metadata.insert("shardfast.format".to_owned(), "1.9".to_owned());
    table.metadata.insert("shardfast.requires".to_owned(), "codec>=1.4 files-elsewhere>=1.10".to_owned());
    let expected = "manifest: expected what format 1.0 can read, found a checkpoint that requires \"codec\" of format \
                    1.4, \"files-elsewhere\" of format 1.10 (it was written by shardfast 0.1.0); upgrade shardfast";
    assert_eq!(table.decode().unwrap_err(), Error::Unsupported(expected.to_owned()));
    table.metadata.remove("shardfast.writer");
    assert_eq!(
        table.decode().unwrap_err(),
        Error::Unsupported(expected.replace(" (it was written by shardfast 0.1.0)", ""))
    );
}

#[test]
fn requirements_have_one_spelling() {
    let long = format!("{}>=1.4", "a".repeat(65));
    for requires in [
        " ",
        "codec",
        "codec>=",
        "codec>=1",
        "codec>=1.",
        "codec>=1.04",
        "codec>=1.4 ",
        " codec>=1.4",
        "codec>1.4",
        "codec >=1.4",
        ">=1.4",
        "Codec>=1.4",
        "4codec>=1.4",
        "co_dec>=1.4",
        "cod\u{e9}c>=1.4",
        "b>=1.4 a>=1.4",
        "a>=1.4 a>=1.5",
        "a>=1.4  b>=1.4",
        "a>=1.4,b>=1.4",
        "a>=4294967296.0",
        "a>=-1.0",
        &long,
    ] {
        let mut table = Table::sample();
        table.metadata.insert("shardfast.requires".to_owned(), requires.to_owned());
        let found = table.decode();
        assert!(
            matches!(&found, Err(Error::Corrupt(m)) if m.contains("shardfast.requires")),
            "{requires:?}: {found:?}"
        );
    }
    for requires in ["a>=1.0", "a-1>=1.4 a2>=4.0", &long[1..]] {
        let mut table = Table::sample();
        table.metadata.insert("shardfast.requires".to_owned(), requires.to_owned());
        assert!(matches!(table.decode(), Err(Error::Unsupported(_))), "{requires:?}");
    }
}

#[test]
fn a_file_elsewhere_is_unsupported_and_named() {
    let elsewhere = "../step-00000900";
    let mut builder = builder();
    builder.tensor(&name("model", "zero"), DType::F32, &[0], elsewhere, &[]);
    let bytes = builder.finish().unwrap().encode();
    let mut table = Table::of(&bytes);
    assert!(table.decode().is_ok());
    // The layout's text is the last one.
    let texts = table.rows("strings.ends") as u64;
    let found = table.set("files.location", 1, texts).decode();
    let expected = "manifest: file extra/00001-000-0123456789abcdef.safetensors: expected it in the checkpoint itself, \
                    found that it lies in \"../step-00000900\"; upgrade shardfast";
    assert_eq!(found.unwrap_err(), Error::Unsupported(expected.to_owned()));
    for location in [texts + 1, u64::from(u32::MAX)] {
        let found = table.set("files.location", 1, location).decode();
        assert!(matches!(&found, Err(Error::Corrupt(m)) if m.contains("there is no string")), "{found:?}");
    }
}

#[test]
fn a_later_major_version_names_the_upgrade_whatever_else_it_holds() {
    let mut table = Table::sample();
    table.columns.clear();
    table.metadata.retain(|key, _| key == "shardfast.writer");
    table.metadata.insert("shardfast.format".to_owned(), "2.0".to_owned());
    let expected = "manifest: expected format 1.x, found 2.0, written by shardfast 0.1.0; upgrade shardfast";
    assert_eq!(table.decode().unwrap_err(), Error::Unsupported(expected.to_owned()));
    for (column, row) in [("leaves.kind", 0), ("leaves.dtype", 4)] {
        let found = Table::sample().set(column, row, 77).decode();
        assert!(matches!(&found, Err(Error::Unsupported(m)) if m.contains("77") && m.contains("upgrade")), "{found:?}");
    }
}

#[test]
fn every_column_and_every_metadata_is_needed() {
    let table = Table::sample();
    for column in table.columns.keys() {
        let mut tampered = table.clone();
        tampered.columns.remove(column);
        let found = tampered.decode();
        assert!(matches!(&found, Err(Error::Corrupt(m)) if m.contains(column.as_str())), "{column}: {found:?}");
        let mut tampered = table.clone();
        tampered.columns.get_mut(column).unwrap().0 = safetensors::Dtype::I8;
        let found = tampered.decode();
        assert!(matches!(&found, Err(Error::Corrupt(m)) if m.contains(column.as_str())), "{column}: {found:?}");
        // One row more or less never fits the rest.
        let width = table.columns[column].0.bitsize() / 8;
        let mut tampered = table.clone();
        let data = &mut tampered.columns.get_mut(column).unwrap().1;
        data.truncate(data.len() - width);
        let found = tampered.decode();
        assert!(matches!(&found, Err(Error::Corrupt(_))), "{column}: {found:?}");
        let mut tampered = table.clone();
        let data = &mut tampered.columns.get_mut(column).unwrap().1;
        data.extend_from_within(data.len() - width..);
        let found = tampered.decode();
        // One more empty string, which no leaf uses, is allowed.
        assert!(matches!(&found, Err(Error::Corrupt(_))) || column == "strings.ends", "{column}: {found:?}");
    }
    for key in [
        "shardfast.format",
        "shardfast.requires",
        "shardfast.attempt",
        "shardfast.world",
        "shardfast.created_unix_ms",
        "shardfast.writer",
    ] {
        let mut tampered = table.clone();
        tampered.metadata.remove(key);
        let found = tampered.decode();
        assert!(matches!(&found, Err(Error::Corrupt(m)) if m.contains(key)), "{key}: {found:?}");
    }
    for (key, value) in [
        ("shardfast.format", "1"),
        ("shardfast.format", "one.two"),
        ("shardfast.format", "1.00"),
        ("shardfast.attempt", "0123456789ABCDEF"),
        ("shardfast.step", "-1"),
        ("shardfast.step", "1e3"),
        ("shardfast.world", "0"),
        ("shardfast.world", "4294967296"),
        ("shardfast.created_unix_ms", " 1"),
    ] {
        let mut tampered = table.clone();
        tampered.metadata.insert(key.to_owned(), value.to_owned());
        let found = tampered.decode();
        assert!(matches!(&found, Err(Error::Corrupt(_))), "{key} = {value}: {found:?}");
    }
}

#[test]
fn an_extreme_number_in_any_row_is_an_error_or_keeps_the_promises() {
    let table = Table::sample();
    let (mut caught, mut kept) = (0, 0);
    for column in table.columns.keys() {
        for row in 0..table.rows(column) {
            for value in
                [0, 1, 0x7f, 0x80, 0xff, 1 << 31, u64::from(u32::MAX), 1 << 62, 1 << 63, u64::MAX - 4095, u64::MAX]
            {
                let mut tampered = table.clone();
                let bytes = tampered.set(column, row, value).encode();
                match Manifest::decode(&bytes) {
                    Err(_) => caught += 1,
                    Ok(decoded) => {
                        promises::hold(&bytes, &decoded);
                        kept += 1;
                    }
                }
            }
        }
    }
    assert!(caught > 800 && kept > 100, "{caught} caught, {kept} kept");
}

#[test]
fn columns_that_contradict_each_other_are_corrupt() {
    type Change = dyn Fn(&mut Table);
    let cases: [(&str, &Change); 34] = [
        ("before the data", &|t| _ = t.set("regions.file_offset", 1, 4095)),
        ("in the header", &|t| _ = t.set("regions.file_offset", 1, 0)),
        ("behind the file", &|t| _ = t.set("regions.file_offset", 1, 4096 + 200 - 47)),
        ("wrapping around", &|t| _ = t.set("regions.file_offset", 1, u64::MAX - 47)),
        ("the wrong size", &|t| _ = t.set("regions.bytes", 1, 47)),
        ("stored in fewer bytes", &|t| _ = t.set("regions.stored_bytes", 1, 47)),
        ("stored in more bytes", &|t| _ = t.set("regions.stored_bytes", 1, 49)),
        ("stored in more bytes than there are", &|t| _ = t.set("regions.stored_bytes", 1, u64::MAX)),
        ("stored in no bytes", &|t| _ = t.set("regions.stored_bytes", 1, 0)),
        ("both sizes wrong", &|t| _ = t.set("regions.bytes", 1, 47).set("regions.stored_bytes", 1, 47)),
        ("a value stored in fewer bytes", &|t| _ = t.set("values.stored_bytes", 0, 8)),
        ("a value of more bytes than are stored", &|t| _ = t.set("values.bytes", 0, u64::MAX)),
        ("no such file", &|t| _ = t.set("regions.file", 0, 2)),
        ("a value before the data", &|t| _ = t.set("values.file_offset", 0, 4095)),
        ("a value behind the file", &|t| _ = t.set("values.bytes", 0, 13).set("values.stored_bytes", 0, 13)),
        ("a value of no such file", &|t| _ = t.set("values.file", 0, 7)),
        ("a region outside", &|t| _ = t.set("regions.offsets", 2, 3)),
        ("a region that wraps", &|t| _ = t.set("regions.offsets", 2, u64::MAX - 1)),
        ("a region twice", &|t| _ = t.set("regions.offsets", 2, 0)),
        ("an empty region", &|t| _ = t.set("regions.lengths", 2, 0)),
        ("a hole", &|t| {
            _ = t.set("regions.lengths", 2, 1).set("regions.bytes", 2, 24).set("regions.stored_bytes", 2, 24);
        }),
        ("an alias of itself", &|t| _ = t.set("leaves.alias_of", 3, 3)),
        ("an alias of an object", &|t| _ = t.set("leaves.alias_of", 3, 0)),
        ("an alias of nothing", &|t| _ = t.set("leaves.alias_of", 3, 5)),
        ("a tensor with a target", &|t| _ = t.set("leaves.alias_of", 4, 1)),
        ("an object with a dtype", &|t| _ = t.set("leaves.dtype", 0, 1)),
        ("an alias with a dtype", &|t| _ = t.set("leaves.dtype", 3, 1)),
        ("unsorted names", &|t| _ = t.set("leaves.name", 1, 4).set("leaves.name", 4, 1)),
        ("the same name", &|t| {
            let first = t.columns["leaves.name"].1[4..8].to_vec();
            t.columns.get_mut("leaves.name").unwrap().1[8..12].copy_from_slice(&first);
        }),
        ("a rank twice", &|t| _ = t.set("ranks.start", 2, 3).set("ranks.stop", 2, 4)),
        ("ranks backwards", &|t| _ = t.set("ranks.stop", 0, 0)),
        ("a rank outside the world", &|t| _ = t.set("ranks.stop", 1, 5)),
        ("data beyond the file", &|t| _ = t.set("files.data_start", 0, 8192)),
        ("data not aligned", &|t| _ = t.set("files.data_start", 0, 4097)),
    ];
    for (what, change) in cases {
        let mut table = Table::sample();
        change(&mut table);
        let found = table.decode();
        assert!(matches!(&found, Err(Error::Corrupt(_))), "{what}: {found:?}");
    }
}

#[test]
fn texts_that_are_none_are_corrupt() {
    let mut table = Table::sample();
    table.columns.get_mut("strings.text").unwrap().1[0] = 0xff;
    assert!(matches!(table.decode(), Err(Error::Corrupt(m)) if m.contains("strings.text") && m.contains("byte 0")));

    let mut builder = builder();
    builder.object(&name("extra", "ü"), "", &[(vec![0..1], extent(1, 4096, 1))]);
    let bytes = builder.finish().unwrap().encode();
    let at = bytes.windows(2).rposition(|pair| pair == "ü".as_bytes()).unwrap();
    let ends = SafeTensors::deserialize(&bytes).unwrap().tensor("strings.text").unwrap().data().as_ptr() as usize;
    let inside = (bytes.as_ptr() as usize + at + 1 - ends) as u64;
    let mut cut = bytes.clone();
    let end = bytes.windows(8).position(|eight| eight == (inside + 1).to_le_bytes()).unwrap();
    cut[end..end + 8].copy_from_slice(&inside.to_le_bytes());
    assert!(matches!(Manifest::decode(&cut), Err(Error::Corrupt(m)) if m.contains("in two")));
}

#[test]
fn paths_that_leave_the_checkpoint_are_corrupt() {
    let honest = "model/00000-000-0123456789abcdef.safetensors";
    for path in ["../", "/", "./", "model/../", "model//", "C:\\", "a\0"] {
        let mut table = Table::sample();
        let evil = format!("{path}{}", &honest[path.len()..]);
        table.columns.get_mut("files.paths").unwrap().1[..honest.len()].copy_from_slice(evil.as_bytes());
        let found = table.decode();
        assert!(matches!(&found, Err(Error::Corrupt(m)) if m.contains("path")), "{evil:?}: {found:?}");
    }
    let mut builder = builder();
    builder.file(file("model/00000-000-0123456789abcdef.safetensors", 8192));
    assert!(matches!(builder.finish(), Err(Error::Invalid(m)) if m.contains("occurs twice")));
}

#[test]
fn every_truncation_is_corrupt() {
    let bytes = manifest().encode();
    for length in 0..bytes.len() {
        assert!(matches!(Manifest::decode(&bytes[..length]), Err(Error::Corrupt(_))), "{length} bytes");
    }
    assert!(Manifest::decode(&[&bytes[..], b"\0"].concat()).is_err());
}
