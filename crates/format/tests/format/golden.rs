//! Holds bytes of version 1.0, frozen: cases are added, never changed.

use std::collections::BTreeMap;

use shardfast_format::{
    Commit, DType, DataHeader, Dims, EntrySpec, FileLayout, LeafName, Manifest, ManifestBuilder, Region, SaveInfo, Tag,
    object,
};

use crate::sample;
use crate::values::{payload, tagged};

const COMMIT: &str = "\
shardfast 1.0\n\
attempt 0123456789abcdef\n\
manifest manifest-0123456789abcdef\n\
manifest_bytes 12\n\
manifest_sha256 b802ab9f53cad6bd4004f3c99d9ae71d7a8ff28686bbdc04a30862ee255374dc\n\
crc64 bca4dd151591dd18\n";

/// JSON of the header, in lines whose breaks are not in the file; spaces pad it to 4096 bytes.
const HEADER_JSON: &str = r#"{"__metadata__":{"shardfast.blocks":"0123456789abcdeffedcba9876543210",
"shardfast.block_bytes":"65536",
"format":"pt",
"note":"a \"b\""},
"w[0:2, 0:3]":{"dtype":"F32",
"shape":[2,3],"data_offsets":[0,24]},
"fp4":{"dtype":"F4",
"shape":[131072],"data_offsets":[24,65560]},
"rng@rank3":{"dtype":"U8",
"shape":[5],"data_offsets":[65560,65565]}}"#;

/// JSON of the manifest, in lines whose breaks are not in the file.
const MANIFEST_JSON: &str = r#"{"__metadata__":{"shardfast.format":"1.0",
"shardfast.requires":"",
"shardfast.attempt":"0123456789abcdef",
"shardfast.world":"2",
"shardfast.created_unix_ms":"1763596800123",
"shardfast.writer":"shardfast 0.1.0",
"shardfast.step":"7"},
"files.path_ends":{"dtype":"U64","shape":[2],"data_offsets":[0,16]},
"files.bytes":{"dtype":"U64","shape":[2],"data_offsets":[16,32]},
"files.data_start":{"dtype":"U64","shape":[2],"data_offsets":[32,48]},
"files.header_crc":{"dtype":"U64","shape":[2],"data_offsets":[48,64]},
"strings.ends":{"dtype":"U64","shape":[7],"data_offsets":[64,120]},
"leaves.dims_end":{"dtype":"U64","shape":[3],"data_offsets":[120,144]},
"leaves.regions_end":{"dtype":"U64","shape":[3],"data_offsets":[144,168]},
"leaves.values_end":{"dtype":"U64","shape":[3],"data_offsets":[168,192]},
"shapes":{"dtype":"U64","shape":[2],"data_offsets":[192,208]},
"regions.offsets":{"dtype":"U64","shape":[4],"data_offsets":[208,240]},
"regions.lengths":{"dtype":"U64","shape":[4],"data_offsets":[240,272]},
"regions.file_offset":{"dtype":"U64","shape":[2],"data_offsets":[272,288]},
"regions.bytes":{"dtype":"U64","shape":[2],"data_offsets":[288,304]},
"regions.stored_bytes":{"dtype":"U64","shape":[2],"data_offsets":[304,320]},
"values.ranks_end":{"dtype":"U64","shape":[1],"data_offsets":[320,328]},
"values.file_offset":{"dtype":"U64","shape":[1],"data_offsets":[328,336]},
"values.bytes":{"dtype":"U64","shape":[1],"data_offsets":[336,344]},
"values.stored_bytes":{"dtype":"U64","shape":[1],"data_offsets":[344,352]},
"files.location":{"dtype":"U32","shape":[2],"data_offsets":[352,360]},
"leaves.key":{"dtype":"U32","shape":[3],"data_offsets":[360,372]},
"leaves.name":{"dtype":"U32","shape":[3],"data_offsets":[372,384]},
"leaves.layout":{"dtype":"U32","shape":[3],"data_offsets":[384,396]},
"leaves.alias_of":{"dtype":"U32","shape":[3],"data_offsets":[396,408]},
"regions.file":{"dtype":"U32","shape":[2],"data_offsets":[408,416]},
"values.file":{"dtype":"U32","shape":[1],"data_offsets":[416,420]},
"ranks.start":{"dtype":"U32","shape":[1],"data_offsets":[420,424]},
"ranks.stop":{"dtype":"U32","shape":[1],"data_offsets":[424,428]},
"leaves.kind":{"dtype":"U8","shape":[3],"data_offsets":[428,431]},
"leaves.dtype":{"dtype":"U8","shape":[3],"data_offsets":[431,434]},
"strings.text":{"dtype":"U8","shape":[28],"data_offsets":[434,462]},
"files.paths":{"dtype":"U8","shape":[88],"data_offsets":[462,550]}}"#;

