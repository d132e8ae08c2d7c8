//! Tests what a save copies when, and that it commits nothing without a confirmation.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use shardfast_engine::{
    Capture, Destination, Engine, Error, Fence, Fences, Kind, Pending, Provider, Result, State, checkpoint, save,
};
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Owner, Region};
use shardfast_tools::verify;

use crate::job::{Job, LONG, Seed, Truth, alike, destination, outcomes};
use crate::layout::{Dice, Layout};

const SHORT: Duration = Duration::from_millis(200);

/// A gate that providers wait at.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

/// A tensor that is copied when its gate is open, if it has one.
struct Gated {
    bytes: u64,
    capture: Capture,
    gate: Option<Arc<Gate>>,
    order: Arc<Mutex<Vec<Capture>>>,
}

impl Provider for Gated {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fill(&self, _at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        self.gate.iter().for_each(|gate| gate.pass());
        self.order.lock().unwrap().push(self.capture);
        out.fill(7);
        Ok(())
    }

    fn capture(&self) -> Capture {
        self.capture
    }
}

/// Another provider, captured in that way.
struct Captured {
    provider: Arc<dyn Provider>,
    capture: Capture,
}

impl Provider for Captured {
    fn bytes(&self) -> u64 {
        self.provider.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.provider.fill(at, out, fences)
    }

    fn capture(&self) -> Capture {
        self.capture
    }
}

fn leaf(name: &str, body: LeafBody) -> Leaf {
    Leaf { name: LeafName::new("model", name), body, layout: String::new() }
}

fn tensor(name: &str, bytes: u64) -> Leaf {
    let shape = [bytes];
    leaf(name, LeafBody::Tensor { dtype: DType::U8, shape: shape[..].into(), parts: vec![Region::whole(&shape)] })
}

fn state(leaves: Vec<(Leaf, Arc<dyn Provider>)>) -> State {
    let (leaves, providers) = leaves.into_iter().map(|(leaf, provider)| (leaf, vec![provider])).unzip();
    let catalog = Arc::new(Catalog { leaves });
    State { catalog, providers, ..State::default() }
}

/// A tensor of which the save has the first bytes already, but must wait for them at the gate.
struct Ahead {
    live: Vec<u8>,
    held: u64,
    gate: Arc<Gate>,
}

impl Provider for Ahead {
    fn bytes(&self) -> u64 {
        self.live.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        if at < self.held {
            self.gate.pass();
        }
        self.live.fill(at, out, fences)
    }

    fn capture(&self) -> Capture {
        Capture::Lazy
    }

    fn is_held(&self, at: u64, bytes: u64) -> bool {
        at + bytes <= self.held
    }

    fn live(&self) -> Option<Arc<dyn Provider>> {
        Some(Arc::new(self.live.clone()))
    }
}

