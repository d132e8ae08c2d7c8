//! Plans which chunks one rank reads, for itself and for others, and which it receives.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use shardfast_format::{BLOCK_BYTES, Manifest};

use super::part::{Part, parts};
use super::{Common, Sets, Wanted};
use crate::error::{Error, Problems};
use crate::load::Piece;

/// Largest number of blocks in a chunk.
pub const CHUNK_BLOCKS_MAX: u32 = 15;

/// Plan of one rank for a shared load.
#[derive(Debug, Clone)]
pub struct Sharing {
    rank: u32,
    items: Vec<Item>,
    /// Parts by file, first byte and item: in the same order on every rank that knows them.
    parts: Vec<Part>,
    /// Largest end in its file of each part and those before it.
    reach: Vec<u64>,
    /// Indices in `parts` of this rank's own items.
    own: Vec<u32>,
    sets: Sets,
    chunk_bytes: u64,
    run_bytes: u64,
    /// Range of each file's data.
    files: Vec<Range<u64>>,
}

/// A wanted item: the set of ranks that want it, and its index among this rank's wants.
#[derive(Debug, Clone)]
struct Item {
    set: u32,
    own: Option<u32>,
}

/// Whole blocks of a file that the same ranks want.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the file in the manifest.
    pub file: u32,
    /// Range in the file, in bytes.
    pub range: Range<u64>,
    /// End of the last element that begins in the chunk: the end of the range, or in the next block.
    pub end: u64,
    /// Ranks that want it, ascending, this one included.
    pub wanters: Arc<[u32]>,
    /// Rank that reads it, one of `wanters`.
    pub reader: u32,
}

impl Sharing {
    /// Plans for `rank`, which wants `wants` and has `common` with others, by [`share`](super::share). A file's data
    /// are cut into runs of `run_bytes`, at least as long as a chunk. One rank reads all chunks of a run that the same
    /// ranks want, since object storage reads a run in one request. All ranks that have something in common must pass
    /// the same `chunk_blocks`, 1 to [`CHUNK_BLOCKS_MAX`], and the same `run_bytes`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a want is no part of the checkpoint, or `common` does not fit the wants.
    pub fn new(
        manifest: &Manifest,
        rank: u32,
        wants: &[Wanted],
        common: &Common,
        chunk_blocks: u32,
        run_bytes: u64,
    ) -> Result<Sharing, Error> {
        let mut sets = Sets::default();
        let ids: Vec<u32> = common.sets.iter().map(|set| sets.of(set.iter().cloned().flatten().collect())).collect();
        let misfit = || Error::Invalid(Problems(vec!["shared regions do not match the wants of a rank".to_owned()]));
        let id = |set: &u32| ids.get(*set as usize).copied().ok_or_else(misfit);
        if common.own.len() != wants.len() || !(1..=CHUNK_BLOCKS_MAX).contains(&chunk_blocks) {
            return Err(misfit());
        }
        let mut known: Vec<(&Wanted, Item)> = Vec::with_capacity(wants.len() + common.others.len());
        for (own, (wanted, set)) in (0..).zip(wants.iter().zip(&common.own)) {
            known.push((wanted, Item { set: id(set)?, own: Some(own) }));
        }
        for (wanted, set) in &common.others {
            known.push((wanted, Item { set: id(set)?, own: None }));
        }
        known.sort_by_key(|(wanted, _)| *wanted);
        let mut parts = parts(manifest, known.iter().map(|(wanted, _)| *wanted))?;
        parts.sort_unstable_by_key(|part| (part.file, part.begin, part.item));

        let items: Vec<Item> = known.into_iter().map(|(_, item)| item).collect();
        let mut reach: Vec<u64> = Vec::with_capacity(parts.len());
        for (i, part) in parts.iter().enumerate() {
            let before = if i > 0 && parts[i - 1].file == part.file { reach[i - 1] } else { 0 };
            reach.push(before.max(part.end));
        }
        let own = (0..).zip(&parts).filter(|(_, part)| items[part.item as usize].own.is_some());
        let own = own.map(|(i, _)| i).collect();
        let files = manifest.files().iter().map(|file| file.data_start..file.bytes).collect();
        let chunk_bytes = u64::from(chunk_blocks) * BLOCK_BYTES;
        let run_bytes = run_bytes.max(chunk_bytes);
        Ok(Sharing { rank, items, parts, reach, own, sets, chunk_bytes, run_bytes, files })
    }

