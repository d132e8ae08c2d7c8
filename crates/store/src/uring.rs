//! Queues writes through `io_uring`: one thread keeps a disk's queue full, from buffers and into files that are
//! registered with the kernel.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::{IoUring, Probe, opcode, types};

use crate::ring::{Flight, Ring};
use crate::sys::{Errno, Sys};
use crate::write::Buffer;

/// Number of buffers and files that a ring registers; those with higher numbers work, too, at a little more cost.
const BUFFERS_MAX: u32 = 1024;
const FILES_MAX: u32 = 64;

/// Time without a completion after which requests that were not begun are cancelled. Seen with Linux 6.18: two direct
/// writes waited for ever for a worker of the ring, of which there was none. Cancelled, they ended.
const PATIENCE: Duration = Duration::from_secs(30);

/// An `io_uring` of one thread.
pub struct Uring {
    ring: IoUring,
    /// `true` if numbered buffers can be registered: not beyond `RLIMIT_MEMLOCK`.
    registers_buffers: bool,
    registered_buffers: Vec<bool>,
    registers_files: bool,
    registered_files: HashMap<RawFd, u32>,
    /// Writes in flight, by the number in their request.
    flights: Vec<Option<Flight>>,
    /// Time limit for a wait; `None` if the kernel (before 5.11) waits for ever.
    patience: Option<Duration>,
}

impl Uring {
    /// Makes a ring for `depth` writes in flight.
    ///
    /// # Errors
    /// The kernel's error: `ENOSYS` or `EPERM` under a seccomp filter or `kernel.io_uring_disabled`, `ENOMEM`;
    /// `EOPNOTSUPP` for a ring that cannot write.
    pub(crate) fn new(depth: u32) -> Sys<Uring> {
        // Completions are processed when this thread asks for them, if the kernel (6.1) offers that.
        let ring = IoUring::builder()
            .dontfork()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(depth)
            .or_else(|_| IoUring::builder().dontfork().build(depth))
            .map_err(errno)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(errno)?;
        if !probe.is_supported(opcode::Write::CODE) || !probe.is_supported(opcode::WriteFixed::CODE) {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(Uring {
            registers_buffers: ring.submitter().register_buffers_sparse(BUFFERS_MAX).is_ok(),
            registered_buffers: vec![false; BUFFERS_MAX as usize],
            registers_files: ring.submitter().register_files_sparse(FILES_MAX).is_ok(),
            registered_files: HashMap::new(),
            flights: (0..depth).map(|_| None).collect(),
            patience: ring.params().is_feature_ext_arg().then_some(PATIENCE),
            ring,
        })
    }

    /// Returns the number under which the flight's buffer is registered with the ring.
    #[allow(unsafe_code)]
    fn buffer(&mut self, flight: &Flight) -> Option<u16> {
        let number = flight.buffer.number().filter(|&number| number < BUFFERS_MAX && self.registers_buffers)?;
        if !self.registered_buffers[number as usize] {
            let bytes = flight.buffer.bytes();
            let range = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
            // SAFETY: the range is allocated now, and the kernel keeps its pages from now on; by `Buffer`'s contract it
            // is the range of every later buffer of this number.
            let registered = unsafe { self.ring.submitter().register_buffers_update(number, &[range], None) };
            self.registers_buffers = registered.is_ok();
            self.registered_buffers[number as usize] = self.registers_buffers;
        }
        self.registers_buffers.then_some(number as u16)
    }

    /// Returns the number under which the file is registered with the ring.
    fn file(&mut self, fd: RawFd) -> Option<u32> {
        if let Some(&number) = self.registered_files.get(&fd) {
            return Some(number);
        }
        let number = self.registered_files.len() as u32;
        if !self.registers_files || number == FILES_MAX {
            return None;
        }
        let registered = self.ring.submitter().register_files_update(number, &[fd]).is_ok_and(|count| count == 1);
        self.registers_files = registered;
        registered.then(|| *self.registered_files.entry(fd).or_insert(number))
    }

    /// Waits until a request is answered, or for as long as is usual.
    fn pause(&self) -> Sys<()> {
        let submitter = self.ring.submitter();
        let Some(patience) = self.patience.map(types::Timespec::from) else {
            return submitter.submit_and_wait(1).map(drop).map_err(errno);
        };
        match submitter.submit_with_args(1, &types::SubmitArgs::new().timespec(&patience)).map_err(errno) {
            Err(Errno::TIME) => {
                // Requests that a device or a worker has begun cannot be cancelled and are waited for; so are all
                // before Linux 6.0.
                let now = Some(types::Timespec::new());
                let _ = submitter.register_sync_cancel(now, types::CancelBuilder::any());
                Ok(())
            }
            waited => waited.map(drop),
        }
    }

    fn entry(&mut self, fd: RawFd, flight: &Flight) -> Entry {
        let bytes = &flight.buffer.bytes()[flight.range.clone()];
        let (address, length) = (bytes.as_ptr(), bytes.len() as u32);
        macro_rules! to {
            ($file:expr) => {
                match self.buffer(flight) {
                    Some(number) => {
                        opcode::WriteFixed::new($file, address, length, number).offset(flight.offset).build()
                    }
                    None => opcode::Write::new($file, address, length).offset(flight.offset).build(),
                }
            };
        }
        match self.file(fd) {
            Some(number) => to!(types::Fixed(number)),
            None => to!(types::Fd(fd)),
        }
    }
}

impl Ring for Uring {
    type File = OwnedFd;

