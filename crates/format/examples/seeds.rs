//! Writes the seed corpus of every fuzz target, `fuzz/corpus/<target>/<number>`, from the well-formed files of the
//! tests.
#![allow(clippy::single_range_in_vec_init)] // the ranks of a value are ranges, often one

#[path = "../tests/format/sample.rs"]
mod sample;
#[path = "../tests/hostile/seeds.rs"]
mod seeds;
#[path = "../tests/format/values.rs"]
mod values;

use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let targets = [
        ("header", seeds::headers()),
        ("manifest", seeds::manifests()),
        ("commit", seeds::commits()),
        ("object", seeds::objects()),
        ("columns", seeds::columns()),
    ];
    for (target, files) in targets {
        let directory = corpus.join(target);
        std::fs::create_dir_all(&directory)?;
        for (number, file) in files.iter().enumerate() {
            std::fs::write(directory.join(format!("{number:02}")), file)?;
        }
        println!("{}: {} files", directory.display(), files.len());
    }
    Ok(())
}
