//! Assigns parts and values to the data files of a rank, and to positions in them.

use std::collections::{BTreeMap, HashSet};

use shardfast_format::{DType, EntrySpec, FileLayout, Leaf, LeafBody, Region, data_file, part_name, value_name};
use shardfast_plan::{Write, pieces};
use shardfast_transfer::error::Result;
use shardfast_transfer::writer::FileJob;

use crate::engine::FileLimits;
use crate::operation::Operation;
use crate::receipt::FileShape;
use crate::state::{PartRange, State, leaf_region};

/// The files that a rank writes together.
#[derive(Default)]
pub(crate) struct Layout {
    /// The files, in order.
    pub(crate) jobs: Vec<FileJob>,
    /// Structures of the files.
    pub(crate) shapes: Vec<FileShape>,
    /// Pieces in the files: file by file, in the order of the entries.
    pub(crate) placed: Vec<Placed>,
}

/// Position of a piece.
pub(crate) struct Placed {
    pub(crate) piece: Piece,
    /// Index of the file.
    pub(crate) file: u32,
    /// Offset from the file's start, in bytes.
    pub(crate) offset: u64,
}

/// A part of a tensor, as much of it as this rank writes into one file; or a value.
pub(crate) struct Piece {
    /// Range of its bytes in the state.
    pub(crate) range: PartRange,
    /// Region of the tensor; the bytes of a value.
    pub(crate) region: Region,
}

impl Layout {
    /// Lays out the files for these parts and values, as many for each key of the state as `limits` require, and
    /// returns where each will lie. `earlier` are this rank's files before these; the data of each begin at a multiple
    /// of `data_at`.
    ///
    /// # Errors
    /// `Internal` when the state has no such part; `Invalid` when a file cannot hold it.
    pub(crate) fn new(
        operation: &Operation,
        state: &State,
        writes: &[Write],
        earlier: &[FileShape],
        data_at: u64,
    ) -> Result<Layout> {
        let (rank, attempt, mut limits) = (operation.engine.rank(), operation.attempt(), operation.engine.file_limits);
        limits.data_bytes = limits.data_bytes.min(state.file_bytes_max.unwrap_or(u64::MAX));
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
            for (index, Contents { entries, pieces, .. }) in (first..).zip(spread(rank, state, &writes, limits)?) {
                let layout = FileLayout::new(&entries, &BTreeMap::new())?.beginning_at_multiple_of(data_at)?;
                let providers = pieces.iter().map(|piece| state.range(&piece.range)).collect::<Result<Vec<_>>>()?;
                let names = pieces.iter().map(|piece| leaves[piece.range.leaf as usize].name.to_string()).collect();
                let file = out.jobs.len() as u32;
                let placed = pieces.into_iter().zip(&layout.offsets);
                out.placed.extend(placed.map(|(piece, &offset)| Placed { piece, file, offset }));
                let (bytes, data_start) = (layout.file_bytes(), layout.data_start);
                out.shapes.push(FileShape { key: key.to_owned(), index, bytes, data_start });
                let path = data_file(key, &attempt, rank, index)?;
                out.jobs.push(FileJob { path, layout, providers, names, is_summed: false });
            }
        }
        Ok(out)
    }
}

/// Contents of one file.
#[derive(Default)]
struct Contents {
    names: HashSet<String>,
    entries: Vec<EntrySpec>,
    pieces: Vec<Piece>,
    data_bytes: u64,
    entries_bytes: u64,
}

