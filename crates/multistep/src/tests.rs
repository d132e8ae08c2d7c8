//! Tests trainings with faults, by seeds: a commit always has the training's bytes at the save.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shardfast_engine::stream::FlatRun;
use shardfast_engine::{Destination, Pending, Prove};
use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafName, Region};
use shardfast_optim::{Gradient, Instructions, LionScalars, Step, Tile, replay};
use shardfast_store::testing::dice::Dice;
use shardfast_transfer::capture::Capture;
use shardfast_transfer::provider::Fences;

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// Name of the variant of any fused step of AdamW on a processor.
const VARIANT: &str = "adam.fused.cpu.f32";

const MIB: u64 = 1 << 20;

/// Steps of the window.
const STEPS: u64 = 4;

/// A tensor that the training changes.
struct Live(Mutex<Vec<u8>>);

impl Live {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Provider for Live {
    fn bytes(&self) -> u64 {
        self.lock().len() as u64
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        out.copy_from_slice(&self.lock()[at as usize..at as usize + out.len()]);
        Ok(())
    }

    fn capture(&self) -> Capture {
        Capture::Lazy
    }
}

fn floats(dice: &mut Dice, numel: u64) -> Vec<u8> {
    let mut float = || (dice.below(2001) as f32 / 1000.0 - 1.0).to_le_bytes();
    (0..numel).flat_map(|_| float()).collect()
}

/// Parameters with two moments each.
struct Training {
    tensors: Vec<[Arc<Live>; 3]>,
    catalog: Arc<Catalog>,
    steps: i32,
}

impl Training {
    fn new(numels: &[u64], dice: &mut Dice) -> Training {
        let live = |bytes| Arc::new(Live(Mutex::new(bytes)));
        let mut of = |&numel: &u64| {
            // A mean of squares is not negative: NaN would hide what steps do.
            let squares =
                floats(dice, numel).chunks(4).flat_map(|four| [four[0], four[1], four[2], four[3] & 0x7f]).collect();
            [live(floats(dice, numel)), live(floats(dice, numel)), live(squares)]
        };
        let tensors: Vec<[Arc<Live>; 3]> = numels.iter().map(&mut of).collect();
        let leaf = |number: usize, array: usize, numel: u64| {
            let shape = Dims::from_slice(&[numel]);
            let body = LeafBody::Tensor { dtype: DType::F32, parts: vec![Region::whole(&shape)], shape };
            Leaf { name: LeafName::new("model", format!("{number:02}.{array}")), body, layout: String::new() }
        };
        let of = |(number, &numel): (usize, &u64)| (0..3).map(move |array| leaf(number, array, numel));
        let leaves = numels.iter().enumerate().flat_map(of).collect();
        Training { tensors, catalog: Arc::new(Catalog { leaves }), steps: 0 }
    }

    fn live(&self) -> impl Iterator<Item = &Arc<Live>> {
        self.tensors.iter().flatten()
    }

    fn units(&self) -> Vec<Unit> {
        let unit = |(number, tensors): (usize, &[Arc<Live>; 3])| Unit {
            class: 0,
            numel: tensors[0].bytes() / 4,
            arrays: (0u32..3)
                .zip(tensors)
                .map(|(array, live)| Array { leaf: number as u32 * 3 + array, part: 0, memory: Arc::clone(live) as _ })
                .collect(),
        };
        self.tensors.iter().enumerate().map(unit).collect()
    }

