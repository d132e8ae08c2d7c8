//! Saves and loads of several ranks, as they are recorded beside the checkpoints of a run.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use shardfast_engine::listen::{Begun, Listener, Listening};
use shardfast_engine::{Destination, Engine, Kind, Prove, State, Timeout, open, save};
use shardfast_format::Catalog;
use shardfast_telemetry::report::RunReport;
use shardfast_telemetry::{Change, Rules, Telemetry, Watcher, csv, report, trace};
use shardfast_transfer::report::Report;

const DEADLINE: Duration = Duration::from_secs(60);

fn engines(world: u32, listening: u32) -> Vec<Arc<Engine>> {
    let engine = |(rank, coord)| {
        let engine = Engine::new(coord, shardfast_engine::staging::STAGING_BYTES_MIN).unwrap();
        if rank < listening {
            engine.listen(Arc::new(Telemetry::new(u16::try_from(rank).ok(), None)));
        }
        engine
    };
    (0..).zip(shardfast_coord::local(world)).map(engine).collect()
}

fn save_step(engines: &[Arc<Engine>], run: &Path, step: u64) -> Vec<Result<(), Kind>> {
    let begin = |engine: &Arc<Engine>| {
        let state =
            State { catalog: Arc::new(Catalog { leaves: Vec::new() }), providers: Vec::new(), ..State::default() };
        let url = run.join(format!("step-{step:08}")).to_str().unwrap().to_owned();
        let (user, prove) = (BTreeMap::new(), Prove::default());
        save(engine, Destination { url, step: Some(step), user, prove, blocking: true }, state, DEADLINE)
    };
    let saves: Vec<_> = engines.iter().map(begin).collect();
    let outcomes = saves.iter().map(|save| save.committed(None).map_err(|error| error.kind)).collect();
    saves.iter().for_each(|save| save.over(DEADLINE));
    outcomes
}

fn read(run: &Path) -> RunReport {
    report(run.to_str().unwrap(), None, None, &|_| (), None, &Timeout::default()).unwrap().0
}

#[test]
fn each_save_and_load_of_a_run_is_recorded_with_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let engines = engines(3, 3);
    for step in [1, 2] {
        assert_eq!(save_step(&engines, dir.path(), step), [Ok(()); 3]);
    }
    assert_eq!(save_step(&engines, dir.path(), 2), [Err(Kind::Conflict); 3]);
    let url = dir.path().join("step-00000002").to_str().unwrap().to_owned();
    std::thread::scope(|threads| {
        for engine in &engines {
            threads.spawn(|| {
                let checkpoint = open(engine, &url, DEADLINE).unwrap();
                checkpoint.load(&[], &[], DEADLINE).unwrap();
                checkpoint.done(DEADLINE).unwrap();
            });
        }
    });
    // The record of a load is stored by a thread that nobody waits for.
    let until = std::time::Instant::now() + DEADLINE;
    while read(dir.path()).loads.is_empty() && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let report = read(dir.path());
    let outcomes: Vec<_> = report.saves.iter().map(|save| (save.step, save.outcome, save.world)).collect();
    let three = Some(3);
    assert_eq!(outcomes, [(1, "committed", three), (2, "committed", three), (2, "failed", three)]);
    assert_eq!(report.loads.iter().map(|load| (load.step, load.outcome)).collect::<Vec<_>>(), [(2, "loaded")]);
    for (operation, words) in [
        (&report.saves[0], ["plan", "copy", "write", "values", "commit", "agree"].as_slice()),
        (&report.loads[0], &["open", "plan", "agree", "read", "finish"]),
    ] {
        for word in words {
            let times = &operation.phases[word];
            assert!(times.len() == 3 && times.iter().all(Option::is_some), "{word}: {times:?}");
        }
        assert!(operation.not_reporting.is_empty() && operation.ended_ms.unwrap() > 0.0, "{operation:?}");
    }
    let failed = &report.saves[2].verdicts[0];
    assert_eq!((failed.subject.as_str(), failed.cause), ("all ranks", "failed"));
    assert!(failed.text.contains("committed there already"), "{failed:?}");
    assert!(report.saves[0].operations["small_writes"].count > 0, "{:?}", report.saves[0].operations);
    assert!(report.unreadable.is_empty(), "{report:?}");
    // Of a small job the events of all ranks are kept.
    for operation in [&report.saves[0], &report.saves[2], &report.loads[0]] {
        let kept: Vec<_> = operation.events.iter().map(|of| (of.rank, of.left_out)).collect();
        assert_eq!(kept, [(0, 0), (1, 0), (2, 0)], "{operation:?}");
        assert!(operation.events[0].count > 0, "{operation:?}");
    }
}

