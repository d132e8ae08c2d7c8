//! Reports how saves and loads will work on this machine, and what they lack, from the engine's and the caller's
//! findings.

use std::fmt::Write;

use serde::Serialize;
use shardfast_tools::Machine;
use shardfast_tools::machine::{Claimed, Directory, Kernel, Mount};

use crate::text::{count, plain, plain_lines, size};

/// Rating of a finding for saves and loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Best possible for saves and loads.
    Ok,
    /// Slower than possible, or without some features.
    Limited,
    /// Saves or loads do not work.
    Failed,
}

/// One checked feature, and its rating.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the checked feature.
    pub name: String,
    /// Rating of the finding for saves and loads.
    pub status: Status,
    /// Description of what was found.
    pub found: String,
    /// Consequence for saves and loads.
    pub follows: String,
}

impl Finding {
    fn new(name: &str, status: Status, found: impl Into<String>, follows: impl Into<String>) -> Finding {
        Finding { name: name.to_owned(), status, found: found.into(), follows: follows.into() }
    }
}

/// Findings of the program around the command.
#[derive(Default)]
pub struct Host {
    /// The staging budget of a process, where the environment sets one.
    pub staging_bytes: Option<u64>,
    /// Findings of the caller.
    pub findings: Vec<Finding>,
}

/// Output of the command with `--json`.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) version: &'static str,
    pub(crate) findings: Vec<Finding>,
}

impl Report {
    pub(crate) fn new(machine: &Machine, host: Host) -> Report {
        let mut findings = vec![kernel(machine), io_uring(&machine.kernel), file_system(&machine.directory)];
        findings.extend(names(&machine.directory));
        findings.extend(direct_io(&machine.directory));
        findings.push(cuda(machine));
        findings.push(memory(machine));
        findings.push(staging(machine, host.staging_bytes));
        findings.push(open_files(machine));
        findings.push(locked_memory(machine));
        findings.extend(host.findings);
        Report { version: env!("CARGO_PKG_VERSION"), findings }
    }

    pub(crate) fn is_usable(&self) -> bool {
        self.findings.iter().all(|finding| finding.status != Status::Failed)
    }

    pub(crate) fn text(&self) -> String {
        let mut out = format!("shardfast {}\n", self.version);
        for Finding { name, status, found, follows } in &self.findings {
            let status = match status {
                Status::Ok => "ok",
                Status::Limited => "limited",
                Status::Failed => "failed",
            };
            let _ = writeln!(out, "{status:<8} {}: {}", plain(name), plain(found));
            let _ = writeln!(out, "         {}", plain_lines(follows).replace('\n', "\n         "));
        }
        out
    }
}

fn kernel(machine: &Machine) -> Finding {
    match &machine.kernel.cachestat {
        Ok(()) => {
            let follows = "loads see what is in the page cache, and take it from there";
            Finding::new("kernel", Status::Ok, &machine.system, follows)
        }
        Err(error) => {
            let follows = format!(
                "{error}: loads cannot see what is in the page cache, and read large files past it; \
                 this needs Linux 6.5 or later and a seccomp profile that permits cachestat"
            );
            Finding::new("kernel", Status::Limited, &machine.system, follows)
        }
    }
}

fn io_uring(kernel: &Kernel) -> Finding {
    let (status, found, follows) = match &kernel.io_uring {
        Ok(true) => (
            Status::Ok,
            "a write through it succeeded".to_owned(),
            "one thread keeps direct writes in flight, from memory that stays registered with the kernel",
        ),
        Ok(false) => (
            Status::Limited,
            "a write through it succeeded; the kernel registered no buffer".to_owned(),
            "one thread keeps direct writes in flight; raise the limit of locked memory (ulimit -l) to save processor \
             time",
        ),
        Err(error) => (
            Status::Limited,
            error.to_string(),
            "direct writes take several threads; check kernel.io_uring_disabled and the container's seccomp profile",
        ),
    };
    Finding::new("io_uring", status, found, follows)
}

fn file_system(directory: &Directory) -> Finding {
    let kind = directory.mount.as_ref().map_or("unknown", |mount| mount.file_system.as_str());
    let mut found = format!("{}: {kind}", directory.path.display());
    if let Some(mount) = &directory.mount {
        let _ = write!(found, ", mounted at {}", mount.point.display());
    }
    if let Some(bytes) = directory.free_bytes {
        let _ = write!(found, ", {} free", size(bytes));
    }
    let (status, follows) = match (&directory.takes_direct, kind) {
        (Err(error), _) => (Status::Failed, format!("no checkpoint can be saved here: {error}")),
        (Ok(_), "tmpfs" | "ramfs") => {
            (Status::Limited, "checkpoints can be saved here; they are lost when the machine restarts".to_owned())
        }
        (Ok(_), "overlay") => {
            let follows = "checkpoints can be saved here; they are lost with the container: mount a volume for them";
            (Status::Limited, follows.to_owned())
        }
        (Ok(_), _) => (Status::Ok, "checkpoints can be saved here: a small file was published durably".to_owned()),
    };
    Finding::new("file system", status, found, follows)
}

