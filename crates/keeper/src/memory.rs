//! Makes the memory of objects, seals it, and reads it.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use crc_fast::{CrcAlgorithm, Digest};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create, sendfile};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};
use shardfast_store::keeper::wire::{Carrier, FINISHED, Role};

/// Bytes of an object that are read at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Memory of one object, without a name in any file system. It lives as long as a process has a descriptor of it.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    bytes_at: Place,
    /// CRC-64/NVME of the bytes, since they were received, sent or read for the first time.
    crc: Arc<OnceLock<u64>>,
    pub(crate) bytes: u64,
    pub(crate) role: Role,
}

/// Place of an object's bytes.
#[derive(Clone, Debug)]
enum Place {
    /// Pages of a descriptor, which other processes map.
    Shared(Arc<OwnedFd>),
    /// Bytes of a small object. There are many, and a process has few descriptors.
    Own(Arc<[u8]>),
}

impl Memory {
    /// Makes memory whose length does not change any more. It takes no page before its bytes are written.
    pub(crate) fn new(bytes: u64, role: Role) -> Result<Memory, Errno> {
        let descriptor = memfd_create("shardfast-keeper", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&descriptor, bytes)?;
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Memory { bytes_at: Place::Shared(Arc::new(descriptor)), crc: Arc::default(), bytes, role })
    }

    /// Makes the memory of a small object.
    pub(crate) fn of(bytes: &[u8], role: Role) -> Memory {
        Memory { bytes_at: Place::Own(bytes.into()), crc: Arc::default(), bytes: bytes.len() as u64, role }
    }

    /// Returns the same bytes where other processes can map them.
    pub(crate) fn shared(&self) -> Result<Memory, Errno> {
        let Place::Own(bytes) = &self.bytes_at else { return Ok(self.clone()) };
        let shared = Memory::new(self.bytes, self.role)?;
        shared.write(bytes, 0)?;
        shared.seal()?;
        Ok(shared)
    }

    /// Writes bytes at an offset of memory that is not sealed.
    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Result<(), Errno> {
        let Place::Shared(descriptor) = &self.bytes_at else { return Err(Errno::PERM) };
        let mut done = 0;
        while done < bytes.len() {
            match retry_on_intr(|| pwrite(descriptor, &bytes[done..], offset + done as u64))? {
                0 => return Err(Errno::NOSPC),
                written => done += written,
            }
        }
        Ok(())
    }

    /// Returns the bytes of a small object.
    pub(crate) fn read(&self) -> Result<Vec<u8>, Errno> {
        let mut bytes = Vec::with_capacity(self.bytes as usize);
        self.read_all(|piece, _| {
            bytes.extend_from_slice(piece);
            Ok::<(), Errno>(())
        })?;
        Ok(bytes)
    }

    /// Reads all bytes piece by piece, each with its offset; returns their CRC-64/NVME.
    pub(crate) fn read_all<E: From<Errno>>(&self, mut each: impl FnMut(&[u8], u64) -> Result<(), E>) -> Result<u64, E> {
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        let descriptor = match &self.bytes_at {
            Place::Shared(descriptor) => descriptor,
            Place::Own(bytes) => {
                crc.update(bytes);
                each(bytes, 0)?;
                return Ok(crc.finalize());
            }
        };
        let (mut piece, mut done) = (vec![0; PIECE_BYTES.min(self.bytes as usize)], 0);
        while done < self.bytes {
            let bytes = piece.len().min((self.bytes - done) as usize);
            let read = retry_on_intr(|| pread(descriptor, &mut piece[..bytes], done))?;
            if read == 0 {
                return Err(Errno::IO.into());
            }
            crc.update(&piece[..read]);
            each(&piece[..read], done)?;
            done += read as u64;
        }
        Ok(crc.finalize())
    }

    /// Returns the CRC of the bytes as they were first, which is the given one unless another was noted before.
    pub(crate) fn noted_crc(&self, crc: u64) -> u64 {
        *self.crc.get_or_init(|| crc)
    }

    /// Returns memory with other bytes and the CRC of these, as after a fault of the memory.
    #[cfg(test)]
    pub(crate) fn with_bytes(&self, bytes: &[u8]) -> Memory {
        Memory { crc: Arc::clone(&self.crc), ..Memory::of(bytes, self.role) }
    }

    /// Sends a range to another machine, without a copy.
    pub(crate) fn send(&self, link: &TcpStream, offset: u64, bytes: u64) -> io::Result<()> {
        let (mut at, end) = (offset, offset + bytes);
        let descriptor = match &self.bytes_at {
            Place::Shared(descriptor) => descriptor,
            Place::Own(own) => return link.put(&own[at as usize..end as usize]),
        };
        while at < end {
            let left = (end - at) as usize;
            if retry_on_intr(|| sendfile(link, descriptor, Some(&mut at), left))? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    /// Seals the bytes: nothing changes them any more.
    pub(crate) fn seal(&self) -> Result<(), Errno> {
        match &self.bytes_at {
            Place::Shared(descriptor) => fcntl_add_seals(descriptor, FINISHED),
            Place::Own(_) => Ok(()),
        }
    }

    /// Returns the descriptor of memory that is [shared](Memory::shared).
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.bytes_at {
            Place::Shared(descriptor) => Some(descriptor.as_fd()),
            Place::Own(_) => None,
        }
    }

    /// Returns whether it is the same memory, not only one with the same bytes.
    pub(crate) fn is(&self, other: &Memory) -> bool {
        match (&self.bytes_at, &other.bytes_at) {
            (Place::Shared(own), Place::Shared(other)) => Arc::ptr_eq(own, other),
            (Place::Own(own), Place::Own(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }

    /// Returns the bytes that are declared and take no page yet.
    pub(crate) fn unwritten(&self) -> u64 {
        let Place::Shared(descriptor) = &self.bytes_at else { return 0 };
        let written = fstat(descriptor).map_or(0, |stat| stat.st_blocks.unsigned_abs() * 512);
        self.bytes.saturating_sub(written)
    }
}
