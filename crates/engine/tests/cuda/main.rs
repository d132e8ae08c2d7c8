//! Tests copies from and to devices, against a driver that has none: their bytes, their times, and their failures.

mod ahead;
mod digest;
mod fake;
mod save;

use std::sync::Arc;
use std::time::Duration;

use shardfast_engine::error::Kind;
use shardfast_engine::{Fences, Memory, Provider, Result, Strided, row_major_strides};
pub(crate) use shardfast_store::testing::dice::Dice;
use shardfast_transfer::cuda::{CopyStream, DeviceMemory, DeviceSink, Devices};

use fake::Fake;

/// Delays of copies, by seed; short, since a sleep takes at least 50 microseconds.
const DELAY_MAX_US: u64 = 300;

/// Time limit of operations that are not to finish in time.
pub(crate) const SHORT: Duration = Duration::from_millis(100);

/// Time limit of operations that end sooner.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A strided view of an allocation: where its first element lies in it, lengths, strides in bytes, bytes an element.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) first: usize,
    pub(crate) lengths: Vec<u64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) item: u64,
    pub(crate) allocation_bytes: usize,
}

impl View {
    /// Makes a view of any order of dimensions, with gaps; no two elements share memory.
    fn random(dice: &mut Dice) -> View {
        let item = 1 << dice.below(4);
        let lengths: Vec<u64> = (0..dice.below(4)).map(|_| 1 + dice.below(9)).collect();
        let mut strides = vec![0; lengths.len()];
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, dice.below(i as u64 + 1) as usize);
        }
        let mut extent = item;
        for d in order {
            let stride = extent + dice.below(2) * dice.below(4) * item;
            strides[d] = stride as i64;
            extent += stride * (lengths[d] - 1);
        }
        let first = (dice.below(3) * item) as usize;
        View { first, lengths, strides, item, allocation_bytes: first + extent as usize }
    }

    pub(crate) fn strided(&self, base: usize) -> Strided {
        Strided::new(base + self.first, &self.lengths, &self.strides, self.item)
    }

    /// Returns the offsets of the elements of a box in the allocation, in row-major order.
    fn places(&self, offsets: &[u64], lengths: &[u64]) -> Vec<usize> {
        let count = lengths.iter().product::<u64>();
        let place = |mut number: u64| {
            let mut place = self.first as i64;
            for d in (0..lengths.len()).rev() {
                place += (offsets[d] + number % lengths[d]) as i64 * self.strides[d];
                number /= lengths[d];
            }
            place as usize
        };
        (0..count).map(place).collect()
    }
}

#[allow(unsafe_code)] // as every caller of the engine hands a device's memory over
pub(crate) fn provider(copies: &Arc<CopyStream>, base: usize, view: &View) -> DeviceMemory {
    // SAFETY: tests free nothing that a provider still reads, unless the refusal is what they look for.
    unsafe { DeviceMemory::new(copies, view.strided(base)) }
}

#[allow(unsafe_code)] // as `provider`
fn sink(copies: &Arc<CopyStream>, base: usize, view: &View) -> Result<DeviceSink> {
    // SAFETY: as `provider`.
    unsafe { DeviceSink::new(copies, base + view.first, &view.lengths, &view.strides, view.item) }
}

fn dense(bytes: usize) -> View {
    View { first: 0, lengths: vec![bytes as u64], strides: vec![1], item: 1, allocation_bytes: bytes }
}

fn filled(provider: &dyn Provider) -> Result<Vec<u8>> {
    let mut out = vec![0; provider.bytes() as usize];
    let mut fences = Fences::default();
    provider.fill(0, &mut out, &mut fences)?;
    fences.wait()?;
    Ok(out)
}

#[test]
fn without_a_driver_everything_says_what_is_missing() {
    let absent = Devices::of("libcuda-that-is-nowhere.so.1");
    for _ in 0..2 {
        let error = absent.device(0).err().unwrap();
        assert_eq!(error.kind, Kind::Unsupported);
        assert!(error.message.contains("libcuda-that-is-nowhere.so.1"), "{error}");
        assert_eq!(absent.count(), Err(error));
    }
    let error = Devices::of("libc.so.6").device(0).err().unwrap();
    assert_eq!(error.kind, Kind::Unsupported, "{error}");
    assert!(error.message.contains("libc.so.6") && error.message.contains("cuGetErrorName"), "{error}");

    let fake = Fake::new(1, 0);
    let error = fake.devices().device(7).err().unwrap();
    assert_eq!(error.kind, Kind::Invalid);
    assert!(error.message.contains("cuda:7") && error.message.contains("found 2"), "{error}");
    assert_eq!(fake.devices().count(), Ok(2));
    fake.fail("cuInit", 1, 100, false);
    assert_eq!(fake.devices().device(0).err().unwrap().kind, Kind::Unsupported);
}