#[test]
fn of_a_larger_job_events_of_a_few_ranks_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(save_step(&engines(10, 10), dir.path(), 1), [Ok(()); 10]);
    let save = &read(dir.path()).saves[0];
    let ranks: Vec<u32> = save.events.iter().map(|of| of.rank).collect();
    // A busy machine may make ranks slow.
    let is_expected = if save.verdicts.is_empty() { ranks == [0] } else { ranks[0] == 0 && ranks.len() < 10 };
    assert!(is_expected && save.not_reporting.is_empty(), "{save:?}");
}

/// A listener to a rank that ends when it is chosen: it never tells.
struct Ending(Arc<dyn Listening>);

impl shardfast_store::Observer for Ending {
    fn stored(&self, event: &shardfast_store::Event<'_>) {
        self.0.stored(event);
    }
}

impl shardfast_transfer::events::Observer for Ending {
    fn noted(&self, event: &shardfast_transfer::events::Event<'_>) {
        self.0.noted(event);
    }
}

impl Listening for Ending {
    fn says(&self, report: &Report) -> Option<Vec<u8>> {
        self.0.says(report)
    }

    fn chooses(&self, said: &[Vec<u8>]) -> Vec<u32> {
        self.0.chooses(said)
    }

    fn tells(&self) -> Vec<u8> {
        panic!("the process ends");
    }

    fn collected(&self, said: Vec<Option<Vec<u8>>>, missing: Vec<u32>, told: Vec<(u32, Vec<u8>)>, report: &Report) {
        self.0.collected(said, missing, told, report);
    }
}

struct EndsIfChosen(Telemetry);

impl Listener for EndsIfChosen {
    fn begins(&self, begun: &Begun<'_>) -> Arc<dyn Listening> {
        Arc::new(Ending(self.0.begins(begun)))
    }
}

#[test]
fn a_rank_that_ends_before_it_tells_its_events_leaves_the_record_of_all() {
    let dir = tempfile::tempdir().unwrap();
    let engines: Vec<_> = (0..)
        .zip(shardfast_coord::local(2))
        .map(|(rank, coord)| {
            let engine = Engine::new(coord, shardfast_engine::staging::STAGING_BYTES_MIN).unwrap();
            let telemetry = Telemetry::new(Some(rank), None);
            let listener: Arc<dyn Listener> =
                if rank == 1 { Arc::new(EndsIfChosen(telemetry)) } else { Arc::new(telemetry) };
            engine.listen(listener);
            engine
        })
        .collect();
    assert_eq!(save_step(&engines, dir.path(), 1), [Ok(()); 2]);
    let save = &read(dir.path()).saves[0];
    assert_eq!((save.outcome, save.not_reporting.len()), ("committed", 0));
    assert_eq!(save.events.iter().map(|of| of.rank).collect::<Vec<_>>(), [0], "its own events rank 0 has");
}