/// Spreads parts and values over files: each goes into the first file that has room for it and no entry of its name
/// yet, since a leaf may be named `w[0:4]` or `rng@rank3` like another leaf's part or value. Cuts parts that are larger
/// than a file.
fn spread(rank: u32, state: &State, writes: &[Write], limits: FileLimits) -> Result<Vec<Contents>> {
    let mut files: Vec<Contents> = Vec::new();
    for write in writes {
        let leaf = &state.catalog.leaves[write.leaf as usize];
        for piece in pieces_of(state, write, limits.data_bytes)? {
            let (entry, data_bytes) = (entry(rank, leaf, &piece.region), piece.range.bytes);
            let entries_bytes = entry.header_bytes_max();
            let has_room = |file: &Contents| {
                file.data_bytes.saturating_add(data_bytes) <= limits.data_bytes
                    && file.entries_bytes.saturating_add(entries_bytes) <= limits.entries_bytes
                    && !file.names.contains(&entry.name)
            };
            let place = files.iter().position(has_room).unwrap_or(files.len());
            if place == files.len() {
                files.push(Contents::default());
            }
            let file = &mut files[place];
            file.data_bytes += data_bytes;
            file.entries_bytes += entries_bytes;
            file.names.insert(entry.name.clone());
            file.entries.push(entry);
            file.pieces.push(piece);
        }
    }
    Ok(files)
}

/// Cuts a write into pieces of at most `bytes_max` bytes, but at least one element; a value stays whole.
fn pieces_of(state: &State, write: &Write, bytes_max: u64) -> Result<Vec<Piece>> {
    let Write { leaf, part, .. } = *write;
    let described = &state.catalog.leaves[leaf as usize];
    match &described.body {
        LeafBody::Tensor { dtype, .. } => {
            let (start, item_bytes) = (state.extent(write)?.0, dtype.size_bytes());
            let piece = |(region, first): (Region, u64)| {
                let bytes = region.numel() * item_bytes;
                Piece { range: PartRange { leaf, part, at: start + first * item_bytes, bytes }, region }
            };
            Ok(pieces(&leaf_region(described, write)?, bytes_max / item_bytes).into_iter().map(piece).collect())
        }
        LeafBody::Object { .. } | LeafBody::Alias { .. } => {
            let bytes = state.provider(leaf, part)?.bytes();
            Ok(vec![Piece { range: PartRange { leaf, part, at: 0, bytes }, region: Region::whole(&[bytes]) }])
        }
    }
}

fn item_bytes(leaf: &Leaf) -> u64 {
    match leaf.body {
        LeafBody::Tensor { dtype, .. } => dtype.size_bytes(),
        LeafBody::Object { .. } | LeafBody::Alias { .. } => 0,
    }
}

