//! Tests captures ahead of a save on a device that is behind the host: a commit has the device's bytes.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use shardfast_engine::{
    Capture, Destination, Engine, Fences, Pending, Prove, Provider, Result, Sink, State, Strided, Want, open, save,
};
use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafName, Region};
use shardfast_multistep::{
    AdamScalars, Applied, Array, Bias, Class, Device, DeviceCopies, Dtype, Dtypes, Figures, OptimizerKind, Pace,
    Rehearsed, Scalars, Unit, Variant, Window,
};
use shardfast_optim::{Gradient, Instructions, Step, Tile, replay};
use shardfast_transfer::cuda::{CopyStream, DeviceMemory};
use shardfast_transfer::digest::Digester;

use crate::fake::Fake;
use crate::{DELAY_MAX_US, Dice, LONG};

/// Name of the variant of a fused step of AdamW on a device.
const VARIANT: &str = "adam.fused.cuda.f32";

/// A device's memory that is captured lazily.
struct Lazy(DeviceMemory);

impl Provider for Lazy {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.0.fill(at, out, fences)
    }

    fn on_device(&self, at: u64, bytes: u64) -> Option<(Arc<dyn Digester>, usize)> {
        self.0.on_device(at, bytes)
    }

    fn capture(&self) -> Capture {
        Capture::Lazy
    }
}

#[allow(unsafe_code)] // as every caller of the engine hands its memory over
fn memory(copies: &Arc<CopyStream>, address: usize, bytes: usize) -> DeviceMemory {
    // SAFETY: the fake device's memory is no memory of this process.
    unsafe { DeviceMemory::new(copies, Strided::new(address, &[bytes as u64 / 4], &[4], 4)) }
}

/// A gradient whose memory the framework takes back when nothing refers to it any more.
struct Given {
    memory: DeviceMemory,
    fake: Arc<Fake>,
    address: usize,
    is_freed: bool,
    _alive: Arc<()>,
}

impl Provider for Given {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.memory.fill(at, out, fences)
    }

    fn on_device(&self, at: u64, bytes: u64) -> Option<(Arc<dyn Digester>, usize)> {
        self.memory.on_device(at, bytes)
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        if self.is_freed {
            self.fake.free_behind(self.address);
        }
    }
}

/// A step of the training.
struct Computed {
    gradients: Vec<Vec<u8>>,
    after: Vec<[Vec<u8>; 3]>,
    scalars: Scalars,
    device_bias: [f32; 2],
}

/// Parameters with two moments each, on the device and as the host computes them.
struct Training {
    fake: Arc<Fake>,
    /// The address and the bytes of each array.
    tensors: Vec<[(usize, Vec<u8>); 3]>,
    /// Addresses of gradients in a framework that keeps their memory.
    gradients: Vec<usize>,
    catalog: Arc<Catalog>,
    steps: i32,
    /// Steps to come, since the host takes longer for them than the device of a real training.
    next: VecDeque<Computed>,
    /// `true` if kernels take no time: copies are far behind then.
    is_fast: bool,
    /// Reference count of the gradients: each holds one clone.
    alive: Arc<()>,
}

fn floats(dice: &mut Dice, numel: u64) -> Vec<u8> {
    (0..numel).flat_map(|_| (dice.below(2001) as f32 / 1000.0 - 1.0).to_le_bytes()).collect()
}

impl Training {
    fn new(fake: &Arc<Fake>, numels: &[u64], dice: &mut Dice) -> Training {
        let placed = |bytes: Vec<u8>| (fake.alloc(&bytes), bytes);
        let zeros = |numel: u64| vec![0; numel as usize * 4];
        let tensors = numels
            .iter()
            .map(|&numel| [placed(floats(dice, numel)), placed(zeros(numel)), placed(zeros(numel))])
            .collect();
        let leaf = |number: usize, array: usize, numel: u64| {
            let shape = Dims::from_slice(&[numel]);
            let body = LeafBody::Tensor { dtype: DType::F32, parts: vec![Region::whole(&shape)], shape };
            Leaf { name: LeafName::new("model", format!("{number:02}.{array}")), body, layout: String::new() }
        };
        let of = |(number, &numel): (usize, &u64)| (0..3).map(move |array| leaf(number, array, numel));
        let leaves = numels.iter().enumerate().flat_map(of).collect();
        let gradients = numels.iter().map(|&numel| fake.alloc(&zeros(numel))).collect();
        Training {
            fake: Arc::clone(fake),
            tensors,
            gradients,
            catalog: Arc::new(Catalog { leaves }),
            steps: 0,
            next: VecDeque::new(),
            is_fast: false,
            alive: Arc::default(),
        }
    }