    /// Returns the rank whose plan this is.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the bytes of all wants of this rank, each counted by itself.
    pub fn bytes(&self) -> u64 {
        self.own.iter().map(|&own| self.parts[own as usize].bytes()).sum()
    }

    /// Returns every rank with which this one has something in common, ascending.
    pub fn peers(&self) -> Vec<u32> {
        let sets = self.items.iter().map(|item| item.set).collect::<BTreeSet<u32>>();
        let ranks = sets.into_iter().flat_map(|set| self.sets.ranks(set).iter().copied());
        let ranks: BTreeSet<u32> = ranks.filter(|&rank| rank != self.rank).collect();
        ranks.into_iter().collect()
    }

    /// Returns the chunks that this rank wants, by file and offset, computed lazily.
    pub fn chunks(&self) -> Chunks<'_> {
        Chunks {
            sharing: self,
            sets: self.sets.clone(),
            dealt: HashMap::new(),
            next_own: 0,
            place: (0, 0),
            reach: 0,
            ready: VecDeque::new(),
        }
    }

    /// Returns the pieces for this rank's wants of the elements that begin in `range` of a file. [`Piece::want`] is the
    /// index of its want.
    pub fn own_pieces(&self, file: u32, range: Range<u64>) -> Vec<Piece> {
        let mut out = Vec::new();
        for part in self.parts_in(file, &range) {
            if let Some(own) = self.items[part.item as usize].own {
                part.pieces(range.start, range.end, |piece| out.push(Piece { want: own, ..piece }));
            }
        }
        out
    }

    /// Returns the pieces of a chunk for the other ranks, grouped by ranks that take the same. Each of them computes
    /// the same pieces, in this order, with [`own_pieces`](Sharing::own_pieces).
    pub fn pieces_of_others(&self, chunk: &Chunk) -> Vec<(Vec<u32>, Vec<Piece>)> {
        let parts: Vec<&Part> = self.parts_in(chunk.file, &chunk.range).collect();
        let set = |part: &Part| self.items[part.item as usize].set;
        let mut sets: Vec<u32> = parts.iter().map(|part| set(part)).collect();
        sets.sort_unstable();
        sets.dedup();
        let mut groups: BTreeMap<Vec<bool>, Vec<u32>> = BTreeMap::new();
        for &rank in chunk.wanters.iter().filter(|&&rank| rank != self.rank) {
            let is_in = sets.iter().map(|&set| self.sets.ranks(set).binary_search(&rank).is_ok()).collect();
            groups.entry(is_in).or_default().push(rank);
        }
        let pieces = |is_in: Vec<bool>| {
            let mut out = Vec::new();
            for part in &parts {
                if sets.binary_search(&set(part)).is_ok_and(|at| is_in[at]) {
                    part.pieces(chunk.range.start, chunk.range.end, |piece| out.push(piece));
                }
            }
            out
        };
        groups.into_iter().map(|(is_in, ranks)| (ranks, pieces(is_in))).collect()
    }

    /// Returns the parts that reach into a range of a file, in their order.
    fn parts_in(&self, file: u32, range: &Range<u64>) -> impl Iterator<Item = &Part> {
        let behind = self.parts.partition_point(|part| (part.file, part.begin) < (file, range.end));
        let mut first = behind;
        while first > 0 && self.parts[first - 1].file == file && self.reach[first - 1] > range.start {
            first -= 1;
        }
        let start = range.start;
        self.parts[first..behind].iter().filter(move |part| part.end > start)
    }

    /// Returns the end of the last element that begins in these blocks.
    fn end(&self, file: u32, chunk: &Range<u64>) -> u64 {
        let mut end = chunk.end;
        for part in self.parts_in(file, chunk) {
            if part.end > chunk.end && part.is_cut_at(chunk.end) {
                part.pieces(chunk.start, chunk.end, |piece| end = end.max(piece.src + piece.span_bytes));
            }
        }
        end
    }

    fn cell(&self, file: u32, at: u64) -> u64 {
        at.saturating_sub(self.files[file as usize].start) / self.chunk_bytes
    }
}

/// Iterator over the chunks of a rank; see [`Sharing::chunks`].
#[derive(Debug)]
pub struct Chunks<'a> {
    sharing: &'a Sharing,
    sets: Sets,
    dealt: HashMap<u32, Dealt>,
    next_own: usize,
    /// File and cell that come next. Cells are the places of chunks: as long as the longest of them.
    place: (u32, u64),
    /// Cell after the last one that this rank's parts up to `next_own` reach.
    reach: u64,
    ready: VecDeque<Chunk>,
}

