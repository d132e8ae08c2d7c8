//! Determines how much memory this process may use, and how much of it is for staging by default.

use std::path::{Path, PathBuf};

/// Returns a quarter of the usable memory, shared by the ranks on this machine; at least 64 MiB.
pub fn staging_bytes_default(local_world: u32) -> u64 {
    let usable = limit_bytes().map_or(memory_bytes(), |limit| limit.min(memory_bytes()));
    (usable / 4 / u64::from(local_world.max(1))).max(64 << 20)
}

/// Returns the machine's memory, in bytes.
pub fn memory_bytes() -> u64 {
    let memory = rustix::system::sysinfo();
    (memory.totalram as u64).saturating_mul(u64::from(memory.mem_unit))
}

/// Returns the memory in bytes that the control groups of this process allow; `None` if they set no limit.
pub fn limit_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limit_bytes(&groups, Path::new("/sys/fs/cgroup"))
}

/// Returns the lowest limit of the control groups that this process is in, given `/proc/self/cgroup` and the mount
/// point of the groups' file system (see cgroups(7)).
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
}