#[test]
fn a_trace_and_a_table_are_made_of_what_was_recorded() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(save_step(&engines(2, 2), dir.path(), 1), [Ok(()); 2]);
    let (place, out) = (dir.path().to_str().unwrap(), dir.path().join("trace.json"));
    let timeout = Timeout::default();
    let nowhere = dir.path().join("empty");
    std::fs::create_dir(&nowhere).unwrap();
    assert_eq!(trace(nowhere.to_str().unwrap(), None, &out, &timeout).unwrap_err().kind, Kind::NotFound);
    assert!(!out.exists(), "nothing is written of a run that is not there");
    let (_, bytes) = trace(place, None, &out, &timeout).unwrap();
    let text = std::fs::read_to_string(&out).unwrap();
    assert_eq!(bytes, text.len() as u64);
    for part in ["\"save of step 1\"", "\"storage\"", "\"phases\"", "\"publish\"", "\"process_name\""] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(trace(place, None, &out, &timeout).unwrap_err().kind, Kind::Conflict);
    let table = csv(place, Some(1), &timeout).unwrap();
    assert!(table.starts_with("operation,step,outcome,") && table.contains("\nsave,1,committed,"), "{table}");
    assert_eq!(csv(place, Some(2), &timeout).unwrap_err().kind, Kind::NotFound);
}

#[test]
fn a_rank_that_says_nothing_is_named_and_the_save_stands() {
    let dir = tempfile::tempdir().unwrap();
    let mut engines = engines(3, 2);
    let url = dir.path().join("step-00000001").to_str().unwrap().to_owned();
    let begin = |engine: &Arc<Engine>| {
        let state =
            State { catalog: Arc::new(Catalog { leaves: Vec::new() }), providers: Vec::new(), ..State::default() };
        let (user, prove) = (BTreeMap::new(), Prove::default());
        save(engine, Destination { url: url.clone(), step: Some(1), user, prove, blocking: true }, state, DEADLINE)
    };
    let saves: Vec<_> = engines.iter().map(begin).collect();
    assert!(saves.iter().all(|save| save.committed(None).is_ok()));
    saves[2].over(DEADLINE);
    drop(engines.pop());
    saves.iter().for_each(|save| save.over(DEADLINE));
    let save = &read(dir.path()).saves[0];
    // Rank 1 is left out, too, if it comes after rank 2 has gone.
    let not_reporting: &[usize] = &save.not_reporting;
    assert!(save.outcome == "committed" && matches!(not_reporting, [2] | [1, 2]), "{not_reporting:?}");
    let missing = save.verdicts.iter().find(|verdict| verdict.cause == "missing").unwrap();
    assert_eq!(missing.subject, "rank 2");
}

#[test]
fn a_save_that_fails_since_a_rank_is_gone_is_recorded_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut engines = engines(2, 2);
    assert_eq!(save_step(&engines, dir.path(), 1), [Ok(()); 2]);
    drop(engines.pop());
    std::fs::create_dir_all(dir.path().join("step-00000002/model")).unwrap();
    assert_eq!(save_step(&engines, dir.path(), 2), [Err(Kind::Unavailable)]);
    let report = read(dir.path());
    let outcomes: Vec<_> = report.saves.iter().map(|save| (save.step, save.outcome)).collect();
    assert_eq!(outcomes, [(1, "committed"), (2, "failed")]);
    let failed = &report.saves[1];
    assert_eq!((failed.world, &failed.not_reporting), (Some(2), &vec![1]));
    assert!(failed.verdicts[0].text.contains("rank 1 is lost"), "{:?}", failed.verdicts);
    assert!(failed.verdicts.iter().any(|verdict| (&*verdict.subject, verdict.cause) == ("rank 1", "missing")));
}

#[test]
fn records_that_are_too_large_or_not_those_of_their_names_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(save_step(&engines(2, 2), dir.path(), 1), [Ok(()); 2]);
    let records = dir.path().join(".telemetry");
    let good = std::fs::read_dir(&records).unwrap().next().unwrap().unwrap().path();
    std::fs::copy(&good, records.join("1700000000000-save-00000105.safetensors")).unwrap();
    let large = std::fs::File::create(records.join("1700000000001-save-00000106.safetensors")).unwrap();
    large.set_len(70 << 20).unwrap();
    let report = read(dir.path());
    assert_eq!(report.saves.iter().map(|save| save.step).collect::<Vec<_>>(), [1]);
    assert!(report.unreadable.len() == 2 && report.unreadable[0].contains("expected the record of that name"));
    let (url, timeout) = (dir.path().to_str().unwrap(), Timeout::default());
    let mut watcher = Watcher::new(url, Rules { room: 0.0, ..Rules::default() }, &timeout).unwrap();
    assert!(watcher.look(&timeout).unwrap().is_empty());
}

