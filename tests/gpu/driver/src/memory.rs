//! Device memory that no program can touch, host memory that is locked, and copies between them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::DEVICES;
use crate::answer::{ALREADY_REGISTERED, Answer, Code, ILLEGAL_ADDRESS, INVALID_VALUE, NOT_REGISTERED, get, put};

/// Device memory begins here: addresses that no process can have, so that touching them ends the program.
const DEVICE_BASE: usize = 1 << 60;
const BYTES_PER_DEVICE: usize = 1 << 48;

/// Allocations begin at multiples of this, as a device's do.
const ALIGNMENT: usize = 512;

/// What memory holds that a copy will write, or that is new.
const RUBBISH: u8 = 0xdb;

#[derive(Default)]
pub(crate) struct Memory {
    allocated: BTreeMap<usize, Vec<u8>>,
    /// Those of them that the driver was asked for.
    given: BTreeSet<usize>,
    used: [usize; DEVICES as usize],
    registered: BTreeMap<usize, usize>,
    /// Whether all host memory counts as locked.
    is_all_locked: bool,
    /// Host memory that copies have yet to read or write.
    in_flight: Vec<Range<usize>>,
}

fn is_device(address: usize) -> bool {
    address >= DEVICE_BASE
}

/// Rows of bytes, each a pitch behind the one before.
#[derive(Clone)]
pub(crate) struct Copy {
    dst: usize,
    dst_pitch: usize,
    src: usize,
    src_pitch: usize,
    width: usize,
    height: usize,
}

impl Copy {
    pub(crate) fn flat(dst: usize, src: usize, bytes: usize) -> Copy {
        Copy { dst, dst_pitch: bytes, src, src_pitch: bytes, width: bytes, height: 1 }
    }

    /// What a `CUDA_MEMCPY2D` at that address asks for.
    pub(crate) fn pitched(address: usize) -> Result<Copy, Code> {
        const UNIFIED: usize = 4;
        let words: [usize; 16] = get(address)?;
        let [_, _, src_type, _, src, _, src_pitch, _, _, dst_type, _, dst, _, dst_pitch, width, height] = words;
        let is_unified = [src_type, dst_type].iter().all(|kind| *kind as u32 as usize == UNIFIED);
        if !is_unified || width == 0 || height == 0 || src_pitch < width || dst_pitch < width {
            return Err(INVALID_VALUE);
        }
        Ok(Copy { dst, dst_pitch, src, src_pitch, width, height })
    }

    fn dst_range(&self) -> Range<usize> {
        self.dst..self.dst + (self.height - 1) * self.dst_pitch + self.width
    }

    fn src_range(&self) -> Range<usize> {
        self.src..self.src + (self.height - 1) * self.src_pitch + self.width
    }

    /// The side of the host, and whether it is written.
    fn host(&self) -> Option<(Range<usize>, bool)> {
        if !is_device(self.dst) {
            Some((self.dst_range(), true))
        } else {
            (!is_device(self.src)).then(|| (self.src_range(), false))
        }
    }
}

impl Memory {
    /// Memory that begins `skew` bytes behind an aligned address.
    pub(crate) fn allocate(&mut self, bytes: usize, skew: usize, device: usize) -> usize {
        let used = &mut self.used[device];
        let address = DEVICE_BASE + device * BYTES_PER_DEVICE + *used + skew;
        // Never used again, and something lies between: no neighbour hides a copy that is too long.
        *used += (skew + bytes + 2 * ALIGNMENT).next_multiple_of(ALIGNMENT);
        self.allocated.insert(address, vec![0; bytes]);
        address
    }

    pub(crate) fn free(&mut self, address: usize) -> Answer {
        self.allocated.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }

    /// Memory that the driver is asked for.
    pub(crate) fn give(&mut self, bytes: usize, device: usize) -> usize {
        let address = self.allocate(bytes, 0, device);
        self.allocated.insert(address, vec![RUBBISH; bytes]);
        self.given.insert(address);
        address
    }

    pub(crate) fn take_back(&mut self, address: usize) -> Answer {
        if !self.given.remove(&address) {
            return Err(INVALID_VALUE);
        }
        self.free(address)
    }

    /// Allocations that the driver was asked for.
    pub(crate) fn given(&self) -> usize {
        self.given.len()
    }

    /// The bytes of a device's memory.
    pub(crate) fn bytes(&mut self, range: Range<usize>) -> Result<&mut [u8], Code> {
        let (start, allocation) = self.allocated.range_mut(..=range.start).next_back().ok_or(INVALID_VALUE)?;
        allocation.get_mut(range.start - start..range.end - start).ok_or(INVALID_VALUE)
    }

    pub(crate) fn write(&mut self, address: usize, from: usize, bytes: usize) -> Answer {
        load(from, self.bytes(address..address + bytes)?);
        Ok(())
    }

