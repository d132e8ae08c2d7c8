//! Simulates writes in flight to a simulated disk.

use super::{Chance, SimDisk, SimFile};
use crate::disk::{Disk, Errno, Flight, Ring, Sys};

/// Queue of writes in flight to a [`SimDisk`]: each is made when it is waited for, in an order of its own.
pub struct SimRing {
    pub(super) disk: SimDisk,
    pub(super) depth: usize,
    pub(super) flights: Vec<(SimFile, Flight)>,
    pub(super) chance: Chance,
}

impl Ring for SimRing {
    type File = SimFile;

    fn submit(&mut self, file: &SimFile, flight: Flight) -> Sys<()> {
        if self.flights.len() == self.depth {
            return Err(Errno::BUSY);
        }
        self.flights.push((file.clone(), flight));
        Ok(())
    }

    fn wait(&mut self) -> Sys<(Flight, Sys<usize>)> {
        let (file, flight) = self.flights.swap_remove(self.chance.below(self.flights.len()));
        let written = self.disk.pwrite(&file, &flight.buffer.bytes()[flight.range.clone()], flight.offset);
        Ok((flight, written))
    }
}
