//! Makes the memory of objects, seals it, and reads it.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use crc_fast::{CrcAlgorithm, Digest};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create, sendfile};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};
use shardfast_store::keeper::wire::{FINISHED, Role};

/// Bytes of an object that are read at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Memory of one object, without a name in any file system. It lives as long as a process has a descriptor of it.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    descriptor: Arc<OwnedFd>,
    /// CRC-64/NVME of the bytes, since they were received, sent or read for the first time.
    crc: Arc<OnceLock<u64>>,
    pub(crate) bytes: u64,
    pub(crate) role: Role,
}

impl Memory {
    /// Makes memory whose length does not change any more. It takes no page before its bytes are written.
    pub(crate) fn new(bytes: u64, role: Role) -> Result<Memory, Errno> {
        let descriptor = memfd_create("shardfast-keeper", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&descriptor, bytes)?;
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Memory { descriptor: Arc::new(descriptor), crc: Arc::default(), bytes, role })
    }

    /// Makes the memory of a small object.
    pub(crate) fn of(bytes: &[u8], role: Role) -> Result<Memory, Errno> {
        let memory = Memory::new(bytes.len() as u64, role)?;
        let mut done = 0;
        while done < bytes.len() {
            done += retry_on_intr(|| pwrite(&*memory.descriptor, &bytes[done..], done as u64))?;
        }
        memory.seal()?;
        Ok(memory)
    }

    /// Returns the bytes of a small object.
    pub(crate) fn read(&self) -> Result<Vec<u8>, Errno> {
        let (mut bytes, mut done) = (vec![0; self.bytes as usize], 0);
        while done < bytes.len() {
            match retry_on_intr(|| pread(&*self.descriptor, &mut bytes[done..], done as u64))? {
                0 => return Err(Errno::IO),
                read => done += read,
            }
        }
        Ok(bytes)
    }

    /// Reads all bytes piece by piece, each with its offset; returns their CRC-64/NVME.
    pub(crate) fn read_all<E: From<Errno>>(&self, mut each: impl FnMut(&[u8], u64) -> Result<(), E>) -> Result<u64, E> {
        let (mut piece, mut done, mut crc) = (vec![0; PIECE_BYTES], 0, Digest::new(CrcAlgorithm::Crc64Nvme));
        while done < self.bytes {
            let bytes = piece.len().min((self.bytes - done) as usize);
            let read = retry_on_intr(|| pread(&*self.descriptor, &mut piece[..bytes], done))?;
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
        Memory { crc: Arc::clone(&self.crc), ..Memory::of(bytes, self.role).expect("memory of a test") }
    }

    /// Sends a range to another machine, without a copy.
    pub(crate) fn send(&self, link: &TcpStream, offset: u64, bytes: u64) -> io::Result<()> {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let left = (end - at) as usize;
            if retry_on_intr(|| sendfile(link, &*self.descriptor, Some(&mut at), left))? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    /// Seals the bytes: nothing changes them any more.
    pub(crate) fn seal(&self) -> Result<(), Errno> {
        fcntl_add_seals(&*self.descriptor, FINISHED)
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    pub(crate) fn is(&self, other: &Memory) -> bool {
        Arc::ptr_eq(&self.descriptor, &other.descriptor)
    }

    /// Returns the bytes that are declared and take no page yet.
    pub(crate) fn unwritten(&self) -> u64 {
        let written = fstat(&*self.descriptor).map_or(0, |stat| stat.st_blocks.unsigned_abs() * 512);
        self.bytes.saturating_sub(written)
    }
}