    /// Changes a bit of a parameter or of one of its moments; whose.
    fn change_bit(&self, dice: &mut Dice) -> usize {
        let unit = dice.below(self.tensors.len() as u64) as usize;
        let mut bytes = self.tensors[unit][dice.below(3) as usize].lock();
        let at = dice.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << dice.below(8);
        unit
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

    /// Steps these parameters with these gradients.
    fn step(&mut self, gradients: &BTreeMap<usize, Vec<u8>>) -> Scalars {
        self.steps += 1;
        let scalars = self.scalars();
        let variant = Variant::named(VARIANT).unwrap();
        for (&number, values) in gradients {
            let [p, m, v] = &self.tensors[number];
            let (mut p, mut m, mut v) = (p.lock(), m.lock(), v.lock());
            let numel = p.len() as u64 / 4;
            let mut tile =
                Tile { offset: 0, numel, dtypes: Dtypes::F32, parameter: &mut p, moments: &mut [&mut m, &mut v] };
            let gradient = Gradient { dtype: Dtype::F32, values, factor: None };
            replay(Instructions::best(), variant, &mut tile, &[Step::Taken { gradient, scalars }]).unwrap();
        }
        scalars
    }

    /// Opens a window over these units, as the last save was planned.
    fn window(&self, engine: &Engine, units: Vec<Unit>) -> Window {
        let planned = engine.planned(&self.catalog).unwrap();
        Window::open(engine, &self.catalog, &planned, vec![class()], units, None).unwrap()
    }

    fn state(&self) -> shardfast_engine::State {
        let providers = self.live().map(|live| vec![Arc::clone(live) as Arc<dyn Provider>]).collect();
        shardfast_engine::State { catalog: Arc::clone(&self.catalog), providers, ..shardfast_engine::State::default() }
    }

    /// Begins a save, and lets the training write over everything as soon as it may.
    fn save(
        &self,
        engine: &Arc<Engine>,
        place: &std::path::Path,
        captured: Option<Captured>,
    ) -> (Pending, Vec<Vec<u8>>) {
        let expected = self.live().map(|live| live.lock().clone()).collect();
        let state = match captured {
            Some(captured) => captured.over(self.state()),
            None => self.state(),
        };
        let url = place.to_str().unwrap().to_owned();
        let destination =
            Destination { url, step: None, user: BTreeMap::new(), prove: Prove::default(), blocking: false };
        let pending = shardfast_engine::save(engine, destination, state, LONG);
        if pending.staged(None).is_ok() {
            self.live().for_each(|live| live.lock().iter_mut().for_each(|byte| *byte = !*byte));
            pending.confirm_unmodified(Ok(()));
        }
        (pending, expected)
    }
}

fn class() -> Class {
    let variant = Variant::named(VARIANT);
    Class { kind: OptimizerKind::Adam, dtypes: Dtypes::F32, device: Device::Cpu, is_fused: None, variant }
}

fn expect_holds(engine: &Arc<Engine>, place: &std::path::Path, expected: &[Vec<u8>], seed: u64) -> String {
    let checkpoint = shardfast_engine::open(engine, place.to_str().unwrap(), LONG).unwrap();
    for (leaf, expected) in expected.iter().enumerate() {
        let mut found = vec![0; expected.len()];
        checkpoint.load_runs(&[FlatRun { leaf, elements: 0..expected.len() as u64 / 4 }], &mut found).unwrap();
        assert!(found == *expected, "seed {seed}: other bytes were committed than the training had");
    }
    checkpoint.manifest().info.user.get("shardfast.replayed").cloned().unwrap_or_default()
}

/// Time at which something else than a step of the optimizer changes the training's or the window's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// A tensor, between two steps, while tiles are copied.
    DuringCopies,
    /// A tensor, once the copies are paused, before the optimizer steps.
    BeforeStep,
    /// A tensor, after a step, before its gradients are copied.
    AfterStep,
    /// A tensor, after a step's gradients were copied, before further tiles are.
    AfterGradients,
    /// A tensor, after the last step, while tiles are copied.
    BeforeClose,
    /// A tensor, between the end of the window and the save.
    AfterClose,
    /// A gradient, after the step that used it, before it is copied.
    Gradient,
    /// Loss of a gradient: the test does not pass it to the window.
    GradientLost,
}

impl Moment {
    const ALL: [Moment; 8] = [
        Moment::DuringCopies,
        Moment::BeforeStep,
        Moment::AfterStep,
        Moment::AfterGradients,
        Moment::BeforeClose,
        Moment::AfterClose,
        Moment::Gradient,
        Moment::GradientLost,
    ];
}

/// The changes of one run for which its save may be refused.
struct Faults {
    /// The only moment at which something is changed; `None` for any number of them, by chance.
    planned: Option<Moment>,
    /// The step at which it is.
    step: u64,
    /// Parameters that were changed, or one of whose moments or gradients was.
    units: BTreeSet<usize>,
}

impl Faults {
    fn are_due(&self, moment: Moment, step: u64, dice: &mut Dice) -> bool {
        match self.planned {
            Some(planned) => (planned, self.step) == (moment, step),
            None => dice.once_in(20),
        }
    }

    /// Changes a bit of a parameter or a moment, if this is due.
    fn change_tensor(&mut self, moment: Moment, step: u64, training: &Training, dice: &mut Dice) {
        if self.are_due(moment, step, dice) {
            self.units.insert(training.change_bit(dice));
        }
    }

