//! Tests the built binary: its output, as text and as JSON, and its exit codes.

#[allow(dead_code)] // shared with the tests of the tools
#[path = "../../../tools/tests/whole/checkpoints.rs"]
mod checkpoints;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use checkpoints::*;
use serde_json::Value as Json;
use shardfast_format::{DType, manifest_name};

fn shardfast(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardfast")).args(args).output().unwrap()
}

/// Returns the output of the command, and checks that it ends with that code.
fn text(args: &[&str], code: i32) -> String {
    let Output { status, stdout, stderr } = shardfast(args);
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(status.code(), Some(code), "{args:?}\n{stdout}\n{stderr}");
    assert_eq!(stderr, "", "{args:?}");
    stdout
}

/// Returns the error line of the command, and checks that it fails with that code.
fn error(args: &[&str], code: i32) -> String {
    for args in [args.to_vec(), [args, &["--json"]].concat()] {
        let Output { status, stdout, stderr } = shardfast(&args);
        assert_eq!(status.code(), Some(code), "{args:?}: {}", String::from_utf8_lossy(&stderr));
        assert!(stdout.is_empty(), "{args:?}");
    }
    String::from_utf8(shardfast(args).stderr).unwrap()
}

/// Returns the object that the command prints, and checks that every field is documented.
fn json(args: &[&str], code: i32) -> Json {
    let object: Json = serde_json::from_str(&text(&[args, &["--json"]].concat(), code)).unwrap();
    let readme = include_str!("../../README.md");
    let mut fields = BTreeSet::new();
    collect_fields(&object, &mut fields);
    for field in fields {
        assert!(readme.contains(&format!("`{field}`")), "README.md does not tell of {field}");
    }
    object
}

fn collect_fields(json: &Json, fields: &mut BTreeSet<String>) {
    match json {
        Json::Object(object) => {
            for (name, value) in object {
                // The names in these two are the user's.
                if name != "user" && name != "tied" {
                    collect_fields(value, fields);
                }
                if !["start", "end"].contains(&name.as_str()) {
                    fields.insert(name.clone());
                }
            }
        }
        Json::Array(items) => items.iter().for_each(|item| collect_fields(item, fields)),
        _ => {}
    }
}

/// A run of two committed steps and one that is not.
struct Run {
    dir: tempfile::TempDir,
}

impl Run {
    fn new() -> Run {
        let run = Run { dir: tempfile::tempdir().unwrap() };
        save_ranks(&run.step(10), Some(10), two_ranks());
        save_ranks(&run.step(20), Some(20), two_ranks_of(5));
        std::fs::create_dir_all(run.dir.path().join("step-00000030/model")).unwrap();
        run
    }

