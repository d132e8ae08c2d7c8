//! Staging ahead of the orders: what a rank may have to write is copied while the ranks still agree on who writes what.
//!
//! A rank that cannot know alone what it has to write would otherwise copy nothing before the last rank was heard, and
//! its training would wait for that. So it copies all of its parts, the urgent ones first, into slots that it keeps
//! until its orders come: one stream of bytes, cut into slots. What it has to write is then written from there, with
//! one copy more; what others write goes back to the arena at once. Parts beyond what may be
//! [kept](Staging::try_keep) are copied when they are written, as ever.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shardfast_format::LeafBody;

use crate::error::{Error, Result};
use crate::pending::Progress;
use crate::provider::{Fences, Provider};
use crate::save::State;
use crate::staging::{Kept, SLOT_BYTES, Staging};
use crate::writer::Countdown;

/// Parts begin at multiples of this, in bytes: no element of any dtype lies askew.
const PART_ALIGNMENT: u64 = 64;

/// How long to wait before looking again whether a slot may be kept.
const PAUSE: Duration = Duration::from_millis(10);

/// What was copied before the orders came.
pub(crate) struct Ahead {
    /// For each leaf of the catalog, where each of its parts begins in the stream.
    starts: Vec<Vec<u64>>,
    slots: Slots,
}

/// A range of a part's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Range {
    pub(crate) leaf: u32,
    pub(crate) part: u32,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// The stream's slots, in order.
struct Slots(Vec<Mutex<Place>>);

/// Where the bytes of one slot's length of the stream are.
enum Place {
    /// Only where they came from.
    Source,
    /// Here, and so many of them are still to be asked for.
    Here { slot: Kept, wanted: u64 },
    /// Asked for, each of them, or not to be asked for.
    Spent,
}

impl Ahead {
    /// Copies the state's tensors until all of them are copied or the orders are `heard`, which waits that long for
    /// them. Tells `progress` when all urgent parts are copied, and when all parts are. What cannot be copied is left
    /// to the writer: it may be another rank's to write.
    pub(crate) fn stage(
        state: &State,
        staging: &Arc<Staging>,
        progress: &Progress,
        heard: &(dyn Fn(Duration) -> bool + Sync),
    ) -> Ahead {
        let stream = Stream::of(state);
        let slots = Slots((0..stream.slots()).map(|_| Mutex::new(Place::Source)).collect());
        let captured = Countdown::new(stream.urgent_bytes.div_ceil(SLOT_BYTES as u64) as usize, || progress.captured());
        let staged = Countdown::new(stream.slots(), || progress.staged());
        let next = AtomicUsize::new(0);
        let fill = || {
            while !heard(Duration::ZERO) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(place) = slots.0.get(index) else { return };
                let Some(mut slot) = keep(staging, heard) else { return };
                if stream.fill(index, &mut slot).is_err() {
                    continue;
                }
                *locked(place) = Place::Here { slot, wanted: 0 };
                if ((index * SLOT_BYTES) as u64) < stream.urgent_bytes {
                    captured.one();
                }
                staged.one();
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4).min(stream.slots());
        std::thread::scope(|scope| {
            let fillers: Vec<_> = (0..threads).map(|_| scope.spawn(fill)).collect();
            // A source that panics is not copied either, and panics again for the writer if it is to be written.
            fillers.into_iter().for_each(|filler| _ = filler.join());
        });
        Ahead { starts: stream.starts, slots }
    }

    /// The state for who asks for exactly these ranges of it, each once: what was copied stands in for what it was
    /// copied from. What else was copied goes back to the arena.
    pub(crate) fn over(self, state: &State, ranges: &[Range]) -> State {
        let Ahead { starts, slots } = self;
        for &Range { leaf, part, at, bytes } in ranges {
            let start = starts.get(leaf as usize).and_then(|starts| starts.get(part as usize));
            // Orders that make no sense are found when they are carried out.
            let Some(start) = start else { continue };
            for (index, _, bytes) in pieces(start + at, bytes) {
                if let Place::Here { wanted, .. } = &mut *locked(&slots.0[index]) {
                    *wanted += bytes as u64;
                }
            }
        }
        for place in &slots.0 {
            let mut place = locked(place);
            if matches!(*place, Place::Here { wanted: 0, .. }) {
                *place = Place::Spent;
            }
        }
        let slots = Arc::new(slots);
        let leaf = |(providers, starts): (&Vec<Arc<dyn Provider>>, Vec<u64>)| match starts.is_empty() {
            true => providers.clone(),
            false => {
                let part = |(source, start): (&Arc<dyn Provider>, u64)| -> Arc<dyn Provider> {
                    Arc::new(Part { source: Arc::clone(source), start, slots: Arc::clone(&slots) })
                };
                providers.iter().zip(starts).map(part).collect()
            }
        };
        State {
            catalog: Arc::clone(&state.catalog),
            providers: state.providers.iter().zip(starts).map(leaf).collect(),
            replicas: state.replicas.clone(),
            compared: Arc::clone(&state.compared),
            ..*state
        }
    }
}