/// An optimizer's moments, with its number of steps between them.
#[test]
fn a_save_is_staged_before_what_was_captured_ahead_of_it_is_ready() {
    let gate = Arc::new(Gate::default());
    let ahead = |held: u64| {
        let live = (0..(5 << 20) + 100).map(|byte: u32| (byte % 251) as u8).collect();
        Arc::new(Ahead { live, held, gate: Arc::clone(&gate) })
    };
    let count = || -> Arc<dyn Provider> {
        Arc::new(Captured { provider: Arc::new(vec![1, 2, 3, 4]), capture: Capture::Inline })
    };
    let (one, two) = (ahead(u64::MAX), ahead((2 << 20) + 77));
    let bytes = one.bytes();
    let leaves: Vec<(Leaf, Arc<dyn Provider>)> = vec![
        (tensor("a", bytes), Arc::clone(&one) as _),
        (tensor("b", 4), count()),
        (tensor("c", bytes), Arc::clone(&two) as _),
        (tensor("d", 4), count()),
    ];
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().to_str().unwrap();
    let engine = Engine::solo();
    let pending = save(&engine, destination(url), state(leaves), LONG);
    pending.staged(Some(LONG)).expect("it waited for what it has already");
    assert_eq!(pending.committed(Some(SHORT)).unwrap_err().kind, Kind::Unavailable, "it did not use it");
    gate.open();
    pending.confirm_unmodified(Ok(()));
    pending.committed(None).unwrap();
    let report = verify(&engine, url, &|_, _| {}).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn what_may_change_at_any_time_is_copied_first_and_waited_for_alone() {
    let (gate, order) = (Arc::new(Gate::default()), Arc::default());
    let patient =
        Gated { bytes: 9 << 20, capture: Capture::Owned, gate: Some(Arc::clone(&gate)), order: Arc::clone(&order) };
    let urgent = Gated { bytes: 3 << 20, capture: Capture::Eager, gate: None, order: Arc::clone(&order) };
    let leaves: Vec<(Leaf, Arc<dyn Provider>)> =
        vec![(tensor("a", patient.bytes), Arc::new(patient)), (tensor("b", urgent.bytes), Arc::new(urgent))];
    let dir = tempfile::tempdir().unwrap();
    let pending = save(&Engine::solo(), destination(dir.path().to_str().unwrap()), state(leaves), LONG);
    pending.captured(Some(LONG)).unwrap();
    assert_eq!(pending.staged(Some(SHORT)).unwrap_err().kind, Kind::Unavailable);
    assert!(order.lock().unwrap().iter().all(|&capture| capture == Capture::Eager), "something else went first");
    gate.open();
    pending.committed(None).unwrap();
    let order = order.lock().unwrap();
    let urgent = order.iter().filter(|capture| **capture == Capture::Eager).count();
    assert!(urgent >= 3 && order[..urgent].iter().all(|capture| *capture == Capture::Eager), "{order:?}");
}

/// A value that is encoded when its gate is open.
struct Late(Arc<Gate>);

impl Provider for Late {
    fn bytes(&self) -> u64 {
        self.0.pass();
        1
    }

    fn fill(&self, _at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        out.fill(0xf6); // null
        Ok(())
    }
}

#[test]
fn encoding_a_value_holds_up_no_tensor() {
    let gate = Arc::new(Gate::default());
    let tensor = (tensor("t", 5 << 20), Arc::new(vec![3u8; 5 << 20]) as Arc<dyn Provider>);
    let value = (leaf("v", LeafBody::Object { owner: Owner::Job }), Arc::new(Late(Arc::clone(&gate))) as _);
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().to_str().unwrap();
    let pending = save(&Engine::solo(), destination(url), state(vec![tensor, value]), LONG);
    pending.staged(None).unwrap();
    assert!(!pending.done());
    gate.open();
    pending.committed(None).unwrap();
    let files = checkpoint::open(&Engine::solo(), url, LONG).unwrap().manifest().files().len();
    assert_eq!(files, 2, "the value has a file of its own");
}

#[test]
fn a_save_commits_only_when_it_is_confirmed() {
    let job = Job::new(Layout::replicas(2));
    let dir = tempfile::tempdir().unwrap();
    let begin = |step: u32, deadline: Duration| {
        let url = dir.path().join(step.to_string());
        let lazy = || Captured { provider: Arc::new(vec![step as u8; 100]), capture: Capture::Lazy };
        let leaves = || vec![(tensor("t", 100), Arc::new(lazy()) as Arc<dyn Provider>)];
        let begin = |engine| save(engine, destination(url.to_str().unwrap()), state(leaves()), deadline);
        (job.engines.iter().map(begin).collect::<Vec<_>>(), url)
    };
    // Not before, and then at once.
    let (pendings, _) = begin(1, LONG);
    pendings[0].confirm_unmodified(Ok(()));
    assert_eq!(pendings[0].committed(Some(SHORT)).unwrap_err().kind, Kind::Unavailable);
    pendings[1].confirm_unmodified(Ok(()));
    assert_eq!(alike(outcomes(pendings)), Ok(vec![(), ()]));

    // One that saw a change fails it for all, and nothing stays. The first word counts.
    let (pendings, url) = begin(2, LONG);
    pendings[0].confirm_unmodified(Ok(()));
    pendings[1].confirm_unmodified(Err(Error::new(Kind::Invalid, "model/t was written during capture")));
    pendings[1].confirm_unmodified(Ok(()));
    let error = alike(outcomes(pendings)).unwrap_err();
    assert_eq!(
        error,
        Error::new(Kind::Invalid, "rank 1: model/t was written during capture (its part was staged, not yet durable)")
    );
    assert_eq!(files_below(&url), 0);

    // The caller on the other rank does not confirm.
    let (pendings, url) = begin(3, SHORT * 3);
    pendings[0].confirm_unmodified(Ok(()));
    let error = alike(outcomes(pendings)).unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert!(!url.join("COMMIT").exists());
}

/// A source that fails before the save is staged.
struct Gone;

impl Provider for Gone {
    fn bytes(&self) -> u64 {
        100
    }

    fn fill(&self, _at: u64, _out: &mut [u8], _: &mut Fences) -> Result<()> {
        Err(Error::new(Kind::Invalid, "its memory was freed"))
    }

    fn capture(&self) -> Capture {
        Capture::Lazy
    }
}

#[test]
fn a_save_that_was_never_staged_waits_for_nobodys_word() {
    let dir = tempfile::tempdir().unwrap();
    let leaves = vec![(tensor("t", 100), Arc::new(Gone) as Arc<dyn Provider>)];
    let pending = save(&Engine::solo(), destination(dir.path().to_str().unwrap()), state(leaves), LONG);
    let error = pending.staged(Some(LONG / 4)).unwrap_err();
    assert_eq!(
        error,
        Error::new(Kind::Invalid, "model/t: its memory was freed (its part was captured, not yet staged)")
    );
}

fn files_below(dir: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { files_below(&path) } else { 1 }).sum()
}