    fn units(&self, beside: &DeviceCopies) -> Vec<Unit> {
        let unit = |(number, tensors): (usize, &[(usize, Vec<u8>); 3])| Unit {
            class: 0,
            numel: tensors[0].1.len() as u64 / 4,
            arrays: (0u32..3)
                .zip(tensors)
                .map(|(array, (address, bytes))| {
                    let memory = Arc::new(Lazy(memory(beside.tiles(), *address, bytes.len())));
                    Array { leaf: number as u32 * 3 + array, part: 0, memory }
                })
                .collect(),
        };
        self.tensors.iter().enumerate().map(unit).collect()
    }

    fn scalars(&self) -> Scalars {
        let correction = |beta: f64| 1.0 - beta.powi(self.steps);
        Scalars::Adam(AdamScalars {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            decoupled: true,
            maximize: false,
            amsgrad: false,
            bias: Bias::Host { correction1: correction(0.9), correction2_sqrt: correction(0.999).sqrt() },
        })
    }

    /// Returns the bias corrections as the device computes them.
    fn device_bias(&self) -> [f32; 2] {
        let correction = |beta: f32| 1.0 - beta.powi(self.steps);
        [correction(0.9), correction(0.999).sqrt()]
    }

    /// Computes `steps` steps.
    fn compute(&mut self, steps: u64, dice: &mut Dice) {
        let mut now: Vec<[Vec<u8>; 3]> =
            self.tensors.iter().map(|of| of.each_ref().map(|(_, bytes)| bytes.clone())).collect();
        for _ in 0..steps {
            self.steps += 1;
            let (scalars, device_bias) = (self.scalars(), self.device_bias());
            let Scalars::Adam(adam) = scalars else { unreachable!("of Adam") };
            let [correction1, correction2_sqrt] = device_bias;
            let of_device = Scalars::Adam(AdamScalars { bias: Bias::Device { correction1, correction2_sqrt }, ..adam });
            let mut gradients = Vec::new();
            for [p, m, v] in &mut now {
                let numel = p.len() as u64 / 4;
                let values = floats(dice, numel);
                let mut tile = Tile { offset: 0, numel, dtypes: Dtypes::F32, parameter: p, moments: &mut [m, v] };
                let gradient = Gradient { dtype: Dtype::F32, values: &values, factor: None };
                let variant = Variant::named(VARIANT).unwrap();
                let step = Step::Taken { gradient, scalars: of_device };
                replay(Instructions::best(), variant, &mut tile, &[step]).unwrap();
                gradients.push(values);
            }
            self.next.push_back(Computed { gradients, after: now.clone(), scalars, device_bias });
        }
    }

    /// Asks the device for forward, backward and a step of the optimizer. The host does not wait. Gradients are written
    /// where the last ones were if they are `kept`, else to memory of their own.
    fn step(&mut self, window: &Window, dice: &mut Dice, kept: bool) {
        let Computed { gradients, after, scalars, device_bias } = self.next.pop_front().expect("computed before");
        let fake = Arc::clone(&self.fake);
        let mut takes_us = |limit: u64| if self.is_fast { 0 } else { dice.below(limit) };
        let mut given = Vec::new();
        for (unit, values) in gradients.iter().enumerate() {
            let address = if kept { self.gradients[unit] } else { fake.alloc(&vec![0xdd; values.len()]) };
            fake.update(address, values, takes_us(2000));
            given.push((unit, address, values.len()));
        }
        window.stepping(Some(fake.foreign())).unwrap();
        for (of, after) in self.tensors.iter_mut().zip(after) {
            for ((address, bytes), after) in of.iter_mut().zip(after) {
                *bytes = after;
                fake.update(*address, bytes, takes_us(300));
            }
        }
        let mut applied = Vec::new();
        for (unit, address, bytes) in given {
            let memory = memory(window.gradients().unwrap(), address, bytes);
            let (fake, _alive) = (Arc::clone(&fake), Arc::clone(&self.alive));
            let gradient = Arc::new(Given { memory, fake, address, is_freed: !kept, _alive });
            let device_bias = Some(device_bias);
            applied.push(Applied { unit, dtype: Dtype::F32, gradient, factor: None, scalars, device_bias });
        }
        window.stepped(applied, Some(fake.foreign())).unwrap();
        if kept {
            // As `zero_grad(set_to_none=False)`.
            for (&address, tensors) in self.gradients.iter().zip(&self.tensors) {
                fake.kernel(address, tensors[0].1.len(), 0, 0);
            }
        }
    }

