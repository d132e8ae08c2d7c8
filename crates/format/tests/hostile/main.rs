//! Runs every decoder over thousands of damaged files. Each must return an error or a value that keeps its promises,
//! without a panic, and hold no more memory than a small multiple of the input.
#![allow(clippy::single_range_in_vec_init)] // the ranks of a value are ranges, often one
#![allow(unsafe_code)] // for the counting allocator below, which is all that needs it

mod decoders {
    pub(crate) mod columns;
    pub(crate) mod commit;
    pub(crate) mod header;
    pub(crate) mod manifest;
    pub(crate) mod object;
}
mod mutate;
#[path = "../format/sample.rs"]
mod sample;
mod seeds;
#[path = "../format/values.rs"]
mod values;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Debug;

use shardfast_format::Error;

use mutate::{Dice, mutate};

const ROUNDS: usize = 15_000;

/// Bytes that a decoder may hold at once for each byte of input. The worst honest inputs: a list of nulls makes a
/// 32-byte value of each byte, and a map of empty strings a tree node of every six bytes.
const HELD_PER_BYTE_MAX: usize = 33;

/// Bytes that a decoder may hold for any input: error messages, buffers of the JSON parser.
const HELD_MAX: usize = 4096;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts the bytes that each thread holds.
struct Counting;

fn count(more: usize, less: usize) {
    // Frees of what another thread allocated may go below zero; only differences within one thread are used.
    let held = HELD.get().wrapping_add(more).wrapping_sub(less);
    HELD.set(held);
    if held > PEAK.get() {
        PEAK.set(held);
    }
}

// SAFETY: every call is handed to `System` unchanged, whose contract is the caller's and the answer's. The counters are
// constant-initialised thread locals without destructors, so reading them neither allocates nor unwinds, at any time in
// a thread's life.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: `block` came from `System` by `alloc` or `realloc` above, with this layout, by the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // Both blocks may exist for a moment.
        count(bytes, 0);
        count(0, layout.size());
        // SAFETY: as for `dealloc`; the caller keeps `realloc`'s contract on `bytes`.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the most bytes that `work` held at once beyond those held before.
fn peak_of<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    (PEAK.get() - before, result)
}

fn decode_within_bounds<T>(decode: fn(&[u8]) -> Result<T, Error>, bytes: &[u8]) -> Result<T, Error> {
    let (peak, result) = peak_of(|| decode(bytes));
    let bound = HELD_MAX + HELD_PER_BYTE_MAX * bytes.len();
    assert!(
        peak <= bound,
        "{peak} bytes held for an input of {}: {:02x?}",
        bytes.len(),
        &bytes[..bytes.len().min(400)]
    );
    result
}

fn attack<T: Debug>(seeds: &[Vec<u8>], decode: fn(&[u8]) -> Result<T, Error>, hold: fn(&[u8], &T)) {
    for seed in seeds {
        hold(seed, &decode_within_bounds(decode, seed).expect("a seed is well-formed"));
    }
    let (mut refused, mut taken) = (0, 0);
    for round in 0..ROUNDS {
        let mut dice = Dice::new(round as u64);
        let (seed, other) = (dice.below(seeds.len()), dice.below(seeds.len()));
        let bytes = mutate(&mut dice, &seeds[seed], &seeds[other]);
        match decode_within_bounds(decode, &bytes) {
            Err(error) => {
                assert!(error.message().len() <= 1000 + 2 * bytes.len(), "{error}");
                refused += 1;
            }
            Ok(value) => {
                hold(&bytes, &value);
                taken += 1;
            }
        }
    }
    assert!(refused > ROUNDS / 4, "only {refused} of {ROUNDS} were refused ({taken} taken)");
}

#[test]
fn data_file_headers() {
    attack(&seeds::headers(), decoders::header::decode, decoders::header::hold);
}

#[test]
fn manifests() {
    attack(&seeds::manifests(), decoders::manifest::decode, decoders::manifest::hold);
}

#[test]
fn commit_records() {
    attack(&seeds::commits(), decoders::commit::decode, decoders::commit::hold);
}

#[test]
fn columns_of_records() {
    attack(&seeds::columns(), decoders::columns::decode, decoders::columns::hold);
}

#[test]
fn values_of_objects() {
    attack(&seeds::objects(), decoders::object::decode, decoders::object::hold);
}

/// Returns inputs that take the most memory per byte, well-formed up to their last byte.
#[test]
fn the_densest_inputs() {
    let object = |bytes: &[u8]| _ = decode_within_bounds(decoders::object::decode, bytes);
    let count = 100_000u32;
    let counted = |head: u8, item: &[u8], items: u32| {
        let mut bytes = vec![head];
        bytes.extend_from_slice(&count.to_be_bytes());
        bytes.extend(item.iter().copied().cycle().take(item.len() * items as usize));
        bytes
    };
    object(&counted(0x9a, &[0xf6], count));
    object(&counted(0x9a, &[0x80], count));
    object(&counted(0x9a, &[0x81, 0xf6], count));
    object(&counted(0x9a, &[0x60], count));
    object(&counted(0x9a, &[0x61, 0x61], count));
    object(&counted(0x9a, &[0xc3, 0x40], count));
    object(&counted(0xba, &[0xf6, 0xf6], count));
    object(&counted(0x9a, &[0xd9, 0xe1, 0x00, 0x80], count));
    // Lists in lists that each claim all the bytes that are left.
    let mut claims = Vec::new();
    for level in 0..64u32 {
        claims.push(0x9a);
        claims.extend_from_slice(&(60_000 - 5 * (level + 1)).to_be_bytes());
    }
    claims.resize(60_000, 0xf6);
    object(&claims);

    let container = |json: String| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        _ = decode_within_bounds(decoders::header::decode, &bytes);
        _ = decode_within_bounds(decoders::manifest::decode, &bytes);
    };
    let entry = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let all = |item: &dyn Fn(u32) -> String| (0..20_000).map(item).collect::<Vec<_>>().join(",");
    container(format!("{{{}}}", all(&|i| format!("\"{i:x}\":{entry}"))));
    container(format!("{{\"__metadata__\":{{{}}}}}", all(&|i| format!("\"{i:x}\":\"\""))));
    container(format!("{{\"__metadata__\":{{{}}}}}", all(&|_| "\"\":\"\"".to_owned())));
    container(format!("{{\"t\":{{\"shape\":[{}]}}}}", all(&|_| "0".to_owned())));
    container(format!("{{\"t\":{}}}", "[".repeat(100_000)));
    container(format!("{{\"t\":\"{}\"}}", "\\u0000".repeat(20_000)));
}