/// Returns the finding on names: how one is published, and how long it may be unknown elsewhere; `None` if none can be.
fn names(directory: &Directory) -> Option<Finding> {
    let found = match directory.published_by? {
        Claimed::Rename => "a new one is published by a rename that replaces nothing",
        Claimed::Link => "a new one is published by a link",
    };
    let remembers = directory.mount.as_ref().and_then(Mount::remembers).filter(|time| !time.is_zero());
    let Some(time) = remembers else {
        return Some(Finding::new("names", Status::Ok, found, "of two savers of one step one succeeds"));
    };
    let found = format!("{found}; a machine may remember names and attributes for {} s", time.as_secs());
    let follows = "of two savers of one step one succeeds; Shardfast asks the server anew for what it looks for, other \
                   programs may see a new checkpoint that much later";
    Some(Finding::new("names", Status::Ok, found, follows))
}

/// Returns the finding on direct I/O; `None` if nothing can be written at all.
fn direct_io(directory: &Directory) -> Option<Finding> {
    let (status, found, follows) = match directory.takes_direct {
        Ok(true) => (
            Status::Ok,
            "a direct write succeeded",
            "writes bypass the page cache, unless a measurement at the first large save says that this is slower",
        ),
        Ok(false) => (
            Status::Limited,
            "the file system refuses it",
            "writes go through the page cache: each byte is copied once more, and several threads write",
        ),
        Err(_) => return None,
    };
    Some(Finding::new("direct I/O", status, found, follows))
}

fn cuda(machine: &Machine) -> Finding {
    let (status, found, follows) = match &machine.cuda_devices {
        Ok(0) => (Status::Limited, "no device".to_owned(), "only tensors in host memory can be saved and loaded"),
        Ok(devices) => (
            Status::Ok,
            count(u64::from(*devices), "device", "devices"),
            "tensors in device memory are copied on streams of their own, beside the training's",
        ),
        Err(error) => (Status::Limited, error.message.clone(), "only tensors in host memory can be saved and loaded"),
    };
    Finding::new("CUDA driver", status, found, follows)
}

fn memory(machine: &Machine) -> Finding {
    let found = size(machine.memory_bytes);
    match machine.memory_limit_bytes {
        Some(limit) => {
            let found = format!("{found}; the control group of this process may use {}", size(limit));
            let follows = "the kernel kills a process of the group when state, staging memory and all else exceed that";
            Finding::new("memory", Status::Ok, found, follows)
        }
        None => Finding::new("memory", Status::Ok, found, "no control group limits this process further"),
    }
}

fn staging(machine: &Machine, chosen: Option<u64>) -> Finding {
    let (bytes, found) = match chosen {
        Some(bytes) => (bytes, format!("{} for each process, as SHARDFAST_STAGING_BYTES says", size(bytes))),
        None => {
            let bytes = machine.staging_bytes_default;
            (bytes, format!("{} for all ranks on this machine, a quarter of the memory that they may use", size(bytes)))
        }
    };
    let usable = machine.memory_limit_bytes.unwrap_or(machine.memory_bytes);
    if bytes > usable / 2 {
        let follows = format!(
            "this is more than half of the usable {}: a large save or load may exceed the memory; \
             set SHARDFAST_STAGING_BYTES to less",
            size(usable)
        );
        return Finding::new("staging budget", Status::Limited, found, follows);
    }
    let follows = "saves and loads take at most that beside the state; SHARDFAST_STAGING_BYTES changes it";
    Finding::new("staging budget", Status::Ok, found, follows)
}

fn open_files(machine: &Machine) -> Finding {
    let (status, found, follows) = match (machine.open_files_max, machine.links_max) {
        (None, _) => {
            (Status::Ok, "no limit".to_owned(), "a rank can share its reads with any number of others".to_owned())
        }
        (Some(max), 0) => (
            Status::Limited,
            format!("at most {max} (ulimit -n)"),
            "a rank does not share its reads with other machines, and a load from many files may fail; \
             raise the limit to 4096 or more"
                .to_owned(),
        ),
        (Some(max), links) => (
            Status::Ok,
            format!("at most {max} (ulimit -n)"),
            format!("a rank can share its reads with up to {links} others"),
        ),
    };
    Finding::new("open files", status, found, follows)
}

