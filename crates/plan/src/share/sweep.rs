//! Finds the items that touch the same blocks, in one pass over each file.

use std::collections::HashSet;

use shardfast_format::{BLOCK_BYTES, Manifest};

use super::Sets;
use super::part::Part;

/// Result of a pass.
pub(super) struct Swept {
    /// Pairs of items of different ranks that share a block, both ways round, sorted.
    pairs: Vec<(u32, u32)>,
    pub(super) bytes_for_each: u64,
    pub(super) bytes_for_all: u64,
}

/// Blocks of a part.
struct Span {
    file: u32,
    first: u64,
    /// Block after the last one.
    end: u64,
    item: u32,
}

/// Finds the pairs of items that touch the same blocks. Returns `None` when the answers to ranks would have more than
/// `others_max` items of other ranks.
pub(super) fn sweep(
    manifest: &Manifest,
    parts: &[Part],
    set_of: &[u32],
    sets: &mut Sets,
    others_max: usize,
) -> Option<Swept> {
    let span = |part: &Part| {
        let data_start = manifest.files()[part.file as usize].data_start;
        let block = |at: u64| at.saturating_sub(data_start) / BLOCK_BYTES;
        Span { file: part.file, first: block(part.begin), end: block(part.end - 1) + 1, item: part.item }
    };
    let mut spans: Vec<Span> = parts.iter().map(span).collect();
    spans.sort_unstable_by_key(|span| (span.file, span.first, span.item));

    let mut pass = Pass { active: Vec::new(), at: 0, for_each: 0, for_all: 0 };
    let (mut pairs, mut others) = (HashSet::new(), 0usize);
    for group in spans.chunk_by(|a, b| (a.file, a.first) == (b.file, b.first)) {
        let place = (group[0].file, group[0].first);
        pass.go_to(place, sets, set_of);
        for span in group {
            for active in &pass.active {
                let (a, b) = (active.item.min(span.item), active.item.max(span.item));
                let (set_a, set_b) = (set_of[a as usize], set_of[b as usize]);
                if set_a != set_b && pairs.insert((a, b)) {
                    others += sets.ranks(set_a).len() + sets.ranks(set_b).len();
                }
            }
            if others > others_max {
                return None;
            }
            pass.active.push(Active { file: span.file, end: span.end, item: span.item });
        }
    }
    pass.go_to((u32::MAX, u64::MAX), sets, set_of);
    let mut pairs: Vec<(u32, u32)> = pairs.into_iter().flat_map(|(a, b)| [(a, b), (b, a)]).collect();
    pairs.sort_unstable();
    let bytes = |blocks: u64| blocks.saturating_mul(BLOCK_BYTES);
    Some(Swept { pairs, bytes_for_each: bytes(pass.for_each), bytes_for_all: bytes(pass.for_all) })
}

impl Swept {
    /// Returns the items of other ranks that share a block with `item`.
    pub(super) fn beside(&self, item: u32) -> impl Iterator<Item = u32> {
        let first = self.pairs.partition_point(|&(a, _)| a < item);
        self.pairs[first..].iter().take_while(move |&&(a, _)| a == item).map(|&(_, b)| b)
    }
}

struct Active {
    file: u32,
    end: u64,
    item: u32,
}

/// Position of a pass, and the spans that reach beyond it.
struct Pass {
    active: Vec<Active>,
    at: u64,
    for_each: u64,
    for_all: u64,
}

impl Pass {
    /// Counts the blocks up to a place, and drops the spans that end before it.
    fn go_to(&mut self, (file, block): (u32, u64), sets: &mut Sets, set_of: &[u32]) {
        while let Some(first) = self.active.iter().map(|active| active.end).min() {
            let is_here = self.active[0].file == file;
            let to = if is_here { first.min(block) } else { first };
            if to > self.at {
                let mut known: Vec<u32> = self.active.iter().map(|active| set_of[active.item as usize]).collect();
                known.sort_unstable();
                known.dedup();
                let union = sets.union(&known);
                // The manifest may give any size for a file until the file was looked at.
                let each = (to - self.at).saturating_mul(sets.ranks(union).len() as u64);
                self.for_each = self.for_each.saturating_add(each);
                self.for_all = self.for_all.saturating_add(to - self.at);
                self.at = to;
            }
            if is_here && first > block {
                break;
            }
            self.active.retain(|active| active.end > to);
        }
        self.at = block;
    }
}
