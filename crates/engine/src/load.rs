//! Loads: from a rank's wants to its memory filled with verified bytes.
//!
//! ```text
//! open → match → plan → agree → read → done
//! ```
//! [`checkpoint`](crate::checkpoint) opens and matches. Each rank plans its reads alone. Then the ranks agree that all
//! have a plan, and where the bytes come from: from storage, or from a peer that wants the same
//! (`peers.rs`). Each rank reads, verifies and scatters; in the end all agree that every rank has everything.

use std::time::Duration;

use shardfast_transfer::error::Result;
use shardfast_transfer::events::{Event, Phase};
use shardfast_transfer::sink::Want;

use crate::checkpoint::Checkpoint;
use crate::peers::carrier::Carrier;
use crate::peers::{self, PeerReads};
use crate::reads::{Loaded, ValueRef};

impl Checkpoint {
    /// Fills every want's sink and returns the wanted values, encoded, in order. Every rank of the engine must call it.
    ///
    /// # Errors
    /// The same on every rank. `Invalid` when a want does not fit its tensor, before anything is read. `Corrupt` names
    /// the checkpoint, the leaf, the file and the byte range: no unverified byte reaches a sink, but sinks filled
    /// before the failure keep their data.
    pub fn load(&self, wants: &[Want], values: &[ValueRef], deadline: Duration) -> Result<Vec<Vec<u8>>> {
        self.load_by(PeerReads::Auto, None, wants, values, deadline).map(|loaded| loaded.values)
    }

    /// [`Checkpoint::load`] with `peer_reads`, the same on all ranks; returns also what it moved. `carrier` transports
    /// messages between the ranks; `None` on all of them: connections of their own.
    ///
    /// # Errors
    /// As [`Checkpoint::load`].
    pub fn load_by(
        &self,
        peer_reads: PeerReads,
        carrier: Option<Box<dyn Carrier>>,
        wants: &[Want],
        values: &[ValueRef],
        deadline: Duration,
    ) -> Result<Loaded> {
        let operation = self.engine.begin(format!("load {}", self.url), deadline);
        let plan = self.plan(wants, values);
        self.ended(Phase::Planned);
        let route = peers::agree_route(&operation, self, peer_reads, &plan, (wants, values), carrier);
        let route = self.noted(route)?;
        self.ended(Phase::Agreed);
        let values_bytes = plan.iter().flat_map(|plan| &plan.values_bytes).map(|&bytes| bytes as u64).sum::<u64>();
        self.files.moves(&Event::Expects { bytes: values_bytes.saturating_add(self.bytes_wanted(wants)) });
        let outcome = route.read(&operation, self, plan, wants);
        self.ended(Phase::Read);
        self.noted(peers::agree_done(&operation, outcome))
    }
}
