//! Finds out what this machine offers to saves and loads, by trying.

use rustix::process::{Resource, getrlimit};
use shardfast_engine::links_max;
use shardfast_store::probe;
pub use shardfast_store::probe::{Claimed, Directory, Kernel, Mount};
use shardfast_transfer::cuda::Devices;
use shardfast_transfer::error::Result;
use shardfast_transfer::memory::{limit_bytes, memory_bytes, staging_bytes_default};

/// Findings about this machine.
#[derive(Debug)]
pub struct Machine {
    /// The system's name, release and architecture.
    pub system: String,
    /// Features that its kernel offers this process.
    pub kernel: Kernel,
    /// Features that the place for checkpoints offers.
    pub directory: Directory,
    /// Number of CUDA devices, or the reason why the driver cannot be used.
    pub cuda_devices: Result<u32>,
    /// The machine's memory.
    pub memory_bytes: u64,
    /// The part of it that the control group of this process may use, where that is less.
    pub memory_limit_bytes: Option<u64>,
    /// The staging memory that all ranks on the machine share by default.
    pub staging_bytes_default: u64,
    /// Number of files that this process may have open; `None` for any number.
    pub open_files_max: Option<u64>,
    /// Number of ranks of other machines that this process can be connected with at once.
    pub links_max: u64,
    /// Bytes of memory that this process may lock; `None` for all of it.
    pub locked_bytes_max: Option<u64>,
}

/// Inspects this machine, and tries what a save to the path or `file://` URL needs; leaves both as they were.
///
/// # Errors
/// `Invalid` if the URL is no place for checkpoints on a file system, `Unsupported` for an unknown scheme.
pub fn examine(url: &str) -> Result<Machine> {
    let system = rustix::system::uname();
    let system = [system.sysname(), system.release(), system.machine()].map(|word| word.to_string_lossy());
    let memory_bytes = memory_bytes();
    Ok(Machine {
        system: system.join(" "),
        kernel: probe::kernel(),
        directory: probe::directory(url)?,
        cuda_devices: Devices::default().count(),
        memory_bytes,
        memory_limit_bytes: limit_bytes().filter(|&limit| limit < memory_bytes),
        staging_bytes_default: staging_bytes_default(1),
        open_files_max: getrlimit(Resource::Nofile).current,
        links_max: links_max(),
        locked_bytes_max: getrlimit(Resource::Memlock).current,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