/// Columns of the manifest: eight-byte rows, four-byte rows and bytes.
const MANIFEST_COLUMNS: &str = "
    2c00000000000000580000000000000018100000000000000510000000000000001000000000000000100000000000008877665544332211
    88776655443322110500000000000000080000000000000008000000000000000d0000000000000011000000000000001200000000000000
    1c00000000000000000000000000000000000000000000000200000000000000000000000000000000000000000000000200000000000000
    0100000000000000010000000000000001000000000000000200000000000000030000000000000000000000000000000000000000000000
    0100000000000000000000000000000001000000000000000300000000000000010000000000000003000000000000000010000000000000
    0c100000000000000c000000000000000c000000000000000c000000000000000c0000000000000001000000000000000010000000000000
    05000000000000000500000000000000
    0000000000000000000000000300000003000000010000000400000005000000020000000200000006000000000000000200000000000000
    0000000000000000010000000000000002000000
    01020000000f6578747261726e676d6f64656c74696564775b53686172642830295d6d6f64656c2f30303030302d3030302d303132333435
    363738396162636465662e7361666574656e736f727365787472612f30303030312d3030302d303132333435363738396162636465662e73
    61666574656e736f7273
";

const OBJECTS: [(&str, &str); 34] = [
    ("tuple", "d9e10082016161"),
    ("set", "d9e10182016161"),
    ("frozenset", "d9e10282016161"),
    ("bytearray", "d9e1034200ff"),
    ("complex", "d9e10482fb3ff8000000000000fb8000000000000000"),
    ("surrogate_str", "d9e1054461edb3bf"),
    ("range", "d9e10683000a21"),
    ("slice", "d9e10783f603f6"),
    ("ellipsis", "d9e108f6"),
    ("ordered_dict", "d9e109a2181e01616102"),
    ("default_dict", "d9e10a826d6275696c74696e733a6c697374a26178016179f6"),
    ("counter", "d9e10ba2181e01616102"),
    ("deque", "d9e10c82088101"),
    ("named_tuple", "d9e10d8273706b672e6d6f643a4f757465722e496e6e6572a26178016179f6"),
    ("namespace", "d9e10e8273706b672e6d6f643a4f757465722e496e6e6572a26178016179f6"),
    ("dataclass", "d9e10f8273706b672e6d6f643a4f757465722e496e6e6572a26178016179f6"),
    ("enum", "d9e1108373706b672e6d6f643a4f757465722e496e6e65726352454401"),
    ("path", "d9e1118269506f73697850617468692f646174612f72756e"),
    ("datetime", "d9e112891907ea0b140c182218381a000c0a0800d9e1161ad693a400"),
    ("date", "d9e113831907ea0b14"),
    ("time", "d9e114860c182218381a000c0a0801d9e1166d4575726f70652f4265726c696e"),
    ("timedelta", "d9e11583201a0001517f1a000f423f"),
    ("time_zone", "d9e1166d4575726f70652f4265726c696e"),
    ("decimal", "d9e11764312e3130"),
    ("fraction", "d9e118822003"),
    ("uuid", "d9e11950000102030405060708090a0b0c0d0e0f"),
    ("tensor_ref", "d9e11a82656d6f64656c6177"),
    ("array", "d9e11b8465746f72636865696e7431368202014401000200"),
    ("numpy_scalar", "d9e11c82633c6634440000803f"),
    ("dtype", "d9e11d8265746f7263686862666c6f61743136"),
    ("torch_size", "d9e11e820203"),
    ("torch_device", "d9e11f66637564613a31"),
    ("pickle", "d9e1204480044e2e"),
    ("attributed", "d9e12182d9e109a2181e01616102a26178016179f6"),
];

