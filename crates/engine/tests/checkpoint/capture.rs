//! What a save copies when, and that it commits nothing that nobody vouches for.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use shardfast_engine::{Engine, Error, Fence, Fences, Kind, Pending, Provider, Result, State, checkpoint, save};
use shardfast_format::{Catalog, DType, Leaf, LeafBody, LeafName, Region};

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
    is_urgent: bool,
    gate: Option<Arc<Gate>>,
    order: Arc<Mutex<Vec<bool>>>,
}

impl Provider for Gated {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fill(&self, _at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        self.gate.iter().for_each(|gate| gate.pass());
        self.order.lock().unwrap().push(self.is_urgent);
        out.fill(7);
        Ok(())
    }

    fn is_urgent(&self) -> bool {
        self.is_urgent
    }
}

fn leaf(name: &str, body: LeafBody) -> Leaf {
    Leaf { name: LeafName::new("model", name), body, layout: String::new() }
}

fn tensor(name: &str, bytes: u64) -> Leaf {
    let shape = [bytes];
    leaf(name, LeafBody::Tensor { dtype: DType::U8, shape: shape[..].into(), parts: vec![Region::whole(&shape)] })
}

fn state(leaves: Vec<(Leaf, Arc<dyn Provider>)>, is_vouched_for: bool) -> State {
    let (leaves, providers) = leaves.into_iter().map(|(leaf, provider)| (leaf, vec![provider])).unzip();
    let (catalog, compared) = (Arc::new(Catalog { leaves }), Arc::default());
    State { catalog, providers, replicas: None, compared, is_vouched_for, is_waited_for: false }
}

#[test]
fn what_may_change_at_any_time_is_copied_first_and_waited_for_alone() {
    let (gate, order) = (Arc::new(Gate::default()), Arc::default());
    let patient = Gated { bytes: 9 << 20, is_urgent: false, gate: Some(Arc::clone(&gate)), order: Arc::clone(&order) };
    let urgent = Gated { bytes: 3 << 20, is_urgent: true, gate: None, order: Arc::clone(&order) };
    let leaves: Vec<(Leaf, Arc<dyn Provider>)> =
        vec![(tensor("a", patient.bytes), Arc::new(patient)), (tensor("b", urgent.bytes), Arc::new(urgent))];
    let dir = tempfile::tempdir().unwrap();
    let pending = save(&Engine::solo(), destination(dir.path().to_str().unwrap()), state(leaves, false), LONG);
    pending.captured(Some(LONG)).unwrap();
    assert_eq!(pending.staged(Some(SHORT)).unwrap_err().kind, Kind::Unavailable);
    assert!(order.lock().unwrap().iter().all(|&is_urgent| is_urgent), "something else went first");
    gate.open();
    pending.committed(None).unwrap();
    let order = order.lock().unwrap();
    let urgent = order.iter().filter(|is_urgent| **is_urgent).count();
    assert!(urgent >= 3 && order[..urgent].iter().all(|is_urgent| *is_urgent), "{order:?}");
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
    let value = (leaf("v", LeafBody::Object { per_rank: false }), Arc::new(Late(Arc::clone(&gate))) as _);
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().to_str().unwrap();
    let pending = save(&Engine::solo(), destination(url), state(vec![tensor, value], false), LONG);
    pending.staged(None).unwrap();
    assert!(!pending.done());
    gate.open();
    pending.committed(None).unwrap();
    let files = checkpoint::open(&Engine::solo(), url, LONG).unwrap().manifest().files().len();
    assert_eq!(files, 2, "the value has a file of its own");
}

