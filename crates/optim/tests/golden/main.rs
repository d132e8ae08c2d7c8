//! Replays golden steps bit for bit: PyTorch's optimizers recorded a few steps in every file under `steps`.
//!
//! `python tests/gpu/record.py` records them on a machine with a device and never replaces one. What was recorded on a
//! CPU (`--device cpu`) shows that this reader reads and compares.

mod recorded;

use std::collections::BTreeMap;
use std::path::Path;

use recorded::Recorded;
use shardfast_optim::{Device, Instructions, Variant};

/// Returns the text of every file, by its name.
fn files() -> BTreeMap<String, String> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/steps");
    let entries = std::fs::read_dir(&place).unwrap_or_else(|error| panic!("{}: {error}", place.display()));
    let paths = entries.map(|entry| entry.expect("the directory can be listed").path());
    paths
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (path.file_name().expect("it has a name").to_string_lossy().into_owned(), text)
        })
        .collect()
}

/// Returns the file of AdamW on a CPU.
fn adam() -> String {
    files().remove("adam.fused.cpu.f32.txt").expect("it was recorded on a CPU")
}

/// Checks that one of the recorded variants has the bits of all runs with every set of instructions.
fn expect_bits(recorded: &Recorded) -> Result<&'static Variant, String> {
    let mut wrong = String::new();
    for &variant in &recorded.variants {
        let mut differs = recorded
            .runs
            .iter()
            .filter(|run| !Instructions::all().into_iter().all(|on| recorded.has_bits_of(run, variant, on)));
        match differs.next() {
            None => return Ok(variant),
            Some(run) => wrong += &format!("; {} has other bits in the run {}", variant.name(), run.settings),
        }
    }
    Err(format!("no variant has the recorded bits{wrong}"))
}

#[test]
fn every_recorded_step_is_replayed_bit_for_bit() {
    let mut named = Vec::new();
    for (name, text) in files() {
        let recorded = Recorded::read(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        let variant = expect_bits(&recorded).unwrap_or_else(|error| panic!("{name}: {error}"));
        println!("{name}: {} runs, the bits of {}", recorded.runs.len(), variant.name());
        named.extend(recorded.variants.iter().map(|variant| variant.name()));
    }
    let cuda = Variant::all().iter().filter(|variant| variant.device() == Device::Cuda);
    let missing: Vec<_> = cuda.map(Variant::name).filter(|name| !named.contains(name)).collect();
    println!("not recorded on a device: {}", if missing.is_empty() { "none".into() } else { missing.join(", ") });
    assert!(named.contains(&"adam.fused.cpu.f32"), "the files that test the reader are gone");
}

#[test]
fn a_changed_bit_is_found() {
    let text = adam();
    // The last bit of what the steps left; the sign of a parameter and of a gradient, which no rounding hides.
    for (word, digit, bit) in [("after", 7, 1), ("before", 0, 8), ("gradient", 0, 8)] {
        let word = format!("\n{word} ");
        let at = text.find(&word).expect("it is there") + word.len() + digit;
        let changed = u8::from_str_radix(&text[at..=at], 16).expect("a digit") ^ bit;
        let changed = format!("{}{changed:x}{}", &text[..at], &text[at + 1..]);
        let error = expect_bits(&Recorded::read(&changed).expect("it still can be read")).expect_err(&word);
        assert!(error.contains("adam.fused.cpu.f32 has other bits in the run AdamW "), "{error}");
    }
}

#[test]
fn files_of_a_device_can_be_read() {
    // With corrections of the device and, of a mixed one, moments of 16 bits. No device left these bits.
    for variant in ["adam.fused.cuda.f32", "adam.fused.cuda.mixed"] {
        let (mut text, mut arrays) = (String::new(), 0);
        let first_run = adam().split("\n\n").take(2).collect::<Vec<_>>().join("\n\n");
        for line in first_run.replace("adam.fused.cpu.f32", variant).lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            let rest = match word {
                "scalars" => rest.strip_suffix("0.0").expect("of the host").to_owned() + "1.0",
                "before" | "after" if variant.ends_with("mixed") => {
                    arrays += 1;
                    let digits = if arrays % 3 == 1 { 8 } else { 4 };
                    rest.split(' ').map(|bits| &bits[..digits]).collect::<Vec<_>>().join(" ")
                }
                _ => rest.to_owned(),
            };
            text += format!("{word} {rest}").trim_end();
            text += "\n";
        }
        expect_bits(&Recorded::read(&text).expect(variant)).expect_err(variant);
    }
}

#[test]
fn another_variant_is_found_to_differ() {
    let text = adam().replace("variants adam.fused.cpu.f32", "variants adam.fused.cpu-default.f32");
    expect_bits(&Recorded::read(&text).expect("it can be read")).expect_err("it rounds otherwise");
    let both = adam().replace("variants ", "variants adam.fused.cpu-default.f32 ");
    let variant = expect_bits(&Recorded::read(&both).expect("it can be read")).expect("the second one is right");
    assert_eq!(variant.name(), "adam.fused.cpu.f32");
}

#[test]
fn damaged_files_are_refused() {
    let text = adam();
    let without = |word: &str| -> String {
        let at = text.lines().position(|line| line.starts_with(word)).expect("it is there");
        text.lines().enumerate().filter(|(number, _)| *number != at).map(|(_, line)| format!("{line}\n")).collect()
    };
    let head = text.split("\n\n").next().expect("there is a head").to_owned();
    for (damaged, expected) in [
        (String::new(), "expected one line `variants ...`"),
        (head, "no run was recorded"),
        (text.replace("adam.fused.cpu.f32", "adam.fused.f32"), "no variant is called adam.fused.f32"),
        (text.replace("gradients F32", "gradients F16"), "gradients are F32 or BF16, not F16"),
        (text.replace("tensors 1 10", "tensors 1 x"), "x is no number"),
        (text.replace("tensors 1 10", "tensors 1 11"), "expected 11 elements, found 10"),
        (without("run"), "expected one line `run ...`"),
        (without("before"), "expected 6 lines `before ...`, found 5"),
        (without("gradient "), "expected 6 lines `gradient ...`, found 5"),
        (without("after"), "expected 6 lines `after ...`, found 5"),
        (without("scalars"), "expected 4 lines `gradient ...`, found 6"),
        (text.replacen("scalars 0", "scalars 0 0", 1), "12 numbers are not the scalars of Adam"),
        (text.replacen("after ", "after 0", 1), "are not the bits of F32"),
        (text.replacen("after ", "after g", 1), "are no hexadecimal digits"),
    ] {
        let error = Recorded::read(&damaged).expect_err(expected);
        assert!(error.contains(expected), "expected {expected:?}, found {error:?}");
    }
}
