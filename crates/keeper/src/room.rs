//! Determines how much memory the machine, and the control groups of this process, still have.

use std::fs;
use std::path::{Path, PathBuf};

/// Part of the memory that is left to other programs: one in so many.
const LEFT: u64 = 20;

/// Room for objects, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Memory of the machine or of the control group, whichever has less room.
    pub(crate) all: u64,
    /// Memory of it that is in use and cannot be taken back.
    pub(crate) used: u64,
}

impl Room {
    /// Returns the room now.
    pub(crate) fn now() -> Room {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of_groups = of_groups(&groups, Path::new("/sys/fs/cgroup"));
        let of_machine = of_machine(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
        of_groups.into_iter().chain([of_machine]).min_by_key(Room::bytes).unwrap_or(of_machine)
    }

    /// Returns the bytes that an object may take.
    pub(crate) fn bytes(&self) -> u64 {
        (self.all - self.all / LEFT).saturating_sub(self.used)
    }
}

/// Returns the room of the machine, given `/proc/meminfo`.
fn of_machine(told: &str) -> Room {
    let of = |name: &str| {
        let line = told.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).map_or(0, |kib| kib << 10)
    };
    let all = of("MemTotal");
    Room { all, used: all.saturating_sub(of("MemAvailable")) }
}

/// Returns the room of each control group that this process is in and that sets a limit, given `/proc/self/cgroup` and
/// the mount point of the groups' file system (see cgroups(7)).
fn of_groups(groups: &str, mounted: &Path) -> Vec<Room> {
    let read = |place: PathBuf| fs::read_to_string(place).ok();
    let number = |place: PathBuf| read(place)?.trim().parse::<u64>().ok();
    let mut rooms = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let (root, limit, usage) = match controllers {
            "" => (mounted.to_owned(), "memory.max", "memory.current"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (mounted.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        // In a container the group may be named as the host sees it: then only the root is there.
        for group in Path::new(group.trim_start_matches('/')).ancestors() {
            let place = root.join(group);
            let (Some(all), Some(used)) = (number(place.join(limit)), number(place.join(usage))) else { continue };
            let told = read(place.join("memory.stat")).unwrap_or_default();
            let of = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
            // The kernel takes back what is in memory of files.
            let files = ["inactive_file ", "active_file "].iter().filter_map(|name| of(name)).sum();
            rooms.push(Room { all, used: used.saturating_sub(files) });
        }
    }
    rooms
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_room_of_all_groups_counts() {
        let mounted = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = mounted.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("job/memory.max", "1000\n");
        put("job/memory.current", "600\n");
        put("job/memory.stat", "anon 1\ninactive_file 60\nactive_file 40\n");
        put("job/step/memory.max", "max\n");
        put("job/step/memory.current", "5\n");
        let rooms = of_groups("0::/job/step\n", mounted.path());
        assert_eq!(rooms, [Room { all: 1000, used: 500 }]);
        assert_eq!(rooms[0].bytes(), 450);
        assert_eq!(of_machine("MemTotal: 100 kB\nMemAvailable:   40 kB\n"), Room { all: 102_400, used: 61_440 });
        assert!(Room::now().all > 0);
    }
}