/// A slot to keep, unless the orders are heard first.
fn keep(staging: &Arc<Staging>, heard: &(dyn Fn(Duration) -> bool + Sync)) -> Option<Kept> {
    loop {
        match staging.try_keep() {
            None if heard(PAUSE) => return None,
            None => {}
            kept => return kept,
        }
    }
}

/// All parts of a state's tensors one behind the other, the urgent ones first.
struct Stream<'a> {
    /// Each part and where it begins, in order.
    parts: Vec<(u64, &'a dyn Provider)>,
    /// As [`Ahead::starts`].
    starts: Vec<Vec<u64>>,
    /// Up to the last byte of an urgent part.
    urgent_bytes: u64,
    bytes: u64,
}

impl<'a> Stream<'a> {
    fn of(state: &'a State) -> Stream<'a> {
        let starts = state.providers.iter().zip(&state.catalog.leaves).map(|(providers, leaf)| match leaf.body {
            LeafBody::Tensor { .. } => vec![0; providers.len()],
            LeafBody::Object { .. } | LeafBody::Alias { .. } => Vec::new(),
        });
        let mut stream = Stream { parts: Vec::new(), starts: starts.collect(), urgent_bytes: 0, bytes: 0 };
        for is_urgent in [true, false] {
            for (starts, providers) in stream.starts.iter_mut().zip(&state.providers) {
                for (start, provider) in starts.iter_mut().zip(providers) {
                    if provider.is_urgent() == is_urgent && provider.bytes() > 0 {
                        *start = stream.bytes.next_multiple_of(PART_ALIGNMENT);
                        stream.bytes = *start + provider.bytes();
                        stream.parts.push((*start, &**provider));
                    }
                }
            }
            if is_urgent {
                stream.urgent_bytes = stream.bytes;
            }
        }
        stream
    }

    fn slots(&self) -> usize {
        self.bytes.div_ceil(SLOT_BYTES as u64) as usize
    }

    /// Fills the stream's `index`-th slot.
    fn fill(&self, index: usize, slot: &mut [u8]) -> Result<()> {
        let from = (index * SLOT_BYTES) as u64;
        let end = from + SLOT_BYTES as u64;
        let mut fences = Fences::default();
        let first = self.parts.partition_point(|(start, _)| *start <= from).saturating_sub(1);
        for (start, provider) in self.parts[first..].iter().take_while(|(start, _)| *start < end) {
            let (begin, stop) = (from.max(*start), end.min(start + provider.bytes()));
            if begin < stop {
                provider.fill(
                    begin - start,
                    &mut slot[(begin - from) as usize..(stop - from) as usize],
                    &mut fences,
                )?;
            }
        }
        fences.wait()
    }
}

/// A tensor's part of which some or all was copied ahead.
struct Part {
    source: Arc<dyn Provider>,
    start: u64,
    slots: Arc<Slots>,
}

impl Provider for Part {
    fn bytes(&self) -> u64 {
        self.source.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        let mut done = 0;
        for (index, within, bytes) in pieces(self.start + at, out.len() as u64) {
            let out = &mut out[done..done + bytes];
            if !self.slots.give(index, within, out)? {
                self.source.fill(at + done as u64, out, fences)?;
            }
            done += bytes;
        }
        Ok(())
    }

    fn is_urgent(&self) -> bool {
        self.source.is_urgent() && !self.is_settled()
    }