    /// Changes or loses gradients of a step, if this is due. Returns those that the test passes to the window, with
    /// their units.
    fn change_gradients(
        &mut self,
        step: u64,
        gradients: BTreeMap<usize, Vec<u8>>,
        dice: &mut Dice,
    ) -> Vec<(usize, Arc<Live>)> {
        let mut given = Vec::new();
        for (unit, mut values) in gradients {
            if self.are_due(Moment::Gradient, step, dice) {
                values[3] ^= 0x20;
                self.units.insert(unit);
            }
            if self.are_due(Moment::GradientLost, step, dice) {
                self.units.insert(unit);
                continue;
            }
            given.push((unit, Arc::new(Live(Mutex::new(values)))));
        }
        given
    }
}

#[derive(Default)]
struct Endings {
    replayed: u64,
    /// Saves that were refused, by the planned moment.
    refused: BTreeMap<Option<Moment>, u64>,
    released: u64,
}

/// Lets tiles be copied for a while, or until no more are.
fn wait_for_copies(window: &Window, dice: &mut Dice) {
    if dice.once_in(3) {
        return std::thread::sleep(Duration::from_micros(dice.below(4000)));
    }
    let (begun, shared) = (Instant::now(), &window.shared);
    let is_copying = |state: MutexGuard<'_, State>| state.copies || state.next < shared.tiles.len();
    while is_copying(shared.lock()) {
        assert!(begun.elapsed() < LONG, "a window copies without end: {:?}", window.figures());
        std::thread::yield_now();
    }
}

/// Trains, saves at the end, changes tensors otherwise than by steps, and injects faults. The save must be refused, or
/// have the bytes that the training had when it began.
fn run(seed: u64, endings: &mut Endings) {
    let mut dice = Dice(seed);
    let place = tempfile::tempdir().unwrap();
    let budget = [(128 + 20) * MIB, (128 + 60) * MIB, 1024 * MIB][dice.below(3) as usize];
    let engine = Engine::new(shardfast_coord::solo(), budget).unwrap();
    let numels: Vec<u64> =
        (0..1 + dice.below(5)).map(|_| [1, 15, 4096, 262_145, 600_001][dice.below(5) as usize]).collect();
    let mut training = Training::new(&numels, &mut dice);
    let (first, saved) = training.save(&engine, &place.path().join("first"), None);
    first.committed(None).unwrap();
    training.live().zip(saved).for_each(|(live, saved)| *live.lock() = saved);

    let steps = 1 + dice.below(STEPS);
    let planned = Moment::ALL.get((seed % 10) as usize).copied();
    let mut faults = Faults { planned, step: dice.below(steps), units: BTreeSet::new() };
    let window = training.window(&engine, training.units());
    if dice.once_in(4) {
        // Nothing was copied yet: the save is not refused for this.
        training.change_bit(&mut dice);
    }
    window.go_on(None).unwrap();
    for step in 0..steps {
        wait_for_copies(&window, &mut dice);
        faults.change_tensor(Moment::DuringCopies, step, &training, &mut dice);
        window.stepping(None).unwrap();
        faults.change_tensor(Moment::BeforeStep, step, &training, &mut dice);
        let mut gradients: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        for (number, &numel) in numels.iter().enumerate() {
            if !dice.once_in(6) {
                gradients.insert(number, floats(&mut dice, numel));
            }
        }
        let scalars = training.step(&gradients);
        faults.change_tensor(Moment::AfterStep, step, &training, &mut dice);
        let given = faults.change_gradients(step, gradients, &mut dice);
        let applied = given.iter().map(|(unit, gradient)| Applied {
            unit: *unit,
            dtype: Dtype::F32,
            gradient: Arc::clone(gradient) as _,
            factor: None,
            scalars,
            device_bias: None,
        });
        window.stepped(applied.collect(), None).unwrap();
        if dice.once_in(2) {
            // They were copied: the save is not refused for this.
            given.iter().for_each(|(_, gradient)| gradient.lock().iter_mut().for_each(|byte| *byte = !*byte));
        }
        faults.change_tensor(Moment::AfterGradients, step, &training, &mut dice);
        window.go_on(None).unwrap();
        if dice.once_in(15) {
            window.release("the test says so");
        }
    }
    if dice.once_in(2) {
        wait_for_copies(&window, &mut dice);
    }
    faults.change_tensor(Moment::BeforeClose, faults.step, &training, &mut dice);
    let captured = window.close();
    faults.change_tensor(Moment::AfterClose, faults.step, &training, &mut dice);
    let figures = window.figures();
    endings.released += figures.let_go_bytes;
    let is_dropped_first = dice.once_in(2);
    let mut window = Some(window);
    if is_dropped_first {
        window = None;
    }
    let (second, expected) = training.save(&engine, &place.path().join("second"), Some(captured));
    match second.committed(None) {
        Ok(()) => {
            let note = expect_holds(&engine, &place.path().join("second"), &expected, seed);
            assert_eq!(note.is_empty(), figures.held_bytes == 0, "seed {seed}: {note:?}");
            assert!(
                note.is_empty() || note.starts_with(&format!("{} bytes by {VARIANT}", figures.held_bytes)),
                "{note}"
            );
            endings.replayed += figures.held_bytes;
        }
        Err(error) => {
            let of_unit = |unit: &usize| error.message.starts_with(&format!("model/{unit:02}."));
            let names_what_changed = faults.units.iter().any(of_unit);
            let says_why = error.message.contains("other bits than the tensor had");
            assert!(says_why && names_what_changed, "seed {seed}, {planned:?} of {:?}: {error}", faults.units);
            assert!(window.is_none_or(|window| window.is_refuted()), "seed {seed}");
            *endings.refused.entry(planned).or_default() += 1;
        }
    }
    drop(second);
    assert_eq!(engine.staging().kept(), 0, "seed {seed}: slots are held afterwards");
}

/// The first seed: from it on, each ending comes soon.
const FIRST: u64 = 30;

/// Seeds of a usual run; a campaign sets more.
fn seeds() -> u64 {
    std::env::var("SHARDFAST_AHEAD_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(30)
}

#[test]
fn what_is_committed_is_what_the_training_had() {
    let mut endings = Endings::default();
    for seed in FIRST..FIRST + 2 * seeds() {
        // On a busy machine fewer gradients come in time: then it takes more seeds.
        if seed < FIRST + seeds() || endings.replayed <= 10 * MIB {
            run(seed, &mut endings);
        }
    }
    let Endings { replayed, refused, released } = endings;
    assert!(replayed > 10 * MIB && released > 0, "{replayed} {released}");
    for moment in Moment::ALL {
        assert!(refused.contains_key(&Some(moment)), "no save was refused for {moment:?}: {refused:?}");
    }
}

/// A tensor whose copies are counted, and wait until they may end.
struct Slow {
    live: Arc<Live>,
    begun: AtomicUsize,
    may_end: AtomicBool,
}

impl Provider for Slow {
    fn bytes(&self) -> u64 {
        self.live.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        expect_soon(|| self.may_end.load(Ordering::SeqCst));
        self.live.fill(at, out, fences)
    }

    fn capture(&self) -> Capture {
        Capture::Lazy
    }
}

fn expect_soon(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "it never was so");
        std::thread::yield_now();
    }
}

