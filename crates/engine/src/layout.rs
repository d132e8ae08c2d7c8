//! Which parts and values go into which data file of a rank, and where in it.

use std::collections::{BTreeMap, HashSet};

use shardfast_format::{DType, EntrySpec, FileLayout, Leaf, LeafBody, data_file, part_name, value_name};
use shardfast_plan::Write;
use smallvec::smallvec;

use crate::error::Result;
use crate::operation::Operation;
use crate::receipt::FileShape;
use crate::state::{State, leaf_region};
use crate::writer::FileJob;

/// The files that a rank writes together.
#[derive(Default)]
pub(crate) struct Layout {
    /// The files, in order.
    pub(crate) jobs: Vec<FileJob>,
    /// How each of them looks.
    pub(crate) shapes: Vec<FileShape>,
    /// What lies in them: file by file, in the order of the entries.
    pub(crate) placed: Vec<Placed>,
}

/// Where a part, some rows of one, or a value lies.
pub(crate) struct Placed {
    pub(crate) write: Write,
    /// Index of the file.
    pub(crate) file: u32,
    /// From the file's start.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Layout {
    /// Lays out the files for these parts and values, one for each key of the state, and says where each will lie.
    /// `earlier` are this rank's files before these.
    ///
    /// # Errors
    /// `Internal` when the state has no such part; `Invalid` when a file cannot hold what it is to hold.
    pub(crate) fn new(operation: &Operation, state: &State, writes: &[Write], earlier: &[FileShape]) -> Result<Layout> {
        let (rank, attempt) = (operation.engine.rank(), operation.attempt());
        let leaves = &state.catalog.leaves;
        let mut by_key: BTreeMap<&str, Vec<Write>> = BTreeMap::new();
        for write in writes {
            by_key.entry(&leaves[write.leaf as usize].name.key).or_default().push(*write);
        }
        let mut out = Layout { placed: Vec::with_capacity(writes.len()), ..Layout::default() };
        for (key, mut writes) in by_key {
            // The widest elements first, so that each tensor is aligned to its element.
            writes.sort_by_key(|write| (std::cmp::Reverse(item_bytes(&leaves[write.leaf as usize])), *write));
            let first = earlier.iter().filter(|file| file.key == key).count() as u32;
            for (index, writes) in (first..).zip(without_namesakes(rank, state, writes)?) {
                let (writes, entries): (Vec<_>, Vec<_>) = writes.into_iter().unzip();
                let layout = FileLayout::new(&entries, &BTreeMap::new())?;
                let providers = writes.iter().map(|write| state.provider(write)).collect::<Result<Vec<_>>>()?;
                let file = out.jobs.len() as u32;
                let placed = writes.iter().zip(&layout.offsets).zip(&providers);
                out.placed.extend(placed.map(|((&write, &offset), of)| Placed {
                    write,
                    file,
                    offset,
                    bytes: of.bytes(),
                }));
                let (bytes, data_start) = (layout.file_bytes(), layout.data_start);
                out.shapes.push(FileShape { key: key.to_owned(), index, bytes, data_start });
                let path = data_file(key, &attempt, rank, index)?;
                let names = writes.iter().map(|write| leaves[write.leaf as usize].name.to_string()).collect();
                out.jobs.push(FileJob { path, layout, providers, names, is_summed: false });
            }
        }
        Ok(out)
    }
}

/// Parts and values with their entries, spread over as few files as it takes that no file has two entries of one name:
/// a leaf may really be called `w[0:4]` or `rng@rank3`, as a part or a value of another one is in its file.
fn without_namesakes(rank: u32, state: &State, writes: Vec<Write>) -> Result<Vec<Vec<(Write, EntrySpec)>>> {
    let mut files: Vec<(HashSet<String>, Vec<_>)> = Vec::new();
    for write in writes {
        let entry = entry(rank, state, &write)?;
        let free = files.iter().position(|(names, _)| !names.contains(&entry.name)).unwrap_or(files.len());
        if free == files.len() {
            files.push(Default::default());
        }
        files[free].0.insert(entry.name.clone());
        files[free].1.push((write, entry));
    }
    Ok(files.into_iter().map(|(_, writes)| writes).collect())
}

fn item_bytes(leaf: &Leaf) -> u64 {
    match leaf.body {
        LeafBody::Tensor { dtype, .. } => dtype.size_bytes(),
        LeafBody::Object { .. } | LeafBody::Alias { .. } => 0,
    }
}

fn entry(rank: u32, state: &State, write: &Write) -> Result<EntrySpec> {
    let leaf = &state.catalog.leaves[write.leaf as usize];
    let name = &leaf.name.name;
    match &leaf.body {
        LeafBody::Tensor { dtype, shape, .. } => {
            let region = leaf_region(leaf, write)?;
            Ok(EntrySpec { name: part_name(name, &region, shape), dtype: *dtype, shape: region.lengths })
        }
        LeafBody::Object { .. } | LeafBody::Alias { .. } => Ok(EntrySpec {
            name: if rank == 0 { name.clone() } else { value_name(name, rank) },
            dtype: DType::U8,
            shape: smallvec![state.provider(write)?.bytes()],
        }),
    }
}