fn unhex(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let digit = |byte: u8| char::from(byte).to_digit(16).unwrap() as u8;
    digits.chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn tiny_layout() -> (FileLayout, Vec<u64>) {
    let entries = [
        EntrySpec { name: "w[0:2, 0:3]".to_owned(), dtype: DType::F32, shape: Dims::from_slice(&[2, 3]) },
        EntrySpec { name: "fp4".to_owned(), dtype: DType::F4x2, shape: Dims::from_slice(&[65_536]) },
        EntrySpec { name: "rng@rank3".to_owned(), dtype: DType::U8, shape: Dims::from_slice(&[5]) },
    ];
    let layout = FileLayout::new(&entries, &BTreeMap::from([("note".to_owned(), "a \"b\"".to_owned())])).unwrap();
    (layout, vec![0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210])
}

fn tiny_manifest() -> Manifest {
    let info = SaveInfo {
        step: Some(7),
        world: 2,
        created_unix_ms: 1_763_596_800_123,
        user: BTreeMap::new(),
        ..sample::info()
    };
    let mut builder = ManifestBuilder::new(info);
    let model = builder.file(sample::file("model/00000-000-0123456789abcdef.safetensors", 4096 + 24));
    let extra = builder.file(sample::file("extra/00001-000-0123456789abcdef.safetensors", 4096 + 5));
    let rows = [
        (Region::new(&[0, 0], &[1, 3]), sample::extent(model, 4096, 12)),
        (Region::new(&[1, 0], &[1, 3]), sample::extent(model, 4108, 12)),
    ];
    builder.tensor(&LeafName::new("model", "w"), DType::F32, &[2, 3], "[Shard(0)]", &rows);
    builder.alias(&LeafName::new("model", "tied"), &LeafName::new("model", "w"));
    builder.object(&LeafName::new("extra", "rng"), "", &[(vec![0..2], sample::extent(extra, 4096, 5))]);
    builder.finish().unwrap()
}

#[test]
fn a_commit_record() {
    let commit = sample::commit(b"the manifest");
    assert_eq!(String::from_utf8(commit.encode()).unwrap(), COMMIT);
    assert_eq!(Commit::decode(COMMIT.as_bytes()).unwrap(), commit);
    commit.verify(b"the manifest").unwrap();
}

#[test]
fn a_data_files_header() {
    let (layout, crcs) = tiny_layout();
    let mut golden = unhex("f80f000000000000");
    golden.extend_from_slice(HEADER_JSON.replace('\n', "").as_bytes());
    golden.resize(4096, b' ');
    assert_eq!(layout.header(&crcs).unwrap(), golden);
    let header = DataHeader::parse(&golden, layout.file_bytes()).unwrap();
    assert_eq!((header.data_start, header.data_bytes), (4096, 65_565));
    assert_eq!(header.block_crcs, crcs);
    assert_eq!(header.metadata["note"], "a \"b\"");
    assert_eq!(header.entries[1].shape[..], [65_536]);
    assert_eq!((header.entries[2].offset, header.entries[2].bytes), (4096 + 65_560, 5));
}

#[test]
fn a_manifest() {
    let json = MANIFEST_JSON.replace('\n', "");
    let data_start = (8 + json.len()).next_multiple_of(8);
    let mut golden = ((data_start - 8) as u64).to_le_bytes().to_vec();
    golden.extend_from_slice(json.as_bytes());
    golden.resize(data_start, b' ');
    golden.extend_from_slice(&unhex(MANIFEST_COLUMNS));
    assert_eq!(String::from_utf8_lossy(&tiny_manifest().encode()), String::from_utf8_lossy(&golden));
    assert_eq!(tiny_manifest().encode(), golden);
    assert_eq!(Manifest::decode(&golden).unwrap(), tiny_manifest());
}

#[test]
fn a_value_of_every_tag() {
    let names: Vec<&str> = OBJECTS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, Tag::ALL.map(Tag::name));
    for (name, golden) in OBJECTS {
        let tag = Tag::from_name(name).unwrap();
        let value = tagged(tag, payload(tag));
        assert_eq!(hex(&object::encode(&value).unwrap()), golden, "{name}");
        assert_eq!(object::decode(&unhex(golden)).unwrap(), value, "{name}");
    }
}
