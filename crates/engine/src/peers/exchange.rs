//! Shares reads between ranks: one of the ranks that want a block reads and verifies it, and passes it on while it
//! reads the next ones.
//!
//! Rounds go in lockstep between any two ranks with a block in common. In each a rank reads some of its chunks, takes
//! its own pieces of them, packs those of others, and swaps one message with each of them. Bytes for a rank of the same
//! machine are packed into shared memory, from which it copies them; bytes for other ranks are sent in the messages.
//! Threads work across rounds: while a round is swapped, the next ones are read and earlier ones are copied to their
//! destinations.
//!
//! A slot of shared memory is in use until all its readers have reported in a later message that they are done. Before
//! a rank sends its message of round *k* it is done with everything up to round *k - 2*; so a rank with slots for four
//! rounds never deadlocks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shardfast_format::Manifest;
use shardfast_plan::{Chunk, Piece, Sharing};
use shardfast_transfer::error::{Error, Kind, Result};
use shardfast_transfer::events::Event;
use shardfast_transfer::host::{pack, row_major_strides};
use shardfast_transfer::interrupt;
use shardfast_transfer::provider::Fences;
use shardfast_transfer::reader::{Files, Span};
use shardfast_transfer::sink::Sink;
use shardfast_transfer::staging::shared::{SharedMemory, SharedSlot, View};
use shardfast_transfer::staging::{SLOT_BYTES, Staging};

use crate::peers::carrier::{Carrier, Message};
use crate::reads::Traffic;

mod message;
mod pool;
mod requests;
mod swap;

use message::{ABANDONED, Body, LAST, Segment, carried, head, parse, shown};
use pool::{Pool, Queue};
pub(crate) use requests::slots_in_request;
use requests::{Request, Task, cores};
use swap::Swap;

/// Rounds that are read while another one is swapped.
const ROUNDS_AHEAD: usize = 2;

/// Requests that are announced before they are made, when there are no rounds.
const ANNOUNCED: usize = 32;

/// Alignment of a segment's pieces in a slot: a cache line.
const SHOWN_ALIGNMENT: usize = 64;

/// A shared load of one rank.
pub(crate) struct Shared<'a> {
    pub(crate) files: &'a Files,
    pub(crate) manifest: &'a Manifest,
    pub(crate) staging: &'a Arc<Staging>,
    pub(crate) sharing: &'a Sharing,
    /// Destinations of this rank's wants, by the index that [`Piece::want`] has.
    pub(crate) sinks: Vec<Vec<&'a Sink>>,
    /// The most bytes of a message, but for its last segment.
    pub(crate) link_bytes: u64,
    pub(crate) neighbours: Neighbours,
}

/// Ranks that map each other's memory.
#[derive(Default)]
pub(crate) struct Neighbours {
    /// Shared memory of this rank.
    pub(crate) memory: Option<Arc<SharedMemory>>,
    /// The ranks that map it.
    pub(crate) viewers: BTreeSet<u32>,
    /// Shared memory of other ranks that this rank maps.
    pub(crate) views: BTreeMap<u32, View>,
}

/// Outcome of a shared load on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ended {
    /// This rank has everything that it wants.
    Done,
    /// Another rank failed, and reports why.
    Stopped,
}

/// Failure of a shared load.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// This rank failed.
    Here(Error),
    /// All ranks have the same error.
    Everywhere(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Here(error)
    }
}

pub(crate) type Troubled<T> = std::result::Result<T, Trouble>;

#[derive(Default)]
struct Counters {
    read: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    /// Bytes of elements that reached their places.
    arrived: AtomicU64,
}

enum Work {
    /// Read for a round, by its number.
    Read(u64, Request),
    /// Copying a segment of a round to its destinations.
    Place(u64, Segment),
}

enum Worked {
    Read { round: u64, segments: Vec<Packed>, lent: Vec<Lent> },
    Placed { round: u64, returned: Option<(u32, u32)> },
}

/// A slot that others read, with the bytes that each of them takes.
type Lent = (SharedSlot, BTreeMap<u32, u64>);

/// A segment, and the ranks that it is sent to.
type Packed = (Vec<u32>, Arc<Vec<u8>>);

