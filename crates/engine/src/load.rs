//! A load, from what a rank wants to its memory filled with proven bytes.
//!
//! ```text
//! plan (pure, each rank alone) → agree that all have a plan → read, prove, scatter → agree that all arrived
//! ```
//!
//! Where ranks want the same blocks, the first agreement tells them so, and they read for each other (`shared.rs`).

use std::time::Duration;

use shardfast_format::{DType, Dims, LeafKind, object};
use shardfast_plan::{Piece, Read, Reads, Sharing, Wanted};
use smallvec::smallvec;

use crate::agree::Operation;
use crate::carrier::{Carrier, Handoff};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Kind, Result};
use crate::reader::{self, LIMITS};
use crate::shared::{Ended, GoOn, Neighbours, Shared, Traffic, Trial, Trouble, Troubled};
use crate::sharing::{self, Opening, Terms};
use crate::sink::{Sink, Want};
use crate::stream::saturating_sum;

/// An encoded value of the manifest: the leaf, and which of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueRef {
    /// Index of the leaf in the manifest; an object.
    pub leaf: usize,
    /// Index among [`shardfast_format::Manifest::values`].
    pub value: usize,
}

/// What a load would read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forecast {
    /// Bytes that were asked for.
    pub bytes_wanted: u64,
    /// Bytes that will be read: those, grown to whole checksummed blocks and across small gaps.
    pub bytes_read: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of files that are opened.
    pub files: u64,
}

/// Who reads what several ranks want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One of them, where a trial shows that it is faster than reading again.
    Measured,
    /// One of them, whatever it takes.
    Shared,
    /// Each for itself.
    Plain,
}

/// What a load brought beside its tensors.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    /// The wanted values, encoded, in order.
    pub values: Vec<Vec<u8>>,
    /// What this rank moved for it.
    pub traffic: Traffic,
}

struct Plan {
    tensors: Reads,
    values: Vec<Read>,
    values_bytes: Vec<usize>,
}

impl Checkpoint {
    /// Fills every want's sink and returns the wanted values, encoded, in order. Every rank of the engine must call it.
    ///
    /// # Errors
    /// The same on every rank. `Invalid` when a want does not fit its tensor, before anything is read. `Corrupt` names
    /// the checkpoint, the leaf, the file and the byte range: no unproven byte reaches a sink, but sinks filled before
    /// the failure keep what they got.
    pub fn load(&self, wants: &[Want], values: &[ValueRef], deadline: Duration) -> Result<Vec<Vec<u8>>> {
        self.load_by(Way::Measured, None, wants, values, deadline).map(|loaded| loaded.values)
    }

    /// [`Checkpoint::load`] in a way that is the same on all ranks, and what it moved. Where every rank gives `rounds`,
    /// they carry what ranks send each other, else connections of the ranks' own.
    ///
    /// # Errors
    /// As [`Checkpoint::load`].
    pub fn load_by(
        &self,
        way: Way,
        rounds: Option<Handoff>,
        wants: &[Want],
        values: &[ValueRef],
        deadline: Duration,
    ) -> Result<Loaded> {
        let operation = self.engine.begin(format!("load {}", self.url), deadline);
        let plan = self.plan(wants, values);
        let is_alone = self.engine.world() == 1 || way == Way::Plain;
        let is_little = way == Way::Measured && sharing::data_bytes(&self.manifest) < sharing::REPEATED_BYTES_MIN;
        let wanted = if is_alone || is_little { Vec::new() } else { sharing::wanted(wants, values) };
        let opening = plan.as_ref().map_err(Error::clone).map(|_| Opening {
            bytes: self.bytes_wanted(wants),
            wants: wanted.iter().map(|(wanted, _)| wanted.clone()).collect(),
            has_rounds: rounds.is_some(),
            exchange_bytes: self.engine.staging_bytes() / sharing::EXCHANGE_PART,
            links_max: sharing::links_max(),
        });
        let opened = operation.agree("open", opening, |ranks| sharing::decide(&self.manifest, ranks, way))?;
        let loaded = match (plan, opened.sharing) {
            (Ok(plan), Some(terms)) => {
                self.run_on_terms(&operation, plan, (wants, wanted), (opened.again, terms), rounds)
            }
            (Ok(plan), None) => {
                self.run(plan, wants, opened.again).map(|loaded| (Ended::Done, loaded)).map_err(Trouble::Here)
            }
            (Err(error), _) => Err(Trouble::Here(error)),
        };
        let (ended, loaded) = match loaded {
            Ok((ended, loaded)) => (Ok(ended), Ok(loaded)),
            Err(Trouble::Here(error)) => (Err(error.clone()), Err(error)),
            Err(Trouble::Everywhere(error)) => return Err(error),
        };
        operation.agree("done", ended, |ranks| match ranks.iter().position(|&ended| ended == Ended::Stopped) {
            None => Ok(vec![(); ranks.len()]),
            Some(rank) => Err(Error::internal(format!("rank {rank} heard that another one gave up; none did"))),
        })?;
        loaded
    }

