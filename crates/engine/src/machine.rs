//! What this machine offers to saves and loads, found by trying.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use shardfast_store::local::probe;
pub use shardfast_store::local::probe::{Directory, Kernel, Mount};

use crate::cuda::Devices;
use crate::engine::{memory_bytes, staging_bytes_default};
use crate::error::Result;
use crate::peers::links_max;

/// What was found.
#[derive(Debug)]
pub struct Machine {
    /// The system's name, release and architecture.
    pub system: String,
    /// What its kernel offers this process.
    pub kernel: Kernel,
    /// What the place for checkpoints offers.
    pub directory: Directory,
    /// How many CUDA devices there are, or why the driver cannot be used.
    pub cuda_devices: Result<u32>,
    /// The machine's memory.
    pub memory_bytes: u64,
    /// The part of it that the control group of this process may use, where that is less.
    pub memory_limit_bytes: Option<u64>,
    /// The staging memory that all ranks on the machine share by default.
    pub staging_bytes_default: u64,
    /// How many files this process may have open; `None` for any number.
    pub open_files_max: Option<u64>,
    /// With how many ranks of other machines this process can be connected at once.
    pub links_max: u64,
    /// How much memory this process may lock; `None` for all of it.
    pub locked_bytes_max: Option<u64>,
}

/// Inspects this machine, and tries what a save to the path or `file://` URL needs; leaves both as they were.
///
/// # Errors
/// `Invalid` if the URL is no place for checkpoints on a file system, `Unsupported` for an unknown scheme.
pub fn examine(url: &str) -> Result<Machine> {
    let system = rustix::system::uname();
    let system = [system.sysname(), system.release(), system.machine()].map(|word| word.to_string_lossy());
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let (memory_bytes, limit) = (memory_bytes(), cgroup_limit_bytes(&groups, Path::new("/sys/fs/cgroup")));
    Ok(Machine {
        system: system.join(" "),
        kernel: probe::kernel(),
        directory: probe::directory(url)?,
        cuda_devices: Devices::default().count(),
        memory_bytes,
        memory_limit_bytes: limit.filter(|&limit| limit < memory_bytes),
        staging_bytes_default: staging_bytes_default(1),
        open_files_max: getrlimit(Resource::Nofile).current,
        links_max: links_max(),
        locked_bytes_max: getrlimit(Resource::Memlock).current,
    })
}

/// The lowest limit of the control groups that this process is in, given `/proc/self/cgroup` and where the groups'
/// file system is mounted (see cgroups(7)).
fn cgroup_limit_bytes(groups: &str, mounted: &Path) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let (root, file) = match controllers {
            "" => (mounted.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (mounted.join("memory"), "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        let group = group.trim_start_matches('/');
        // In a container the group may be named as the host sees it: then only the root is there.
        let places = Path::new(group).ancestors().map(|group| root.join(group).join(file));
        places.filter_map(|place: PathBuf| std::fs::read_to_string(place).ok()?.trim().parse().ok()).collect()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_all_groups_above_counts() {
        let mounted = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = mounted.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let limit = |groups: &str| cgroup_limit_bytes(groups, mounted.path());
        assert_eq!(limit("0::/job/step\n"), None);
        put("job/memory.max", "4096\n");
        put("job/step/memory.max", "max\n");
        assert_eq!(limit("0::/job/step\n"), Some(4096));
        put("job/step/memory.max", "1024\n");
        assert_eq!(limit("0::/job/step\n"), Some(1024));
        assert_eq!(limit("0::/other\n"), None);
        // A container sees its own group as the root, whatever the host calls it.
        put("memory.max", "512\n");
        assert_eq!(limit("0::/elsewhere\n"), Some(512));
        // Version 1.
        put("memory/slurm/memory.limit_in_bytes", "256\n");
        assert_eq!(limit("5:cpu,memory:/slurm/job_7\n4:cpuset:/x\n"), Some(256));
        assert_eq!(limit("4:cpuset:/slurm\n"), None);
    }

    #[test]
    fn this_machine_is_examined() {
        let dir = tempfile::tempdir().unwrap();
        let found = examine(dir.path().to_str().unwrap()).unwrap();
        assert!(found.memory_bytes > found.staging_bytes_default);
        assert!(found.memory_limit_bytes.is_none_or(|limit| limit < found.memory_bytes));
        assert_eq!(found.directory.path, dir.path());
        assert!(found.system.starts_with("Linux "), "{}", found.system);
    }
}
