//! Tests digests of a device's memory: equal to the host's, of the right moment, and their failures.

use std::sync::Arc;

use shardfast_engine::error::Kind;
use shardfast_engine::staging::{STAGING_BYTES_MIN, Slot, Staging};
use shardfast_engine::{Fences, Result};
use shardfast_transfer::cuda::{CopyStream, Device};
use shardfast_transfer::digest::{Digester, Digests, digest};

use crate::fake::Fake;
use crate::{DELAY_MAX_US, Dice, LONG, SHORT, dense, sink, while_held};

/// The kernel as devices run it.
const KERNEL: &str = include_str!("../../../transfer/src/cuda/device/digest.ptx");

/// Staging memory that is page-locked for a device.
#[allow(unsafe_code)]
fn staging(device: &Arc<Device>) -> Arc<Staging> {
    let (staging, device) = (Staging::new(STAGING_BYTES_MIN).unwrap(), Arc::clone(device));
    staging.page_lock(Arc::new(move |memory| {
        // SAFETY: the arena drops its locks before it unmaps the memory.
        Ok(Box::new(unsafe { device.page_lock(memory) }?) as Box<dyn Send>)
    }));
    staging
}

#[allow(unsafe_code)] // as every caller of the engine hands a device's memory over
fn digests(copies: &Arc<CopyStream>, runs: &[(usize, usize)], scratch: Slot) -> Result<Arc<dyn Digests>> {
    // SAFETY: tests free nothing that is still digested, unless what comes of that is what they look for.
    unsafe { Arc::clone(copies).digests(runs, scratch) }
}

#[test]
fn digests_of_every_alignment_and_length_are_the_hosts() {
    let fake = Fake::new(1, DELAY_MAX_US);
    let device = fake.device();
    let (staging, mut dice) = (staging(&device), Dice(1));
    let (mut runs, mut expected) = (Vec::new(), Vec::new());
    let one_in = std::env::var("SHARDFAST_DIGESTS_ONE_IN").map_or(3, |runs| runs.parse().expect("a number"));
    for skew in 0..16 {
        // Each is there, at one alignment in so many.
        let short = (0..=100).filter(|bytes| (skew + bytes) % one_in == 0);
        // These have more words than the threads of a run, and more pairs of words.
        for bytes in short.chain([8 * 1024 - 8, 8 * 1024 + 7, 16 * 1024 + 21, 40_000 + dice.below(100) as usize]) {
            let contents = dice.bytes(bytes);
            // Of its own, so that whatever is read outside of the run fails.
            runs.push((fake.alloc_skewed(&contents, skew), bytes));
            expected.push(digest(&contents));
        }
    }
    let found = digests(&fake.copies(&device), &runs, staging.acquire().unwrap()).unwrap();
    let found = found.wait().unwrap();
    assert_eq!(found.len(), runs.len());
    for ((found, expected), (address, bytes)) in found.iter().zip(&expected).zip(&runs) {
        assert_eq!(found, expected, "{bytes} bytes at {address:#x}");
    }
}

#[test]
fn runs_anywhere_in_a_tensor_are_digested_in_their_order() {
    let fake = Fake::new(2, DELAY_MAX_US);
    let device = fake.device();
    let (staging, mut dice) = (staging(&device), Dice(2));
    let contents = dice.bytes(1 << 18);
    let base = fake.alloc(&contents);
    let copies = fake.copies(&device);
    for round in 0..4 {
        let ranges: Vec<(usize, usize)> = (0..60)
            .map(|_| {
                let at = dice.below(contents.len() as u64) as usize;
                let bytes_max = 1 << (1 + dice.below(18));
                (at, (dice.below(bytes_max) as usize).min(contents.len() - at))
            })
            .collect();
        let runs: Vec<(usize, usize)> = ranges.iter().map(|(at, bytes)| (base + at, *bytes)).collect();
        let expected: Vec<u64> = ranges.iter().map(|(at, bytes)| digest(&contents[*at..at + bytes])).collect();
        let found = digests(&copies, &runs, staging.acquire().unwrap()).unwrap();
        assert_eq!(found.wait().unwrap(), expected, "round {round}");
    }
    let none = digests(&copies, &[], staging.acquire().unwrap()).unwrap();
    assert_eq!(none.wait(), Ok(&[][..]));
}