#[test]
#[allow(unsafe_code)]
fn views_stream_as_they_do_in_host_memory() {
    let fake = Fake::new(2, 0);
    fake.lock_all();
    let device = fake.device();
    let mut dice = Dice(2);
    for round in 0..300 {
        let view = View::random(&mut dice);
        let bytes = dice.bytes(view.allocation_bytes);
        let copies = fake.copies(&device);
        let on_device = provider(&copies, fake.alloc(&bytes), &view);
        // SAFETY: `bytes` outlives the provider and is not written.
        let on_host = unsafe { Memory::new(view.strided(bytes.as_ptr() as usize)) };
        let expected = filled(&on_host).unwrap();
        assert_eq!(filled(&on_device).unwrap(), expected, "round {round}: {view:?}");
        let at = dice.below(expected.len() as u64) as usize;
        let end = at + dice.below((expected.len() - at) as u64 + 1) as usize;
        let (mut part, mut fences) = (vec![0; end - at], Fences::default());
        on_device.fill(at as u64, &mut part, &mut fences).unwrap();
        fences.wait().unwrap();
        assert_eq!(part, expected[at..end], "round {round}: bytes {at}..{end} of {view:?}");
    }
}

#[test]
fn boxes_land_in_views_and_nowhere_else() {
    let fake = Fake::new(3, 0);
    fake.lock_all();
    let device = fake.device();
    let mut dice = Dice(3);
    for round in 0..300 {
        let view = View::random(&mut dice);
        let mut expected = dice.bytes(view.allocation_bytes);
        let base = fake.alloc(&expected);
        let offsets: Vec<u64> = view.lengths.iter().map(|&length| dice.below(length)).collect();
        let lengths: Vec<u64> = offsets.iter().zip(&view.lengths).map(|(o, n)| 1 + dice.below(n - o)).collect();
        // The box as a part of a larger row-major block, as in a file.
        let around: Vec<u64> = lengths.iter().map(|&length| length + dice.below(3)).collect();
        let src_strides = row_major_strides(&around, view.item);
        let src = dice.bytes((around.iter().product::<u64>() * view.item) as usize);
        let source = View {
            first: 0,
            lengths: around.clone(),
            strides: src_strides.iter().map(|&stride| stride as i64).collect(),
            item: view.item,
            allocation_bytes: src.len(),
        };
        let item = view.item as usize;
        let from = source.places(&vec![0; around.len()], &lengths);
        for (place, from) in view.places(&offsets, &lengths).into_iter().zip(from) {
            expected[place..place + item].copy_from_slice(&src[from..from + item]);
        }
        let mut fences = Fences::default();
        let sink = sink(&fake.copies(&device), base, &view).unwrap();
        sink.scatter(&offsets, &lengths, &src_strides, &src, &mut fences).unwrap();
        fences.wait().unwrap();
        assert_eq!(fake.peek(base, expected.len()), expected, "round {round}: {lengths:?} at {offsets:?} of {view:?}");
    }
}

/// Does `work` while the training's stream is held, and lets it go on when the work is done or `limit` is over; whether
/// the work was done by then.
pub(crate) fn while_held<T>(fake: &Fake, limit: Duration, work: impl FnOnce() -> T) -> (T, bool) {
    let (done, waiting) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let release = scope.spawn(move || {
            let is_done = waiting.recv_timeout(limit).is_ok();
            fake.release();
            is_done
        });
        let result = work();
        let _ = done.send(());
        (result, release.join().unwrap())
    })
}

#[test]
fn no_stale_byte_is_staged() {
    for seed in 0..5 {
        let fake = Fake::new(seed, DELAY_MAX_US);
        fake.lock_all();
        let (base, device) = (fake.alloc(&[1; 1 << 16]), fake.device());
        fake.hold();
        fake.kernel(base, 1 << 16, 2, 1000);
        let provider = provider(&fake.copies(&device), base, &dense(1 << 16));
        let (staged, too_soon) = while_held(&fake, SHORT, || filled(&provider).unwrap());
        assert!(!too_soon && staged == [2; 1 << 16], "seed {seed}");
    }
}

