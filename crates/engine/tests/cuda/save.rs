//! Tests saves of tensors on a device, through the whole engine, and loads of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardfast_engine::error::Kind;
use shardfast_engine::{
    Checkpoint, Destination, Engine, Pending, Provider, Result, Sink, State, Want, open, row_major_strides, save,
};
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Owner, Region};
use shardfast_transfer::cuda::CopyStream;

use crate::fake::Fake;
use crate::{DELAY_MAX_US, Dice, LONG, SHORT, View, provider, sink, while_held};

/// A tensor on the device and what it holds.
struct Tensor {
    dtype: DType,
    view: View,
    base: usize,
    bytes: Vec<u8>,
}

impl Tensor {
    fn new(fake: &Fake, dice: &mut Dice, dtype: DType, view: View) -> Tensor {
        let bytes = dice.bytes(view.allocation_bytes);
        Tensor { dtype, base: fake.alloc(&bytes), view, bytes }
    }

    fn elements(&self) -> Vec<u8> {
        elements(&self.view, &self.bytes)
    }
}

/// The elements of a view in row-major order.
fn elements(view: &View, allocation: &[u8]) -> Vec<u8> {
    let places = view.places(&vec![0; view.lengths.len()], &view.lengths);
    places.into_iter().flat_map(|place| allocation[place..place + view.item as usize].to_vec()).collect()
}

fn view(lengths: &[u64], order: &[usize], item: u64, gap: u64) -> View {
    let mut strides = vec![0; lengths.len()];
    let mut extent = item;
    for &d in order {
        strides[d] = (extent + gap * item) as i64;
        extent += (extent + gap * item) * (lengths[d] - 1);
    }
    View { first: 0, lengths: lengths.to_vec(), strides, item, allocation_bytes: extent as usize }
}

/// Larger than two slots, transposed, cut out, tiny, of 8, 16 and 32 bits.
fn tensors(fake: &Fake) -> Vec<Tensor> {
    let mut dice = Dice(7);
    let mut all = vec![
        Tensor::new(fake, &mut dice, DType::F32, view(&[1200, 2000], &[1, 0], 4, 0)),
        Tensor::new(fake, &mut dice, DType::BF16, view(&[40, 30], &[0, 1], 2, 0)),
        Tensor::new(fake, &mut dice, DType::F8E4M3, view(&[64, 48], &[1, 0], 1, 5)),
        Tensor::new(fake, &mut dice, DType::F32, view(&[], &[], 4, 0)),
    ];
    for _ in 0..50 {
        all.push(Tensor::new(fake, &mut dice, DType::BF16, view(&[3], &[0], 2, 0)));
    }
    all
}

fn name(index: usize) -> LeafName {
    LeafName::new("model", format!("w{index:03}"))
}

fn state(fake: &Fake, tensors: &[Tensor]) -> State {
    state_of(&fake.copies(&fake.device()), tensors)
}

fn state_of(copies: &Arc<CopyStream>, tensors: &[Tensor]) -> State {
    let leaf = |(index, tensor): (usize, &Tensor)| {
        let shape = tensor.view.lengths.as_slice().into();
        let body = LeafBody::Tensor { dtype: tensor.dtype, parts: vec![Region::whole(&tensor.view.lengths)], shape };
        Leaf { name: name(index), body, layout: String::new() }
    };
    let provider =
        |tensor: &Tensor| -> Vec<Arc<dyn Provider>> { vec![Arc::new(provider(copies, tensor.base, &tensor.view))] };
    State {
        catalog: Arc::new(Catalog { leaves: tensors.iter().enumerate().map(leaf).collect() }),
        providers: tensors.iter().map(provider).collect(),
        ..State::default()
    }
}

fn begin(engine: &Arc<Engine>, place: &Path, state: State) -> Pending {
    let url = place.to_str().unwrap().to_owned();
    save(
        engine,
        Destination {
            url,
            step: None,
            user: BTreeMap::new(),
            prove: shardfast_engine::Prove::default(),
            blocking: false,
        },
        state,
        LONG,
    )
}