#[test]
fn digests_are_of_what_the_training_had_been_given_to_write() {
    for seed in 0..5 {
        let fake = Fake::new(seed, DELAY_MAX_US);
        let (device, base) = (fake.device(), fake.alloc(&[1; 5000]));
        let staging = staging(&device);
        device.prepare_digests().unwrap();
        fake.hold();
        fake.kernel(base, 5000, 2, 1000);
        let digests = digests(&fake.copies(&device), &[(base + 3, 4000)], staging.acquire().unwrap()).unwrap();
        let (found, too_soon) = while_held(&fake, SHORT, || digests.wait().unwrap().to_vec());
        assert!(!too_soon && found == [digest(&[2; 4000])], "seed {seed}");
    }
}

#[test]
fn without_the_wait_for_the_training_stale_bytes_would_be_digested() {
    let fake = Fake::new(6, DELAY_MAX_US);
    let (device, base) = (fake.device(), fake.alloc(&[1; 64]));
    let staging = staging(&device);
    device.prepare_digests().unwrap();
    fake.forget_waits();
    fake.hold();
    fake.kernel(base, 64, 2, 0);
    let digests = digests(&fake.copies(&device), &[(base, 64)], staging.acquire().unwrap()).unwrap();
    assert_eq!(digests.wait().unwrap(), [digest(&[1; 64])], "the fake driver cannot show a missing wait");
    fake.release();
}

#[test]
fn digests_are_of_what_their_own_stream_wrote_before() {
    let fake = Fake::new(7, DELAY_MAX_US);
    let (device, base) = (fake.device(), fake.alloc(&[1; 4096]));
    let staging = staging(&device);
    let copies = fake.copies(&device);
    let (mut source, mut fences) = (staging.acquire().unwrap(), Fences::default());
    source.fill(9);
    let sink = sink(&copies, base, &dense(4096)).unwrap();
    sink.scatter(&[0], &[4096], &[1], &source[..4096], &mut fences).unwrap();
    let digests = digests(&copies, &[(base, 4096)], staging.acquire().unwrap()).unwrap();
    assert_eq!(digests.wait().unwrap(), [digest(&[9; 4096])]);
    fences.wait().unwrap();
}

#[test]
fn the_caller_does_not_wait_for_the_training_once_the_kernel_is_loaded() {
    let fake = Fake::new(8, DELAY_MAX_US);
    let (device, base) = (fake.device(), fake.alloc(&[1; 512]));
    let staging = staging(&device);
    let begin = |limit| {
        fake.hold();
        let copies = fake.copies(&device);
        while_held(&fake, limit, || digests(&copies, &[(base, 512)], staging.acquire().unwrap()).unwrap())
    };
    // The driver loads the kernel.
    let (first, in_time) = begin(SHORT);
    assert!(!in_time, "the fake driver cannot show that loading a kernel waits");
    assert_eq!(first.wait().unwrap(), [digest(&[1; 512])]);
    drop(first);
    let (second, in_time) = begin(LONG);
    assert!(in_time, "it waited for the training");
    assert_eq!(second.wait().unwrap(), [digest(&[1; 512])]);
    drop(second);

    let other = fake.devices().device(0).unwrap();
    other.prepare_digests().unwrap();
    fake.hold();
    let copies = fake.copies(&other);
    let slot = staging.acquire().unwrap();
    let (prepared, in_time) = while_held(&fake, LONG, || digests(&copies, &[(base, 512)], slot).unwrap());
    assert!(in_time, "it waited for the training although the kernel was loaded in advance");
    assert_eq!(prepared.wait().unwrap(), [digest(&[1; 512])]);
}

#[test]
fn several_threads_wait_and_what_was_made_serves_the_next_ones() {
    let fake = Fake::new(9, DELAY_MAX_US);
    let (device, base) = (fake.device(), fake.alloc(&[1; 512]));
    let staging = staging(&device);
    device.prepare_digests().unwrap();
    fake.hold();
    fake.kernel(base, 512, 3, 5000);
    let copies = fake.copies(&device);
    let begin = || digests(&copies, &[(base, 512), (base + 8, 16)], staging.acquire().unwrap()).unwrap();
    let (shared, other) = (begin(), begin());
    let expected = [digest(&[3; 512]), digest(&[3; 16])];
    let ((), too_soon) = while_held(&fake, SHORT, || {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| assert_eq!(shared.wait().unwrap(), expected));
            }
        });
    });
    assert!(!too_soon);
    drop(other);
    drop(shared);
    for _ in 0..5 {
        assert_eq!(begin().wait().unwrap(), expected);
    }
    assert_eq!((fake.calls("cuMemAlloc_v2"), fake.calls("cuModuleLoadData")), (2, 1), "kept for the next ones");
}