    pub(crate) fn read(&mut self, address: usize, to: usize, bytes: usize) -> Answer {
        store(to, self.bytes(address..address + bytes)?);
        Ok(())
    }

    pub(crate) fn fill(&mut self, address: usize, bytes: usize, value: u8) -> Answer {
        self.bytes(address..address + bytes)?.fill(value);
        Ok(())
    }

    pub(crate) fn attribute(&mut self, value: usize, attribute: u32, address: usize) -> Answer {
        const MEMORY_TYPE: u32 = 2;
        const MEMORY_TYPE_HOST: u32 = 1;
        const MEMORY_TYPE_DEVICE: u32 = 2;
        const IS_MANAGED: u32 = 8;
        const DEVICE_ORDINAL: u32 = 9;
        if attribute == MEMORY_TYPE && !is_device(address) && self.is_registered(&(address..address + 1))? {
            return put(value, MEMORY_TYPE_HOST);
        }
        self.bytes(address..address)?;
        match attribute {
            MEMORY_TYPE => put(value, MEMORY_TYPE_DEVICE),
            IS_MANAGED => put(value, 0u32),
            DEVICE_ORDINAL => put(value, ((address - DEVICE_BASE) / BYTES_PER_DEVICE) as u32),
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn register(&mut self, address: usize, bytes: usize) -> Answer {
        if bytes == 0 || is_device(address) {
            return Err(INVALID_VALUE);
        }
        if self.registered.range(..address + bytes).next_back().is_some_and(|(start, length)| start + length > address)
        {
            return Err(ALREADY_REGISTERED);
        }
        self.registered.insert(address, bytes);
        Ok(())
    }

    /// Whether copies were still under way there.
    pub(crate) fn unregister(&mut self, address: usize) -> Result<bool, Code> {
        let bytes = self.registered.remove(&address).ok_or(NOT_REGISTERED)?;
        Ok(self.in_flight.iter().any(|range| range.start < address + bytes && address < range.end))
    }

    pub(crate) fn lock_all(&mut self, locks: bool) -> Answer {
        self.is_all_locked = locks;
        Ok(())
    }

    pub(crate) fn locked(&self) -> usize {
        self.registered.len()
    }

    /// Whether all of a range is locked; an error when only a part of it is.
    fn is_registered(&self, range: &Range<usize>) -> Result<bool, Code> {
        if self.is_all_locked {
            return Ok(true);
        }
        let Some((start, bytes)) = self.registered.range(..range.end).next_back() else { return Ok(false) };
        match start + bytes {
            end if end <= range.start => Ok(false),
            end if *start <= range.start && range.end <= end => Ok(true),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Takes a copy on: whether it can be made while the caller goes on.
    pub(crate) fn admit(&mut self, copy: &Copy) -> Result<bool, Code> {
        for range in [copy.dst_range(), copy.src_range()] {
            if is_device(range.start) {
                self.bytes(range)?;
            }
        }
        let Some((host, is_written)) = copy.host() else { return Ok(true) };
        let is_asynchronous = self.is_registered(&host)?;
        if is_written {
            for row in 0..copy.height {
                store(copy.dst + row * copy.dst_pitch, &vec![RUBBISH; copy.width]);
            }
        }
        self.in_flight.push(host);
        Ok(is_asynchronous)
    }

    /// Forgets a copy that was taken on.
    pub(crate) fn retire(&mut self, copy: &Copy) {
        let host = copy.host().map(|(host, _)| host);
        if let Some(at) = self.in_flight.iter().position(|range| Some(range) == host.as_ref()) {
            self.in_flight.swap_remove(at);
        }
    }

    /// Makes the copy.
    pub(crate) fn make(&mut self, copy: &Copy) -> Answer {
        let mut row_bytes = vec![0; copy.width];
        for row in 0..copy.height {
            let (dst, src) = (copy.dst + row * copy.dst_pitch, copy.src + row * copy.src_pitch);
            if is_device(src) {
                row_bytes.copy_from_slice(self.bytes(src..src + copy.width).map_err(|_| ILLEGAL_ADDRESS)?);
            } else {
                load(src, &mut row_bytes);
            }
            if is_device(dst) {
                self.bytes(dst..dst + copy.width).map_err(|_| ILLEGAL_ADDRESS)?.copy_from_slice(&row_bytes);
            } else {
                store(dst, &row_bytes);
            }
        }
        Ok(())
    }
}

/// What a program's memory holds now.
pub(crate) fn copied(from: usize, bytes: usize) -> Vec<u8> {
    let mut copied = vec![0; bytes];
    load(from, &mut copied);
    copied
}

#[allow(unsafe_code)]
fn load(from: usize, into: &mut [u8]) {
    // SAFETY: the caller of the driver keeps the memory readable until the copy is done, which is what tests are about.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, into.as_mut_ptr(), into.len()) }
}

#[allow(unsafe_code)]
fn store(to: usize, bytes: &[u8]) {
    // SAFETY: as `load`, for writing.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) }
}