/// Messages to the peers in a round.
#[derive(Default)]
struct Outgoing {
    messages: BTreeMap<u32, Message>,
    /// Requests that are not answered yet.
    missing: usize,
    is_last: bool,
}

impl Shared<'_> {
    /// Fills the sinks. The carrier reaches each of [`Sharing::peers`].
    ///
    /// # Errors
    /// The error of this rank. `Corrupt` names the checkpoint, the leaves, and the file and the byte range, or the rank
    /// from which they came; no unverified byte reaches a sink.
    pub(crate) fn run(&self, carrier: Box<dyn Carrier + '_>) -> Result<(Ended, Traffic)> {
        let counters = Counters::default();
        let queue = Queue::default();
        let interrupt = interrupt::current();
        let work = |work: Work| {
            interrupt::within(interrupt.clone(), || match work {
                Work::Read(round, request) => self.read(round, request, &counters),
                Work::Place(round, segment) => self.place(round, &segment, &counters),
            })
        };
        let ended = std::thread::scope(|scope| {
            let swap = Swap::start(scope, carrier, |took| self.files.moves(&Event::Exchanged { took }));
            let mut course = Course::new(self, Pool::new(scope, &queue, &work), &counters);
            let outcome = course.rounds(&swap);
            if !matches!(outcome, Ok(Ended::Done)) {
                // So that no peer waits for this rank; a failure to send it does not matter here.
                let message = vec![Arc::new(head(ABANDONED, &[]))];
                _ = swap.begin(course.open.iter().map(|&peer| (peer, message.clone())).collect());
                _ = swap.end();
            }
            drop(swap);
            if let Ok(Ended::Done) = outcome {
                course.rest()?;
                self.expect_all(&counters)?;
            }
            outcome
        })?;
        let traffic = Traffic {
            bytes_read: counters.read.into_inner(),
            bytes_received: counters.received.into_inner(),
            bytes_sent: counters.sent.into_inner(),
            is_shared: ended == Ended::Done,
        };
        Ok((ended, traffic))
    }

    /// Makes a request, verifies the bytes, takes this rank's pieces and packs the others'.
    fn read(&self, round: u64, request: Request, counters: &Counters) -> Result<Worked> {
        let Request { span: Span { file, .. }, tasks } = request;
        let ranges: Vec<Range<u64>> = tasks.iter().map(|task| self.range(&task.chunk)).collect();
        let mut slots = self.staging.acquire_many(tasks.len())?;
        let damaged = self.files.read_blocks(file, &ranges, &mut slots)?;
        if let Some(damage) = damaged.first() {
            let leaves = self.files.leaves_in(file, &damage.span);
            return Err(Error::corrupt(format!("{}: {leaves}: {damage}", self.files.place())));
        }
        let (mut segments, mut lent) = (Vec::new(), Vec::new());
        for ((task, range), memory) in tasks.into_iter().zip(ranges).zip(slots) {
            counters.read.fetch_add(range.end - range.start, Ordering::Relaxed);
            let (packed, taken) = self.hand_on(task, range.start, &memory, counters)?;
            segments.extend(packed);
            lent.extend(taken);
        }
        Ok(Worked::Read { round, segments, lent })
    }

    /// Takes this rank's pieces of a chunk and packs the others' from `memory`, which holds the file from `start` on.
    fn hand_on(
        &self,
        task: Task,
        start: u64,
        memory: &[u8],
        counters: &Counters,
    ) -> Result<(Vec<Packed>, Option<Lent>)> {
        let Task { chunk, others, slot } = task;
        let source = |piece: &Piece| {
            let at = (piece.src - start) as usize;
            &memory[at..at + piece.span_bytes as usize]
        };
        let began = Instant::now();
        // Waits before the memory is used again, also after an error.
        let mut fences = Fences::default();
        for piece in self.sharing.own_pieces(chunk.file, chunk.range.clone()) {
            for sink in &self.sinks[piece.want as usize] {
                sink.scatter(&piece.dst_offsets, &piece.lengths, &piece.src_strides, source(&piece), &mut fences)?;
                self.files.moves(&Event::Copied { bytes: piece.bytes() });
            }
            counters.arrived.fetch_add(piece.bytes(), Ordering::Relaxed);
        }
        let packed = self.packed(&chunk, others, slot, source);
        fences.wait()?;
        self.files.moves(&Event::Placed { took: began.elapsed() });
        Ok(packed)
    }

    /// Packs the others' pieces of a chunk: into the slot if they map it and there is room, else into their messages.
    fn packed<'m>(
        &self,
        chunk: &Chunk,
        others: Vec<(Vec<u32>, Vec<Piece>)>,
        mut slot: Option<SharedSlot>,
        source: impl Fn(&Piece) -> &'m [u8],
    ) -> (Vec<Packed>, Option<Lent>) {
        let (mut segments, mut takers, mut used) = (Vec::new(), BTreeMap::new(), 0);
        for (ranks, pieces) in others {
            let bytes = pieces.iter().map(Piece::bytes).sum::<u64>();
            let is_shown = |rank: &u32| self.neighbours.viewers.contains(rank);
            let (near, mut far): (Vec<u32>, Vec<u32>) = ranks.into_iter().partition(is_shown);
            let room = slot.as_mut().and_then(|slot| {
                let number = u64::from(slot.number());
                let room = slot.bytes().get_mut(used..)?.get_mut(..bytes as usize)?;
                Some((number * SLOT_BYTES as u64 + used as u64, room))
            });
            match room.filter(|_| !near.is_empty()) {
                Some((at, room)) => {
                    let mut left = room;
                    for piece in &pieces {
                        pack(&piece.lengths, &piece.src_strides, piece.item_bytes(), source(piece), |run| {
                            let (to, rest) = std::mem::take(&mut left).split_at_mut(run.len());
                            to.copy_from_slice(run);
                            left = rest;
                        });
                    }
                    used = (used + bytes as usize).next_multiple_of(SHOWN_ALIGNMENT);
                    takers.extend(near.iter().map(|&rank| (rank, bytes)));
                    segments.push((near, Arc::new(shown(chunk, at, bytes))));
                }
                None => far.extend(near),
            }
            if !far.is_empty() {
                segments.push((far, Arc::new(carried(chunk, &pieces, &source))));
            }
        }
        (segments, slot.filter(|_| !takers.is_empty()).map(|slot| (slot, takers)))
    }

    /// Copies the verified bytes of a segment to their destinations.
    fn place(&self, round: u64, segment: &Segment, counters: &Counters) -> Result<Worked> {
        let Segment { from, file, chunk, body } = segment;
        let began = Instant::now();
        let failed = |what: String| {
            let (place, leaves) = (self.files.place(), self.files.leaves_in(*file, chunk));
            let path = &self.manifest.files()[*file as usize].path;
            let (start, end) = (chunk.start, chunk.end);
            Error::corrupt(format!(
                "{place}: {leaves}: file {path}, bytes {start}..{end}, as rank {from} sent them: {what}"
            ))
        };
        let (packed, returned) = match body {
            Body::Message { message, bytes, crc } => {
                let mismatch = |found| failed(format!("expected CRC-64 {crc:016x}, found {found:016x}"));
                (Body::verified(message, bytes, *crc).map_err(mismatch)?, None)
            }
            Body::Shared { at, bytes } => {
                let view = self.neighbours.views.get(from);
                let packed = view.and_then(|view| view.bytes(*at, *bytes));
                let unseen = || failed(format!("{bytes} bytes at {at} are outside of the memory that this rank maps"));
                (packed.ok_or_else(unseen)?, Some((*from, (at / SLOT_BYTES as u64) as u32)))
            }
        };
        let pieces = self.sharing.own_pieces(*file, chunk.clone());
        let expected = pieces.iter().map(Piece::bytes).sum::<u64>();
        if expected != packed.len() as u64 {
            return Err(failed(format!("expected {expected} bytes for this rank, found {}", packed.len())));
        }
        let mut fences = Fences::default();
        let mut at = 0;
        for piece in &pieces {
            let source = &packed[at..at + piece.bytes() as usize];
            let strides = row_major_strides(&piece.lengths, piece.item_bytes());
            for sink in &self.sinks[piece.want as usize] {
                sink.scatter(&piece.dst_offsets, &piece.lengths, &strides, source, &mut fences)?;
                self.files.moves(&Event::Copied { bytes: piece.bytes() });
            }
            at += source.len();
        }
        fences.wait()?;
        self.files.moves(&Event::Placed { took: began.elapsed() });
        counters.arrived.fetch_add(expected, Ordering::Relaxed);
        Ok(Worked::Placed { round, returned })
    }

    /// Checks that every wanted byte has arrived exactly once.
    fn expect_all(&self, counters: &Counters) -> Result<()> {
        let expected: u64 = self.sharing.bytes();
        let arrived = counters.arrived.load(Ordering::Relaxed);
        if arrived == expected {
            return Ok(());
        }
        Err(Error::internal(format!("{}: expected {expected} bytes, received {arrived}", self.files.place())))
    }
}