#[test]
fn a_save_commits_only_when_it_is_vouched_for() {
    let job = Job::new(Layout::replicas(2));
    let dir = tempfile::tempdir().unwrap();
    let begin = |step: u32, deadline: Duration| {
        let url = dir.path().join(step.to_string());
        let leaves = || vec![(tensor("t", 100), Arc::new(vec![step as u8; 100]) as Arc<dyn Provider>)];
        let begin = |engine| save(engine, destination(url.to_str().unwrap()), state(leaves(), true), deadline);
        (job.engines.iter().map(begin).collect::<Vec<_>>(), url)
    };
    // Not before, and then at once.
    let (pendings, _) = begin(1, LONG);
    pendings[0].vouch(Ok(()));
    assert_eq!(pendings[0].committed(Some(SHORT)).unwrap_err().kind, Kind::Unavailable);
    pendings[1].vouch(Ok(()));
    assert_eq!(alike(outcomes(pendings)), Ok(vec![(), ()]));

    // One that saw a change fails it for all, and nothing stays. The first word counts.
    let (pendings, url) = begin(2, LONG);
    pendings[0].vouch(Ok(()));
    pendings[1].vouch(Err(Error::new(Kind::Invalid, "model/t was written while it was being captured")));
    pendings[1].vouch(Ok(()));
    let error = alike(outcomes(pendings)).unwrap_err();
    assert_eq!(
        error,
        Error::new(
            Kind::Invalid,
            "rank 1: model/t was written while it was being captured (its part was staged, not yet durable)"
        )
    );
    assert_eq!(files_below(&url), 0);

    // Nobody says anything.
    let (pendings, url) = begin(3, SHORT * 3);
    pendings[0].vouch(Ok(()));
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
}

#[test]
fn a_save_that_was_never_staged_waits_for_nobodys_word() {
    let dir = tempfile::tempdir().unwrap();
    let leaves = vec![(tensor("t", 100), Arc::new(Gone) as Arc<dyn Provider>)];
    let pending = save(&Engine::solo(), destination(dir.path().to_str().unwrap()), state(leaves, true), LONG);
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
            // SAFETY: the engine gives `out` to nobody before it has waited for the fence.
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
    save(&engine, destination(&url(1)), state(leaves(), false), LONG).committed(None).unwrap();
    assert_eq!(device.waits.load(Ordering::SeqCst), 1, "twenty small tensors share a slot and a fence");
    let opened = checkpoint::open(&engine, &url(1), LONG).unwrap();
    let path = opened.manifest().files()[0].path.clone();
    let file = std::fs::read(dir.path().join("1").join(path)).unwrap();
    assert!(file.ends_with(&contents.concat()), "bytes were used before they had arrived");

    device.is_lost.store(true, Ordering::SeqCst);
    let error = save(&engine, destination(&url(2)), state(leaves(), false), LONG).committed(None).unwrap_err();
    assert_eq!(error, Error::new(Kind::Unavailable, "the device is lost (its part was captured, not yet staged)"));
}

/// A tensor that its owner writes as soon as it may.
struct Scribbled {
    bytes: Mutex<Vec<u8>>,
    is_urgent: bool,
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

    fn is_urgent(&self) -> bool {
        self.is_urgent
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
            let one = Arc::new(Scribbled { bytes: bytes.into(), is_urgent: dice.once_in(3) });
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
        tensors.iter().filter(|tensor| tensor.is_urgent).for_each(|tensor| tensor.scribble());
        told.staged(None).unwrap();
        tensors.iter().for_each(|tensor| tensor.scribble());
    });
    (pending, writer)
}

/// Nobody knows who holds what, and one rank comes only when all others are staged: nothing of their planning stands in
/// the way of their training.
#[test]
fn a_first_save_is_captured_and_staged_before_a_late_rank_has_come() {
    let place = crate::reshard::scratch();
    for (name, layout) in [("rows", Layout::rows(3)), ("replicas", Layout::replicas(3))] {
        let url = place.path().join(name).to_str().unwrap().to_owned();
        let (truth, mut dice) = (Truth::small(1, 7), Dice(5));
        let job = Job::new(layout.ignorant());
        let early: Vec<_> = (0..2).map(|rank| save_scribbled(&job, rank, &url, &truth, &mut dice)).collect();
        for (pending, _) in &early {
            pending.captured(Some(LONG)).unwrap();
            pending.staged(Some(LONG)).unwrap();
            let phases = pending.report().phases_ms;
            assert!(phases.contains_key("staged") && !phases.contains_key("planned"), "{phases:?}");
        }
        let late = save_scribbled(&job, 2, &url, &truth, &mut dice);
        let (pendings, writers): (Vec<_>, Vec<_>) = early.into_iter().chain([late]).unzip();
        alike(outcomes(pendings)).unwrap();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let loading = Job::new(Layout::rows(2));
        assert_eq!(loading.compare(|engine| checkpoint::open(engine, &url, LONG), &truth, &mut dice), Ok(None));
    }
}