/// A tensor's bytes as the checkpoint has them.
#[allow(unsafe_code)] // as every caller of the engine hands its memory over
fn loaded(checkpoint: &Checkpoint, index: usize, tensor: &Tensor) -> Vec<u8> {
    let region = Region::whole(&tensor.view.lengths);
    let strides = row_major_strides(&region.lengths, tensor.view.item);
    let strides: Vec<i64> = strides.iter().map(|&stride| stride as i64).collect();
    let mut out = vec![0; (region.numel() * tensor.view.item) as usize];
    // SAFETY: `out` is looked at only after the load.
    let sink = unsafe { Sink::new(out.as_mut_ptr() as usize, &region.lengths, &strides, tensor.view.item) }.unwrap();
    let leaf = checkpoint.manifest().find(&name(index)).unwrap();
    checkpoint.load(&[Want { leaf, region, sink }], &[], LONG).unwrap();
    out
}

/// Saves while the training's stream is far behind; which tensors the checkpoint does not have as they were at the
/// call. A driver that `keeps_order` stages nothing before the training went on.
fn torn(fake: &Fake, keeps_order: bool) -> Vec<usize> {
    let place = tempfile::tempdir().unwrap();
    let engine = Engine::new(shardfast_coord::solo(), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap();
    let mut tensors = tensors(fake);
    // What the training has asked for when the save is called belongs to it; what it asks for afterwards does not.
    fake.hold();
    for (index, tensor) in tensors.iter_mut().enumerate().skip(1).step_by(2) {
        fake.kernel(tensor.base, tensor.bytes.len(), index as u8, 500);
        tensor.bytes = vec![index as u8; tensor.bytes.len()];
    }
    let pending = begin(&engine, &place.path().join("a"), state(fake, &tensors));
    let stage = || pending.staged(Some(LONG)).unwrap();
    if keeps_order {
        assert_eq!(while_held(fake, SHORT, stage), ((), false));
    } else {
        stage();
        fake.release();
    }
    for tensor in &tensors {
        fake.kernel(tensor.base, tensor.bytes.len(), 0xee, 0);
    }
    pending.committed(Some(LONG)).unwrap();
    let checkpoint = open(&engine, place.path().join("a").to_str().unwrap(), LONG).unwrap();
    let differs = |(index, tensor): &(usize, &Tensor)| loaded(&checkpoint, *index, tensor) != tensor.elements();
    tensors.iter().enumerate().filter(differs).map(|(index, _)| index).collect()
}

#[test]
fn a_device_is_saved_as_it_was_at_the_call() {
    for seed in 1..4 {
        let fake = Fake::new(seed, DELAY_MAX_US);
        fake.lock_all();
        assert_eq!(torn(&fake, true), [0; 0], "seed {seed}");
        fake.synchronize();
    }
}

#[test]
fn a_driver_that_forgets_the_order_is_noticed() {
    let fake = Fake::new(1, DELAY_MAX_US);
    fake.lock_all();
    fake.forget_waits();
    assert_ne!(torn(&fake, false), [0; 0], "the fake driver cannot show a missing wait");
    fake.synchronize();
}

#[test]
#[allow(unsafe_code)]
fn what_was_saved_goes_back_to_a_device() {
    let fake = Fake::new(3, DELAY_MAX_US);
    let path = fake.path();
    let engine = Engine::with_driver(path.to_str().unwrap(), 70 << 20).unwrap();
    let (place, tensors) = (tempfile::tempdir().unwrap(), tensors(&fake));
    // SAFETY: the default stream.
    let copies = || unsafe { engine.accelerators().copies_after(0, 0) }.unwrap();
    let first = copies();
    begin(&engine, &place.path().join("a"), state_of(&first, &tensors)).committed(Some(LONG)).unwrap();
    let checkpoint = open(&engine, place.path().join("a").to_str().unwrap(), LONG).unwrap();
    let copies = copies();
    // All in one load, whose slots are used again and again while copies are under way.
    let bases: Vec<usize> = tensors.iter().map(|tensor| fake.alloc(&vec![0; tensor.bytes.len()])).collect();
    let wants: Vec<Want> = tensors
        .iter()
        .zip(&bases)
        .enumerate()
        .map(|(index, (tensor, &base))| Want {
            leaf: checkpoint.manifest().find(&name(index)).unwrap(),
            region: Region::whole(&tensor.view.lengths),
            sink: Sink::Device(sink(&copies, base, &tensor.view).unwrap()),
        })
        .collect();
    checkpoint.load(&wants, &[], LONG).unwrap();
    for (index, (tensor, base)) in tensors.iter().zip(bases).enumerate() {
        let back = elements(&tensor.view, &fake.peek(base, tensor.bytes.len()));
        assert!(back == tensor.elements(), "tensor {index}");
    }
    // The arena, locked once whatever the number of saves and loads.
    assert_eq!(fake.calls("cuMemHostRegister_v2"), 1);
    fake.fail("cuMemcpyAsync", 1, 700, true);
    let error = checkpoint.load(&wants, &[], LONG).unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert!(error.message.contains("cuda:0"), "{error}");
}

fn files(place: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(place) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path.to_string_lossy().into_owned()) }
    }
    found
}

