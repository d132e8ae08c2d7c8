//! Puts bytes captured ahead of a save in place of the tensors.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use shardfast_engine::State;
use shardfast_format::LeafBody;
use shardfast_transfer::capture::Capture;
use shardfast_transfer::digest::{Digester, Digests, RUNS_MAX, digest};
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::provider::{Evidence, Fences, Provider, Run};

use super::{Figures, Shared, device_copies};

/// Bytes that a [`Window`](super::Window) holds when the save begins. They are returned when this and everything made
/// from it are dropped.
pub struct Captured {
    shared: Arc<Shared>,
}

impl Captured {
    pub(super) fn new(shared: Arc<Shared>) -> Captured {
        Captured { shared }
    }

    /// Returns the state with captured bytes in place of the tensors' own. A state with other leaves stays as it is.
    pub fn over(self, mut state: State) -> State {
        let shared = Arc::new(self);
        let is_same = Arc::ptr_eq(&shared.shared.catalog, &state.catalog)
            || shared.shared.catalog.fingerprint() == state.catalog.fingerprint();
        if !is_same {
            return state;
        }
        let mut runs: HashMap<(u32, u32), Vec<HeldRun>> = HashMap::new();
        for (tile, held) in shared.shared.tiles.iter().enumerate().filter(|(_, tile)| tile.is_held()) {
            for (number, piece) in held.pieces.iter().enumerate() {
                let unit = &shared.shared.units[piece.unit];
                for (array, of) in unit.arrays.iter().enumerate() {
                    let range = piece.of_unit(held.width(array));
                    let elements = piece.elements.clone();
                    let run = HeldRun { range, elements, tile, number, array, digest: None };
                    runs.entry((of.leaf, of.part)).or_default().push(run);
                }
            }
        }
        state.ahead_since = (!runs.is_empty()).then_some(shared.shared.opened);
        if shared.shared.beside.is_some() {
            shared.digest(&state, &mut runs);
        }
        for ((leaf, part), mut runs) in runs {
            runs.sort_unstable_by_key(|run| run.range.start);
            let place = state.providers.get_mut(leaf as usize).and_then(|parts| parts.get_mut(part as usize));
            let is_tensor = matches!(&state.catalog.leaves[leaf as usize].body, LeafBody::Tensor { .. });
            if let Some(live) = place.filter(|_| is_tensor) {
                let name = state.catalog.leaves[leaf as usize].name.to_string();
                *live = Arc::new(Held { live: Arc::clone(live), runs, captured: Arc::clone(&shared), name });
            }
        }
        state
    }

    /// Has devices sum their copies of these runs, in few launches. Runs that they do not sum are copied for that.
    fn digest(&self, state: &State, runs: &mut HashMap<(u32, u32), Vec<HeldRun>>) {
        type Launch<'a> = (Arc<dyn Digester>, Vec<(usize, usize)>, Vec<&'a mut HeldRun>);
        let mut launches: Vec<Launch<'_>> = Vec::new();
        for ((leaf, part), runs) in runs {
            let live = state.providers.get(*leaf as usize).and_then(|parts| parts.get(*part as usize));
            for run in runs {
                let bytes = run.range.end - run.range.start;
                let Some((copies, address)) = live.and_then(|live| live.on_device(run.range.start, bytes)) else {
                    continue;
                };
                let open = launches
                    .iter_mut()
                    .rev()
                    .find(|(known, ..)| Arc::as_ptr(known).addr() == Arc::as_ptr(&copies).addr());
                let (_, places, of) = match open {
                    Some(open) if open.1.len() < RUNS_MAX => open,
                    _ => {
                        launches.push((copies, Vec::new(), Vec::new()));
                        let Some(new) = launches.last_mut() else { continue };
                        new
                    }
                };
                places.push((address, bytes as usize));
                of.push(run);
            }
        }
        for (copies, places, of) in launches {
            match device_copies::digests(copies, &places, &self.shared.staging) {
                Ok(None) => {}
                Ok(Some(digests)) => {
                    for (index, run) in of.into_iter().enumerate() {
                        run.digest = Some((Arc::clone(&digests), index));
                    }
                }
                Err(error) => _ = self.shared.lock().reason.get_or_insert(error.message),
            }
        }
    }

    /// Returns the figures of the window.
    pub fn figures(&self) -> Figures {
        self.shared.figures()
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        self.shared.tiles.iter().for_each(|tile| _ = tile.release());
    }
}

/// A run of a part's bytes that a tile holds.
struct HeldRun {
    /// Range of the part's bytes.
    range: Range<u64>,
    elements: Range<u64>,
    tile: usize,
    /// The piece's number in the tile.
    number: usize,
    array: usize,
    /// Result in which the device puts the digest of its bytes, and the index there.
    digest: Option<(Arc<dyn Digests>, usize)>,
}

