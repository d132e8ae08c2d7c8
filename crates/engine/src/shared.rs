//! Reads shared between ranks: each block is read and proven by one of those who want it, and passed on while the next
//! ones are being read.
//!
//! Rounds go in lockstep between any two ranks with something in common. In each a rank reads some of its chunks, takes
//! what it wants of them, packs what others want, and swaps one message with each of them; meanwhile it reads for the
//! next round and unpacks what came in the last one. A message is a head and segments, one for a chunk:
//!
//! ```text
//! head     u64 flags (1: the last one with segments, 2: this rank gave up), u64 CRC-64 of the flags
//! segment  u64 file, u64 start, u64 end: the chunk; u64 bytes that follow the CRC; u64 CRC-64 of all but itself; bytes
//! ```
//!
//! All numbers are little-endian. The bytes are the elements of the receiver's pieces of the chunk, in the plan's
//! order, each piece row-major. The sender proved each block that they come from; the receiver proves the segment.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardfast_format::{BLOCK_BYTES, Crc64, Manifest, crc64};
use shardfast_plan::{Chunk, Chunks, Piece, Sharing};

use crate::carrier::{Carrier, Message};
use crate::error::{Error, Kind, Result};
use crate::provider::Fences;
use crate::reader::{Files, each_ahead};
use crate::sink::{Sink, pack, row_major_strides};
use crate::staging::Staging;
use crate::writer::Failure;

/// Rounds after which the ranks decide whether to go on: the first ones only fill the pipeline.
const TRIAL_ROUNDS: u32 = 3;

/// A round of the trial is this much smaller: what it found to be slower should not have been much of the load.
const TRIAL_PART: u64 = 8;

/// Of what came from others, the bytes that are read once more to see what that takes.
pub(crate) const AGAIN_BYTES: u64 = 4 * BLOCK_BYTES;

const HEAD_BYTES: usize = 16;
const SEGMENT_HEAD_BYTES: usize = 40;
const LAST: u64 = 1;
const GAVE_UP: u64 = 2;

/// A shared load of one rank.
pub(crate) struct Shared<'a> {
    pub(crate) files: &'a Files,
    pub(crate) manifest: &'a Manifest,
    pub(crate) staging: &'a Arc<Staging>,
    pub(crate) sharing: &'a Sharing,
    /// Where each of this rank's wants goes, by the index that [`Piece::want`] has.
    pub(crate) sinks: Vec<Vec<&'a Sink>>,
    /// The most bytes of a message, but for its last segment.
    pub(crate) link_bytes: u64,
}

/// What a rank measured while the ranks tried to share.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Trial {
    /// Reading, proving and placing what this rank read.
    read_s: f64,
    /// Packing for others, proving and placing what others read.
    pass_on_s: f64,
    /// Rounds of messages, and the bytes of those that this rank sent and received.
    swap_s: f64,
    swapped_bytes: u64,
    /// Bytes of the blocks that others read for this rank.
    passed_on_bytes: u64,
    /// Reading and proving some of them here, too.
    again_s: f64,
    again_bytes: u64,
}

/// How a shared load ended on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ended {
    /// Everything that this rank wants is there.
    Done,
    /// Another rank gave up, and tells why.
    Stopped,
}

/// Why a shared load failed.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Something happened on this rank.
    Here(Error),
    /// All ranks know it, in the same words.
    Everywhere(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Here(error)
    }
}

pub(crate) type Troubled<T> = std::result::Result<T, Trouble>;

/// Bytes that one rank's load moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Read from storage.
    pub bytes_read: u64,
    /// Received from other ranks.
    pub bytes_received: u64,
    /// Sent to other ranks, all together.
    pub bytes_sent: u64,
    /// Whether ranks read for each other until the end.
    pub is_shared: bool,
}

#[derive(Default)]
struct Counters {
    read: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    /// Bytes of elements that reached their places.
    arrived: AtomicU64,
    /// Nanoseconds of all threads.
    reading: AtomicU64,
    passing_on: AtomicU64,
}