#[test]
fn a_step_waits_for_the_tile_under_way_and_no_other_begins_before_it_is_over() {
    const SHORT: Duration = Duration::from_millis(50);
    let engine = Engine::new(shardfast_coord::solo(), 1024 * MIB).unwrap();
    let place = tempfile::tempdir().unwrap();
    let training = Training::new(&[4 * 262_144], &mut Dice(1));
    training.save(&engine, &place.path().join("first"), None).0.committed(None).unwrap();
    let mut units = training.units();
    let (begun, may_end) = (AtomicUsize::new(0), AtomicBool::new(false));
    let slow = Arc::new(Slow { live: Arc::clone(&training.tensors[0][0]), begun, may_end });
    units[0].arrays[0].memory = Arc::clone(&slow) as _;
    let window = training.window(&engine, units);
    window.go_on(None).unwrap();
    expect_soon(|| slow.begun.load(Ordering::SeqCst) == 1);
    let steps = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            window.stepping(None).unwrap();
            steps.store(true, Ordering::SeqCst);
        });
        expect_soon(|| !window.shared.lock().may_copy);
        std::thread::sleep(SHORT);
        let is_early = steps.load(Ordering::SeqCst);
        slow.may_end.store(true, Ordering::SeqCst);
        assert!(!is_early, "the optimizer stepped while a tile was copied");
    });
    std::thread::sleep(SHORT);
    assert_eq!(slow.begun.load(Ordering::SeqCst), 1, "a tile was copied while the optimizer stepped");
    window.go_on(None).unwrap();
    expect_soon(|| slow.begun.load(Ordering::SeqCst) > 1);
}

