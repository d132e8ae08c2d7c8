//! Builds a checked manifest from leaves in any order.

use std::collections::HashMap;
use std::ops::Range;

use super::{
    Extent, FileEntry, KIND_ALIAS, KIND_OBJECT, KIND_TENSOR, Leaves, Manifest, Regions, SaveInfo, Strings, Values,
};
use crate::catalog::LeafName;
use crate::dtype::DType;
use crate::error::Error;
use crate::region::{Dims, Region};

/// Collects files and leaves, in any order.
#[derive(Debug, Clone)]
pub struct ManifestBuilder {
    info: SaveInfo,
    files: Vec<FileEntry>,
    leaves: Vec<(LeafName, String, Body)>,
}

#[derive(Debug, Clone)]
enum Body {
    Tensor(DType, Dims, Vec<(Region, Extent)>),
    Object(Vec<(Vec<Range<u32>>, Extent)>),
    Alias(LeafName),
}

impl ManifestBuilder {
    /// Starts a manifest without leaves.
    pub fn new(info: SaveInfo) -> ManifestBuilder {
        ManifestBuilder { info, files: Vec::new(), leaves: Vec::new() }
    }

    /// Adds a data file; returns its index, which extents refer to.
    pub fn file(&mut self, file: FileEntry) -> u32 {
        self.files.push(file);
        (self.files.len() - 1) as u32
    }

    /// Adds a tensor. The regions must tile it; only a tensor without elements may have none.
    pub fn tensor(&mut self, name: &LeafName, dtype: DType, shape: &[u64], layout: &str, regions: &[(Region, Extent)]) {
        self.push(name, layout, Body::Tensor(dtype, Dims::from_slice(shape), regions.to_vec()));
    }

    /// Adds an object: for each distinct value, the ranks that saved it and its extent.
    pub fn object(&mut self, name: &LeafName, layout: &str, values: &[(Vec<Range<u32>>, Extent)]) {
        self.push(name, layout, Body::Object(values.to_vec()));
    }

    /// Adds a leaf that is the same tensor as the leaf `of`.
    pub fn alias(&mut self, name: &LeafName, of: &LeafName) {
        self.push(name, "", Body::Alias(of.clone()));
    }

    fn push(&mut self, name: &LeafName, layout: &str, body: Body) {
        self.leaves.push((name.clone(), layout.to_owned(), body));
    }

    /// Sorts everything into columns and checks it as [`Manifest::decode`] does.
    ///
    /// # Errors
    /// `Invalid`, naming the leaf or file at fault.
    pub fn finish(self) -> Result<Manifest, Error> {
        let mut leaves = self.leaves;
        leaves.sort_by(|a, b| a.0.cmp(&b.0));
        let names: Vec<LeafName> = leaves.iter().map(|(name, ..)| name.clone()).collect();
        let mut strings = Interner::default();
        let mut columns = Leaves::default();
        let mut regions = Regions::default();
        let mut values = Values::default();
        for (name, layout, body) in leaves {
            columns.key.push(strings.id(&name.key));
            columns.name.push(strings.id(&name.name));
            columns.layout.push(strings.id(&layout));
            let (mut kind, mut code, mut target) = (KIND_OBJECT, 0, 0);
            match body {
                Body::Tensor(dtype, shape, mut parts) => {
                    (kind, code) = (KIND_TENSOR, dtype.code());
                    columns.shape.extend_from_slice(&shape);
                    parts.sort_by(|a, b| a.0.offsets.cmp(&b.0.offsets));
                    for (region, extent) in parts {
                        check_ndim(&name, &region, shape.len())?;
                        regions.offsets.extend_from_slice(&region.offsets);
                        regions.lengths.extend_from_slice(&region.lengths);
                        regions.file.push(extent.file);
                        regions.offset.push(extent.offset);
                        regions.bytes.push(extent.bytes);
                        regions.stored_bytes.push(extent.bytes);
                    }
                }
                Body::Object(mut copies) => {
                    copies.sort_by_key(|(ranks, _)| ranks.first().map_or(0, |range| range.start));
                    for (ranks, extent) in copies {
                        for range in ranks {
                            values.rank_start.push(range.start);
                            values.rank_stop.push(range.end);
                        }
                        values.ranks_end.push(values.rank_start.len() as u64);
                        values.file.push(extent.file);
                        values.offset.push(extent.offset);
                        values.bytes.push(extent.bytes);
                        values.stored_bytes.push(extent.bytes);
                    }
                }
                Body::Alias(of) => {
                    kind = KIND_ALIAS;
                    target = match names.binary_search(&of) {
                        Ok(index) => index as u32,
                        Err(_) => {
                            return Err(Error::Invalid(format!("manifest: alias {name}: there is no leaf {of}")));
                        }
                    };
                }
            }
            columns.kind.push(kind);
            columns.dtype.push(code);
            columns.alias_of.push(target);
            columns.dims_end.push(columns.shape.len() as u64);
            columns.regions_end.push(regions.file.len() as u64);
            columns.values_end.push(values.file.len() as u64);
        }
        let strings = strings.strings;
        let mut manifest = Manifest { info: self.info, files: self.files, strings, leaves: columns, regions, values };
        manifest.check().map_err(|error| match error {
            Error::Corrupt(message) => Error::Invalid(message),
            other => other,
        })?;
        Ok(manifest)
    }
}

fn check_ndim(name: &LeafName, region: &Region, expected: usize) -> Result<(), Error> {
    match [region.offsets.len(), region.lengths.len()].into_iter().find(|&found| found != expected) {
        Some(found) => Err(Error::Invalid(format!(
            "manifest: tensor {name}: region {region}: expected {expected} dimensions, found {found}"
        ))),
        None => Ok(()),
    }
}

#[derive(Default)]
struct Interner {
    strings: Strings,
    ids: HashMap<String, u32>,
}

impl Interner {
    fn id(&mut self, text: &str) -> u32 {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = self.strings.ends.len() as u32;
        self.strings.text.push_str(text);
        self.strings.ends.push(self.strings.text.len() as u64);
        self.ids.insert(text.to_owned(), id);
        id
    }
}