fn locked_memory(machine: &Machine) -> Finding {
    let found = match machine.locked_bytes_max {
        None => "no limit".to_owned(),
        Some(bytes) => format!("at most {} (ulimit -l)", size(bytes)),
    };
    let follows = match (&machine.kernel.io_uring, machine.locked_bytes_max) {
        (Err(_), _) => "nothing is locked without io_uring",
        (Ok(_), None) => "all staging memory can be registered with io_uring",
        (Ok(_), Some(_)) => {
            "that much staging memory is registered with io_uring (all of it in a process with CAP_IPC_LOCK); \
             writes from the rest cost more processor time"
        }
    };
    Finding::new("locked memory", Status::Ok, found, follows)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use shardfast_engine::{Error, Kind};

    const GIB: u64 = 1 << 30;

    fn mount(kind: &str, options: &str) -> Mount {
        Mount { file_system: kind.into(), point: PathBuf::from("/"), source: String::new(), options: options.into() }
    }

    fn machine() -> Machine {
        Machine {
            system: "Linux 6.18.0 x86_64".into(),
            kernel: Kernel { io_uring: Ok(true), cachestat: Ok(()) },
            directory: Directory {
                path: "/runs".into(),
                mount: Some(mount("xfs", "")),
                free_bytes: Some(5 * GIB),
                takes_direct: Ok(true),
                published_by: Some(Claimed::Rename),
            },
            cuda_devices: Ok(8),
            memory_bytes: 64 * GIB,
            memory_limit_bytes: None,
            staging_bytes_default: 16 * GIB,
            open_files_max: Some(4096),
            links_max: 3584,
            locked_bytes_max: None,
        }
    }

    fn statuses(machine: &Machine, host: Host) -> Vec<(String, Status)> {
        let report = Report::new(machine, host);
        report.findings.into_iter().map(|finding| (finding.name, finding.status)).collect()
    }

    /// Returns the findings that are not ok.
    fn bad(machine: &Machine, staging_bytes: Option<u64>) -> Vec<(String, Status)> {
        let all = statuses(machine, Host { staging_bytes, findings: Vec::new() });
        all.into_iter().filter(|(_, status)| *status != Status::Ok).collect()
    }

    #[test]
    fn a_machine_with_everything_is_ok() {
        assert_eq!(bad(&machine(), None), []);
        let report = Report::new(&machine(), Host::default());
        assert!(report.is_usable());
        let text = report.text();
        assert!(
            text.contains("\nok       file system: /runs: xfs, mounted at /, 5.0 GiB free\n         checkp"),
            "{text}"
        );
    }

    #[test]
    fn what_is_missing_limits_and_what_fails_fails() {
        let refused = || shardfast_store::Error::new(shardfast_store::Kind::Unsupported, "io_uring", "x", "refused");
        let limited = |name: &str| vec![(name.to_owned(), Status::Limited)];
        let with = |change: &dyn Fn(&mut Machine)| {
            let mut machine = machine();
            change(&mut machine);
            machine
        };
        assert_eq!(bad(&with(&|m| m.kernel.io_uring = Err(refused())), None), limited("io_uring"));
        assert_eq!(bad(&with(&|m| m.kernel.io_uring = Ok(false)), None), limited("io_uring"));
        assert_eq!(bad(&with(&|m| m.kernel.cachestat = Err(refused())), None), limited("kernel"));
        assert_eq!(bad(&with(&|m| m.directory.takes_direct = Ok(false)), None), limited("direct I/O"));
        assert_eq!(bad(&with(&|m| m.cuda_devices = Ok(0)), None), limited("CUDA driver"));
        let no_driver = || Err(Error::new(Kind::Unsupported, "no driver"));
        assert_eq!(bad(&with(&|m| m.cuda_devices = no_driver()), None), limited("CUDA driver"));
        assert_eq!(bad(&with(&|m| m.links_max = 0), None), limited("open files"));
        for kind in ["tmpfs", "overlay"] {
            assert_eq!(bad(&with(&|m| m.directory.mount = Some(mount(kind, ""))), None), limited("file system"));
        }
        let unwritable = with(&|m| {
            m.directory.takes_direct = Err(refused());
            m.directory.published_by = None;
        });
        assert_eq!(bad(&unwritable, None), [("file system".to_owned(), Status::Failed)]);
        assert!(!Report::new(&unwritable, Host::default()).is_usable());
        assert!(
            !statuses(&unwritable, Host::default()).iter().any(|(name, _)| name == "direct I/O" || name == "names")
        );
    }

    #[test]
    fn what_a_network_file_system_remembers_is_told() {
        let mut remote = machine();
        remote.directory.mount = Some(mount("nfs4", "rw,acregmax=3,acdirmax=45"));
        remote.directory.published_by = Some(Claimed::Link);
        let text = Report::new(&remote, Host::default()).text();
        let told =
            "ok       names: a new one is published by a link; a machine may remember names and attributes for 45 s";
        assert!(text.contains(told), "{text}");
    }

    #[test]
    fn the_staging_budget_is_held_against_the_memory_that_may_be_used() {
        let limited = [("staging budget".to_owned(), Status::Limited)];
        let group = Machine { memory_limit_bytes: Some(20 * GIB), ..machine() };
        assert_eq!(bad(&group, None), limited);
        assert_eq!(bad(&group, Some(2 * GIB)), []);
        assert_eq!(bad(&machine(), Some(40 * GIB)), limited);
    }

    #[test]
    fn what_the_caller_found_counts_and_does_not_reach_the_terminal_as_it_is() {
        let finding = Finding::new("a\x1b", Status::Failed, "b\n", "c\nd\x1b");
        let report = Report::new(&machine(), Host { staging_bytes: None, findings: vec![finding] });
        assert!(!report.is_usable());
        let text = report.text();
        assert!(text.ends_with("failed   a\\u{1b}: b\\n\n         c\n         d\\u{1b}\n"), "{text}");
    }
}
