//! A save's input: the state of a rank, and the destination.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shardfast_format::{Catalog, Leaf, LeafBody, LeafName, Region, sha256};
use shardfast_plan::{Replicas, Write};
use shardfast_transfer::capture::Captures;
use shardfast_transfer::error::{Error, Result};
use shardfast_transfer::provider::{Fences, Provider, Run};

/// State that one rank gives to a save.
#[derive(Default)]
pub struct State {
    /// The rank's leaves.
    pub catalog: Arc<Catalog>,
    /// Parts' bytes by leaf of the catalog, in order: one provider for an object, none for an alias.
    pub providers: Vec<Vec<Arc<dyn Provider>>>,
    /// Ranks that hold the same parts of each leaf; `None` when that is not known.
    pub replicas: Option<Arc<Replicas>>,
    /// Times of comparing replicas, by leaf; for leaves beyond its end, the first save.
    pub compared: Arc<Vec<Compared>>,
    /// Classes that make state, such as optimizers.
    pub makers: Arc<Vec<Maker>>,
    /// Time since which some of the bytes are captured in steps ahead of the save; `None` if there are none.
    pub ahead_since: Option<Instant>,
    /// Most bytes of data in a file; `None` for as many as the format has room for.
    pub file_bytes_max: Option<u64>,
}

/// A class that makes state here, such as an optimizer's. A save fails in which something was made, and two ranks have
/// classes for it that differ in name and in kind: no load could give it to both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maker {
    /// Name of the value leaf that the state belongs to.
    pub value: LeafName,
    /// The name of the class.
    pub class: String,
    /// Kind, common to classes that can load each other's state.
    pub kind: String,
    /// Owners of state that it has made.
    pub made: Vec<String>,
    /// Owners of state that it may make later.
    pub unmade: Vec<String>,
}

/// Destination of a save, and its notes.
#[derive(Debug, Clone)]
pub struct Destination {
    /// The URL of the checkpoint; must hold no committed checkpoint.
    pub url: String,
    /// The training step, if it is one of a run.
    pub step: Option<u64>,
    /// The user's notes.
    pub user: BTreeMap<String, String>,
    /// Replicas to compare: ranks that hold the same region with different bytes fail the save.
    pub prove: Prove,
    /// `true` if the caller does nothing else until the save has ended.
    pub blocking: bool,
}

/// Replicas that a save compares.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Prove {
    /// None: of each region the copy of the lowest rank that holds it is taken.
    Nothing,
    /// Replicas of leaves that are compared at the first save of a plan, if this is it.
    #[default]
    FirstSave,
    /// All that may be compared at all.
    EverySave,
}

/// Time at which the replicas of a leaf are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Compared {
    /// At the first save of each plan, and when the caller asks every save to.
    #[default]
    FirstSave,
    /// Whenever the caller asks every save to: such replicas drift apart in correct programs.
    OnRequest,
    /// At every save, in any case: that they were equal once proves nothing later.
    EverySave,
    /// Never: the user declared that they may differ.
    Never,
}

/// A range of the bytes of a tensor's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PartRange {
    /// Index of the leaf in the catalog.
    pub(crate) leaf: u32,
    pub(crate) part: u32,
    /// Offset from the part's start, in bytes.
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

impl State {
    /// Returns the captures among its tensors.
    pub(crate) fn captures(&self) -> Captures {
        self.providers.iter().flatten().map(|provider| provider.capture()).collect()
    }

    /// Returns the bytes of a part, or of a value.
    pub(crate) fn provider(&self, leaf: u32, part: u32) -> Result<Arc<dyn Provider>> {
        let of = self.providers[leaf as usize].get(part as usize).map(Arc::clone);
        let name = &self.catalog.leaves[leaf as usize].name;
        of.ok_or_else(|| Error::internal(format!("{name}: it has no part {part}")))
    }

