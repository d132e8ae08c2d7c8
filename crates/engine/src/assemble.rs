//! Assembles the manifest from the writes of all ranks: every element of every leaf exactly once.

use std::collections::BTreeMap;
use std::ops::Range;

use shardfast_format::{Extent, FileEntry, LeafName, Manifest, ManifestBuilder, Region, SaveInfo, data_file};
use shardfast_plan::Assembly;
use shardfast_transfer::error::{Error, Result};

use crate::plans::Value;
use crate::receipt::{FileShape, Receipt};

/// Returns the manifest of the writes of all ranks.
pub(crate) fn assemble(values: &[Value], info: SaveInfo, receipts: &[Receipt]) -> Result<Manifest> {
    let attempt = info.attempt.clone();
    let mut builder = ManifestBuilder::new(info);
    let mut aliases: BTreeMap<&LeafName, &LeafName> = BTreeMap::new();
    let mut extents: Vec<std::vec::IntoIter<Extent>> = Vec::with_capacity(receipts.len());
    let mut structures = Vec::with_capacity(receipts.len());
    for (rank, Receipt { tensors, values, header_crcs, .. }) in (0u32..).zip(receipts) {
        let expected = tensors.files.len() + values.files.len();
        if header_crcs.len() != expected {
            let found = header_crcs.len();
            return Err(Error::internal(format!(
                "rank {rank} reports {found} checksums of files, expected {expected}"
            )));
        }
        let add = |(file, crc): (&FileShape, &[u8; 8])| {
            let path = data_file(&file.key, &attempt, rank, file.index)?;
            let (bytes, data_start, header_crc) = (file.bytes, file.data_start, u64::from_le_bytes(*crc));
            Ok::<u32, Error>(builder.file(FileEntry { path, bytes, data_start, header_crc }))
        };
        let files = tensors.files.iter().chain(&values.files).zip(header_crcs).map(add);
        let mut files = files.collect::<Result<Vec<u32>>>()?;
        let value_files = files.split_off(tensors.files.len());
        let extent = |&(file, offset, bytes): &(u32, u64, u64)| {
            let file = value_files.get(file as usize).copied();
            file.map(|file| Extent { file, offset, bytes }).ok_or_else(|| unknown_file(rank))
        };
        extents.push(values.extents.iter().map(extent).collect::<Result<Vec<_>>>()?.into_iter());
        structures.push((rank, tensors, files));
    }
    let mut tensors = Assembly::default();
    for (rank, structure, files) in &structures {
        for leaf in &structure.leaves {
            let place = |(region, file, offset): &(Region, u32, u64)| {
                let file = files.get(*file as usize).ok_or_else(|| unknown_file(*rank))?;
                Ok((region.clone(), *file, *offset))
            };
            let regions = leaf.regions.iter().map(place).collect::<Result<Vec<_>>>()?;
            tensors.tensor(*rank, &leaf.name, (leaf.dtype, &leaf.shape), &leaf.layout, regions);
        }
        for (name, of) in &structure.aliases {
            let known = *aliases.entry(name).or_insert(of);
            if known != of {
                return Err(Error::invalid(format!(
                    "{name}: expected the same on all ranks, found an alias of {known}, and on rank {rank} one of {of}"
                )));
            }
        }
    }
    tensors.finish(&mut builder)?;
    for value in values {
        let of = |(writer, ranks): (&u32, &Vec<Range<u32>>)| {
            let extent = extents.get_mut(*writer as usize).and_then(Iterator::next);
            extent
                .map(|extent| (ranks.clone(), extent))
                .ok_or_else(|| Error::internal(format!("rank {writer} did not write its value of {}", value.name)))
        };
        let copies = value.writers.iter().map(of).collect::<Result<Vec<_>>>()?;
        builder.object(&value.name, &value.layout, &copies);
    }
    if let Some(writer) = extents.iter_mut().position(|extents| extents.next().is_some()) {
        return Err(Error::internal(format!("rank {writer} wrote more values than planned")));
    }
    for (name, of) in aliases {
        builder.alias(name, of);
    }
    Ok(builder.finish()?)
}

fn unknown_file(rank: u32) -> Error {
    Error::internal(format!("rank {rank} reports a file that it does not have"))
}