#[test]
fn a_run_without_records_or_with_damaged_ones_is_reported_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_str().unwrap();
    let error = report(place, None, None, &|_| (), None, &Timeout::default()).unwrap_err();
    assert_eq!(error.kind, Kind::NotFound, "{error}");
    assert_eq!(save_step(&engines(2, 0), dir.path(), 1), [Ok(()); 2]);
    std::fs::create_dir_all(dir.path().join("step-00000002/model")).unwrap();
    let unrecorded = read(dir.path());
    let outcomes: Vec<_> = unrecorded.saves.iter().map(|save| (save.step, save.outcome, save.world)).collect();
    assert_eq!(outcomes, [(1, "committed", None), (2, "incomplete", None)]);

    assert_eq!(save_step(&engines(2, 2), dir.path(), 3), [Ok(()); 2]);
    let records = dir.path().join(".telemetry");
    let good = std::fs::read_dir(&records).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&good).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    std::fs::write(records.join("0000000000001-save-00000003.safetensors"), &bytes).unwrap();
    std::fs::write(records.join("notes.txt"), "mine").unwrap();
    let report = report(place, Some(3), None, &|_| (), None, &Timeout::default()).unwrap().0;
    assert_eq!(report.saves.iter().map(|save| (save.step, save.outcome)).collect::<Vec<_>>(), [(3, "committed")]);
    assert!(report.unreadable.len() == 1 && report.unreadable[0].contains("0000000000001-save"), "{report:?}");
}

#[test]
fn a_page_is_written_once_and_names_cannot_end_its_script() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("a<script>&b");
    std::fs::create_dir(&run).unwrap();
    assert_eq!(save_step(&engines(2, 2), &run, 1), [Ok(()); 2]);
    let (place, out) = (run.to_str().unwrap(), dir.path().join("page.html"));
    let (_, bytes) = report(place, None, None, &|_| (), Some(&out), &Timeout::default()).unwrap();
    let page = std::fs::read_to_string(&out).unwrap();
    assert_eq!(bytes, Some(page.len()));
    assert!(page.contains("a\\u003cscript>&b") && !page.contains("a<script>&b"));
    assert_eq!(page.matches("</script>").count(), 2);
    assert!(!page.contains("http://") && !page.contains("https://"), "the page asks the network for something");
    let error = report(place, None, None, &|_| (), Some(&out), &Timeout::default()).unwrap_err();
    assert!(error.kind == Kind::Conflict && error.message.contains("is there already"), "{error}");
    let nowhere = dir.path().join("no/page.html");
    assert_eq!(
        report(place, None, None, &|_| (), Some(&nowhere), &Timeout::default()).unwrap_err().kind,
        Kind::Invalid
    );
    assert_eq!(std::fs::read_to_string(&out).unwrap(), page);
}

/// A listener that counts events, and those who listen for it.
#[derive(Default)]
struct Counting {
    events: Arc<AtomicUsize>,
    listening: Mutex<Vec<Weak<Counted>>>,
}

struct Counted(Arc<AtomicUsize>);

impl Listener for Counting {
    fn begins(&self, _: &Begun<'_>) -> Arc<dyn Listening> {
        let counted = Arc::new(Counted(Arc::clone(&self.events)));
        self.listening.lock().unwrap().push(Arc::downgrade(&counted));
        counted
    }
}