/// A device that copies on a thread of its own, some time later.
#[derive(Default)]
struct Device {
    under_way: Arc<AtomicU64>,
    is_lost: AtomicBool,
    waits: AtomicU64,
}

/// Memory of a [`Device`].
struct Remote {
    device: Arc<Device>,
    fence: Arc<dyn Fence>,
    contents: Vec<u8>,
}

impl Provider for Remote {
    fn bytes(&self) -> u64 {
        self.contents.len() as u64
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        // A thread may not outlive `out`: it is handed over as an address, as a device would get it.
        let (to, from) = (out.as_mut_ptr() as usize, self.contents[at as usize..at as usize + out.len()].to_vec());
        let under_way = Arc::clone(&self.device.under_way);
        under_way.fetch_add(1, Ordering::SeqCst);
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            // SAFETY: the engine passes `out` on only after it has waited for the fence.
            #[allow(unsafe_code)]
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len());
            }
            under_way.fetch_sub(1, Ordering::SeqCst);
        });
        fences.add(&self.fence);
        Ok(())
    }
}

impl Fence for Device {
    fn wait(&self) -> Result<()> {
        while self.under_way.load(Ordering::SeqCst) > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        self.waits.fetch_add(1, Ordering::SeqCst);
        if self.is_lost.load(Ordering::SeqCst) {
            return Err(Error::new(Kind::Unavailable, "the device is lost"));
        }
        Ok(())
    }

    fn mark(self: Arc<Self>) -> Result<Arc<dyn Fence>> {
        Ok(self)
    }
}

