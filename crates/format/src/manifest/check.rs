//! Checks all invariants of a manifest, once, in linear time (plus a sort of file paths).

use super::{Extent, FileEntry, KIND_ALIAS, KIND_OBJECT, KIND_TENSOR, Manifest, SaveInfo, Strings, span};
use crate::container::{JSON_BYTES_MAX, LENGTH_BYTES, NDIM_MAX, tensor_bytes};
use crate::dtype::DType;
use crate::error::Error;
use crate::header::DATA_ALIGNMENT;
use crate::name;
use crate::region::checked_numel;

/// Limit of the user's notes, in bytes: they are in a header that every reader parses.
const USER_BYTES_MAX: usize = 1 << 20;

type Checked = Result<(), Error>;

fn corrupt<T>(message: String) -> Result<T, Error> {
    Err(Error::Corrupt(format!("manifest: {message}")))
}

/// Checks that the columns of one table have the same number of rows.
pub(super) fn same_rows(table: &str, rows: &[usize]) -> Checked {
    match rows.iter().find(|&&n| n != rows[0]) {
        Some(other) => corrupt(format!("the columns of {table} have {} and {other} rows", rows[0])),
        None => Ok(()),
    }
}

/// Checks that cumulative ends never fall and end with the rows they count.
fn check_ends(column: &str, ends: &[u64], rows: usize) -> Checked {
    let mut last = 0;
    for &end in ends {
        if end < last {
            return corrupt(format!("column {column}: {end} follows {last}"));
        }
        last = end;
    }
    if last != rows as u64 {
        return corrupt(format!("column {column}: expected to end with {rows}, found {last}"));
    }
    Ok(())
}

impl Strings {
    pub(super) fn check(&self, column: &str) -> Checked {
        check_ends(column, &self.ends, self.text.len())?;
        match self.ends.iter().find(|&&end| !self.text.is_char_boundary(end as usize)) {
            Some(end) => corrupt(format!("column {column}: {end} cuts a character in two")),
            None => Ok(()),
        }
    }
}

impl Manifest {
    /// Checks everything and computes the derived columns.
    pub(super) fn check(&mut self) -> Checked {
        check_info(&self.info)?;
        check_files(&self.files)?;
        self.check_columns()?;
        self.place_coords()?;
        self.check_kinds()?;
        for i in 0..self.len() {
            self.check_leaf(i)?;
        }
        Ok(())
    }

    /// Checks lengths and ends, so that no accessor can read outside its column.
    fn check_columns(&self) -> Checked {
        let (l, r, v) = (&self.leaves, &self.regions, &self.values);
        let (n, strings) = (l.kind.len(), self.strings.ends.len());
        let names = [l.key.len(), l.name.len(), l.layout.len()];
        same_rows("leaves", &[n, names[0], names[1], names[2], l.dtype.len(), l.alias_of.len()])?;
        same_rows("leaves", &[n, l.dims_end.len(), l.regions_end.len(), l.values_end.len()])?;
        same_rows("regions", &[r.file.len(), r.offset.len(), r.bytes.len(), r.stored_bytes.len()])?;
        same_rows("regions", &[r.offsets.len(), r.lengths.len()])?;
        same_rows("values", &[v.file.len(), v.offset.len(), v.bytes.len(), v.stored_bytes.len(), v.ranks_end.len()])?;
        same_rows("ranks", &[v.rank_start.len(), v.rank_stop.len()])?;
        check_ends("leaves.dims_end", &l.dims_end, l.shape.len())?;
        check_ends("leaves.regions_end", &l.regions_end, r.file.len())?;
        check_ends("leaves.values_end", &l.values_end, v.file.len())?;
        check_ends("values.ranks_end", &v.ranks_end, v.rank_start.len())?;
        for (column, ids) in [("leaves.key", &l.key), ("leaves.name", &l.name), ("leaves.layout", &l.layout)] {
            if let Some(id) = ids.iter().find(|&&id| id as usize >= strings) {
                return corrupt(format!("column {column}: there is no string {id}, only {strings}"));
            }
        }
        Ok(())
    }