/// A shared load on its way from round to round.
struct Course<'s, 'scope, 'env> {
    shared: &'s Shared<'s>,
    pool: Pool<'scope, 'env, Work, Worked>,
    counters: &'s Counters,
    /// Chunks that this rank reads for others.
    chunks: Peekable<Box<dyn Iterator<Item = Chunk> + 's>>,
    /// Rounds that were swapped.
    round: u64,
    /// The next rounds that are being prepared.
    ahead: VecDeque<Outgoing>,
    /// `true` if they, and earlier rounds, hold all that this rank reads for others.
    is_planned: bool,
    /// The ranks that expect another message.
    open: BTreeSet<u32>,
    /// Segments that are not in their places yet, by the round in which they came.
    unplaced: BTreeMap<u64, usize>,
    /// Slots that others read, and which ranks do.
    lent: BTreeMap<u32, (SharedSlot, BTreeSet<u32>)>,
    /// Others' slots with which this rank is done.
    returns: BTreeMap<u32, Vec<u32>>,
}

impl<'s, 'scope, 'env> Course<'s, 'scope, 'env> {
    fn new(shared: &'s Shared<'s>, pool: Pool<'scope, 'env, Work, Worked>, counters: &'s Counters) -> Self {
        let sharing = shared.sharing;
        let is_own = move |chunk: &Chunk| chunk.wanters.len() > 1 && chunk.reader == sharing.rank();
        let chunks: Box<dyn Iterator<Item = Chunk> + 's> = Box::new(sharing.chunks().filter(is_own));
        Course {
            shared,
            pool,
            counters,
            chunks: chunks.peekable(),
            round: 0,
            ahead: VecDeque::new(),
            is_planned: false,
            open: shared.sharing.peers().into_iter().collect(),
            unplaced: BTreeMap::new(),
            lent: BTreeMap::new(),
            returns: BTreeMap::new(),
        }
    }