/// Bytes of a device, with their digest as the checksum.
struct Digested {
    live: Run,
    known: Option<(Arc<dyn Digests>, usize)>,
    captured: Arc<Captured>,
}

impl Provider for Digested {
    fn bytes(&self) -> u64 {
        self.live.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        self.live.fill(at, out, fences)
    }

    /// Returns the digest of all of it: a piece of a tile is no longer than a slot, so it is asked for at once.
    fn sum(&self, at: u64, bytes: u64, slot: &mut [u8]) -> Result<u64> {
        if (at, bytes) != (0, self.live.bytes()) {
            return Err(Error::internal("a device's digest is of a whole piece"));
        }
        if let Some((digests, index)) = &self.known {
            let found = digests.wait()?.get(*index).copied();
            if *index == 0 {
                // Before the lock, since it may wait for the device.
                let took_ms = digests.took_ms().unwrap_or(0.0);
                self.captured.shared.lock().figures.device_proof_ms += took_ms;
            }
            return found.ok_or_else(|| Error::internal("a device has no such digest"));
        }
        let (copied, mut fences) = (&mut slot[..bytes as usize], Fences::default());
        self.live.fill(0, copied, &mut fences)?;
        fences.wait()?;
        Ok(digest(copied))
    }

    fn capture(&self) -> Capture {
        self.live.capture()
    }

    fn is_torn(&self) -> bool {
        self.live.is_torn()
    }
}

/// A part of which some runs were captured ahead.
struct Held {
    /// Provider of the training's own bytes.
    live: Arc<dyn Provider>,
    /// Ascending and disjoint.
    runs: Vec<HeldRun>,
    captured: Arc<Captured>,
    name: String,
}

impl Held {
    /// Returns the runs that overlap a range of the part's bytes.
    fn runs_in(&self, range: &Range<u64>) -> &[HeldRun] {
        let first = self.runs.partition_point(|run| run.range.end <= range.start);
        let end = self.runs.partition_point(|run| run.range.start < range.end);
        &self.runs[first..end.max(first)]
    }
}

impl Provider for Held {
    fn bytes(&self) -> u64 {
        self.live.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> Result<()> {
        let end = at + out.len() as u64;
        let mut done = at;
        let mut live = |from: u64, to: u64, out: &mut [u8]| match from < to {
            true => self.live.fill(from, &mut out[(from - at) as usize..(to - at) as usize], fences),
            false => Ok(()),
        };
        for run in self.runs_in(&(at..end)) {
            let (from, to) = (run.range.start.max(at), run.range.end.min(end));
            live(done, from, out)?;
            let place = &mut out[(from - at) as usize..(to - at) as usize];
            self.captured.shared.tiles[run.tile].read(run.number, run.array, from - run.range.start, place)?;
            done = to;
        }
        live(done, end, out)
    }

    fn sum(&self, at: u64, bytes: u64, slot: &mut [u8]) -> Result<u64> {
        self.live.sum(at, bytes, slot)
    }

    fn capture(&self) -> Capture {
        self.live.capture()
    }

    fn is_torn(&self) -> bool {
        self.live.is_torn()
    }

    fn is_held(&self, at: u64, bytes: u64) -> bool {
        let mut done = at;
        for run in self.runs_in(&(at..at + bytes)) {
            if run.range.start > done {
                return false;
            }
            done = run.range.end;
        }
        done >= at + bytes
    }

    fn live(&self) -> Option<Arc<dyn Provider>> {
        Some(Arc::clone(&self.live))
    }

    fn evidence(&self) -> Vec<Evidence> {
        let of = |run: &HeldRun| {
            let (captured, tile, number, array) = (Arc::clone(&self.captured), run.tile, run.number, run.array);
            let live = Run::new(Arc::clone(&self.live), run.range.start, run.range.end - run.range.start);
            let live: Arc<dyn Provider> = match captured.shared.beside {
                Some(_) => Arc::new(Digested { live, known: run.digest.clone(), captured: Arc::clone(&self.captured) }),
                None => Arc::new(live),
            };
            Evidence {
                name: format!("{}, elements {}..{}", self.name, run.elements.start, run.elements.end),
                how: captured.shared.tiles[tile].variant.map_or("", |variant| variant.name()),
                live,
                agrees: Box::new(move |live| {
                    let agrees = captured.shared.tiles[tile].sum(number, array)? == live;
                    captured.shared.lock().is_refuted |= !agrees;
                    Ok(agrees)
                }),
            }
        };
        self.runs.iter().map(of).collect()
    }
}