    fn state(&self, engine: &Engine) -> Result<State> {
        #[allow(unsafe_code)]
        // SAFETY: the stream lives as long as the driver.
        let copies = unsafe { engine.accelerators().copies_after(0, self.fake.stream) }?;
        let provider = |(address, bytes): &(usize, Vec<u8>)| -> Vec<Arc<dyn Provider>> {
            vec![Arc::new(Lazy(memory(&copies, *address, bytes.len())))]
        };
        let providers = self.tensors.iter().flatten().map(provider).collect();
        Ok(State { catalog: Arc::clone(&self.catalog), providers, ..State::default() })
    }

    /// Begins a save. The training writes over everything as soon as it may.
    fn save(&self, engine: &Arc<Engine>, place: &Path, window: Option<&Window>) -> Result<Pending> {
        let captured = window.map(Window::close);
        let state = self.state(engine)?;
        let state = match captured {
            Some(captured) => captured.over(state),
            None => state,
        };
        let url = place.to_str().unwrap().to_owned();
        let destination =
            Destination { url, step: None, user: BTreeMap::new(), prove: Prove::default(), blocking: false };
        let pending = save(engine, destination, state, LONG);
        if pending.staged(None).is_ok() {
            for (address, bytes) in self.tensors.iter().flatten() {
                self.fake.kernel(*address, bytes.len(), 0xee, 0);
            }
            pending.confirm_unmodified(Ok(()));
        }
        Ok(pending)
    }

    /// Puts back what a save let the training write over.
    fn restore(&self) {
        for (address, bytes) in self.tensors.iter().flatten() {
            self.fake.update(*address, bytes, 0);
        }
    }

    #[allow(unsafe_code)] // as every caller of the engine hands its memory over
    fn expect_holds(&self, engine: &Arc<Engine>, place: &Path, seed: u64) {
        let checkpoint = open(engine, place.to_str().unwrap(), LONG).unwrap();
        for (leaf, (_, bytes)) in self.tensors.iter().flatten().enumerate() {
            let mut found = vec![0u8; bytes.len()];
            let region = Region::whole(&[bytes.len() as u64 / 4]);
            // SAFETY: `found` is looked at only after the load.
            let sink = unsafe { Sink::new(found.as_mut_ptr() as usize, &region.lengths, &[4], 4) }.unwrap();
            let leaf = checkpoint.manifest().find(&self.catalog.leaves[leaf].name).unwrap();
            checkpoint.load(&[Want { leaf, region, sink }], &[], LONG).unwrap();
            assert!(found == *bytes, "seed {seed}: other bytes were committed than the device had");
        }
    }
}

fn class(is_known: bool) -> Class {
    let variant = Variant::named(VARIANT).filter(|_| is_known);
    Class { kind: OptimizerKind::Adam, dtypes: Dtypes::F32, device: Device::Cuda, is_fused: None, variant }
}

/// A job on a device of its own.
struct Job {
    fake: Arc<Fake>,
    engine: Arc<Engine>,
    place: tempfile::TempDir,
    training: Training,
    dice: Dice,
}

impl Job {
    /// Makes a job with a first save, whose plan tells which writes follow.
    fn new(seed: u64, numels: &[u64]) -> Job {
        let fake = Arc::new(Fake::new(seed, DELAY_MAX_US));
        fake.lock_all();
        let engine = Engine::with_driver(fake.path().to_str().unwrap(), 300 << 20).unwrap();
        let mut dice = Dice(seed);
        let mut training = Training::new(&fake, numels, &mut dice);
        let place = tempfile::tempdir().unwrap();
        training.save(&engine, &place.path().join("first"), None).unwrap().committed(Some(LONG)).unwrap();
        training.restore();
        training.compute(3, &mut dice);
        Job { fake, engine, place, training, dice }
    }

    fn beside(&self, is_waited: bool, pace: Option<Pace>) -> DeviceCopies {
        DeviceCopies::new(&self.engine, 0, self.fake.foreign(), is_waited, pace).unwrap()
    }

    fn open(&self, is_waited: bool, pace: Option<Pace>) -> Window {
        let beside = self.beside(is_waited, pace);
        let units = self.training.units(&beside);
        let catalog = &self.training.catalog;
        let planned = self.engine.planned(catalog).unwrap();
        let window = Window::open(&self.engine, catalog, &planned, vec![class(true)], units, Some(beside)).unwrap();
        window.go_on(Some(self.fake.foreign())).unwrap();
        window
    }