#[test]
fn gradients_without_memory_let_the_newest_tiles_go() {
    let mut dice = Dice(1);
    let engine = Engine::new(shardfast_coord::solo(), (128 + 16) * MIB).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mut training = Training::new(&[4 * 262_144], &mut dice);
    training.save(&engine, &place.path().join("first"), None).0.committed(None).unwrap();
    let window = training.window(&engine, training.units());
    window.go_on(None).unwrap();
    let until = Instant::now() + LONG;
    while window.figures().held_bytes < 12 * MIB && Instant::now() < until {
        std::thread::yield_now();
    }
    // Twelve slots, and one for the gradients of each tile, are sixteen.
    assert_eq!((window.figures().held_bytes, engine.staging().kept()), (12 * MIB, 12));
    let held: Vec<_> = std::iter::from_fn(|| engine.staging().try_keep(1, 0)).flatten().collect();
    window.stepping(None).unwrap();
    let gradients = BTreeMap::from([(0, floats(&mut dice, 4 * 262_144))]);
    let scalars = training.step(&gradients);
    let gradient: Arc<dyn Provider> = Arc::new(gradients[&0].clone());
    window
        .stepped(vec![Applied { unit: 0, dtype: Dtype::F32, gradient, factor: None, scalars, device_bias: None }], None)
        .unwrap();
    let figures = window.figures();
    assert_eq!(figures.let_go_bytes + figures.held_bytes, 12 * MIB);
    assert!(figures.let_go_bytes > 0 && figures.held_bytes > 0, "{figures:?}");
    assert_eq!(window.reason().as_deref(), Some("there was no memory for gradients"));
    // The program may change what is held once it is proven, and nothing else before it is copied.
    let state = window.close().over(training.state());
    let (parameter, end) = (&state.providers[0][0], figures.held_bytes / 3);
    assert!(parameter.is_held(0, end) && !parameter.is_held(end - 4, 8) && !parameter.is_held(end, 4));
    drop((held, window, state));
    // A replay under way gives its slots back when it has ended.
    while engine.staging().kept() > 0 && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(engine.staging().kept(), 0);
}

#[test]
fn a_step_that_does_not_fit_lets_go_before_the_save() {
    let mut dice = Dice(1);
    let engine = Engine::new(shardfast_coord::solo(), 1024 * MIB).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mut training = Training::new(&[1000, 2000], &mut dice);
    training.save(&engine, &place.path().join("first"), None).0.committed(None).unwrap();
    let window = training.window(&engine, training.units());
    window.go_on(None).unwrap();
    expect_soon(|| window.figures().held_bytes > 0);
    window.stepping(None).unwrap();
    let gradients = BTreeMap::from([(0, floats(&mut dice, 1000)), (1, floats(&mut dice, 2000))]);
    let scalars = training.step(&gradients);
    let other = Scalars::Lion(LionScalars { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 });
    let applied = gradients.into_iter().zip([scalars, other]).map(|((unit, gradient), scalars)| {
        let gradient: Arc<dyn Provider> = Arc::new(gradient);
        Applied { unit, dtype: Dtype::F32, gradient, factor: None, scalars, device_bias: None }
    });
    // No replay can find it out.
    let under_way = window.shared.tiles[0].lock_slots();
    window.stepped(applied.collect(), None).unwrap();
    assert_eq!(window.figures().held_bytes, 0);
    drop(under_way);
    assert!(window.reason().is_some_and(|reason| reason.contains("scalars")), "{:?}", window.reason());
    let (second, expected) = training.save(&engine, &place.path().join("second"), Some(window.close()));
    second.committed(None).unwrap();
    expect_holds(&engine, &place.path().join("second"), &expected, 0);
    drop((window, second));
    expect_soon(|| engine.staging().kept() == 0);
}

#[test]
fn a_tile_that_is_let_go_during_its_replay_gives_its_memory_back() {
    let engine = Engine::new(shardfast_coord::solo(), 1 << 30).unwrap();
    let training = Training::new(&[1000], &mut Dice(2));
    let units = training.units();
    let tile = tile::tiles(&[class()], &units, &[(0, 0..1000)]).remove(0);
    tile.hold(engine.staging().try_keep(3, 0).unwrap(), Fences::default());
    let under_way = tile.lock_slots();
    assert_eq!(tile.release(), 12_000);
    drop(under_way);
    assert_eq!(engine.staging().kept(), 3);
    tile.replay(&units).unwrap();
    assert_eq!(engine.staging().kept(), 0);
}