    /// Swaps messages until no rank expects another one.
    fn rounds(&mut self, swap: &Swap) -> Result<Ended> {
        self.plan()?;
        loop {
            if self.open.is_empty() {
                self.finish()?;
                return Ok(Ended::Done);
            }
            self.plan()?;
            while self.ahead.front().is_some_and(|round| round.missing > 0) || self.is_behind() {
                self.settle()?;
            }
            let rest = Outgoing { is_last: true, ..Outgoing::default() };
            let Outgoing { messages, is_last, .. } = self.ahead.pop_front().unwrap_or(rest);
            self.round += 1;
            swap.begin(self.addressed(messages, is_last))?;
            let planned = self.plan();
            let is_abandoned = self.take(swap.end()?, is_last);
            // This rank's own error is reported, even if others failed, too.
            planned?;
            if is_abandoned? {
                return Ok(Ended::Stopped);
            }
        }
    }

    /// Plans rounds and begins to read for them.
    fn plan(&mut self) -> Result<()> {
        while self.ahead.len() < ROUNDS_AHEAD && !self.is_planned {
            let free = self.shared.neighbours.memory.as_ref().map_or(usize::MAX, |memory| memory.free_slots());
            if free < self.round_slots() && !self.ahead.is_empty() {
                return Ok(());
            }
            let round = self.round + self.ahead.len() as u64 + 1;
            let (requests, is_last) = self.next_requests();
            self.is_planned = is_last;
            self.ahead.push_back(Outgoing { missing: requests.len(), is_last, ..Outgoing::default() });
            for request in requests {
                let threads = self.shared.announce(&request)?;
                self.pool.submit(Work::Read(round, request), false, threads);
            }
        }
        Ok(())
    }