#[test]
fn what_a_device_copies_is_waited_for_once_per_slot() {
    let device = Arc::new(Device::default());
    let fence: Arc<dyn Fence> = Arc::clone(&device) as _;
    let contents: Vec<Vec<u8>> = (0..20).map(|i| (0..1000u32).map(|j| (i * 37 + j) as u8).collect()).collect();
    let leaves = || {
        let remote = |contents: &Vec<u8>| -> Arc<dyn Provider> {
            Arc::new(Remote { device: Arc::clone(&device), fence: Arc::clone(&fence), contents: contents.clone() })
        };
        contents.iter().enumerate().map(|(i, c)| (tensor(&format!("t{i:02}"), 1000), remote(c))).collect::<Vec<_>>()
    };
    let dir = tempfile::tempdir().unwrap();
    let url = |step: u32| dir.path().join(step.to_string()).to_str().unwrap().to_owned();
    let engine = Engine::solo();
    save(&engine, destination(&url(1)), state(leaves()), LONG).committed(None).unwrap();
    assert_eq!(device.waits.load(Ordering::SeqCst), 1, "twenty small tensors share a slot and a fence");
    let opened = checkpoint::open(&engine, &url(1), LONG).unwrap();
    let path = opened.manifest().files()[0].path.clone();
    let file = std::fs::read(dir.path().join("1").join(path)).unwrap();
    assert!(file.ends_with(&contents.concat()), "bytes were used before they had arrived");

    device.is_lost.store(true, Ordering::SeqCst);
    let error = save(&engine, destination(&url(2)), state(leaves()), LONG).committed(None).unwrap_err();
    assert_eq!(error, Error::new(Kind::Unavailable, "the device is lost (its part was captured, not yet staged)"));
}

/// A tensor that its owner writes as soon as it may.
struct Scribbled {
    bytes: Mutex<Vec<u8>>,
    capture: Capture,
}

impl Scribbled {
    fn scribble(&self) {
        self.bytes.lock().unwrap().as_mut_slice().fill(0xee);
    }
}

impl Provider for Scribbled {
    fn bytes(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        let at = at as usize;
        out.copy_from_slice(&self.bytes.lock().unwrap()[at..at + out.len()]);
        Ok(())
    }

    fn capture(&self) -> Capture {
        self.capture
    }
}

/// Puts tensors that are written as early as possible into the place of a state's; gives them all.
fn scribbled(state: &mut State, dice: &mut Dice) -> Vec<Arc<Scribbled>> {
    let mut all = Vec::new();
    for (leaf, providers) in state.catalog.leaves.iter().zip(&mut state.providers) {
        let LeafBody::Tensor { .. } = leaf.body else { continue };
        for provider in providers {
            let mut bytes = vec![0; provider.bytes() as usize];
            provider.fill(0, &mut bytes, &mut Fences::default()).unwrap();
            let capture = if dice.once_in(3) { Capture::Eager } else { Capture::Owned };
            let one = Arc::new(Scribbled { bytes: bytes.into(), capture });
            all.push(Arc::clone(&one));
            *provider = one;
        }
    }
    all
}

/// Begins a save of a rank whose state is written as early as that is allowed, by a thread of its own.
fn save_scribbled(
    job: &Job,
    rank: u32,
    url: &str,
    truth: &Truth,
    dice: &mut Dice,
) -> (Pending, thread::JoinHandle<()>) {
    let mut state = truth.state(&job.layout, rank, &mut Dice(dice.next()));
    let tensors = scribbled(&mut state, dice);
    let pending = save(&job.engines[rank as usize], destination(url), state, LONG);
    let told = pending.clone();
    let writer = thread::spawn(move || {
        told.captured(None).unwrap();
        tensors.iter().filter(|tensor| tensor.capture == Capture::Eager).for_each(|tensor| tensor.scribble());
        told.staged(None).unwrap();
        tensors.iter().for_each(|tensor| tensor.scribble());
    });
    (pending, writer)
}