    fn url(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    fn step(&self, step: u64) -> String {
        format!("{}/step-{step:08}", self.url())
    }

    fn new_dir(&self, name: &str) -> String {
        format!("{}/{name}", self.url())
    }
}

fn flip(path: &Path, byte: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[byte] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn ls_tells_the_steps_of_a_run() {
    let run = Run::new();
    std::fs::create_dir_all(run.dir.path().join("step-00000040")).unwrap();
    std::fs::write(run.dir.path().join("step-00000040/COMMIT"), "rubbish\x1b[31m").unwrap();
    let said = text(&["ls", run.url()], 0);
    let words: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(said.starts_with(&format!("run {}: 4 steps, 2 committed\n", run.url())), "{said}");
    assert_eq!(words[1], ["STEP", "STATUS", "AGE", "SIZE", "WORLD", "LEAVES", "FILES"]);
    assert_eq!((words[2][..2].to_vec(), words[2][6..].to_vec()), (vec!["10", "committed"], vec!["2", "9", "6"]));
    assert_eq!(words[4], ["30", "incomplete"]);
    assert_eq!(words[5], ["40", "unreadable"]);
    assert!(words[6..].concat().concat().contains("step-00000040") && !said.contains('\x1b'), "{said}");

    let object = json(&["ls", run.url()], 0);
    let statuses: Vec<&str> =
        object["checkpoints"].as_array().unwrap().iter().map(|line| line["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["committed", "committed", "incomplete", "unreadable"]);
    assert_eq!((&object["is_run"], &object["checkpoints"][1]["step"]), (&Json::Bool(true), &Json::from(20)));
    assert_eq!(object["checkpoints"][0]["holds"]["world"], 2);

    let one = json(&["ls", &run.step(10)], 0);
    assert_eq!((&one["is_run"], &one["checkpoints"][0]["step"]), (&Json::Bool(false), &Json::from(10)));
}

#[test]
fn inspect_shows_leaves_and_says_which_checkpoint_is_meant() {
    let run = Run::new();
    let said = text(&["inspect", run.url()], 0);
    assert!(said.contains(&format!("newest committed checkpoint is {}\n", run.step(20))), "{said}");
    assert!(said.contains("passed over, not committed: step 30"), "{said}");
    let line = said.lines().find(|line| line.trim_start().starts_with("embed")).unwrap();
    assert_eq!(
        line.split_whitespace().collect::<Vec<_>>().join(" "),
        "embed F32 [1000, 70] 273.4 KiB 2 regions in 2 files 1 parts"
    );
    assert!(said.contains("note = a test") && said.contains("step 20, 2 ranks"), "{said}");
    assert!(!said.contains("0.9"), "{said}");

    let values = text(&["inspect", &run.step(10), "--values", "--leaf", "extra/*"], 0);
    assert!(values.contains(r#"= {"lr": 0.001, "betas": [0.9, 0.95]}"#), "{values}");
    assert!(values.contains("rank 1: b\"") && !values.contains("embed") && !values.contains("is a run"), "{values}");

    let none = text(&["inspect", run.url(), "--leaf", "zzz*"], 0);
    assert!(none.ends_with("\nno leaf matches zzz*\n") && !values.contains("no leaf"), "{none}");

    let object = json(&["inspect", run.url(), "--values"], 0);
    assert_eq!((&object["step"], &object["passed_over"]), (&Json::from(20), &Json::from(vec![30])));
    let leaves = object["leaves"].as_array().unwrap();
    assert_eq!(leaves.len(), 9);
    let tied = leaves.iter().find(|leaf| leaf["leaf"] == "model/tied").unwrap();
    assert_eq!((&tied["kind"], &tied["of"]), (&Json::from("alias"), &Json::from("model/embed")));
    let embed = leaves.iter().find(|leaf| leaf["leaf"] == "model/embed").unwrap();
    assert_eq!((&embed["kind"], &embed["shape"]), (&Json::from("tensor"), &Json::from(vec![1000, 70])));
}

#[test]
fn verify_names_what_is_damaged() {
    let run = Run::new();
    let said = text(&["verify", run.url()], 0);
    assert!(said.contains("step-00000020: sound: 9 leaves, 6 files, ") && said.ends_with(", 3 values\n"), "{said}");
    let object = json(&["verify", run.url(), "--all"], 0);
    assert_eq!((&object["sound"], object["checkpoints"].as_array().unwrap().len()), (&Json::Bool(true), 2));

    let checkpoint = opened(&run.step(10));
    let file = checkpoint.manifest().files().iter().find(|file| file.path.starts_with("extra/00001")).unwrap();
    let path = Path::new(&run.step(10)).join(&file.path);
    flip(&path, file.data_start as usize + 2000);
    assert_eq!(json(&["verify", run.url()], 0)["sound"], true);
    let said = text(&["verify", run.url(), "--all"], 1);
    assert!(said.contains("step-00000010: damaged: 1 problem\n") && said.contains("step-00000020: sound"), "{said}");
    let start = file.data_start;
    assert!(said.contains(&format!("file {}, bytes {start}..", file.path)), "{said}");
    assert!(said.contains("\n    extra/rng of rank 1\n"), "{said}");
    let object = json(&["verify", &run.step(10)], 1);
    let finding = &object["checkpoints"][0]["findings"][0];
    assert_eq!((&finding["problem"], &finding["block"]["start"]), (&Json::from("block"), &Json::from(start)));
    assert_eq!(finding["block"]["expected"].as_str().unwrap().len(), 16);
    assert_eq!(object["checkpoints"][0]["leaves_damaged"], Json::from(vec!["extra/rng"]));

    std::fs::remove_file(&path).unwrap();
    let said = text(&["verify", &run.step(10)], 1);
    assert!(said.contains("is missing") && said.contains("extra/rng"), "{said}");

    std::fs::write(Path::new(&run.step(20)).join("COMMIT"), "rubbish").unwrap();
    let object = json(&["verify", run.url()], 1);
    assert_eq!(object["checkpoints"][0]["findings"][0]["problem"], "commit");
}

#[test]
fn verify_names_a_checkpoint_under_the_name_of_another_step() {
    let run = Run::new();
    text(&["copy", &run.step(10), &run.step(77)], 0);
    let object = json(&["verify", run.url(), "--all"], 1);
    let of = |number: usize| object["checkpoints"][number]["findings"].as_array().unwrap().len();
    assert_eq!((of(0), of(1), of(2)), (0, 0, 1));
    let finding = &object["checkpoints"][2]["findings"][0];
    assert_eq!(finding["problem"], "step");
    assert!(finding["message"].as_str().unwrap().contains("expected the checkpoint of step 77, found that of step 10"));
    let elsewhere = run.new_dir("elsewhere");
    text(&["copy", &run.step(10), &elsewhere], 0);
    assert_eq!(json(&["verify", &elsewhere], 0)["sound"], true);
}

#[test]
fn diff_tells_what_differs() {
    let run = Run::new();
    let said = text(&["diff", &run.step(10), &run.step(10)], 0);
    assert!(said.ends_with("9 leaves equal, 0 different; 314.0 KiB of tensors compared\n"), "{said}");
    let said = text(&["diff", &run.step(10), run.url()], 1);
    assert!(said.contains("extra/args: at [\"lr\"]: a has 0.001, b has 5.001\n"), "{said}");
    assert!(said.contains("model/norm: 70 of 70 F32 elements differ"), "{said}");
    assert!(said.contains("2 leaves equal, 7 different"), "{said}");
    let object = json(&["diff", &run.step(10), &run.step(20)], 1);
    assert_eq!((&object["equal"], object["differences"].as_array().unwrap().len()), (&Json::from(2), 7));
    let of = |leaf: &str| object["differences"].as_array().unwrap().iter().find(|d| d["leaf"] == leaf).unwrap().clone();
    assert_eq!(of("model/norm")["elements_different"], 70);
    assert_eq!(
        (of("extra/args")["difference"].clone(), of("extra/args")["a"].clone()),
        ("value".into(), "0.001".into())
    );

    let other = run.new_dir("other");
    save_ranks(&other, None, vec![vec![Tensor::random(1, DType::U8, &[3]).whole("model", "norm")]]);
    let object = json(&["diff", &other, &run.step(10)], 1);
    let kinds: BTreeSet<String> = object["differences"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["difference"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds, BTreeSet::from(["kind".to_owned(), "only_in_b".to_owned()]));
}

#[test]
fn export_writes_files_that_the_stack_opens() {
    let run = Run::new();
    let (out, small) = (run.new_dir("out"), run.new_dir("small"));
    let said = text(&["export", run.url(), &out], 0);
    assert!(said.contains("exported 4 tensors, 305.8 KiB, to "), "{said}");
    assert!(said.contains("left out: tied, which is tied to embed\n"), "{said}");
    assert!(Path::new(&out).join("model.safetensors").exists());

    let object = json(&["export", run.url(), &small, "--shard-size", "100KB"], 0);
    assert_eq!((&object["index"], &object["tied"]["tied"]), (&"model.safetensors.index.json".into(), &"embed".into()));
    assert_eq!(object["files"][0]["name"], "model-00001-of-00002.safetensors");
    assert!(Path::new(&small).join("model.safetensors.index.json").exists());
    json(&["export", run.url(), &small, "--key", "optimizer"], 0);
    assert!(error(&["export", run.url(), &out], 5).starts_with("shardfast: Conflict: "));
    let missing = error(&["export", run.url(), &out, "--key", "ema"], 3);
    assert!(missing.contains("\"ema\"") && missing.contains("optimizer"), "{missing}");
    assert!(error(&["export", run.url(), &out, "--shard-size", "5 apples"], 2).contains("apples"));
}

#[test]
fn copies_are_the_same_checkpoint_and_runs_are_brought_up_to_date() {
    let run = Run::new();
    let (place, other) = (run.new_dir("copy"), run.new_dir("other"));
    let said = text(&["copy", &run.step(10), &place], 0);
    assert!(said.starts_with("copied ") && said.contains(" files, "), "{said}");
    assert!(text(&["verify", &place], 0).contains("sound"));
    assert!(text(&["diff", &run.step(10), &place], 0).contains("equal"));
    assert!(json(&["copy", &run.step(10), &place], 0)["was_there"].as_bool().unwrap());
    assert!(error(&["copy", &run.step(20), &place], 5).starts_with("shardfast: Conflict: "));
    assert!(error(&["copy", &run.new_dir("nothing"), &place], 3).starts_with("shardfast: NotFound: "));

    let synced = json(&["sync", run.url(), &other], 0);
    assert_eq!(synced["checkpoints"].as_array().unwrap().len(), 2);
    assert_eq!(synced["incomplete"][0], 30);
    assert!(text(&["sync", run.url(), &other], 0).contains("already\n"));
    assert!(text(&["verify", &other, "--all"], 0).contains("sound"));
    assert!(error(&["sync", &run.new_dir("nothing"), &other], 3).contains("no run with a step"));

    // Damaged steps do not keep those behind them, and the code is that of the first.
    let third = run.new_dir("third");
    let file = opened(&run.step(10)).manifest().files()[0].clone();
    flip(&Path::new(&run.step(10)).join(&file.path), file.data_start as usize);
    let synced = json(&["sync", run.url(), &third], 4);
    assert_eq!((&synced["failed"][0]["step"], &synced["failed"][0]["kind"]), (&Json::from(10), &Json::from("Corrupt")));
    assert_eq!(synced["checkpoints"].as_array().unwrap().len(), 1);
    assert!(text(&["sync", run.url(), &third], 4).contains("not copied: step 10: "));
}

#[test]
fn steps_behind_one_move_out_of_the_way() {
    let run = Run::new();
    let moved = json(&["rewind", run.url(), "--to", "10"], 0);
    let place = format!("{}/abandoned-from-00000011", run.url());
    assert_eq!((&moved["moved"][0], &moved["into"]), (&Json::from(20), &Json::from(place.as_str())));
    assert!(text(&["verify", &place], 0).contains("sound"));
    assert_eq!(json(&["ls", run.url()], 0)["abandoned"][0], place);
    assert!(text(&["rewind", run.url(), "--to", "10"], 0).contains("no committed step behind"));
    assert!(text(&["rewind", run.url(), "--to", "0"], 0).contains("moved 1 step (10)"));
    assert!(error(&["rewind", &run.new_dir("nothing"), "--to", "0"], 3).contains("no run with a step"));
}

#[test]
fn failures_have_their_exit_codes_and_go_to_standard_error() {
    let run = Run::new();
    let nothing = run.new_dir("nothing");
    for args in
        [vec!["ls", &nothing], vec!["inspect", &nothing], vec!["verify", &nothing], vec!["verify", &nothing, "--all"]]
    {
        assert!(error(&args, 3).starts_with("shardfast: NotFound: "), "{args:?}");
    }
    assert_eq!(error(&["diff", &run.step(10), &nothing], 3).lines().count(), 1);
    assert!(error(&["inspect", &run.step(30)], 3).contains("step-00000030"));
    assert!(error(&["ls", "memory://"], 2).starts_with("shardfast: Invalid: "));
    assert!(error(&["ls", "gopher://host/run"], 4).starts_with("shardfast: Unsupported: "));
    for usage in [vec!["frobnicate"], vec!["ls"], vec!["ls", "a", "b"], vec![]] {
        error(&usage, 2);
    }

    // Damage that is no finding but in the way.
    let checkpoint = opened(&run.step(10));
    let file = checkpoint.manifest().files().iter().find(|file| file.path.starts_with("model/00000")).unwrap();
    flip(&Path::new(&run.step(10)).join(&file.path), file.data_start as usize);
    let said = error(&["diff", &run.step(10), &run.step(20)], 4);
    assert!(said.starts_with("shardfast: Corrupt: ") && said.contains(&file.path), "{said}");
    assert!(error(&["export", &run.step(10), &run.new_dir("out")], 4).contains("model/embed"));
    flip(&Path::new(&run.step(20)).join(manifest_name(&opened(&run.step(20)).manifest().info.attempt)), 4100);
    assert!(error(&["inspect", run.url()], 4).starts_with("shardfast: Corrupt: "));
}

#[test]
fn help_tells_the_exit_codes() {
    for args in [vec!["--help"], vec!["verify", "--help"]] {
        let said = text(&args, 0);
        assert!(said.contains("Exit codes:") && said.contains("there is no such checkpoint"), "{said}");
    }
    assert_eq!(text(&["--version"], 0), format!("shardfast {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn who_reads_no_more_is_no_error() {
    let run = Run::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardfast"))
        .args(["inspect", run.url(), "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert_eq!((status.code(), stderr), (Some(0), Vec::new()));
}

#[test]
fn the_library_is_the_command() {
    let args = |args: &[&str]| args.iter().map(std::ffi::OsString::from).collect::<Vec<_>>();
    save_ranks("memory://cli-run/step-00000001", Some(1), two_ranks());
    assert_eq!(shardfast_cli::run(args(&["shardfast", "verify", "memory://cli-run"]), &[], Default::default), 0);
    assert_eq!(shardfast_cli::run(args(&["shardfast", "verify", "memory://cli-nothing"]), &[], Default::default), 3);
    assert_eq!(shardfast_cli::run(args(&["shardfast"]), &[], Default::default), 2);
}

/// The finding of that name.
const PLANNED: [&str; 11] =
    ["interval", "--parameters", "7B", "--ranks", "8", "--step", "2s", "--mtbf", "6h", "--storage", "2GB"];

#[test]
fn interval_tells_how_often_a_planned_job_should_save() {
    let said = text(&PLANNED, 0);
    assert!(said.starts_with("save every 106 steps (3.53 min): least time is wasted so\n"), "{said}");
    assert!(said.contains("\n  state      78.2 GiB, 9.8 GiB a rank\n"), "{said}");
    assert!(said.contains("costs 1.05 s of training, commits 42 s after its step"), "{said}");
    let object = json(&PLANNED, 0);
    assert_eq!((object["steps"].as_u64(), object["limit"].as_str()), (Some(106), Some("waste")));
    // A rate for each rank is as good, and a cost that was measured decides.
    let mut planned = PLANNED.to_vec();
    planned[9..].copy_from_slice(&["--storage-per-rank", "250MB"]);
    assert_eq!(text(&planned, 0), said);
    let hidden = json(&[&PLANNED[..], &["--cost", "10ms"]].concat(), 0);
    assert_eq!((hidden["steps"].as_u64(), hidden["limit"].as_str()), (Some(24), Some("storage")));
    assert_eq!(json(&[&PLANNED[..], &["--at-most", "20"]].concat(), 0)["limit"], "at_most");
}

#[test]
fn interval_takes_a_save_that_costs_nothing_and_a_restart_that_takes_no_time() {
    let free = json(&[&PLANNED[..], &["--cost", "0", "--restart", "0s"]].concat(), 0);
    assert_eq!((free["cost_s"].as_f64(), free["restart_s"].as_f64()), (Some(0.0), Some(0.0)));
    // The storage alone decides, as beside any cost that is small enough.
    assert_eq!((free["steps"].as_u64(), free["limit"].as_str()), (Some(24), Some("storage")));
    let said = text(&[&PLANNED[..], &["--cost", "0", "--restart", "0"]].concat(), 0);
    assert!(said.contains("\n  a save     costs the training nothing, commits 42 s after its step\n"), "{said}");
    assert!(said.contains("restarts not counted"), "{said}");
}

#[test]
fn interval_shows_waste_beyond_all_numbers_in_words() {
    let mut planned = PLANNED.to_vec();
    planned[8] = "10ms";
    let said = text(&planned, 0);
    assert!(said.contains("\n  waste      more than 1000%, lost to saves and failures\n"), "{said}");
    assert_eq!(json(&planned, 0)["waste"].as_f64(), Some(f64::MAX));
}

#[test]
fn interval_refuses_what_is_no_job() {
    let refused = |at: usize, with: &str| {
        let mut planned = PLANNED.to_vec();
        planned[at] = with;
        error(&planned, 2)
    };
    assert!(refused(8, "0h").contains("expected a time above zero"), "{}", refused(8, "0h"));
    assert!(refused(6, "soon").contains("expected a time above zero"));
    assert!(refused(2, "many").contains("expected a number of parameters"));
    assert!(refused(4, "0").contains("0"));
    assert!(error(&PLANNED[..9], 2).contains("--storage"));
    let bounds = error(&[&PLANNED[..], &["--at-least", "9", "--at-most", "8"]].concat(), 2);
    assert!(bounds.starts_with("shardfast: Invalid: --at-least 9, --at-most 8: expected --at-least to be"), "{bounds}");
    assert!(bounds.contains("lower it or raise --at-most"), "{bounds}");
    let none = error(&[&PLANNED[..], &["--at-least", "0"]].concat(), 2);
    assert!(none.starts_with("shardfast: Invalid: --at-least 0: expected a number of steps"), "{none}");
    for option in ["--cost", "--restart", "--step", "--mtbf"] {
        let mut planned: Vec<&str> = PLANNED.to_vec();
        match PLANNED.iter().position(|&known| known == option) {
            Some(at) => planned[at + 1] = "-5s",
            None => planned.extend([option, "-5s"]),
        }
        let negative = error(&planned, 2);
        assert!(negative.contains("'-5s'") && negative.contains(option), "{negative}");
        assert!(negative.contains("expected a time"), "{negative}");
    }
}

fn finding<'a>(report: &'a Json, name: &str) -> &'a Json {
    let findings = report["findings"].as_array().unwrap();
    findings.iter().find(|finding| finding["name"] == name).unwrap_or_else(|| panic!("no {name}: {report:#}"))
}

#[test]
fn doctor_tells_of_this_machine_and_leaves_it_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("not/yet");
    let report = json(&["doctor", path.to_str().unwrap()], 0);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let found = |name: &str| finding(&report, name)["found"].as_str().unwrap();
    assert!(found("kernel").contains(kernel.trim()), "{report:#}");
    assert!(found("file system").starts_with(&format!("{}: ", dir.path().display())), "{report:#}");
    for name in ["io_uring", "direct I/O", "CUDA driver", "memory", "staging budget", "open files", "locked memory"] {
        assert!(["ok", "limited"].contains(&finding(&report, name)["status"].as_str().unwrap()), "{report:#}");
        assert_ne!(finding(&report, name)["follows"], "", "{name}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let said = text(&["doctor", dir.path().to_str().unwrap()], 0);
    let starts: Vec<&str> = said.lines().skip(1).step_by(2).filter_map(|line| line.split(": ").next()).collect();
    assert_eq!(starts.len(), report["findings"].as_array().unwrap().len(), "{said}");
    assert!(starts.iter().all(|start| start.starts_with("ok  ") || start.starts_with("limited  ")), "{said}");
    assert!(Command::new(env!("CARGO_BIN_EXE_shardfast")).arg("doctor").current_dir(dir.path()).status().is_ok());
}

#[test]
fn doctor_fails_where_nothing_can_be_saved() {
    // No user can write there, not even root.
    let report = json(&["doctor", "/proc/self"], 1);
    assert_eq!(finding(&report, "file system")["status"], "failed", "{report:#}");
    assert!(text(&["doctor", "/proc/self"], 1).contains("\nfailed   file system: /proc/self: proc"));
    assert!(error(&["doctor", "memory://x"], 2).contains("expected a path"));
    assert!(error(&["doctor", "nosuch://x"], 4).contains("nosuch"));
}