    /// Slots that one round takes at most: shared memory has enough for four rounds.
    fn round_slots(&self) -> usize {
        let needs = self.shared.files.needs();
        let most = self.shared.neighbours.memory.as_ref().map_or(0, |memory| memory.slots() / 4);
        most.min(needs.in_flight * slots_in_request(needs))
    }

    /// Returns the requests of the next round, and whether it is the last one.
    fn next_requests(&mut self) -> (Vec<Request>, bool) {
        let shared = self.shared;
        let Shared { sharing, link_bytes, neighbours, .. } = shared;
        let (mut requests, mut slots, slots_max) = (Vec::new(), 0, self.round_slots());
        let mut bytes_to: BTreeMap<u32, u64> = BTreeMap::new();
        // A request that does not fit as a whole waits for the next round.
        let last_begin = slots_max.saturating_sub(slots_in_request(shared.files.needs()));
        let fits = |chunk: &Chunk, slots: usize, requests: &[Request]| {
            slots <= last_begin || slots < slots_max && shared.continued(requests, chunk).is_some()
        };
        while let Some(chunk) = self.chunks.next_if(|chunk| fits(chunk, slots, &requests)) {
            let others = sharing.pieces_of_others(&chunk);
            let is_shown = |rank: &u32| neighbours.viewers.contains(rank);
            let mut is_full = false;
            for (ranks, pieces) in &others {
                let bytes = pieces.iter().map(Piece::bytes).sum::<u64>();
                for &rank in ranks.iter().filter(|rank| !is_shown(rank)) {
                    let to = bytes_to.entry(rank).or_default();
                    *to += bytes;
                    // The next chunk may be as large as this one, which would be too much.
                    is_full |= *to + (chunk.range.end - chunk.range.start) > *link_bytes;
                }
            }
            let is_near = others.iter().any(|(ranks, _)| ranks.iter().any(is_shown));
            let slot = neighbours.memory.as_ref().filter(|_| is_near).and_then(SharedMemory::take);
            slots += usize::from(slot.is_some());
            shared.request(Task { chunk, others, slot }, &mut requests);
            if is_full {
                break;
            }
        }
        (requests, self.chunks.peek().is_none())
    }

    /// Returns the messages of a round, with their heads.
    fn addressed(&mut self, mut segments: BTreeMap<u32, Message>, is_last: bool) -> BTreeMap<u32, Message> {
        let mut messages = BTreeMap::new();
        for &peer in &self.open {
            let returned = self.returns.remove(&peer).unwrap_or_default();
            let mut message = vec![Arc::new(head(if is_last { LAST } else { 0 }, &returned))];
            message.extend(segments.remove(&peer).unwrap_or_default());
            let bytes = message.iter().map(|piece| piece.len() as u64).sum::<u64>();
            self.counters.sent.fetch_add(bytes, Ordering::Relaxed);
            messages.insert(peer, message);
        }
        messages
    }