#[test]
fn a_lost_device_fails_the_save_and_leaves_nothing() {
    for (call, nth, code) in [
        ("cuMemcpyAsync", 1, 214),
        ("cuMemcpyAsync", 20, 700),
        ("cuMemcpy2DAsync_v2", 1, 719),
        ("cuEventSynchronize", 1, 719),
        ("cuEventSynchronize", 2, 700),
        ("cuEventRecord", 2, 4242),
    ] {
        let fake = Fake::new(nth, DELAY_MAX_US);
        fake.lock_all();
        let (place, engine) = (
            tempfile::tempdir().unwrap(),
            Engine::new(shardfast_coord::solo(), shardfast_engine::staging::STAGING_BYTES_MIN).unwrap(),
        );
        let state = state(&fake, &tensors(&fake));
        fake.fail(call, nth, code, true);
        let pending = begin(&engine, &place.path().join("a"), state);
        let error = pending.committed(Some(LONG)).unwrap_err();
        assert_eq!(error.kind, Kind::Unavailable, "{error}");
        for word in ["cuda:0", &format!("({code})")] {
            assert!(error.message.contains(word), "{call} {nth}: {error}: without {word}");
        }
        assert!(pending.done(), "{call} {nth}: the save did not end, it was given up: {error}");
        assert_eq!(files(place.path()), [""; 0], "{call} {nth}");

        // The rest of the job is alive, and so is the staging memory.
        let host: Vec<Vec<Arc<dyn Provider>>> = vec![vec![Arc::new(vec![1u8; 9 << 20])]];
        let body = LeafBody::Object { owner: Owner::Job };
        let leaf = Leaf { name: name(0), body, layout: String::new() };
        let alive = State { catalog: Arc::new(Catalog { leaves: vec![leaf] }), providers: host, ..State::default() };
        let saved: Result<()> = begin(&engine, &place.path().join("b"), alive).committed(Some(LONG));
        saved.unwrap();
    }
}

/// Page-locking takes longer than the copies of a save.
#[test]
fn memory_that_was_reserved_is_page_locked_before_the_first_save() {
    let fake = Fake::new(5, DELAY_MAX_US);
    let engine = Engine::with_driver(fake.path().to_str().unwrap(), 150 << 20).unwrap();
    engine.accelerators().reserve(0, 100 << 20).unwrap();
    let begun = Instant::now();
    while fake.calls("cuMemHostRegister_v2") < 2 {
        assert!(begun.elapsed() < LONG, "not reserved");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (place, tensors) = (tempfile::tempdir().unwrap(), tensors(&fake));
    // SAFETY: the default stream.
    #[allow(unsafe_code)]
    let copies = unsafe { engine.accelerators().copies_after(0, 0) }.unwrap();
    begin(&engine, &place.path().join("a"), state_of(&copies, &tensors)).committed(Some(LONG)).unwrap();
    assert_eq!(fake.calls("cuMemHostRegister_v2"), 2, "more was made, or locked again");
}
