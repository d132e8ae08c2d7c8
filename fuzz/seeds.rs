//! Writes the seed corpus of every fuzz target, `corpus/<target>/<number>`, from the well-formed files of the tests.

#[path = "../crates/format/tests/format/sample.rs"]
mod sample;
#[path = "../crates/format/tests/hostile/seeds.rs"]
mod seeds;
#[path = "../crates/format/tests/format/values.rs"]
mod values;

use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let targets = [
        ("header", seeds::headers()),
        ("manifest", seeds::manifests()),
        ("commit", seeds::commits()),
        ("object", seeds::objects()),
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