    #[allow(unsafe_code)]
    fn submit(&mut self, file: &OwnedFd, flight: Flight) -> Sys<()> {
        let place = self.flights.iter().position(Option::is_none).ok_or(Errno::BUSY)?;
        let entry = self.entry(file.as_raw_fd(), &flight).user_data(place as u64);
        // SAFETY: the buffer is kept in `flights` until the kernel has answered (see `Drop`), and by `Buffer`'s
        // contract its range stays as it is; the file is open, and the kernel holds it from the submission below on.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Errno::BUSY)?;
        self.flights[place] = Some(flight);
        loop {
            match self.ring.submit().map_err(errno) {
                Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                submitted => return submitted.map(drop),
            }
        }
    }

    fn wait(&mut self) -> Sys<(Flight, Sys<usize>)> {
        loop {
            if let Some(done) = self.ring.completion().next() {
                let flight = self.flights[done.user_data() as usize].take().ok_or(Errno::IO)?;
                let taken = match usize::try_from(done.result()) {
                    Ok(taken) => Ok(taken),
                    Err(_) if done.result() == -Errno::CANCELED.raw_os_error() => Err(Errno::TIMEDOUT),
                    Err(_) => Err(Errno::from_raw_os_error(-done.result())),
                };
                return Ok((flight, taken));
            }
            match self.pause() {
                Ok(()) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl Drop for Uring {
    /// Unregisters files at once: the kernel dismantles a ring some time later, and would keep the files, deleted ones
    /// and their space too, until then. Writes still in flight were abandoned by a failure of the ring itself or a
    /// panic. The kernel may read their memory until they are done, which this process will not learn, so the memory is
    /// leaked.
    fn drop(&mut self) {
        if !self.registered_files.is_empty() {
            let _ = self.ring.submitter().unregister_files();
        }
        for flight in self.flights.drain(..) {
            std::mem::forget(flight);
        }
    }
}

/// Page to try the ring with.
struct Probed(Box<[u8; 4096]>);

// SAFETY: a box's contents stay where they are, and nothing writes them; its ring never sees another buffer.
#[allow(unsafe_code)]
unsafe impl Buffer for Probed {
    fn bytes(&self) -> &[u8] {
        &self.0[..]
    }

    fn number(&self) -> Option<u32> {
        Some(0)
    }
}

/// Writes a page into a file in memory; returns whether the ring keeps numbered buffers mapped.
///
/// # Errors
/// As [`Uring::new`]; the error of the write.
pub(crate) fn try_out() -> Sys<bool> {
    let file = rustix::fs::memfd_create("shardfast-probe", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut ring = Uring::new(1)?;
    ring.submit(&file, Flight { buffer: Box::new(Probed(Box::new([0; 4096]))), range: 0..4096, offset: 0, write: 0 })?;
    let (_, written) = ring.wait()?;
    if written? == 4096 { Ok(ring.registers_buffers) } else { Err(Errno::IO) }
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    struct Page(Box<[u8]>, u32);

    // SAFETY: a box's contents stay where they are, and nothing writes them; every test numbers each page once.
    #[allow(unsafe_code)]
    unsafe impl Buffer for Page {
        fn bytes(&self) -> &[u8] {
            &self.0
        }

        fn number(&self) -> Option<u32> {
            Some(self.1)
        }
    }

    #[test]
    fn writes_land_where_they_should_and_errors_come_back_with_their_buffers() {
        let Ok(mut ring) = Uring::new(4) else {
            eprintln!("skipped: this kernel offers no io_uring");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let file: OwnedFd = std::fs::File::create_new(dir.path().join("f")).unwrap().into();
        let read_only: OwnedFd = std::fs::File::open(dir.path().join("f")).unwrap().into();
        // Numbers below and beyond what a ring registers.
        let numbers = [0, 7, BUFFERS_MAX - 1, BUFFERS_MAX];
        for (i, &number) in numbers.iter().enumerate() {
            let buffer = Box::new(Page(vec![i as u8 + 1; 100].into(), number));
            ring.submit(&file, Flight { buffer, range: 10..60, offset: i as u64 * 50, write: i }).unwrap();
        }
        let buffer = Box::new(Page(vec![0; 1].into(), BUFFERS_MAX + 1));
        assert_eq!(ring.submit(&file, Flight { buffer, range: 0..1, offset: 0, write: 9 }), Err(Errno::BUSY));
        for _ in numbers {
            let (flight, written) = ring.wait().unwrap();
            assert_eq!(written, Ok(50));
            assert_eq!(flight.buffer.bytes()[0] as usize, flight.write + 1);
        }
        let expected: Vec<u8> = (1..=4).flat_map(|i| [i; 50]).collect();
        assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), expected);
        let buffer = Box::new(Page(vec![0; 10].into(), BUFFERS_MAX + 1));
        ring.submit(&read_only, Flight { buffer, range: 0..10, offset: 0, write: 3 }).unwrap();
        let (flight, written) = ring.wait().unwrap();
        assert_eq!((flight.write, written), (3, Err(Errno::BADF)));
    }

    #[test]
    fn a_probe_succeeds_where_a_ring_does() {
        match Uring::new(1) {
            Ok(ring) => assert!(try_out().is_ok_and(|registers| registers || !ring.registers_buffers)),
            Err(errno) => assert_eq!(try_out(), Err(errno)),
        }
    }

    #[test]
    fn what_the_kernel_does_not_begin_is_taken_back() {
        let Ok(mut ring) = Uring::new(2) else {
            eprintln!("skipped: this kernel offers no io_uring");
            return;
        };
        let can_take_back = ring.ring.submitter().register_sync_cancel(None, types::CancelBuilder::any());
        if ring.patience.is_none() || can_take_back.is_err_and(|error| error.kind() == ErrorKind::InvalidInput) {
            eprintln!("skipped: this kernel's io_uring takes nothing back");
            return;
        }
        ring.patience = Some(Duration::from_millis(50));
        // Without a reader the pipe takes its 64 KiB and then nothing.
        let (_nobody, pipe) = std::io::pipe().unwrap();
        let pipe = OwnedFd::from(pipe);
        let page = |write| Flight {
            buffer: Box::new(Page(vec![0; 1 << 16].into(), BUFFERS_MAX)),
            range: 0..1 << 16,
            offset: 0,
            write,
        };
        ring.submit(&pipe, page(0)).unwrap();
        assert_eq!(ring.wait().unwrap().1, Ok(1 << 16));
        ring.submit(&pipe, page(1)).unwrap();
        let (flight, written) = ring.wait().unwrap();
        assert_eq!((flight.write, flight.buffer.bytes().len(), written), (1, 1 << 16, Err(Errno::TIMEDOUT)));
    }
}