    fn place_coords(&mut self) -> Checked {
        let mut position = 0usize;
        let mut starts = Vec::with_capacity(self.len());
        for i in 0..self.len() {
            starts.push(position);
            let (ndim, regions) = (span(&self.leaves.dims_end, i).len(), span(&self.leaves.regions_end, i).len());
            position = position.saturating_add(ndim.saturating_mul(regions));
        }
        let found = self.regions.offsets.len();
        if position != found {
            return corrupt(format!("column regions.offsets: expected {position} rows, found {found}"));
        }
        self.regions.coords_start = starts;
        Ok(())
    }

    /// Checks that all kinds of leaves are known. Runs first, so that kinds of a later version are `Unsupported`, not
    /// `Corrupt`.
    fn check_kinds(&self) -> Checked {
        match self.leaves.kind.iter().position(|&kind| kind > KIND_ALIAS) {
            Some(i) => Err(Error::Unsupported(format!(
                "manifest: leaf {}/{}: kind {} is not known; upgrade shardfast",
                self.key(i),
                self.name(i),
                self.leaves.kind[i]
            ))),
            None => Ok(()),
        }
    }

    fn check_leaf(&self, i: usize) -> Checked {
        let (key, name) = (self.key(i), self.name(i));
        let (kind, code, target) = (self.leaves.kind[i], self.leaves.dtype[i], self.leaves.alias_of[i]);
        // Neighbours share their key, mostly.
        if i == 0 || self.leaves.key[i] != self.leaves.key[i - 1] {
            name::check_key(key).or_else(|error| corrupt(format!("leaf {i}: {}", error.message())))?;
        }
        if i > 0 && (self.key(i - 1), self.name(i - 1)) >= (key, name) {
            let before = format!("{}/{}", self.key(i - 1), self.name(i - 1));
            return corrupt(format!("leaves: expected sorted and unique names, found {before} before {key}/{name}"));
        }
        let shape = self.shape(i);
        let (regions, values) = (span(&self.leaves.regions_end, i).len(), span(&self.leaves.values_end, i).len());
        match kind {
            KIND_TENSOR => {
                if values != 0 || target != 0 {
                    return corrupt(format!("tensor {key}/{name}: has values or a target"));
                }
                let Some(dtype) = DType::from_code(code) else {
                    return Err(Error::Unsupported(format!(
                        "manifest: tensor {key}/{name}: dtype {code} is not known; upgrade shardfast"
                    )));
                };
                self.check_tensor(i, dtype)
            }
            KIND_OBJECT => {
                if regions != 0 || !shape.is_empty() || code != 0 || target != 0 {
                    return corrupt(format!("object {key}/{name}: has a shape, a dtype, regions or a target"));
                }
                self.check_object(i)
            }
            // `check_kinds` has refused all other kinds.
            _ => {
                if regions != 0 || values != 0 || !shape.is_empty() || code != 0 {
                    return corrupt(format!("alias {key}/{name}: has a shape, a dtype, regions or values"));
                }
                match self.leaves.kind.get(target as usize) {
                    Some(&KIND_TENSOR) => Ok(()),
                    Some(_) => corrupt(format!("alias {key}/{name}: its target, leaf {target}, is no tensor")),
                    None => corrupt(format!("alias {key}/{name}: there is no leaf {target}, only {}", self.len())),
                }
            }
        }
    }

    fn check_tensor(&self, i: usize, dtype: DType) -> Checked {
        let shape = self.shape(i);
        let flaw = |message: String| corrupt(format!("tensor {}/{}: {message}", self.key(i), self.name(i)));
        if shape.len() > NDIM_MAX {
            return flaw(format!("expected at most {NDIM_MAX} dimensions, found {}", shape.len()));
        }
        if tensor_bytes(dtype, shape).is_none() {
            return flaw(format!("{dtype} {shape:?} is beyond 2^64 bytes"));
        }
        let numel = checked_numel(shape).unwrap_or(0);
        let (mut covered, mut last) = (0u64, None);
        for (row, (region, extent)) in span(&self.leaves.regions_end, i).zip(self.regions(i)) {
            if !region.fits(shape) {
                return flaw(format!("the region {region} is not inside {shape:?}"));
            }
            if region.is_empty() && !region.is_whole(shape) {
                return flaw(format!("the region {region} holds no element"));
            }
            let (expected, found) = (region.numel() * dtype.size_bytes(), self.regions.bytes[row]);
            if found != expected {
                return flaw(format!("region {region}: expected {expected} bytes of {dtype}, found {found}"));
            }
            if let Err(message) = self.inside(extent, expected) {
                return flaw(format!("region {region}: {message}"));
            }
            if last.is_some_and(|last| last >= region.offsets) {
                return flaw(format!("the region {region} is out of order or occurs twice"));
            }
            covered = covered.saturating_add(region.numel());
            last = Some(region.offsets);
        }
        if covered != numel {
            return flaw(format!("expected regions of {numel} elements in all, found {covered}"));
        }
        Ok(())
    }