/// Tests states of all kinds with unknown holders, one or two saves in flight, one rank late.
#[test]
fn what_is_written_after_it_was_captured_or_staged_is_not_saved() {
    let place = crate::reshard::scratch();
    for seed in 0..30 {
        let _told = Seed(seed);
        let mut dice = Dice(seed);
        let job = Job::new(Layout::random(&mut dice).ignorant());
        let truth = |dice: &mut Dice| match dice.below(4) {
            0 => Truth::small(dice.next(), 150_000 + dice.below(300_000)),
            _ => Truth::random(dice),
        };
        let truths: Vec<Truth> = (0..=dice.below(2)).map(|_| truth(&mut dice)).collect();
        let url = |number: usize| place.path().join(format!("{seed} {number}")).to_str().unwrap().to_owned();
        let late = dice.below(u64::from(job.layout.world())) as u32;
        let mut begun: Vec<Vec<_>> = truths.iter().map(|_| Vec::new()).collect();
        for rank in (0..job.layout.world()).filter(|&rank| rank != late).chain([late]) {
            if rank == late {
                let wait = Duration::from_millis(dice.below(30));
                begun.iter().flatten().for_each(|(pending, _): &(Pending, _)| _ = pending.staged(Some(wait)));
            }
            for (number, truth) in truths.iter().enumerate() {
                begun[number].push(save_scribbled(&job, rank, &url(number), truth, &mut dice));
            }
        }
        for (number, begun) in begun.into_iter().enumerate() {
            let (pendings, writers): (Vec<_>, Vec<_>) = begun.into_iter().unzip();
            alike(outcomes(pendings)).unwrap();
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            let loading = Job::new(Layout::rows(2));
            let flaw =
                loading.compare(|engine| checkpoint::open(engine, &url(number), LONG), &truths[number], &mut dice);
            assert_eq!(flaw, Ok(None), "save {number}");
        }
    }
}

/// The policy and the nice value of this thread.
fn scheduling() -> (u32, i32) {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // Behind the name, which may hold anything, the third field of proc_pid_stat(5) is the first.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[41 - 3].parse().unwrap(), fields[19 - 3].parse().unwrap())
}

/// Notes how the threads that copy it are scheduled: their policy and their nice value.
struct Scheduled {
    capture: Capture,
    seen: Arc<Mutex<Vec<(u32, i32)>>>,
}

impl Provider for Scheduled {
    fn bytes(&self) -> u64 {
        1 << 20
    }

    fn fill(&self, _at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        self.seen.lock().unwrap().push(scheduling());
        out.fill(7);
        Ok(())
    }

    fn capture(&self) -> Capture {
        self.capture
    }
}

#[test]
fn what_saves_in_the_background_gives_way_to_the_program() {
    const SCHED_BATCH: u32 = 3;
    let engine = Engine::solo();
    const LAZY: &[Capture] = &[Capture::Lazy];
    const BOTH: &[Capture] = &[Capture::Lazy, Capture::Eager];
    let cases = [
        (LAZY, false, (SCHED_BATCH, 3)),
        (LAZY, true, (0, 0)),
        (&[Capture::Owned], false, (0, 0)),
        (BOTH, false, (0, 3)), // the caller waits for what is captured eagerly
        (LAZY, false, (SCHED_BATCH, 3)),
    ];
    for (captures, blocking, expected) in cases {
        let (dir, seen) = (tempfile::tempdir().unwrap(), Arc::default());
        let leaf = |(number, capture): (usize, &Capture)| {
            let provider = Scheduled { capture: *capture, seen: Arc::clone(&seen) };
            (tensor(&number.to_string(), 1 << 20), Arc::new(provider) as Arc<dyn Provider>)
        };
        let state = state(captures.iter().enumerate().map(leaf).collect());
        let destination = Destination { blocking, ..destination(dir.path().to_str().unwrap()) };
        let pending = save(&engine, destination, state, LONG);
        pending.confirm_unmodified(Ok(()));
        pending.committed(Some(LONG)).unwrap();
        let seen = seen.lock().unwrap();
        // The whole test may run at a nice value.
        let expected = (expected.0, scheduling().1 + expected.1);
        assert!(!seen.is_empty() && seen.iter().all(|one| *one == expected), "{expected:?}, {seen:?}");
    }
}