impl shardfast_store::Observer for Counted {
    fn stored(&self, _: &shardfast_store::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl shardfast_transfer::events::Observer for Counted {
    fn noted(&self, _: &shardfast_transfer::events::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Listening for Counted {
    fn says(&self, _: &Report) -> Option<Vec<u8>> {
        None
    }

    fn chooses(&self, _: &[Vec<u8>]) -> Vec<u32> {
        panic!("nothing was said");
    }

    fn tells(&self) -> Vec<u8> {
        panic!("nobody was chosen");
    }

    fn collected(&self, _: Vec<Option<Vec<u8>>>, _: Vec<u32>, _: Vec<(u32, Vec<u8>)>, _: &Report) {
        panic!("nothing was said");
    }
}

#[test]
fn who_keeps_a_save_that_has_ended_keeps_no_events() {
    let dir = tempfile::tempdir().unwrap();
    let (counting, engine) = (Arc::new(Counting::default()), engines(1, 0).remove(0));
    engine.listen(Arc::clone(&counting) as Arc<dyn Listener>);
    let url = dir.path().join("step-00000001").to_str().unwrap().to_owned();
    let state = State { catalog: Arc::new(Catalog { leaves: Vec::new() }), providers: Vec::new(), ..State::default() };
    let destination =
        Destination { url, step: Some(1), user: BTreeMap::new(), prove: Prove::default(), blocking: true };
    let pending = save(&engine, destination, state, DEADLINE);
    pending.committed(None).unwrap();
    pending.over(DEADLINE);
    assert!(counting.events.load(Ordering::Relaxed) > 8, "events of phases and of the store");
    assert!(counting.listening.lock().unwrap().iter().all(|one| one.upgrade().is_none()));
    assert!(pending.report().phases_ms.contains_key("committed"));
}

fn said(changes: &[Change]) -> Vec<(&str, &str, &str)> {
    changes.iter().map(|change| (change.state, change.alert.rule, &*change.alert.subject)).collect()
}

/// Copies a directory of files and directories.
fn copied(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => copied(&entry.path(), &to.join(entry.file_name())),
            false => _ = std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap(),
        }
    }
}

#[test]
fn a_watch_says_what_begins_and_what_is_over_and_reads_each_record_once() {
    let dir = tempfile::tempdir().unwrap();
    let (run, engines, timeout) = (dir.path().join("run"), engines(2, 2), Timeout::default());
    let url = run.to_str().unwrap();
    // A disk that is nearly full is no matter of this test.
    let mut watcher = Watcher::new(url, Rules { room: 0.0, ..Rules::default() }, &timeout).unwrap();
    let missing = watcher.look(&timeout).unwrap_err();
    assert_eq!((missing.kind, missing.message.contains("expected a run")), (Kind::NotFound, true), "{missing}");

    (1..=7).for_each(|step| assert_eq!(save_step(&engines, &run, step), [Ok(()); 2]));
    assert_eq!(said(&watcher.look(&timeout).unwrap()), []);
    assert_eq!(save_step(&engines, &run, 7), [Err(Kind::Conflict); 2]);
    let failed = watcher.look(&timeout).unwrap();
    assert_eq!(said(&failed), [("firing", "failed", "run")]);
    assert_eq!(failed[0].alert.step, Some(7));
    assert!(failed[0].alert.text.starts_with("the save failed on all ranks: it failed: "), "{}", failed[0].alert.text);
    assert_eq!(said(&watcher.look(&timeout).unwrap()), [], "said once");
    // Another watch finds what fires now, and says nothing of what is over.
    let other = Watcher::new(url, Rules { room: 0.0, ..Rules::default() }, &timeout).unwrap().look(&timeout).unwrap();
    assert_eq!(said(&other), [("firing", "failed", "run")]);
    assert_eq!(save_step(&engines, &run, 8), [Ok(()); 2]);
    assert_eq!(said(&watcher.look(&timeout).unwrap()), [("resolved", "failed", "run")]);

    // Records that were read are not read again.
    let records = || std::fs::read_dir(run.join(".telemetry")).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(records().count(), 9);
    let of_failed =
        records().filter(|path| path.to_str().unwrap().ends_with("-save-00000007.safetensors")).max().unwrap();
    let failed = std::fs::read(of_failed).unwrap();
    records().for_each(|record| std::fs::write(record, &failed).unwrap());
    assert_eq!(said(&watcher.look(&timeout).unwrap()), []);
    // Records that a sweep removed are no matter, nor are damaged ones.
    records().for_each(|record| std::fs::remove_file(record).unwrap());
    std::fs::write(run.join(".telemetry/1700000000000-save-00000009.safetensors"), "damaged").unwrap();
    assert_eq!(said(&watcher.look(&timeout).unwrap()), []);

    // A commit without a record counts.
    assert_eq!(save_step(&engines, &run, 8), [Err(Kind::Conflict); 2]);
    assert_eq!(said(&watcher.look(&timeout).unwrap()), [("firing", "failed", "run")]);
    copied(&run.join("step-00000008"), &run.join("step-00000010"));
    assert_eq!(said(&watcher.look(&timeout).unwrap()), [("resolved", "failed", "run")]);
}

#[test]
fn a_watch_tells_a_save_under_way_from_one_that_was_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let (engines, timeout) = (engines(1, 1), Timeout::default());
    let url = dir.path().to_str().unwrap();
    (1..=3).for_each(|step| assert_eq!(save_step(&engines, dir.path(), step), [Ok(())]));
    let mut watcher = Watcher::new(url, Rules { room: 0.0, ..Rules::default() }, &timeout).unwrap();
    let model = dir.path().join("step-00000004/model");
    std::fs::create_dir_all(&model).unwrap();
    assert_eq!(said(&watcher.look(&timeout).unwrap()), []);
    std::fs::remove_dir_all(dir.path().join("step-00000004")).unwrap();
    assert_eq!(said(&watcher.look(&timeout).unwrap()), []);
    std::fs::create_dir_all(&model).unwrap();
    let hours = std::time::SystemTime::now() - Duration::from_secs(2 * 3600);
    std::fs::File::open(&model).unwrap().set_modified(hours).unwrap();
    let found = watcher.look(&timeout).unwrap();
    assert_eq!(said(&found), [("firing", "cut_off", "step 4")]);
    assert_eq!(found[0].alert.text, "the save began 2.0 h ago and was not committed");
    assert_eq!(save_step(&engines, dir.path(), 5), [Ok(())]);
    assert_eq!(said(&watcher.look(&timeout).unwrap()), [("resolved", "cut_off", "step 4")]);
}

#[test]
fn a_watch_knows_the_room_that_the_storage_has() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(save_step(&engines(1, 1), dir.path(), 1), [Ok(())]);
    let (url, timeout) = (dir.path().to_str().unwrap(), Timeout::default());
    let look = |room| Watcher::new(url, Rules { room, ..Rules::default() }, &timeout).unwrap().look(&timeout).unwrap();
    assert_eq!(said(&look(1e15)), [("firing", "room", "run")]);
    assert_eq!(said(&look(1e-9)), []);
    let refused = Watcher::new(url, Rules { rate: 2.0, ..Rules::default() }, &timeout).err().unwrap();
    assert_eq!((refused.kind, refused.message.contains("--rate 2")), (Kind::Invalid, true), "{refused}");
}

#[test]
fn a_report_of_one_step_counts_in_a_row_as_that_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let engines = engines(2, 2);
    for outcome in [Ok(()), Err(Kind::Conflict)] {
        for step in 1..4 {
            assert_eq!(save_step(&engines, dir.path(), step), [outcome; 2]);
        }
    }
    let in_a_row = |step| {
        let report = report(dir.path().to_str().unwrap(), step, None, &|_| (), None, &Timeout::default()).unwrap().0;
        assert!(report.saves.iter().all(|save| step.is_none_or(|step| save.step == step)));
        let failed = report.saves.into_iter().rev().find(|save| save.step == 3 && !save.verdicts.is_empty()).unwrap();
        failed.verdicts.iter().find(|verdict| verdict.cause == "failed").unwrap().in_a_row
    };
    assert_eq!((in_a_row(None), in_a_row(Some(3))), (3, 3));
}