    fn is_settled(&self) -> bool {
        let is_here = |place: &Mutex<Place>| !matches!(*locked(place), Place::Source);
        pieces(self.start, self.bytes()).all(|(index, ..)| is_here(&self.slots.0[index]))
    }
}

impl Slots {
    /// Copies bytes of a slot from `within` on; whether they are there. Each byte is given once.
    fn give(&self, index: usize, within: usize, out: &mut [u8]) -> Result<bool> {
        let mut place = locked(&self.0[index]);
        let left = match &mut *place {
            Place::Source => return Ok(false),
            Place::Spent => return Err(Error::internal("bytes that were copied ahead are asked for twice")),
            Place::Here { slot, wanted } => {
                out.copy_from_slice(&slot[within..within + out.len()]);
                *wanted = wanted.saturating_sub(out.len() as u64);
                *wanted
            }
        };
        if left == 0 {
            *place = Place::Spent;
        }
        Ok(true)
    }
}

/// A range of the stream as pieces of slots: which one, from where in it, and how many bytes.
fn pieces(from: u64, bytes: u64) -> impl Iterator<Item = (usize, usize, usize)> {
    let (slot_bytes, end) = (SLOT_BYTES as u64, from + bytes);
    let mut at = from;
    std::iter::from_fn(move || {
        let piece = (slot_bytes - at % slot_bytes).min(end - at);
        let (index, within) = ((at / slot_bytes) as usize, (at % slot_bytes) as usize);
        at += piece;
        (piece > 0).then_some((index, within, piece as usize))
    })
}

fn locked(place: &Mutex<Place>) -> MutexGuard<'_, Place> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use shardfast_format::{Catalog, DType, Leaf, LeafName, Region};

    use super::*;
    use crate::staging::STAGING_BYTES_MIN;

    /// Two tensors of bytes of a slot and a half each, each as one part.
    fn state() -> State {
        let bytes = 3 * SLOT_BYTES as u64 / 2;
        let leaf = |name: &str| {
            let shape = [bytes];
            let body =
                LeafBody::Tensor { dtype: DType::U8, shape: shape[..].into(), parts: vec![Region::whole(&shape)] };
            Leaf { name: LeafName::new("model", name), body, layout: String::new() }
        };
        let provider = |content: u8| vec![Arc::new(vec![content; bytes as usize]) as Arc<dyn Provider>];
        State {
            catalog: Arc::new(Catalog { leaves: vec![leaf("a"), leaf("b")] }),
            providers: vec![provider(1), provider(2)],
            replicas: None,
            compared: Arc::default(),
            is_vouched_for: false,
            is_waited_for: false,
        }
    }

    fn stage(state: &State, staging: &Arc<Staging>, heard: bool) -> Ahead {
        Ahead::stage(state, staging, &Progress::unheard(), &|_| heard)
    }

    fn kept(staging: &Arc<Staging>) -> usize {
        let left: Vec<Kept> = std::iter::from_fn(|| staging.try_keep()).collect();
        6 - left.len()
    }

    #[test]
    fn slots_go_back_when_nothing_of_them_is_wanted_any_more() {
        let (state, staging) = (state(), Staging::new(2 * STAGING_BYTES_MIN).unwrap());
        assert_eq!(kept(&staging), 0);
        let ahead = stage(&state, &staging, false);
        assert_eq!(kept(&staging), 3);
        // `b` is another rank's to write.
        let whole = |leaf: u32| Range { leaf, part: 0, at: 0, bytes: 3 * SLOT_BYTES as u64 / 2 };
        let copied = ahead.over(&state, &[whole(0)]);
        assert_eq!(kept(&staging), 2);
        let part = &copied.providers[0][0];
        assert!(part.is_settled());
        let mut out = vec![0; SLOT_BYTES];
        part.fill(0, &mut out, &mut Fences::default()).unwrap();
        assert!(out.iter().all(|&byte| byte == 1));
        assert_eq!(kept(&staging), 1);
        let error = part.fill(0, &mut out, &mut Fences::default()).unwrap_err();
        assert!(error.message.contains("twice"), "{error}");
        drop(copied);
        assert_eq!(kept(&staging), 0);
    }

    #[test]
    fn what_is_not_ahead_is_read_where_it_is() {
        let (state, staging) = (state(), Staging::new(STAGING_BYTES_MIN).unwrap());
        let ranges = [0, 1].map(|leaf| Range { leaf, part: 0, at: 0, bytes: 3 * SLOT_BYTES as u64 / 2 });
        for is_heard in [true, false] {
            // Slots for two of three, which only the orders' arrival ends the wait for.
            let looks = AtomicUsize::new(0);
            let heard = |pause: Duration| is_heard || (!pause.is_zero() && looks.fetch_add(1, Ordering::Relaxed) > 0);
            let ahead = Ahead::stage(&state, &staging, &Progress::unheard(), &heard);
            let copied = ahead.over(&state, &ranges);
            let settled: Vec<bool> = copied.providers.iter().flatten().map(|part| part.is_settled()).collect();
            assert_eq!(settled, [!is_heard, false]);
            for (part, content) in copied.providers.iter().flatten().zip([1, 2]) {
                let mut out = vec![0; part.bytes() as usize];
                part.fill(0, &mut out, &mut Fences::default()).unwrap();
                assert!(out.iter().all(|&byte| byte == content));
            }
        }
    }
}
