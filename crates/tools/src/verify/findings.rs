//! The damage of a checkpoint, collected from many threads in bounded memory.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Serialize, Serializer};
use shardfast_format::{Manifest, Region};
use shardfast_transfer::reader::Damage;

use super::spans::Span;
use crate::inspect::full_name;

/// Number of findings that are listed in full; of further ones only the leaves are.
const FINDINGS_MAX: usize = 65_536;

/// One damage that was found.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The kind of damage.
    pub problem: Problem,
    /// The file, in the checkpoint; none if it is not in one file.
    pub file: Option<String>,
    /// The damaged bytes of the file; `None` for the whole file.
    pub block: Option<Block>,
    /// The leaves that it hits.
    pub leaves: Vec<Hit>,
    /// Description of what was expected and what was found.
    pub message: String,
}

/// The kind of damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    /// Damaged commit: nothing else can be checked.
    Commit,
    /// The manifest is missing or not the committed one: nothing else can be checked.
    Manifest,
    /// The checkpoint lies under the name of another step.
    Step,
    /// A tensor's regions do not hold each element once.
    Coverage,
    /// An index contradicts the manifest.
    Index,
    /// A data file is missing, of another size, or has another header.
    File,
    /// Difference between a file's entry and the manifest.
    Entry,
    /// Block whose bytes are not the saved ones.
    Block,
    /// The store failed to read these bytes.
    Unreadable,
    /// A value's bytes are verified, but cannot be decoded.
    Value,
}

/// A run of bytes of a data file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Block {
    /// First byte, from the file's start.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
    /// The CRC-64 in the file's header.
    #[serde(serialize_with = "hex")]
    pub expected: Option<u64>,
    /// CRC-64 of the bytes read.
    #[serde(serialize_with = "hex")]
    pub found: Option<u64>,
}

/// A leaf that is hit, and which part of it.
#[derive(Debug, Clone, Serialize)]
pub struct Hit {
    /// Key and name.
    pub leaf: String,
    /// Regions of a tensor that are hit, in its global shape.
    pub regions: Vec<Region>,
    /// Ranks whose value of an object is hit.
    pub ranks: Vec<Range<u32>>,
}

fn hex<S: Serializer>(crc: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    crc.map(|crc| format!("{crc:016x}")).serialize(serializer)
}

impl Block {
    pub(super) fn of(damage: &Damage) -> Block {
        let Range { start, end } = damage.span;
        Block { start, end, expected: Some(damage.expected), found: Some(damage.found) }
    }
}

/// The findings so far.
pub(super) struct Findings<'a> {
    manifest: &'a Manifest,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    listed: Vec<Finding>,
    left_out: u64,
    /// Leaf and row of every span that is hit.
    spans: HashSet<(u32, u32)>,
    leaves: HashSet<usize>,
}

impl<'a> Findings<'a> {
    pub(super) fn new(manifest: &'a Manifest) -> Findings<'a> {
        Findings { manifest, state: Mutex::default() }
    }

    /// Adds a finding about a leaf of the manifest.
    pub(super) fn of_leaf(&self, problem: Problem, leaf: usize, message: String) {
        self.lock().leaves.insert(leaf);
        let hit = Hit { leaf: full_name(self.manifest, leaf), regions: Vec::new(), ranks: Vec::new() };
        self.push(Finding { problem, file: None, block: None, leaves: vec![hit], message });
    }

    /// Adds a finding about the checkpoint as a whole.
    pub(super) fn of_all(&self, problem: Problem, message: String) {
        self.push(Finding { problem, file: None, block: None, leaves: Vec::new(), message });
    }

    /// Adds a finding about a file that hits no leaf.
    pub(super) fn of_file(&self, problem: Problem, path: &str, message: String) {
        self.push(Finding { problem, file: Some(path.to_owned()), block: None, leaves: Vec::new(), message });
    }

    /// Adds a finding about these spans of a file, or some bytes of each.
    pub(super) fn of_spans<'s>(
        &self,
        problem: Problem,
        path: &str,
        block: Option<Block>,
        hit: impl Iterator<Item = (&'s Span, Option<Range<u64>>)>,
        message: String,
    ) {
        let mut hit: Vec<_> = hit.collect();
        hit.sort_by_key(|(span, _)| (span.leaf, span.row));
        let mut state = self.lock();
        state.spans.extend(hit.iter().map(|(span, _)| (span.leaf, span.row)));
        state.leaves.extend(hit.iter().map(|(span, _)| span.leaf as usize));
        let is_full = state.listed.len() >= FINDINGS_MAX;
        drop(state);
        let mut leaves = Vec::new();
        if !is_full {
            for spans in hit.chunk_by(|a, b| a.0.leaf == b.0.leaf) {
                leaves.push(Hit {
                    leaf: full_name(self.manifest, spans[0].0.leaf as usize),
                    regions: spans.iter().flat_map(|(s, bytes)| s.regions(self.manifest, bytes.clone())).collect(),
                    ranks: spans.iter().flat_map(|(span, _)| span.ranks(self.manifest)).collect(),
                });
            }
        }
        self.push(Finding { problem, file: Some(path.to_owned()), block, leaves, message });
    }

    /// Returns whether a finding hits the span.
    pub(super) fn has_hit(&self, span: &Span) -> bool {
        self.lock().spans.contains(&(span.leaf, span.row))
    }

    /// Returns the findings by file and offset, the number of those left out, and the names of all leaves that are hit.
    pub(super) fn into_parts(self) -> (Vec<Finding>, u64, Vec<String>) {
        let State { mut listed, left_out, leaves, .. } =
            self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let place = |finding: &Finding| (finding.file.clone(), finding.block.as_ref().map(|block| block.start));
        listed.sort_by_cached_key(|finding| (place(finding), finding.problem));
        let mut leaves: Vec<usize> = leaves.into_iter().collect();
        leaves.sort_unstable();
        (listed, left_out, leaves.into_iter().map(|leaf| full_name(self.manifest, leaf)).collect())
    }

    fn push(&self, finding: Finding) {
        let mut state = self.lock();
        if state.listed.len() < FINDINGS_MAX {
            state.listed.push(finding);
        } else {
            state.left_out += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