    /// What this rank's [`Checkpoint::load`] would read. Not a byte is read for it, and other ranks need not call it.
    ///
    /// # Errors
    /// `Invalid` when a want does not fit its tensor.
    pub fn forecast(&self, wants: &[Want], values: &[ValueRef]) -> Result<Forecast> {
        let plan = self.plan(wants, values)?;
        let mut forecast =
            Forecast { bytes_wanted: plan.values_bytes.iter().map(|&n| n as u64).sum(), ..Forecast::default() };
        forecast.bytes_wanted += self.bytes_wanted(wants);
        let mut files = std::collections::HashSet::new();
        for read in plan.values.into_iter().chain(plan.tensors) {
            let range = self.files.whole_blocks(read.file, read.offset..read.offset + read.bytes);
            forecast.bytes_read += range.end - range.start;
            forecast.reads += 1;
            files.insert(read.file);
        }
        forecast.files = files.len() as u64;
        Ok(forecast)
    }

    /// Fills every want's sink on this rank alone: nothing is agreed with the others.
    pub(crate) fn load_alone(&self, wants: &[Want], values: &[ValueRef]) -> Result<Vec<Vec<u8>>> {
        self.run(self.plan(wants, values)?, wants, false).map(|loaded| loaded.values)
    }

    /// Of tensors.
    fn bytes_wanted(&self, wants: &[Want]) -> u64 {
        let bytes = |want: &Want| match self.manifest.leaf(want.leaf).kind {
            LeafKind::Tensor { dtype, .. } => want.region.numel() * dtype.size_bytes(),
            _ => 0,
        };
        saturating_sum(wants.iter().map(bytes))
    }

    fn plan(&self, wants: &[Want], values: &[ValueRef]) -> Result<Plan> {
        let planned: Vec<_> =
            wants.iter().map(|want| shardfast_plan::Want { leaf: want.leaf, region: want.region.clone() }).collect();
        let tensors = shardfast_plan::load(&self.manifest, &planned, LIMITS)?;
        let mut plan = Plan { tensors, values: Vec::new(), values_bytes: Vec::new() };
        for (i, value) in values.iter().enumerate() {
            let is_object =
                value.leaf < self.manifest.len() && matches!(self.manifest.leaf(value.leaf).kind, LeafKind::Object);
            let extent = is_object.then(|| self.manifest.values(value.leaf).nth(value.value)).flatten();
            let (_, extent) = extent
                .ok_or_else(|| Error::invalid(format!("{}: there is no value {value:?} in its manifest", self.url)))?;
            self.expect_value_size(value.leaf, extent.bytes)?;
            plan.values_bytes.push(extent.bytes as usize);
            let mut at = 0;
            while at < extent.bytes {
                let bytes = (extent.bytes - at).min(LIMITS.read_max_bytes);
                let piece = Piece {
                    want: (wants.len() + i) as u32,
                    src: extent.offset + at,
                    lengths: smallvec![bytes],
                    src_strides: smallvec![1],
                    dst_offsets: Dims::from_slice(&[at]),
                    span_bytes: bytes,
                };
                plan.values.push(Read { file: extent.file, offset: piece.src, bytes, pieces: vec![piece] });
                at += bytes;
            }
        }
        plan.values = coalesced(plan.values);
        Ok(plan)
    }

    /// Refuses a value that is larger than any that is decoded, before there is memory for it.
    fn expect_value_size(&self, leaf: usize, bytes: u64) -> Result<()> {
        if bytes <= object::BYTES_MAX {
            return Ok(());
        }
        let (url, leaf, most) = (&self.url, self.manifest.leaf(leaf), object::BYTES_MAX);
        let (key, name) = (leaf.key, leaf.name);
        let what = format!("{url}: {key}/{name} is a value of {bytes} bytes: expected at most {most}");
        Err(Error::new(Kind::Unsupported, what))
    }

    fn run(&self, plan: Plan, wants: &[Want], again: bool) -> Result<Loaded> {
        let mut values: Vec<Vec<u8>> = plan.values_bytes.iter().map(|&bytes| vec![0; bytes]).collect();
        let value_sinks = value_sinks(&mut values)?;
        let sinks: Vec<&Sink> = wants.iter().map(|want| &want.sink).chain(&value_sinks).collect();
        let reads = plan.values.into_iter().chain(plan.tensors);
        let bytes_read = reader::run(&self.files, reads, &sinks, &self.engine.staging, again)?;
        drop(value_sinks);
        Ok(Loaded { values, traffic: Traffic { bytes_read, ..Traffic::default() } })
    }