#[test]
fn a_slot_is_not_given_back_before_the_device_has_written_it() {
    let fake = Fake::new(16, DELAY_MAX_US);
    let (device, base) = (fake.device(), fake.alloc(&[1; 512]));
    let staging = staging(&device);
    device.prepare_digests().unwrap();
    fake.hold();
    let digests = digests(&fake.copies(&device), &[(base, 512)], staging.acquire().unwrap()).unwrap();
    let ((), too_soon) = while_held(&fake, SHORT, || drop(digests));
    assert!(!too_soon, "it was dropped while the device was about to write its slot");
}

#[test]
#[allow(unsafe_code)]
fn what_cannot_be_digested_is_refused() {
    let fake = Fake::new(10, 0);
    let devices = fake.devices();
    let (device, other) = (devices.device(0).unwrap(), devices.device(1).unwrap());
    let staging = staging(&device);
    let (host, base, freed) = ([0u8; 64], fake.alloc(&[1; 100]), fake.alloc(&[0; 64]));
    fake.free(freed);
    let copies = fake.copies(&device);
    // SAFETY: 0 is the default stream.
    let elsewhere = unsafe { other.copies_after(0) }.unwrap();
    let good = (base, 100);
    for (copies, run, word) in [
        (&copies, (host.as_ptr() as usize, 64), "does not know"),
        (&copies, (freed, 64), "does not know"),
        (&copies, (base, 102), "does not know"),
        (&copies, (base + 50, usize::MAX), "bytes at"),
        (&elsewhere, good, "found memory of cuda:0"),
    ] {
        let error = digests(copies, &[good, run], staging.acquire().unwrap()).err().unwrap();
        assert_eq!(error.kind, Kind::Invalid, "{error}");
        assert!(error.message.contains(word) && error.message.contains("cuda:"), "{error}: without {word}");
    }
    // A run of no bytes is nowhere.
    let empty = digests(&copies, &[(host.as_ptr() as usize, 0), (freed, 0)], staging.acquire().unwrap()).unwrap();
    assert_eq!(empty.wait().unwrap(), [0, 0]);
    drop(empty);

    let error = digests(&copies, &vec![good; 43_691], staging.acquire().unwrap()).err().unwrap();
    assert_eq!(error.kind, Kind::Invalid);
    assert!(error.message.contains("at most 43690 runs") && error.message.contains("found 43691"), "{error}");

    let unlocked = Staging::new(STAGING_BYTES_MIN).unwrap();
    let error = digests(&copies, &[good], unlocked.acquire().unwrap()).err().unwrap();
    assert_eq!(error.kind, Kind::Unsupported);
    assert!(error.message.contains("cuda:0: expected page-locked"), "{error}");
}

#[test]
fn memory_that_is_freed_too_early_is_an_error_and_no_digest() {
    let fake = Fake::new(11, 0);
    let (device, base) = (fake.device(), fake.alloc(&[1; 4096]));
    let staging = staging(&device);
    device.prepare_digests().unwrap();
    fake.hold();
    let digests = digests(&fake.copies(&device), &[(base, 4096)], staging.acquire().unwrap()).unwrap();
    fake.free(base);
    fake.release();
    let error = digests.wait().unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable);
    assert!(error.message.contains("cuda:0") && error.message.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    assert_eq!(digests.wait(), Err(error), "the same as before");
}