    /// Processes the messages of a round, of which this rank's messages were the last ones with segments or not.
    /// Returns whether another rank failed.
    fn take(&mut self, received: BTreeMap<u32, Vec<u8>>, sent_last: bool) -> Result<bool> {
        let place = self.shared.files.place();
        if let Some(silent) = self.open.iter().find(|&peer| !received.contains_key(peer)) {
            return Err(Error::new(Kind::Unavailable, format!("{place}: rank {silent} sent no message")));
        }
        let mut bytes: u64 = received.values().map(|message| message.len() as u64).sum();
        // First, which ranks expect another message.
        let files: Vec<u64> = self.shared.manifest.files().iter().map(|file| file.bytes).collect();
        let parsed: Vec<_> =
            received.into_iter().map(|(peer, message)| (peer, parse(peer, message, &files, place))).collect();
        let mut is_abandoned = false;
        for (peer, parsed) in &parsed {
            let flags = parsed.as_ref().map_or(0, |parsed| parsed.flags);
            is_abandoned |= flags & ABANDONED != 0;
            if flags & ABANDONED != 0 || sent_last && flags & LAST != 0 {
                self.open.remove(peer);
            }
        }
        for (peer, parsed) in parsed {
            let parsed = parsed?;
            for slot in parsed.returned {
                self.take_back(peer, slot)?;
            }
            for segment in parsed.segments {
                bytes += if let Body::Shared { bytes, .. } = segment.body { bytes } else { 0 };
                *self.unplaced.entry(self.round).or_default() += 1;
                self.pool.submit(
                    Work::Place(self.round, segment),
                    true,
                    cores().min(self.shared.files.needs().in_flight),
                );
            }
        }
        self.counters.received.fetch_add(bytes, Ordering::Relaxed);
        Ok(is_abandoned)
    }

    /// Notes that a peer is done with a slot.
    fn take_back(&mut self, peer: u32, slot: u64) -> Result<()> {
        let number = u32::try_from(slot).ok();
        let looking = number.and_then(|number| self.lent.get_mut(&number)).map(|(_, looking)| looking);
        let Some((number, looking)) = number.zip(looking).filter(|(_, looking)| looking.contains(&peer)) else {
            let place = self.shared.files.place();
            return Err(Error::corrupt(format!("{place}: rank {peer} returns slot {slot}, which it does not have")));
        };
        looking.remove(&peer);
        if looking.is_empty() {
            self.lent.remove(&number);
        }
        Ok(())
    }

    /// Returns whether a segment of two rounds ago or earlier is not copied yet.
    fn is_behind(&self) -> bool {
        self.unplaced.keys().next().is_some_and(|&round| round < self.round)
    }

    /// Waits for some work to be done.
    fn settle(&mut self) -> Result<()> {
        match self.pool.next().transpose()? {
            Some(Worked::Read { round, segments, lent }) => {
                // After the rounds there is none.
                let at = round.checked_sub(self.round + 1).and_then(|at| self.ahead.get_mut(at as usize));
                if let Some(outgoing) = at {
                    outgoing.missing -= 1;
                    for (ranks, segment) in segments {
                        for rank in ranks {
                            outgoing.messages.entry(rank).or_default().push(Arc::clone(&segment));
                        }
                    }
                }
                for (slot, takers) in lent {
                    self.counters.sent.fetch_add(takers.values().sum(), Ordering::Relaxed);
                    self.lent.insert(slot.number(), (slot, takers.into_keys().collect()));
                }
            }
            Some(Worked::Placed { round, returned }) => {
                if let Some(left) = self.unplaced.get_mut(&round) {
                    *left -= 1;
                }
                self.unplaced.retain(|_, left| *left > 0);
                if let Some((peer, slot)) = returned {
                    self.returns.entry(peer).or_default().push(slot);
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Waits for all work that was begun.
    fn finish(&mut self) -> Result<()> {
        while self.pool.unfinished() > 0 {
            self.settle()?;
        }
        Ok(())
    }

    /// Reads the chunks that only this rank wants, after the rounds.
    fn rest(&mut self) -> Result<()> {
        let mut requests = Vec::new();
        for chunk in self.shared.sharing.chunks().filter(|chunk| chunk.wanters.len() == 1) {
            self.shared.request(Task { chunk, others: Vec::new(), slot: None }, &mut requests);
            // The last one may grow.
            if requests.len() > 1 {
                self.read_alone(requests.remove(0))?;
            }
        }
        requests.into_iter().try_for_each(|request| self.read_alone(request))?;
        self.finish()
    }

    /// Begins to read a chunk that no round carries.
    fn read_alone(&mut self, request: Request) -> Result<()> {
        while self.pool.unfinished() >= ANNOUNCED {
            self.settle()?;
        }
        let threads = self.shared.announce(&request)?;
        self.pool.submit(Work::Read(0, request), false, threads);
        Ok(())
    }
}