impl Counters {
    /// Adds the time of some work, which began then, to what it was spent on.
    fn split(&self, began: Instant, trial: &mut Trial) {
        let all_s = began.elapsed().as_secs_f64();
        let [reading, passing_on] = [&self.reading, &self.passing_on].map(|ns| ns.swap(0, Ordering::Relaxed) as f64);
        let of_reading = reading / (reading + passing_on).max(1.0);
        trial.read_s += all_s * of_reading;
        trial.pass_on_s += all_s * (1.0 - of_reading);
    }
}

/// Adds the time that something takes to a counter of nanoseconds.
fn timed<T>(counter: &AtomicU64, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    counter.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    done
}

/// A chunk to read, and what others take of it.
struct Task {
    chunk: Chunk,
    others: Vec<(Vec<u32>, Vec<Piece>)>,
}

/// Part of a message that came.
struct Segment {
    from: u32,
    message: Arc<Vec<u8>>,
    file: u32,
    chunk: Range<u64>,
    bytes: Range<usize>,
    crc: u64,
}

enum Work {
    Read(Task),
    Unpack(Segment),
}

/// A segment, and the ranks that it is sent to.
type Packed = (Vec<u32>, Arc<Vec<u8>>);

/// What came in a round, and how long it took.
type Swapped = (Result<BTreeMap<u32, Vec<u8>>>, Duration);

/// A message that came, taken apart.
struct Parsed {
    flags: u64,
    bytes: u64,
    segments: Vec<Segment>,
}

/// What is sent to each peer in a round.
#[derive(Default)]
struct Outgoing {
    messages: BTreeMap<u32, Message>,
    is_last: bool,
}

/// Asks all ranks whether to go on sharing, telling what this one measured.
pub(crate) type GoOn<'a> = &'a mut dyn FnMut(Trial) -> Troubled<bool>;

impl Trial {
    /// Whether sharing is faster than every rank's reading for itself, by what all ranks measured.
    ///
    /// Reading and swapping overlap, so the slower one counts. A swap waits for the slowest rank to have read, so the
    /// best rate that any rank had stands for the network. Without sharing, each rank reads again what others read.
    pub(crate) fn is_worth_it(trials: &[Trial]) -> bool {
        let most = |of: &dyn Fn(&Trial) -> f64| trials.iter().map(of).fold(0.0, f64::max);
        let rate = most(&|trial| trial.swapped_bytes as f64 / trial.swap_s.max(1e-9));
        let swap_s = most(&|trial| trial.swapped_bytes as f64) / rate.max(1.0);
        let work_s = most(&|trial| trial.read_s + trial.pass_on_s);
        let again_s = most(&|trial| match trial.again_bytes {
            0 => 0.0,
            bytes => trial.again_s * trial.passed_on_bytes as f64 / bytes as f64,
        });
        let alone_s = most(&|trial| trial.read_s) + again_s;
        // What is about as fast either way is simpler without messages.
        work_s.max(swap_s) < 0.95 * alone_s
    }
}