#[test]
fn without_the_wait_for_the_training_stale_bytes_would_be_staged() {
    let fake = Fake::new(1, DELAY_MAX_US);
    fake.lock_all();
    fake.forget_waits();
    let (base, device) = (fake.alloc(&[1; 64]), fake.device());
    fake.hold();
    fake.kernel(base, 64, 2, 0);
    let staged = filled(&provider(&fake.copies(&device), base, &dense(64))).unwrap();
    assert_eq!(staged, [1; 64], "the fake driver cannot show a missing wait");
    fake.release();
}

#[test]
fn nothing_is_loaded_into_memory_that_the_training_still_uses() {
    let fake = Fake::new(4, DELAY_MAX_US);
    fake.lock_all();
    let base = fake.alloc(&[1; 512]);
    let device = fake.device();
    fake.kernel(base, 512, 2, 30_000);
    let mut fences = Fences::default();
    let sink = sink(&fake.copies(&device), base, &dense(512)).unwrap();
    sink.scatter(&[0], &[512], &[1], &[9; 512], &mut fences).unwrap();
    fences.wait().unwrap();
    assert_eq!(fake.peek(base, 512), [9; 512]);
}

#[test]
fn a_save_does_not_wait_for_the_moment_of_the_next() {
    let fake = Fake::new(5, 0);
    fake.lock_all();
    let base = fake.alloc(&[1; 4096]);
    let device = fake.device();
    let first = fake.copies(&device);
    fake.hold();
    let second = fake.copies(&device);
    let behind = provider(&second, base, &dense(4096));
    let (mut slot, mut fences) = (vec![0; 4096], Fences::default());
    behind.fill(0, &mut slot, &mut fences).unwrap();
    let ahead = provider(&first, base, &dense(4096));
    let (staged, in_time) = while_held(&fake, LONG, || filled(&ahead).unwrap());
    assert!(in_time, "it waited for a stream that it does not depend on");
    assert_eq!(staged, [1; 4096]);
    fences.wait().unwrap();
    assert_eq!(slot, [1; 4096]);
}

#[test]
#[allow(unsafe_code)]
fn copies_are_under_way_until_the_fence_was_waited_for() {
    let fake = Fake::new(6, 0);
    let (device, bytes) = (fake.device(), 1 << 16);
    let base = fake.alloc(&vec![7; bytes]);
    fake.hold();
    fake.kernel(base, bytes, 8, 0);
    let mut slot = vec![0; bytes];
    // SAFETY: `slot` outlives the lock.
    let lock = unsafe { device.page_lock(std::ptr::NonNull::from(&*slot)) }.unwrap();
    let provider = provider(&fake.copies(&device), base, &dense(bytes));
    let mut fences = Fences::default();
    provider.fill(0, &mut slot, &mut fences).unwrap();
    assert!(slot.iter().all(|&byte| byte != 8), "the copy did not begin only: it is done");
    fake.release();
    fences.wait().unwrap();
    assert!(slot.iter().all(|&byte| byte == 8));
    drop(lock);
}