fn entry(rank: u32, leaf: &Leaf, region: &Region) -> EntrySpec {
    let (name, shape) = (&leaf.name.name, region.lengths.clone());
    match &leaf.body {
        LeafBody::Tensor { dtype, shape: whole, .. } => {
            EntrySpec { name: part_name(name, region, whole), dtype: *dtype, shape }
        }
        LeafBody::Object { .. } | LeafBody::Alias { .. } => {
            let name = if rank == 0 { name.clone() } else { value_name(name, rank) };
            EntrySpec { name, dtype: DType::U8, shape }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use shardfast_format::{Catalog, LeafKind, LeafName, Manifest, Owner};
    use shardfast_transfer::provider::Provider;

    use super::*;
    use crate::stream::FlatRun;
    use crate::{Destination, Engine, Prove, open, save};

    const LONG: Duration = Duration::from_secs(60);

    /// Tensors of no to three dimensions.
    const TENSORS: [(&str, DType, &[u64]); 5] = [
        ("a", DType::F32, &[3, 4, 5]),
        ("b", DType::BF16, &[1, 9]),
        ("c", DType::U8, &[70]),
        ("d", DType::F64, &[]),
        ("e", DType::F32, &[0, 3]),
    ];

    fn bytes_of(seed: u8, bytes: u64) -> Vec<u8> {
        (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
    }

    /// Makes the state of every rank: these tensors whole, an alias of one and a value.
    fn state() -> State {
        let mut leaves = Vec::new();
        let mut providers: Vec<Vec<Arc<dyn Provider>>> = Vec::new();
        for (seed, (name, dtype, shape)) in (0u8..).zip(TENSORS) {
            let parts = vec![Region::whole(shape)];
            let bytes = parts[0].numel() * dtype.size_bytes();
            leaves.push((name, LeafBody::Tensor { dtype, shape: shape.into(), parts }));
            providers.push(vec![Arc::new(bytes_of(seed, bytes))]);
        }
        leaves.push(("tied", LeafBody::Alias { of: LeafName::new("model", "a") }));
        leaves.push(("value", LeafBody::Object { owner: Owner::Job }));
        providers.extend([vec![], vec![Arc::new(bytes_of(99, 40)) as Arc<dyn Provider>]]);
        let leaf = |(name, body)| Leaf { name: LeafName::new("model", name), body, layout: String::new() };
        State {
            catalog: Arc::new(Catalog { leaves: leaves.into_iter().map(leaf).collect() }),
            providers,
            ..State::default()
        }
    }

    /// Saves on all ranks, whose replicas are compared.
    fn save_all(engines: &[Arc<Engine>], place: &Path) {
        let destination = Destination {
            url: place.to_str().unwrap().to_owned(),
            step: None,
            user: BTreeMap::new(),
            prove: Prove::EverySave,
            blocking: true,
        };
        let pending: Vec<_> = engines.iter().map(|engine| save(engine, destination.clone(), state(), LONG)).collect();
        pending.into_iter().for_each(|pending| pending.committed(None).unwrap());
    }

    /// Loads all tensors and compares them with the saved ones.
    fn compare(place: &Path) -> Manifest {
        let checkpoint = open(&Engine::solo(), place.to_str().unwrap(), LONG).unwrap();
        let manifest = checkpoint.manifest();
        for (seed, (name, dtype, shape)) in (0u8..).zip(TENSORS) {
            let leaf = manifest.find(&LeafName::new("model", name)).unwrap();
            assert_eq!(manifest.leaf(leaf).kind, LeafKind::Tensor { dtype, shape });
            let numel = shape.iter().product();
            let mut found = vec![0; (numel * dtype.size_bytes()) as usize];
            checkpoint.load_runs(&[FlatRun { leaf, elements: 0..numel }], &mut found).unwrap();
            assert_eq!(found, bytes_of(seed, found.len() as u64), "{name}");
        }
        manifest.clone()
    }

    fn saved_within(limits: FileLimits) -> Vec<Manifest> {
        let place = tempfile::tempdir().unwrap();
        let engine = |coord| {
            let mut engine = Engine::new(coord, shardfast_transfer::staging::STAGING_BYTES_MIN).unwrap();
            Arc::get_mut(&mut engine).unwrap().file_limits = limits;
            engine
        };
        let engines: Vec<_> = shardfast_coord::local(2).into_iter().map(engine).collect();
        // The second save is of a remembered plan.
        ["first", "second"]
            .map(|name| place.path().join(name))
            .map(|place| {
                save_all(&engines, &place);
                compare(&place)
            })
            .into()
    }

    #[test]
    fn parts_larger_than_a_file_are_cut_and_come_back() {
        for data_bytes in [1, 8, 20, 40, 64, 100] {
            for manifest in saved_within(FileLimits { data_bytes, ..FileLimits::default() }) {
                let value = manifest.find(&LeafName::new("model", "value")).unwrap();
                let of_value = manifest.values(value).next().unwrap().1.file;
                for (index, file) in (0u32..).zip(manifest.files()) {
                    let found = file.bytes - file.data_start;
                    // Neither an element nor a value can be cut.
                    let least = if index == of_value { 40 } else { 8 };
                    assert!(found <= data_bytes.max(least), "{}: {found} bytes of {data_bytes}", file.path);
                }
                let cut = manifest.find(&LeafName::new("model", "a")).unwrap();
                assert!(manifest.regions(cut).len() as u64 >= 240u64.div_ceil(data_bytes.max(4)), "{data_bytes}");
            }
        }
    }

    #[test]
    fn names_that_fill_a_header_begin_another_file() {
        let files = |entries_bytes| {
            let limits = FileLimits { entries_bytes, ..FileLimits::default() };
            let manifests = saved_within(limits);
            manifests.iter().map(|manifest| manifest.files().len()).collect::<BTreeSet<_>>()
        };
        let (few, many) = (files(FileLimits::default().entries_bytes), files(1));
        assert_eq!(few.len(), 1);
        // One for each tensor with elements, of each rank that shares its writing, and one for the value.
        assert!(few.first() <= Some(&4) && many.first() >= Some(&6), "{few:?} {many:?}");
    }
}