    /// Steps of a window, with gradients that are written over if they are `kept`.
    fn steps(&mut self, window: &Window, steps: u64, kept: bool) {
        for step in 0..steps {
            self.training.step(window, &mut self.dice, kept);
            if step + 1 < steps {
                window.go_on(Some(self.fake.foreign())).unwrap();
            }
        }
    }

    /// Makes the save that the window was opened for; returns what the window held.
    fn save(&self, window: Window, seed: u64) -> Figures {
        let place = self.place.path().join("second");
        let pending = self.training.save(&self.engine, &place, Some(&window)).unwrap();
        pending.committed(Some(LONG)).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        self.training.expect_holds(&self.engine, &place, seed);
        let figures = window.figures();
        drop((pending, window));
        figures
    }
}

fn expect_soon(is_so: impl Fn() -> bool, or_else: &str) {
    let until = std::time::Instant::now() + LONG;
    while !is_so() {
        assert!(std::time::Instant::now() < until, "{or_else}");
        std::thread::yield_now();
    }
}

/// Seeds of a test: as a usual run has it, or as a campaign says.
fn seeds(usual: u64) -> u64 {
    std::env::var("SHARDFAST_DEVICE_SEEDS").map_or(usual, |seeds| seeds.parse().expect("a number"))
}

#[test]
fn what_is_captured_beside_the_training_is_what_the_device_had() {
    for seed in 1..=seeds(4) {
        let is_waited = seed % 2 == 0;
        let mut job = Job::new(seed, &[300_000, 4097, 15, 270_000]);
        job.training.is_fast = seed / 2 % 2 == 1;
        let window = job.open(is_waited, None);
        job.steps(&window, 1 + seed % 3, is_waited);
        let launches = job.fake.calls("cuLaunchKernel");
        let figures = job.save(window, seed);
        assert!(figures.held_bytes > 6 << 20 && figures.let_go_bytes == 0, "seed {seed}: {figures:?}");
        assert_eq!(job.fake.calls("cuLaunchKernel"), launches + 1, "the proof is one launch");
        assert!(figures.device_proof_ms > 0.0, "seed {seed}: {figures:?}");
        assert_eq!(u64::from(figures.steps), 2 + seed % 3, "the window's steps and the save's own");
        job.fake.synchronize();
    }
}

#[test]
fn gradients_that_are_written_over_before_they_were_copied_commit_nothing() {
    let mut refused = 0;
    for seed in 1..5 {
        let mut job = Job::new(seed, &[300_000, 5000]);
        let window = job.open(false, None);
        job.steps(&window, 2, true);
        let place = job.place.path().join("second");
        match job.training.save(&job.engine, &place, Some(&window)).unwrap().committed(Some(LONG)) {
            Ok(()) => job.training.expect_holds(&job.engine, &place, seed),
            Err(error) => {
                assert!(error.message.contains("other bits than the tensor had"), "{error}");
                assert!(window.is_refuted());
                refused += 1;
            }
        }
        job.fake.synchronize();
    }
    assert!(refused > 0, "the training went on before its gradients were copied, and it made no difference");
}

/// Returns the findings of a rehearsal of two steps, and whether it saw gradients change between them.
fn rehearse(seed: u64, kept: bool, foreign: bool) -> (Vec<Rehearsed>, bool) {
    let mut job = Job::new(seed, &[300_000, 4097, 15]);
    let beside = job.beside(false, None);
    let units = job.training.units(&beside);
    let window = Window::rehearsal(&job.engine, &job.training.catalog, vec![class(false)], units, Some(beside));
    job.steps(&window, 2, kept);
    if foreign {
        job.fake.kernel(job.training.tensors[0][0].0, 4, 1, 0);
    }
    let found = window.rehearse(Some(job.fake.foreign())).unwrap();
    job.fake.synchronize();
    (found, window.are_gradients_left())
}

#[test]
fn a_rehearsal_finds_the_variant_and_whether_gradients_are_left_alone() {
    let variant = Rehearsed::By(Variant::named(VARIANT).unwrap());
    assert_eq!(rehearse(1, false, false), (vec![variant.clone()], true));
    assert_eq!(rehearse(2, true, false), (vec![variant], false));
    assert!(
        matches!(&rehearse(3, false, true).0[..], [Rehearsed::ByNone(why)] if why.contains("this training's bits"))
    );
}