/// States of all kinds, some larger than what may be copied ahead, one or two saves in flight, one rank late.
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

#[test]
fn what_a_device_copies_ahead_has_arrived_when_it_is_staged() {
    let device = Arc::new(Device::default());
    let fence: Arc<dyn Fence> = Arc::clone(&device) as _;
    let contents: Vec<u8> = (0..(3u32 << 19)).map(|i| (i % 251) as u8).collect();
    let remote = Remote { device: Arc::clone(&device), fence, contents: contents.clone() };
    let leaves: Vec<(Leaf, Arc<dyn Provider>)> = vec![(tensor("t", contents.len() as u64), Arc::new(remote))];
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().to_str().unwrap();
    let job = Job::new(Layout::replicas(2));
    let early = save(&job.engines[0], destination(url), state(leaves, false), LONG);
    early.staged(Some(LONG)).unwrap();
    assert_eq!(device.under_way.load(Ordering::SeqCst), 0, "staged, and still under way");
    let late = save(&job.engines[1], destination(url), state(Vec::new(), false), LONG);
    alike(outcomes(vec![early, late])).unwrap();
    let path = checkpoint::open(&Engine::solo(), url, LONG).unwrap().manifest().files()[0].path.clone();
    assert!(std::fs::read(dir.path().join(path)).unwrap().ends_with(&contents));
}

/// Notes how the threads that copy it are scheduled: their policy and their nice value.
struct Scheduled {
    is_urgent: bool,
    seen: Arc<Mutex<Vec<(u32, i32)>>>,
}

impl Provider for Scheduled {
    fn bytes(&self) -> u64 {
        1 << 20
    }

    fn fill(&self, _at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // Behind the name, which may hold anything, the third field of proc_pid_stat(5) is the first.
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        self.seen.lock().unwrap().push((fields[41 - 3].parse().unwrap(), fields[19 - 3].parse().unwrap()));
        out.fill(7);
        Ok(())
    }

    fn is_urgent(&self) -> bool {
        self.is_urgent
    }
}

#[test]
fn what_saves_in_the_background_gives_way_to_the_program() {
    const SCHED_BATCH: u32 = 3;
    let engine = Engine::solo();
    let gives_way = (true, false, false);
    for how in [gives_way, (true, true, false), (false, false, false), (true, false, true), gives_way] {
        let (is_vouched_for, is_waited_for, is_urgent) = how;
        let (dir, seen) = (tempfile::tempdir().unwrap(), Arc::default());
        let provider = Scheduled { is_urgent, seen: Arc::clone(&seen) };
        let leaves: Vec<(Leaf, Arc<dyn Provider>)> = vec![(tensor("a", 1 << 20), Arc::new(provider))];
        let state = State { is_waited_for, ..state(leaves, is_vouched_for) };
        let pending = save(&engine, destination(dir.path().to_str().unwrap()), state, LONG);
        pending.vouch(Ok(()));
        pending.committed(Some(LONG)).unwrap();
        let expected = match how {
            (true, false, false) => (SCHED_BATCH, 3),
            (true, false, true) => (0, 3), // the caller waits for it
            _ => (0, 0),
        };
        let seen = seen.lock().unwrap();
        assert!(!seen.is_empty() && seen.iter().all(|one| *one == expected), "{expected:?}, {seen:?}");
    }
}