    /// Returns the bytes of a range of a part.
    pub(crate) fn range(&self, range: &PartRange) -> Result<Arc<dyn Provider>> {
        let of = self.provider(range.leaf, range.part)?;
        match (range.at, range.bytes) == (0, of.bytes()) {
            true => Ok(of),
            false => Ok(Arc::new(Run::new(of, range.at, range.bytes))),
        }
    }

    /// Returns offset and length of the write in the part's bytes.
    pub(crate) fn extent(&self, write: &Write) -> Result<(u64, u64)> {
        let leaf = &self.catalog.leaves[write.leaf as usize];
        match &leaf.body {
            LeafBody::Tensor { dtype, parts, .. } => {
                let bytes = leaf_region(leaf, write)?.numel() * dtype.size_bytes();
                Ok((write.skipped(&parts[write.part as usize]) * dtype.size_bytes(), bytes))
            }
            LeafBody::Object { .. } | LeafBody::Alias { .. } => {
                Err(Error::internal(format!("{}: it is no tensor and has no extents", leaf.name)))
            }
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.catalog.validate()?;
        if self.providers.len() != self.catalog.leaves.len() {
            return Err(Error::internal(format!(
                "expected the bytes of {} leaves, found those of {}",
                self.catalog.leaves.len(),
                self.providers.len()
            )));
        }
        for (leaf, providers) in self.catalog.leaves.iter().zip(&self.providers) {
            let expected: Vec<Option<u64>> = match &leaf.body {
                LeafBody::Tensor { dtype, parts, .. } => {
                    parts.iter().map(|part| Some(part.numel() * dtype.size_bytes())).collect()
                }
                LeafBody::Object { .. } => vec![None],
                LeafBody::Alias { .. } => Vec::new(),
            };
            let fits = expected.len() == providers.len()
                && expected.iter().zip(providers).all(|(bytes, provider)| bytes.is_none_or(|b| b == provider.bytes()));
            if !fits {
                let found: Vec<u64> = providers.iter().map(|provider| provider.bytes()).collect();
                return Err(Error::invalid(format!(
                    "leaf {}: its parts need {expected:?} bytes, its memory has {found:?}",
                    leaf.name
                )));
            }
        }
        Ok(())
    }

    /// Checks by samples that the copied bytes are those at the beginning of the save.
    pub(crate) fn expect_whole(&self) -> Result<()> {
        let torn = self.catalog.leaves.iter().zip(&self.providers);
        let mut torn = torn.filter(|(_, providers)| providers.iter().any(|provider| provider.is_torn()));
        let Some((first, _)) = torn.next() else { return Ok(()) };
        let more = torn.count();
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        Err(Error::invalid(format!(
            "{}{more} was written during capture, and not by an optimizer step: call staged() on the save before \
             modifying tensors any other way",
            first.name
        )))
    }

    /// Returns the SHA-256 of every encoded value, in the catalog's order.
    pub(crate) fn digests(&self) -> Result<Vec<[u8; 32]>> {
        let leaves = self.catalog.leaves.iter().zip(&self.providers);
        leaves
            .filter(|(leaf, _)| matches!(leaf.body, LeafBody::Object { .. }))
            .map(|(_, providers)| {
                let mut bytes = vec![0; providers[0].bytes() as usize];
                providers[0].fill(0, &mut bytes, &mut Fences::default())?;
                Ok(sha256(&bytes))
            })
            .collect()
    }
}

/// Returns the region of a tensor's part that is to be written.
pub(crate) fn leaf_region(leaf: &Leaf, write: &Write) -> Result<Region> {
    let LeafBody::Tensor { parts, .. } = &leaf.body else {
        return Err(Error::internal(format!("{}: it is no tensor and has no part {}", leaf.name, write.part)));
    };
    let region = parts.get(write.part as usize).and_then(|part| write.region(part));
    region.ok_or_else(|| Error::internal(format!("{}: it has no {write:?}", leaf.name)))
}