#[test]
fn a_step_and_what_comes_behind_it_are_asked_for_while_the_device_stands_still() {
    let mut job = Job::new(5, &[300_000, 4097]);
    let window = job.open(false, None);
    job.fake.synchronize();
    job.fake.hold();
    // The step, its gradients and what comes behind it are asked for while the device stands still.
    job.training.step(&window, &mut job.dice, false);
    window.go_on(Some(job.fake.foreign())).unwrap();
    job.fake.release();
    job.training.step(&window, &mut job.dice, false);
    let figures = job.save(window, 5);
    assert!(figures.held_bytes > 3 << 20 && figures.gradients_kept_bytes > 1 << 20, "{figures:?}");
}

#[test]
fn as_many_tiles_are_begun_as_are_copied_until_the_next_step() {
    let numels = [3 << 20];
    let of = |pace: Option<Pace>, steps: u64| {
        let mut job = Job::new(6, &numels);
        let window = job.open(false, pace);
        job.steps(&window, steps, false);
        job.fake.synchronize(); // a time is known when the device was there
        let pace = window.pace();
        (job.save(window, 6), pace)
    };
    // 36 MiB of state in tiles of 3 MiB.
    let (figures, pace) = of(None, 2);
    assert_eq!((figures.held_bytes, figures.left_bytes), (36 << 20, 0));
    let pace = pace.expect("it was measured");
    assert!(pace.bytes_per_ms > 0.0 && pace.room_ms > 0.0, "{pace:?}");
    let (figures, _) = of(Some(Pace { bytes_per_ms: (1 << 20) as f64, room_ms: 7.0 }), 1);
    assert_eq!((figures.held_bytes, figures.left_bytes), (6 << 20, 30 << 20), "0.95 of 7 MiB");
}

#[test]
fn no_gradient_is_kept_of_what_is_not_held() {
    let mut job = Job::new(7, &[1 << 20, 1 << 20]);
    // One tile of 3 MiB, which is a quarter of one of the parameters.
    let window = job.open(true, Some(Pace { bytes_per_ms: (1 << 20) as f64, room_ms: 4.0 }));
    job.steps(&window, 1, true);
    job.fake.synchronize();
    let figures = job.save(window, 7);
    assert_eq!((figures.held_bytes, figures.gradients_kept_bytes), (3 << 20, 4 << 20), "{figures:?}");
}

#[test]
fn a_rehearsal_keeps_the_gradients_of_its_samples_alone() {
    let numels: Vec<u64> = (0..20).map(|unit| 5000 + unit).collect();
    let mut job = Job::new(8, &numels);
    let beside = job.beside(false, None);
    let units = job.training.units(&beside);
    let window = Window::rehearsal(&job.engine, &job.training.catalog, vec![class(false)], units, Some(beside));
    job.steps(&window, 1, true);
    assert_eq!(Arc::strong_count(&job.training.alive) - 1, 8, "gradients of the samples alone");
}

#[test]
fn what_fails_on_the_device_commits_nothing_wrong_and_nothing_is_held_afterwards() {
    const CALLS: [&str; 6] = [
        "cuMemcpyAsync",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventCreate",
        "cuEventSynchronize",
        "cuLaunchKernel",
    ];
    let mut failed = 0;
    let seeds = seeds(6);
    for seed in 0..seeds {
        let mut job = Job::new(seed + 1, &[300_000, 4097]);
        let is_lost = seed % 3 == 0;
        let call = CALLS[seed as usize % CALLS.len()];
        let window = job.open(seed % 2 == 0, None);
        job.fake.synchronize();
        let nth = if call == "cuLaunchKernel" { 1 } else { 1 + job.dice.below(12) };
        job.fake.fail(call, nth, 719, is_lost);
        let mut lets_go = false;
        for _ in 0..2 {
            let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                job.training.step(&window, &mut job.dice, seed % 2 == 0);
            }));
            if tried.is_err() || window.go_on(Some(job.fake.foreign())).is_err() {
                lets_go = true;
                break;
            }
        }
        if lets_go {
            window.release("a call failed");
            failed += 1;
            drop(window);
        } else {
            let place = job.place.path().join("second");
            // The call may fail as soon as a stream is made for the save's copies.
            let saved = job.training.save(&job.engine, &place, Some(&window));
            match saved.and_then(|pending| pending.committed(Some(LONG))) {
                Ok(()) => job.training.expect_holds(&job.engine, &place, seed),
                Err(_) => failed += 1,
            }
            drop(window);
        }
        let Job { fake, engine, training, .. } = job;
        expect_soon(|| Arc::strong_count(&training.alive) == 1, "a gradient is still held");
        drop(engine);
        // The program's context and stream are left: one slot that is held would keep all page-locked memory.
        expect_soon(|| is_lost || fake.live() == 2, "something of the device's is still held");
    }
    assert!(failed > seeds / 6, "{failed}");
}