    /// [`Checkpoint::run_shared`], after which every rank has been asked whether to go on exactly if that was to be.
    fn run_on_terms(
        &self,
        operation: &Operation,
        plan: Plan,
        wanted: (&[Want], Vec<(Wanted, Vec<usize>)>),
        (again, mut terms): (bool, Terms),
        rounds: Option<Handoff>,
    ) -> Troubled<(Ended, Loaded)> {
        let mut asked = false;
        let ask = |trial: Result<Trial>| {
            let answer = operation.agree("go on", trial, |trials| Ok(vec![Trial::is_worth_it(&trials); trials.len()]));
            answer.map_err(Trouble::Everywhere)
        };
        let mut go_on = |trial| {
            asked = true;
            ask(Ok(trial))
        };
        let loaded = self.run_shared(operation, plan, wanted, (again, &mut terms), rounds, &mut go_on);
        match &loaded {
            _ if asked || !terms.is_measured => loaded,
            Ok(_) => ask(Ok(Trial::default())).and(loaded),
            Err(Trouble::Here(error)) => ask(Err(error.clone())).and(loaded),
            Err(Trouble::Everywhere(_)) => loaded,
        }
    }

    /// Reads with others, on their terms. `wanted` has the places among `wants` and values of each thing wanted.
    fn run_shared(
        &self,
        operation: &Operation,
        plan: Plan,
        (wants, wanted): (&[Want], Vec<(Wanted, Vec<usize>)>),
        (again, terms): (bool, &mut Terms),
        rounds: Option<Handoff>,
        go_on: GoOn<'_>,
    ) -> Troubled<(Ended, Loaded)> {
        let (names, places): (Vec<Wanted>, Vec<Vec<usize>>) = wanted.into_iter().unzip();
        let has_peers = !terms.common.sets.is_empty();
        let rank = self.engine.rank();
        let sharing = has_peers.then(|| Sharing::new(&self.manifest, rank, &names, &terms.common, terms.chunk_blocks));
        let sharing = sharing.transpose().map_err(Error::from);
        let (carrier, neighbours): (Box<dyn Carrier>, _) = match rounds {
            Some(rounds) if terms.by_rounds => {
                rounds.announce();
                (Box::new(rounds), Neighbours::default())
            }
            _ => {
                let known = sharing.as_ref().map_err(Error::clone);
                let known = known.map(|sharing| {
                    // Whoever has nothing in common with others has nothing against it either.
                    let is_cached = |_: &Sharing| self.files.are_cached(|| plan.tensors.spans());
                    let peers = sharing.as_ref().map_or(Vec::new(), Sharing::peers);
                    (peers, terms.is_measured && sharing.as_ref().is_none_or(is_cached))
                });
                let Some(connected) = sharing::connect(operation, known, terms.message_bytes_max)? else {
                    terms.is_measured = false;
                    return Ok((Ended::Done, self.run(plan, wants, again)?));
                };
                // Where no byte passes a network there is none to be slower than the storage.
                terms.is_measured &= !connected.is_in_memory;
                (Box::new(connected.peers), connected.neighbours)
            }
        };
        let Some(sharing) = sharing? else {
            drop(carrier);
            if terms.is_measured {
                go_on(Trial::default())?;
            }
            return Ok((Ended::Done, self.run(plan, wants, false)?));
        };
        let mut values: Vec<Vec<u8>> = plan.values_bytes.iter().map(|&bytes| vec![0; bytes]).collect();
        let value_sinks = value_sinks(&mut values)?;
        let sink =
            |&place: &usize| wants.get(place).map_or_else(|| &value_sinks[place - wants.len()], |want| &want.sink);
        let shared = Shared {
            files: &self.files,
            manifest: &self.manifest,
            staging: &self.engine.staging,
            sharing: &sharing,
            sinks: places.iter().map(|places| places.iter().map(sink).collect()).collect(),
            link_bytes: terms.link_bytes,
            neighbours,
        };
        let go_on: Option<GoOn<'_>> = if terms.is_measured { Some(go_on) } else { None };
        let (ended, traffic) = shared.run(carrier, go_on)?;
        drop(value_sinks);
        Ok((ended, Loaded { values, traffic }))
    }
}

#[allow(unsafe_code)]
fn value_sinks(values: &mut [Vec<u8>]) -> Result<Vec<Sink>> {
    let sink = |bytes: &mut Vec<u8>| {
        // SAFETY: the callers neither move nor look at the values until the reads are over and the sinks dropped, and
        // each vector has one sink.
        unsafe { Sink::new(bytes.as_mut_ptr() as usize, &[bytes.len() as u64], &[1], DType::U8.size_bytes()) }
    };
    values.iter_mut().map(sink).collect()
}

/// The same pieces in fewer reads: a state may hold thousands of small values side by side.
fn coalesced(mut reads: Vec<Read>) -> Vec<Read> {
    reads.sort_by_key(|read| (read.file, read.offset));
    let mut out: Vec<Read> = Vec::new();
    for read in reads {
        let end = read.offset + read.bytes;
        match out.last_mut() {
            Some(last)
                if last.file == read.file
                    && read.offset <= last.offset + last.bytes + LIMITS.gap_max_bytes
                    && end - last.offset <= LIMITS.read_max_bytes =>
            {
                last.bytes = last.bytes.max(end - last.offset);
                last.pieces.extend(read.pieces);
            }
            _ => out.push(read),
        }
    }
    out
}