#[test]
fn small_tensors_share_one_wait_and_regular_views_one_copy() {
    let fake = Fake::new(7, 0);
    fake.lock_all();
    let device = fake.device();
    let copies = fake.copies(&device);
    let bytes: Vec<u8> = (0..200u8).collect();
    let tensors: Vec<DeviceMemory> =
        bytes.iter().map(|&byte| provider(&copies, fake.alloc(&[byte; 24]), &dense(24))).collect();
    let (mut slot, mut fences) = (vec![0; 24 * bytes.len()], Fences::default());
    for (tensor, place) in tensors.iter().zip(slot.chunks_mut(24)) {
        tensor.fill(0, place, &mut fences).unwrap();
    }
    fences.wait().unwrap();
    assert!(slot.chunks(24).zip(&bytes).all(|(place, &byte)| place == [byte; 24]));
    assert_eq!((fake.calls("cuMemcpyAsync"), fake.calls("cuEventSynchronize")), (200, 1));

    // Columns 2..6 of a row-major matrix of 100 rows by 64 bytes.
    let matrix: Vec<u8> = (0..6400).map(|i| (i % 251) as u8).collect();
    let columns = View { first: 8, lengths: vec![100, 4], strides: vec![64, 4], item: 4, allocation_bytes: 6400 };
    let expected: Vec<u8> = matrix.chunks(64).flat_map(|row| row[8..24].to_vec()).collect();
    assert_eq!(filled(&provider(&copies, fake.alloc(&matrix), &columns)).unwrap(), expected);
    assert_eq!((fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpy2DAsync_v2")), (200, 1));
}

#[test]
fn dense_views_in_another_order_are_one_copy_in_both_directions() {
    let fake = Fake::new(15, DELAY_MAX_US);
    fake.lock_all();
    let device = fake.device();
    // A convolution's weight [8][16][3][3] of 16 bits with its channels last.
    let lengths = vec![8, 16, 3, 3];
    let strides = vec![16 * 9 * 2, 2, 3 * 16 * 2, 16 * 2];
    let view = View { first: 0, lengths: lengths.clone(), strides, item: 2, allocation_bytes: 8 * 16 * 9 * 2 };
    let bytes = Dice(15).bytes(view.allocation_bytes);
    let copies = fake.copies(&device);
    let elements = filled(&provider(&copies, fake.alloc(&bytes), &view)).unwrap();
    let expected: Vec<u8> = view.places(&[0; 4], &lengths).iter().flat_map(|&at| bytes[at..at + 2].to_vec()).collect();
    assert_eq!(elements, expected);
    let base = fake.alloc(&vec![0; bytes.len()]);
    let mut fences = Fences::default();
    let sink = sink(&copies, base, &view).unwrap();
    sink.scatter(&[0; 4], &lengths, &row_major_strides(&lengths, 2), &elements, &mut fences).unwrap();
    fences.wait().unwrap();
    assert_eq!(fake.peek(base, bytes.len()), bytes);
    assert_eq!((fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpy2DAsync_v2")), (2, 0));
}

#[test]
#[allow(unsafe_code)]
fn memory_that_cannot_be_locked_is_reported_and_copied_without() {
    let fake = Fake::new(8, DELAY_MAX_US);
    let device = fake.device();
    let slot = vec![0; 8192];
    fake.fail("cuMemHostRegister_v2", 1, 800, false);
    // SAFETY: `slot` outlives the locks.
    let error = unsafe { device.page_lock(std::ptr::NonNull::from(&*slot)) }.err().unwrap();
    assert_eq!(error.kind, Kind::Unsupported);
    assert!(error.message.contains("8192 bytes") && error.message.contains("CUDA_ERROR_NOT_PERMITTED"), "{error}");
    let base = fake.alloc(&[5; 8192]);
    assert_eq!(filled(&provider(&fake.copies(&device), base, &dense(8192))).unwrap(), [5; 8192]);

    // SAFETY: as above.
    let lock = || unsafe { device.page_lock(std::ptr::NonNull::from(&*slot)) };
    let first = lock().unwrap();
    assert_eq!(lock().err().unwrap().kind, Kind::Conflict);
    drop(first);
    drop(lock().unwrap());
}

#[test]
fn failures_name_the_device_the_call_and_the_error() {
    for (call, code, kind, name) in [
        ("cuMemcpyAsync", 214, Kind::Unavailable, "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("cuEventSynchronize", 700, Kind::Unavailable, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuEventRecord", 719, Kind::Unavailable, "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuCtxPushCurrent_v2", 709, Kind::Unavailable, "an error that this driver does not name"),
        ("cuMemcpyAsync", 4242, Kind::Unavailable, "an error that this driver does not name"),
        ("cuEventCreate", 2, Kind::Exhausted, "CUDA_ERROR_OUT_OF_MEMORY"),
    ] {
        let fake = Fake::new(9, 0);
        fake.lock_all();
        let device = fake.device();
        let provider = provider(&fake.copies(&device), fake.alloc(&[1; 64]), &dense(64));
        // The first push is for the question whose memory it is.
        fake.fail(call, if call == "cuCtxPushCurrent_v2" { 2 } else { 1 }, code, true);
        let error = filled(&provider).err().unwrap();
        assert_eq!(error.kind, kind, "{error}");
        for word in ["cuda:0", call, name, &format!("({code})")] {
            assert!(error.message.contains(word), "{error}: without {word}");
        }
    }
}

#[test]
fn a_fence_that_fails_leaves_no_copy_under_way() {
    let fake = Fake::new(10, 0);
    fake.lock_all();
    let device = fake.device();
    let base = fake.alloc(&[1; 4096]);
    fake.kernel(base, 4096, 2, 20_000);
    let provider = provider(&fake.copies(&device), base, &dense(4096));
    for call in ["cuEventRecord", "cuEventSynchronize", "cuEventCreate"] {
        let (mut slot, mut fences) = (vec![0; 4096], Fences::default());
        provider.fill(0, &mut slot, &mut fences).unwrap();
        fake.fail(call, 1, 999, false);
        assert_eq!(fences.wait().unwrap_err().kind, Kind::Unavailable);
        assert_eq!(slot, [2; 4096], "{call}");
    }
}

#[test]
#[allow(unsafe_code)]
fn memory_that_is_not_the_devices_is_refused() {
    let fake = Fake::new(11, 0);
    fake.lock_all();
    let devices = fake.devices();
    let (device, other) = (devices.device(0).unwrap(), devices.device(1).unwrap());
    let copies = fake.copies(&device);
    let host = [0u8; 64];
    let freed = fake.alloc(&[0; 64]);
    fake.free(freed);
    let short = fake.alloc(&[0; 63]);
    // SAFETY: 0 is the default stream.
    let elsewhere = unsafe { other.copies_after(0) }.unwrap();
    for (copies, address, word) in [
        (&copies, host.as_ptr() as usize, "does not know"),
        (&copies, freed, "does not know"),
        (&copies, short, "CUDA_ERROR_INVALID_VALUE"),
        (&elsewhere, short, "found memory of cuda:0"),
    ] {
        let error = filled(&provider(copies, address, &dense(64))).unwrap_err();
        assert_eq!(error.kind, Kind::Invalid, "{error}");
        assert!(error.message.contains(word), "{error}: without {word}");
    }
    let shared = View { first: 0, lengths: vec![4, 8], strides: vec![0, 1], item: 1, allocation_bytes: 8 };
    assert!(sink(&copies, fake.alloc(&[0; 8]), &shared).err().unwrap().message.contains("share memory"));
}

#[test]
#[allow(unsafe_code)]
fn graphs_being_captured_are_neither_copied_nor_disturbed() {
    let fake = Fake::new(12, 0);
    fake.lock_all();
    let device = fake.device();
    let provider = provider(&fake.copies(&device), fake.alloc(&[3; 64]), &dense(64));
    fake.capture(fake.stream, true);
    // SAFETY: the stream lives as long as the driver.
    let error = unsafe { device.copies_after(fake.stream) }.err().unwrap();
    assert_eq!(error.kind, Kind::Invalid);
    assert!(error.message.contains("graph"), "{error}");
    assert_eq!(filled(&provider).unwrap(), [3; 64], "another thread's capture was broken");
    fake.capture(fake.stream, false);
}

#[test]
#[allow(unsafe_code)]
fn what_was_made_is_given_back_and_contexts_stay_as_they_were() {
    let fake = Fake::new(13, 0);
    let before = fake.live();
    let mine = fake.alloc(&[0; 8]);
    {
        let devices = fake.devices();
        let other = devices.device(1).unwrap();
        for _ in 0..3 {
            // SAFETY: 0 is the default stream.
            drop(unsafe { other.copies_after(0) }.unwrap());
        }
        assert_eq!(fake.live() - before, 3, "one context, one stream, one event");
        assert_eq!(fake.alloc(&[0; 8]) >> 48, mine >> 48, "the thread's device changed");
        assert!(Arc::ptr_eq(&other, &devices.device(1).unwrap()));
    }
    assert_eq!(fake.live(), before);
}

#[allow(unsafe_code)]
// SAFETY: as POSIX declares them.
unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
}

#[test]
#[allow(unsafe_code)]
fn a_forked_process_is_told_that_it_has_no_devices() {
    let fake = Fake::new(14, 0);
    let device = fake.device();
    let idle = fake.copies(&device);
    let mut status = -1;
    // SAFETY: the child calls nothing of the driver, or the test fails; it ends without unwinding.
    unsafe {
        let child = fork();
        if child == 0 {
            let error = device.copies_after(fake.stream).err();
            drop(idle);
            let told = error.is_some_and(|e| e.kind == Kind::Invalid && e.message.contains("fork"));
            _exit(i32::from(!told));
        }
        assert_eq!(waitpid(child, &mut status, 0), child);
    }
    assert_eq!(status, 0);
}