/// Reads that the ranks of a set have done for each other so far.
#[derive(Debug, Default)]
struct Dealt {
    /// Bytes that each rank of the set reads.
    bytes: Vec<u64>,
    /// File and run of the last chunk, and the index of its reader.
    last: Option<((u32, u64), usize)>,
}

impl Iterator for Chunks<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        while self.ready.is_empty() {
            let (file, cell) = self.next_cell()?;
            self.cut(file, cell);
        }
        self.ready.pop_front()
    }
}

impl Chunks<'_> {
    /// Returns the next cell into which this rank's parts reach.
    fn next_cell(&mut self) -> Option<(u32, u64)> {
        let sharing = self.sharing;
        loop {
            while let Some(&own) = sharing.own.get(self.next_own) {
                let part = &sharing.parts[own as usize];
                if (part.file, sharing.cell(part.file, part.begin)) > self.place {
                    break;
                }
                if part.file == self.place.0 {
                    self.reach = self.reach.max(sharing.cell(part.file, part.end - 1) + 1);
                }
                self.next_own += 1;
            }
            if self.place.1 < self.reach {
                self.place.1 += 1;
                return Some((self.place.0, self.place.1 - 1));
            }
            let part = &sharing.parts[*sharing.own.get(self.next_own)? as usize];
            self.place = (part.file, sharing.cell(part.file, part.begin));
            self.reach = self.place.1;
        }
    }

    /// Cuts a cell into chunks.
    fn cut(&mut self, file: u32, cell: u64) {
        let sharing = self.sharing;
        let data = &sharing.files[file as usize];
        let start = data.start + cell * sharing.chunk_bytes;
        let range = start..(start + sharing.chunk_bytes).min(data.end);
        // Blocks, as bits, in which an element begins that a set of ranks wants.
        let mut blocks_of: BTreeMap<u32, u32> = BTreeMap::new();
        let mut own = 0;
        for part in sharing.parts_in(file, &range) {
            let item = &sharing.items[part.item as usize];
            let mut blocks = 0;
            part.runs(range.start, range.end, |first, last| {
                let (first, last) = ((first - start) / BLOCK_BYTES, (last - start) / BLOCK_BYTES);
                blocks |= (1 << (last + 1)) - (1 << first);
            });
            *blocks_of.entry(item.set).or_default() |= blocks;
            own |= if item.own.is_some() { blocks } else { 0 };
        }
        let mut block = 0;
        while start + block * BLOCK_BYTES < range.end {
            if own >> block & 1 == 0 {
                block += 1;
                continue;
            }
            let wanters = |sets: &mut Sets, block: u64| {
                let known: Vec<u32> =
                    blocks_of.iter().filter(|(_, blocks)| *blocks >> block & 1 == 1).map(|(&set, _)| set).collect();
                sets.union(&known)
            };
            let first = block;
            let set = wanters(&mut self.sets, first);
            while block < 32 && own >> block & 1 == 1 && wanters(&mut self.sets, block) == set {
                block += 1;
            }
            let chunk = start + first * BLOCK_BYTES..(start + block * BLOCK_BYTES).min(range.end);
            let run = (file, (chunk.start - data.start) / sharing.run_bytes);
            let reader = self.deal(set, run, chunk.end - chunk.start);
            let end = sharing.end(file, &chunk);
            let wanters = Arc::clone(self.sets.ranks(set));
            self.ready.push_back(Chunk { file, range: chunk, end, wanters, reader });
        }
    }

    /// Returns the rank that reads the next bytes that a set of ranks wants: the reader of the other bytes of their
    /// run, else the rank that has read the least for the set so far.
    fn deal(&mut self, set: u32, run: (u32, u64), bytes: u64) -> u32 {
        let ranks = self.sets.ranks(set);
        let dealt = self.dealt.entry(set).or_default();
        dealt.bytes.resize(ranks.len(), 0);
        // Many sets may have one chunk each: not all of them begin with their lowest rank.
        let first = ranks
            .iter()
            .fold(0u64, |hash, &rank| (hash ^ u64::from(rank)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
        let first = (first % ranks.len() as u64) as usize;
        let turn = |i: usize| (i + ranks.len() - first) % ranks.len();
        let least = || (0..ranks.len()).min_by_key(|&i| (dealt.bytes[i], turn(i))).expect("a set has ranks");
        let i = dealt.last.filter(|(last, _)| *last == run).map_or_else(least, |(_, i)| i);
        dealt.bytes[i] += bytes;
        dealt.last = Some((run, i));
        ranks[i]
    }
}
