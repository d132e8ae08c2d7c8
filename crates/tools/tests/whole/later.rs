//! Tests checkpoints of an invented later version: known parts are loaded, and the rest refused by name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shardfast_engine::{Checkpoint, Engine, Kind, Result, ValueRef, open};
use shardfast_format::LeafName;
use shardfast_tools::verify;

const LONG: Duration = Duration::from_secs(60);

/// Returns the checkpoints that `tests/reader/write_later.py` wrote.
fn later() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reader/later")
}

fn opened(name: &str) -> Result<Checkpoint> {
    open(&Engine::solo(), later().join(name).to_str().unwrap(), LONG)
}

#[test]
fn a_later_version_without_anything_to_know_is_loaded() {
    let checkpoint = opened("readable").unwrap();
    let manifest = checkpoint.manifest();
    assert_eq!(manifest.info.writer, "shardfast 7.0.0");
    let leaf = manifest.find(&LeafName::new("extra", "args")).unwrap();
    let values = checkpoint.load(&[], &[ValueRef { leaf, value: 0 }], LONG).unwrap();
    assert_eq!(values[0].len(), 13);
    let url = later().join("readable");
    assert!(verify(&Engine::solo(), url.to_str().unwrap(), &|_, _| {}).unwrap().is_sound());
}

#[test]
fn what_would_be_misread_is_refused_by_name() {
    let cases: [(&str, Kind, &[&str]); 6] = [
        ("unknown-feature", Kind::Unsupported, &["\"delta\" of format 1.3", "shardfast 7.0.0", "upgrade"]),
        ("codec-column", Kind::Unsupported, &["column \"regions.codec\"", "upgrade"]),
        ("compressed", Kind::Unsupported, &["\"codec\" of format 1.4, \"delta\" of format 1.3", "upgrade"]),
        ("stored-bytes", Kind::Corrupt, &["model/w", "32 bytes", "12 stored bytes"]),
        ("file-elsewhere", Kind::Unsupported, &["\"files-elsewhere\" of format 1.5", "upgrade"]),
        ("file-elsewhere-unannounced", Kind::Unsupported, &["model/00000-000-", "\"../step-00000900\"", "upgrade"]),
    ];
    for (name, kind, words) in cases {
        let error = opened(name).err().unwrap_or_else(|| panic!("{name} was opened"));
        assert_eq!(error.kind, kind, "{name}: {error}");
        for word in words {
            assert!(error.message.contains(word), "{name}: no {word} in {error}");
        }
        assert!(!error.message.contains("missing"), "{name}: {error}");
    }
    let named = std::fs::read_dir(later()).unwrap().count();
    assert_eq!(named, cases.len() + 1);
}