#[test]
fn failed_calls_are_errors_that_leave_nothing_behind() {
    for (call, nth, code, kind) in [
        ("cuModuleLoadData", 1, 218, Kind::Unsupported),
        ("cuModuleLoadData", 1, 209, Kind::Unsupported),
        ("cuModuleLoadData", 1, 222, Kind::Unsupported),
        ("cuModuleLoadData", 1, 2, Kind::Exhausted),
        ("cuModuleGetFunction", 1, 500, Kind::Unavailable),
        ("cuMemAlloc_v2", 1, 2, Kind::Exhausted),
        ("cuEventCreate", 1, 2, Kind::Exhausted),
        ("cuMemcpyAsync", 1, 719, Kind::Unavailable),
        ("cuMemsetD8Async", 1, 719, Kind::Unavailable),
        ("cuLaunchKernel", 1, 719, Kind::Unavailable),
        ("cuMemcpyAsync", 2, 719, Kind::Unavailable),
        ("cuEventRecord", 1, 719, Kind::Unavailable),
        ("cuEventRecord", 2, 719, Kind::Unavailable),
        ("cuEventSynchronize", 1, 719, Kind::Unavailable),
    ] {
        let fake = Fake::new(12, DELAY_MAX_US);
        let before = fake.live();
        let base = fake.alloc(&[1; 1000]);
        {
            let device = fake.device();
            let (staging, copies) = (staging(&device), fake.copies(&device));
            let begin = || digests(&copies, &[(base, 1000)], staging.acquire().unwrap());
            fake.fail(call, nth, code, false);
            let error = begin().and_then(|digests| digests.wait().map(<[u64]>::to_vec)).unwrap_err();
            assert_eq!(error.kind, kind, "{call}: {error}");
            assert!(error.message.contains("cuda:0") && error.message.contains(call), "{error}: without {call}");
            // The next ones work.
            assert_eq!(begin().unwrap().wait().unwrap(), [digest(&[1; 1000])], "after {call}");
            let allocated = fake.calls("cuMemAlloc_v2");
            assert_eq!(allocated, if call == "cuMemAlloc_v2" { 2 } else { 1 }, "after {call} a buffer was lost");
        }
        assert_eq!(fake.live(), before, "{call}");
    }
}

#[test]
fn a_failed_call_leaves_no_copy_under_way() {
    for (call, nth) in [("cuMemsetD8Async", 1), ("cuLaunchKernel", 1), ("cuMemcpyAsync", 2), ("cuEventRecord", 2)] {
        let fake = Fake::new(13, 0);
        let (device, base) = (fake.device(), fake.alloc(&[1; 64]));
        let staging = staging(&device);
        device.prepare_digests().unwrap();
        fake.hold();
        let copies = fake.copies(&device);
        fake.fail(call, nth, 719, false);
        let slot = staging.acquire().unwrap();
        let (failed, too_soon) = while_held(&fake, SHORT, || digests(&copies, &[(base, 64)], slot).is_err());
        assert!(failed && !too_soon, "{call}: the slot was given back while a copy was under way");
    }
}

#[test]
fn graphs_being_captured_are_not_disturbed() {
    let fake = Fake::new(14, 0);
    let (device, base) = (fake.device(), fake.alloc(&[4; 64]));
    let staging = staging(&device);
    let (copies, slot) = (fake.copies(&device), staging.acquire().unwrap());
    fake.capture(fake.stream, true);
    let digests = digests(&copies, &[(base, 64)], slot).unwrap();
    assert_eq!(digests.wait().unwrap(), [digest(&[4; 64])], "another thread's capture was broken");
    fake.capture(fake.stream, false);
}

#[test]
fn the_fake_driver_knows_the_kernels_instructions_and_refuses_others_by_name() {
    let fake = Fake::new(15, 0);
    fake.load(KERNEL).unwrap();
    for (old, new, word) in [
        ("min.u64", "max.u64", "unknown instruction `max.u64`"),
        ("ld.global.u8", "ld.global.nc.u8", "unknown instruction `ld.global.nc.u8`"),
        ("bra mix", "bra mixed", "unknown label `mixed`"),
        ("[sums]", "[totals]", "unknown parameter `[totals]`"),
        ("or.b64 %word, %word, %second", "or.b64 %word, %word, %third", "unknown register `%third`"),
        ("mov.u32 %shift, 0", "mov.u64 %shift, 0", "expected `%shift` of type U64, found U32"),
        ("mov.u32 %run, %ctaid.x", "mov.u32 %tid.x, %run", "`%tid.x` cannot be written"),
        (".address_size 64", ".address_size 32", "unknown directive `.address_size 32`"),
        ("min.u64 %left, %left, 8", "min.u64 %left, %left", "expected 3 operands, found 2"),
        (".reg .u32", ".reg .f32", "unknown type `.f32`"),
    ] {
        assert!(KERNEL.contains(old), "{old}");
        let why = fake.load(&KERNEL.replace(old, new)).unwrap_err();
        assert!(why.contains(word), "{why}: without {word}");
    }
}