impl Shared<'_> {
    /// Fills the sinks. With `go_on` the ranks try first and decide then, else they share to the end. The carrier has a
    /// connection with each of [`Sharing::peers`].
    ///
    /// # Errors
    /// What went wrong here. `Corrupt` names the checkpoint, the leaves, and the file and the byte range, or the rank
    /// from which they came; no unproven byte reaches a sink.
    pub(crate) fn run(&self, carrier: Box<dyn Carrier + '_>, go_on: Option<GoOn<'_>>) -> Troubled<(Ended, Traffic)> {
        let counters = Counters::default();
        let mut done = go_on.is_some().then(HashSet::new);
        let went_on = self.rounds(carrier, go_on, &counters, &mut done)?;
        let mut traffic = Traffic { is_shared: went_on == Some(true), ..Traffic::default() };
        if let Some(went_on) = went_on {
            let is_left = |chunk: &Chunk| match &done {
                Some(done) if !went_on => !done.contains(&(chunk.file, chunk.range.start)),
                _ => chunk.wanters.len() == 1,
            };
            let left = self.sharing.chunks().filter(is_left);
            self.work(left.map(|chunk| Work::Read(Task { chunk, others: Vec::new() })), &counters, !went_on)?;
            self.expect_all(&counters)?;
        }
        traffic.bytes_read = counters.read.into_inner();
        traffic.bytes_received = counters.received.into_inner();
        traffic.bytes_sent = counters.sent.into_inner();
        Ok((if went_on.is_some() { Ended::Done } else { Ended::Stopped }, traffic))
    }

    /// The rounds. Returns whether the ranks shared to the end; `None` when another one gave up.
    fn rounds(
        &self,
        mut carrier: Box<dyn Carrier + '_>,
        mut go_on: Option<GoOn<'_>>,
        counters: &Counters,
        done: &mut Option<HashSet<(u32, u64)>>,
    ) -> Troubled<Option<bool>> {
        std::thread::scope(|scope| {
            let (to_carrier, messages) = crossbeam_channel::bounded::<BTreeMap<u32, Message>>(0);
            let (answers, from_carrier) = crossbeam_channel::bounded(0);
            scope.spawn(move || {
                for messages in messages {
                    let began = Instant::now();
                    let swapped = carrier.swap(messages);
                    if answers.send((swapped, began.elapsed())).is_err() {
                        return;
                    }
                }
            });
            let swap = Swap { to_carrier, from_carrier };
            let mut trial = Trial::default();
            let mut open: BTreeSet<u32> = self.sharing.peers().into_iter().collect();
            let outcome = self.lockstep(&swap, &mut open, &mut trial, &mut go_on, counters, done);
            if matches!(outcome, Ok(None) | Err(Trouble::Here(_))) {
                // So that nobody waits for this rank; whether they hear it makes no difference here.
                let message = vec![Arc::new(head(GAVE_UP))];
                _ = swap.begin(open.iter().map(|&peer| (peer, message.clone())).collect());
                _ = swap.end();
            }
            outcome
        })
    }

    fn lockstep(
        &self,
        swap: &Swap,
        open: &mut BTreeSet<u32>,
        trial: &mut Trial,
        go_on: &mut Option<GoOn<'_>>,
        counters: &Counters,
        done: &mut Option<HashSet<(u32, u64)>>,
    ) -> Troubled<Option<bool>> {
        let mut chunks = self.sharing.chunks();
        let began = Instant::now();
        let tasks = self.next_tasks(&mut chunks, go_on.is_some(), done);
        let mut outgoing = self.prepare(tasks, Vec::new(), counters, go_on.is_some())?;
        counters.split(began, trial);
        let mut incoming = Vec::new();
        let mut round = 0;
        loop {
            round += 1;
            if (open.is_empty() || round > TRIAL_ROUNDS)
                && let Some(go_on) = go_on.take()
            {
                self.read_again(trial, &incoming, counters)?;
                if !go_on(*trial)? {
                    self.work(incoming.into_iter().map(Work::Unpack), counters, false)?;
                    return Ok(Some(false));
                }
            }
            if open.is_empty() {
                break;
            }
            let sent_last = outgoing.is_last;
            let mut messages: BTreeMap<u32, Message> = BTreeMap::new();
            for &peer in open.iter() {
                let mut message = vec![Arc::new(head(if sent_last { LAST } else { 0 }))];
                message.extend(outgoing.messages.remove(&peer).unwrap_or_default());
                let bytes = message.iter().map(|piece| piece.len() as u64).sum::<u64>();
                counters.sent.fetch_add(bytes, Ordering::Relaxed);
                trial.swapped_bytes += bytes;
                messages.insert(peer, message);
            }
            swap.begin(messages)?;
            let began = Instant::now();
            let tasks =
                if sent_last { (Vec::new(), true) } else { self.next_tasks(&mut chunks, go_on.is_some(), done) };
            let prepared = self.prepare(tasks, std::mem::take(&mut incoming), counters, go_on.is_some());
            counters.split(began, trial);
            let (received, swap_s) = swap.end();
            trial.swap_s += swap_s.as_secs_f64();
            let received = received?;
            if let Some(silent) = open.iter().find(|&peer| !received.contains_key(peer)) {
                let place = self.files.place();
                return Err(Error::new(Kind::Unavailable, format!("{place}: rank {silent} sends no more")).into());
            }
            // First of all, who expects another message.
            let parsed: Vec<_> =
                received.into_iter().map(|(peer, message)| (peer, self.parse(peer, message))).collect();
            let mut gave_up = false;
            for (peer, parsed) in &parsed {
                let flags = parsed.as_ref().map_or(0, |parsed| parsed.flags);
                gave_up |= flags & GAVE_UP != 0;
                if flags & GAVE_UP != 0 || sent_last && flags & LAST != 0 {
                    open.remove(peer);
                }
            }
            outgoing = prepared?;
            for (_, parsed) in parsed {
                let Parsed { bytes, segments, .. } = parsed?;
                counters.received.fetch_add(bytes, Ordering::Relaxed);
                trial.swapped_bytes += bytes;
                incoming.extend(segments);
            }
            if gave_up {
                return Ok(None);
            }
            for segment in &incoming {
                trial.passed_on_bytes += segment.chunk.end - segment.chunk.start;
                done.iter_mut().for_each(|done| _ = done.insert((segment.file, segment.chunk.start)));
            }
        }
        self.work(incoming.into_iter().map(Work::Unpack), counters, false)?;
        Ok(Some(true))
    }

    /// The chunks that this rank reads in the next round, and whether they are the last ones.
    fn next_tasks(
        &self,
        chunks: &mut Chunks<'_>,
        is_trial: bool,
        done: &mut Option<HashSet<(u32, u64)>>,
    ) -> (Vec<Task>, bool) {
        let link_bytes = if is_trial { self.link_bytes / TRIAL_PART } else { self.link_bytes };
        let mut tasks = Vec::new();
        let mut bytes_to: BTreeMap<u32, u64> = BTreeMap::new();
        for chunk in chunks.by_ref() {
            if chunk.wanters.len() == 1 || chunk.reader != self.sharing.rank() {
                continue;
            }
            let others = self.sharing.pieces_of_others(&chunk);
            let mut is_full = false;
            for (ranks, pieces) in &others {
                let bytes = pieces.iter().map(Piece::bytes).sum::<u64>();
                for &rank in ranks {
                    let to = bytes_to.entry(rank).or_default();
                    *to += bytes;
                    // As large as the chunk itself, the next one would be too much.
                    is_full |= *to + (chunk.range.end - chunk.range.start) > link_bytes;
                }
            }
            done.iter_mut().for_each(|done| _ = done.insert((chunk.file, chunk.range.start)));
            tasks.push(Task { chunk, others });
            if is_full {
                return (tasks, false);
            }
        }
        (tasks, true)
    }

    /// Reads and packs what goes out in the next round, and unpacks what came in the last one.
    fn prepare(
        &self,
        (tasks, is_last): (Vec<Task>, bool),
        incoming: Vec<Segment>,
        counters: &Counters,
        again: bool,
    ) -> Result<Outgoing> {
        let work = incoming.into_iter().map(Work::Unpack).chain(tasks.into_iter().map(Work::Read));
        let packed = self.work(work, counters, again)?;
        let mut outgoing = Outgoing { messages: BTreeMap::new(), is_last };
        for (ranks, segment) in packed {
            for rank in ranks {
                outgoing.messages.entry(rank).or_default().push(Arc::clone(&segment));
            }
        }
        Ok(outgoing)
    }

    /// Does all work, on several threads; the segments that are to be sent, with their receivers.
    fn work(&self, work: impl Iterator<Item = Work>, counters: &Counters, again: bool) -> Result<Vec<Packed>> {
        let (failure, packed) = (Failure::default(), Mutex::new(Vec::new()));
        let announce = |work: &Work| match work {
            Work::Unpack(_) => true,
            Work::Read(Task { chunk, .. }) => {
                let range = self.files.whole_blocks(chunk.file, chunk.range.start..chunk.end);
                self.files.prefetch(chunk.file, range, again).unwrap_or_else(|error| {
                    let leaves = self.files.leaves_in(chunk.file, &chunk.range);
                    failure.set(error.within(format_args!("{leaves} cannot be read")));
                    true
                })
            }
        };
        let one = |work: Work| {
            if failure.is_set() {
                return;
            }
            let worked = match work {
                Work::Read(task) => self.read(task, counters).map(|segments| {
                    packed.lock().unwrap_or_else(PoisonError::into_inner).extend(segments);
                }),
                Work::Unpack(segment) => timed(&counters.passing_on, || self.unpack(&segment, counters)),
            };
            worked.unwrap_or_else(|error| failure.set(error));
        };
        each_ahead(work.take_while(|_| !failure.is_set()), announce, one);
        failure.into_result()?;
        Ok(packed.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads a chunk, proves it, takes what is this rank's and packs what is others'.
    fn read(&self, task: Task, counters: &Counters) -> Result<Vec<Packed>> {
        let Task { chunk, others } = task;
        let began = Instant::now();
        let range = self.files.whole_blocks(chunk.file, chunk.range.start..chunk.end);
        let mut slot = self.staging.acquire()?;
        let damaged = self.files.read_blocks(chunk.file, range.clone(), &mut slot, |_| true)?;
        if let Some(damage) = damaged.first() {
            let leaves = self.files.leaves_in(chunk.file, &damage.span);
            return Err(Error::corrupt(format!("{}: {leaves}: {damage}", self.files.place())));
        }
        counters.read.fetch_add(range.end - range.start, Ordering::Relaxed);
        let source = |piece: &Piece| {
            let at = (piece.src - range.start) as usize;
            &slot[at..at + piece.span_bytes as usize]
        };
        // Waited for before the slot is given back, whatever happens.
        let mut fences = Fences::default();
        for piece in self.sharing.own_pieces(chunk.file, chunk.range.clone()) {
            for sink in &self.sinks[piece.want as usize] {
                sink.scatter(&piece.dst_offsets, &piece.lengths, &piece.src_strides, source(&piece), &mut fences)?;
            }
            counters.arrived.fetch_add(piece.bytes(), Ordering::Relaxed);
        }
        counters.reading.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let segment = |(ranks, pieces): (Vec<u32>, Vec<Piece>)| (ranks, Arc::new(packed(&chunk, &pieces, source)));
        let segments = timed(&counters.passing_on, || others.into_iter().map(segment).collect());
        fences.wait()?;
        Ok(segments)
    }

    /// Takes a message apart, without proving its segments.
    fn parse(&self, from: u32, message: Vec<u8>) -> Result<Parsed> {
        let message = Arc::new(message);
        let numbers = |at: usize, count: usize| -> Option<Vec<u64>> {
            let bytes = message.get(at..at + 8 * count)?;
            let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
            bytes.chunks(8).map(number).collect()
        };
        let damaged = |what: &str| {
            Error::corrupt(format!(
                "{}: the message of rank {from}, which reads for this one, {what}",
                self.files.place()
            ))
        };
        let head = numbers(0, 2).ok_or_else(|| damaged("is cut short"))?;
        if crc64(&head[0].to_le_bytes()) != head[1] {
            return Err(damaged("begins with bytes that it did not send"));
        }
        let mut segments = Vec::new();
        let mut at = HEAD_BYTES;
        while at < message.len() {
            let numbers = numbers(at, SEGMENT_HEAD_BYTES / 8).ok_or_else(|| damaged("is cut short"))?;
            let [file, start, end, bytes, crc] = numbers[..] else { return Err(damaged("is cut short")) };
            at += SEGMENT_HEAD_BYTES;
            let behind = usize::try_from(bytes).ok().and_then(|bytes| at.checked_add(bytes));
            let behind = behind.filter(|&behind| behind <= message.len()).ok_or_else(|| damaged("is cut short"))?;
            let file = u32::try_from(file).ok().filter(|&file| (file as usize) < self.manifest.files().len());
            let file = file.ok_or_else(|| damaged("speaks of a file that the checkpoint lacks"))?;
            if start > end || end > self.manifest.files()[file as usize].bytes {
                return Err(damaged("speaks of bytes that the file lacks"));
            }
            segments.push(Segment {
                from,
                message: Arc::clone(&message),
                file,
                chunk: start..end,
                bytes: at..behind,
                crc,
            });
            at = behind;
        }
        Ok(Parsed { flags: head[0], bytes: message.len() as u64, segments })
    }

    /// Proves a segment and puts its bytes into their places.
    fn unpack(&self, segment: &Segment, counters: &Counters) -> Result<()> {
        let Segment { from, message, file, chunk, bytes, crc } = segment;
        let failed = |what: String| {
            let (place, leaves) = (self.files.place(), self.files.leaves_in(*file, chunk));
            let path = &self.manifest.files()[*file as usize].path;
            let (start, end) = (chunk.start, chunk.end);
            Error::corrupt(format!(
                "{place}: {leaves}: file {path}, bytes {start}..{end}, as rank {from} sent them: {what}"
            ))
        };
        let head = &message[bytes.start - SEGMENT_HEAD_BYTES..bytes.start - 8];
        let packed = &message[bytes.clone()];
        let found = segment_crc(head, packed);
        if found != *crc {
            return Err(failed(format!("expected CRC-64 {crc:016x}, found {found:016x}")));
        }
        let pieces = self.sharing.own_pieces(*file, chunk.clone());
        let expected = pieces.iter().map(Piece::bytes).sum::<u64>();
        if expected != packed.len() as u64 {
            return Err(failed(format!("expected {expected} bytes of this rank's, found {}", packed.len())));
        }
        let mut fences = Fences::default();
        let mut at = 0;
        for piece in &pieces {
            let source = &packed[at..at + piece.bytes() as usize];
            let strides = row_major_strides(&piece.lengths, piece.item_bytes());
            for sink in &self.sinks[piece.want as usize] {
                sink.scatter(&piece.dst_offsets, &piece.lengths, &strides, source, &mut fences)?;
            }
            at += source.len();
        }
        fences.wait()?;
        counters.arrived.fetch_add(expected, Ordering::Relaxed);
        Ok(())
    }

    /// Reads some of what came from others from storage, too, to see what that takes. Other work on this machine must
    /// not pass for slow storage, so the fastest block counts.
    fn read_again(&self, trial: &mut Trial, segments: &[Segment], counters: &Counters) -> Result<()> {
        let Some(Segment { file, chunk, .. }) = segments.first() else { return Ok(()) };
        let mut slot = self.staging.acquire()?;
        let mut fastest = Duration::MAX;
        for start in (chunk.start..chunk.end.min(chunk.start + AGAIN_BYTES)).step_by(BLOCK_BYTES as usize) {
            let range = self.files.whole_blocks(*file, start..start + 1);
            let began = Instant::now();
            self.files.read_blocks(*file, range.clone(), &mut slot, |_| true)?;
            fastest = fastest.min(began.elapsed());
            trial.again_bytes = BLOCK_BYTES;
            counters.read.fetch_add(range.end - range.start, Ordering::Relaxed);
        }
        trial.again_s = fastest.as_secs_f64();
        Ok(())
    }

    /// That every element has come, neither more nor less.
    fn expect_all(&self, counters: &Counters) -> Result<()> {
        let expected: u64 = self.sharing.bytes();
        let arrived = counters.arrived.load(Ordering::Relaxed);
        if arrived == expected {
            return Ok(());
        }
        Err(Error::internal(format!("{}: {expected} bytes are wanted, and {arrived} arrived", self.files.place())))
    }
}

/// The way to the thread that swaps.
struct Swap {
    to_carrier: crossbeam_channel::Sender<BTreeMap<u32, Message>>,
    from_carrier: crossbeam_channel::Receiver<Swapped>,
}

impl Swap {
    fn begin(&self, messages: BTreeMap<u32, Message>) -> Result<()> {
        self.to_carrier.send(messages).map_err(|_| Error::internal("the thread that swaps messages has ended"))
    }

    /// What the round that began brought, and how long it took.
    fn end(&self) -> Swapped {
        let ended = || (Err(Error::internal("the thread that swaps messages has ended")), Duration::ZERO);
        self.from_carrier.recv().unwrap_or_else(|_| ended())
    }
}

/// A segment: what others take of a chunk.
fn packed<'a>(chunk: &Chunk, pieces: &[Piece], source: impl Fn(&Piece) -> &'a [u8]) -> Vec<u8> {
    let bytes = pieces.iter().map(Piece::bytes).sum::<u64>();
    let mut segment = Vec::with_capacity(SEGMENT_HEAD_BYTES + bytes as usize);
    for number in [u64::from(chunk.file), chunk.range.start, chunk.range.end, bytes, 0] {
        segment.extend(number.to_le_bytes());
    }
    for piece in pieces {
        pack(&piece.lengths, &piece.src_strides, piece.item_bytes(), source(piece), &mut segment);
    }
    let (crc, bytes) = (SEGMENT_HEAD_BYTES - 8, SEGMENT_HEAD_BYTES);
    let found = segment_crc(&segment[..crc], &segment[bytes..]);
    segment[crc..bytes].copy_from_slice(&found.to_le_bytes());
    segment
}