    fn check_object(&self, i: usize) -> Checked {
        let flaw = |message: String| corrupt(format!("object {}/{}: {message}", self.key(i), self.name(i)));
        let mut all = Vec::new();
        let mut last = None;
        for (row, (ranks, extent)) in span(&self.leaves.values_end, i).zip(self.values(i)) {
            let world = self.info.world;
            let Some(first) = ranks.first().map(|range| range.start) else {
                return flaw("a value was saved by no rank".to_owned());
            };
            if let Some(range) = ranks.iter().find(|range| range.is_empty() || range.end > world) {
                return flaw(format!("the ranks {range:?} are empty or outside a world of {world}"));
            }
            if last.is_some_and(|last| last >= first) || ranks.windows(2).any(|pair| pair[0].end > pair[1].start) {
                return flaw("its ranks are out of order".to_owned());
            }
            if let Err(message) = self.inside(extent, self.values.bytes[row]) {
                return flaw(format!("the value of rank {first}: {message}"));
            }
            last = Some(first);
            all.extend(ranks);
        }
        all.sort_unstable_by_key(|range| range.start);
        if let Some(pair) = all.windows(2).find(|pair| pair[0].end > pair[1].start) {
            return flaw(format!("rank {} has two values", pair[1].start));
        }
        if all.is_empty() {
            return flaw("has no value".to_owned());
        }
        Ok(())
    }

    /// Checks that an extent lies inside its file and holds `expected` bytes: without a required feature, stored bytes
    /// are not encoded.
    fn inside(&self, extent: Extent, expected: u64) -> Result<(), String> {
        let Extent { file, offset, bytes } = extent;
        if bytes != expected {
            return Err(format!("expected its {expected} bytes to be stored as they are, found {bytes} stored bytes"));
        }
        let Some(entry) = self.files.get(file as usize) else {
            return Err(format!("there is no file {file}, only {}", self.files.len()));
        };
        match offset.checked_add(bytes) {
            Some(end) if offset >= entry.data_start && end <= entry.bytes => Ok(()),
            _ => Err(format!(
                "{bytes} bytes at {offset} are not inside the data [{}, {}) of {}",
                entry.data_start, entry.bytes, entry.path
            )),
        }
    }
}

fn check_info(info: &SaveInfo) -> Checked {
    name::check_attempt(&info.attempt).or_else(|error| corrupt(error.message().to_owned()))?;
    if info.world == 0 {
        return corrupt("world: expected at least one rank, found 0".to_owned());
    }
    let user_bytes: usize = info.user.iter().map(|(key, value)| key.len() + value.len()).sum();
    if user_bytes > USER_BYTES_MAX {
        return corrupt(format!("the user's notes: expected at most {USER_BYTES_MAX} bytes, found {user_bytes}"));
    }
    Ok(())
}

fn check_files(files: &[FileEntry]) -> Checked {
    for FileEntry { path, bytes, data_start, .. } in files {
        name::check_path(path).or_else(|error| corrupt(error.message().to_owned()))?;
        let header = 1..=(JSON_BYTES_MAX + LENGTH_BYTES).min(*bytes);
        if !data_start.is_multiple_of(DATA_ALIGNMENT) || !header.contains(data_start) {
            return corrupt(format!(
                "file {path}: expected data at a multiple of {DATA_ALIGNMENT} of at most {}, found {data_start}",
                header.end()
            ));
        }
    }
    let mut paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
    paths.sort_unstable();
    match paths.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => corrupt(format!("the file {} occurs twice", pair[0])),
        None => Ok(()),
    }
}