fn head(flags: u64) -> Vec<u8> {
    let flags = flags.to_le_bytes();
    [flags, crc64(&flags).to_le_bytes()].concat()
}

fn segment_crc(head: &[u8], bytes: &[u8]) -> u64 {
    let mut crc = Crc64::new();
    crc.update(head);
    crc.update(bytes);
    crc.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that read 1 GB in a second, and as much came from others.
    const EVEN: Trial = Trial {
        read_s: 1.0,
        pass_on_s: 0.2,
        swap_s: 1.0,
        swapped_bytes: 2 << 30,
        passed_on_bytes: 1 << 30,
        again_s: 1.0,
        again_bytes: 1 << 30,
    };

    #[test]
    fn sharing_is_worth_it_where_reading_again_takes_longer_than_passing_on() {
        assert!(Trial::is_worth_it(&[EVEN; 2]));
        // The page cache has it.
        assert!(!Trial::is_worth_it(&[Trial { again_s: 0.1, ..EVEN }; 2]));
        // The network is slower than the storage.
        assert!(!Trial::is_worth_it(&[Trial { swap_s: 2.5, ..EVEN }; 2]));
        // A rank that waited in its rounds for a slow reader says nothing about the network.
        let (fast, slow) = (Trial { read_s: 0.1, swap_s: 2.9, ..EVEN }, Trial { read_s: 3.0, swap_s: 0.1, ..EVEN });
        assert!(Trial::is_worth_it(&[fast, slow]));
        // Processors that are busy with packing and proving.
        assert!(!Trial::is_worth_it(&[Trial { pass_on_s: 1.1, ..EVEN }; 2]));
        // A rank that has nothing in common with others.
        assert!(Trial::is_worth_it(&[EVEN, EVEN, Trial::default()]));
        assert!(!Trial::is_worth_it(&[Trial::default(); 2]));
    }

    #[test]
    fn pieces_are_packed_in_row_major_order() {
        let source: Vec<u8> = (0..48).collect();
        let mut out = vec![99];
        // A box [2, 3] of two-byte elements out of rows of eight.
        pack(&[2, 3], &[16, 2], 2, &source[4..], &mut out);
        assert_eq!(out, [99, 4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25]);
        pack(&[], &[], 2, &source[6..8], &mut out);
        assert_eq!(out[13..], [6, 7]);
    }
}
