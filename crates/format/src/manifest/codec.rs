//! Stores the manifest's columns in a safetensors file.

use std::collections::BTreeMap;

use super::{FileEntry, Leaves, Manifest, Regions, SaveInfo, Strings, Values, requires};
use crate::container::{self, Container, Entry, LENGTH_BYTES};
use crate::digits::decimal_u64;
use crate::dtype::DType;
use crate::error::Error;
use crate::region::Dims;
use crate::version::{FORMAT_MAJOR, FORMAT_MINOR, other_major, parse_version};

/// Location of a file that lies in the checkpoint itself.
const HERE: u32 = 0;

const FORMAT: &str = "shardfast.format";
const REQUIRES: &str = "shardfast.requires";
pub(super) const ATTEMPT: &str = "shardfast.attempt";
const STEP: &str = "shardfast.step";
const WORLD: &str = "shardfast.world";
const CREATED: &str = "shardfast.created_unix_ms";
const WRITER: &str = "shardfast.writer";
const USER: &str = "user.";

/// Name of the column with the paths of data files.
pub(super) const PATHS: &str = "files.paths";

/// Prefix of columns that a reader may ignore.
const INFORMATION: &str = "info.";

/// Alignment of a column, in bytes, so that columns can be used in place.
const COLUMN_ALIGNMENT: u64 = 8;

impl Manifest {
    /// Encodes the manifest as a safetensors file of 1-D columns.
    pub fn encode(&self) -> Vec<u8> {
        let Manifest { info, files, strings, leaves, regions, values } = self;
        let paths: String = files.iter().map(|file| file.path.as_str()).collect();
        let path_ends = files.iter().scan(0, |end, file| {
            *end += file.path.len() as u64;
            Some(*end)
        });
        // Wide numbers first: every column then lies aligned without padding.
        let mut out = Columns::default();
        out.u64s("files.path_ends", path_ends);
        out.u64s("files.bytes", files.iter().map(|file| file.bytes));
        out.u64s("files.data_start", files.iter().map(|file| file.data_start));
        out.u64s("files.header_crc", files.iter().map(|file| file.header_crc));
        out.u64s("strings.ends", strings.ends.iter().copied());
        out.u64s("leaves.dims_end", leaves.dims_end.iter().copied());
        out.u64s("leaves.regions_end", leaves.regions_end.iter().copied());
        out.u64s("leaves.values_end", leaves.values_end.iter().copied());
        out.u64s("shapes", leaves.shape.iter().copied());
        out.u64s("regions.offsets", regions.offsets.iter().copied());
        out.u64s("regions.lengths", regions.lengths.iter().copied());
        out.u64s("regions.file_offset", regions.offset.iter().copied());
        out.u64s("regions.bytes", regions.bytes.iter().copied());
        out.u64s("regions.stored_bytes", regions.stored_bytes.iter().copied());
        out.u64s("values.ranks_end", values.ranks_end.iter().copied());
        out.u64s("values.file_offset", values.offset.iter().copied());
        out.u64s("values.bytes", values.bytes.iter().copied());
        out.u64s("values.stored_bytes", values.stored_bytes.iter().copied());
        out.u32s("files.location", &vec![HERE; files.len()]);
        out.u32s("leaves.key", &leaves.key);
        out.u32s("leaves.name", &leaves.name);
        out.u32s("leaves.layout", &leaves.layout);
        out.u32s("leaves.alias_of", &leaves.alias_of);
        out.u32s("regions.file", &regions.file);
        out.u32s("values.file", &values.file);
        out.u32s("ranks.start", &values.rank_start);
        out.u32s("ranks.stop", &values.rank_stop);
        out.u8s("leaves.kind", &leaves.kind);
        out.u8s("leaves.dtype", &leaves.dtype);
        out.u8s("strings.text", strings.text.as_bytes());
        out.u8s(PATHS, paths.as_bytes());
        out.into_file(&info_metadata(info))
    }

    /// Decodes and checks a manifest. Ignores metadata that this build does not know, and columns that are information
    /// only.
    ///
    /// # Errors
    /// `Unsupported` for another major version and for additions of a later minor version: required features, columns,
    /// files that lie elsewhere, kinds of leaves, dtypes. `Corrupt` for everything else. All name the feature, column,
    /// leaf or file at fault.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, Error> {
        let mut parsed = container::parse("manifest", bytes, bytes.len() as u64)?;
        check_version(&parsed.metadata)?;
        check_required(&parsed.metadata)?;
        let info = info_of(std::mem::take(&mut parsed.metadata))?;
        let mut source = Source { parsed, bytes };
        let strings = source.strings("strings.text", "strings.ends")?;
        let (files, locations) = files_of(&mut source)?;
        let mut manifest = Manifest {
            info,
            files,
            strings,
            leaves: Leaves {
                key: source.u32s("leaves.key")?,
                name: source.u32s("leaves.name")?,
                layout: source.u32s("leaves.layout")?,
                kind: source.u8s("leaves.kind")?,
                dtype: source.u8s("leaves.dtype")?,
                alias_of: source.u32s("leaves.alias_of")?,
                dims_end: source.u64s("leaves.dims_end")?,
                regions_end: source.u64s("leaves.regions_end")?,
                values_end: source.u64s("leaves.values_end")?,
                shape: source.u64s("shapes")?,
            },
            regions: Regions {
                offsets: source.u64s("regions.offsets")?,
                lengths: source.u64s("regions.lengths")?,
                file: source.u32s("regions.file")?,
                offset: source.u64s("regions.file_offset")?,
                bytes: source.u64s("regions.bytes")?,
                stored_bytes: source.u64s("regions.stored_bytes")?,
                coords_start: Vec::new(),
            },
            values: Values {
                ranks_end: source.u64s("values.ranks_end")?,
                rank_start: source.u32s("ranks.start")?,
                rank_stop: source.u32s("ranks.stop")?,
                file: source.u32s("values.file")?,
                offset: source.u64s("values.file_offset")?,
                bytes: source.u64s("values.bytes")?,
                stored_bytes: source.u64s("values.stored_bytes")?,
            },
        };
        source.expect_nothing_else()?;
        check_locations(&manifest.files, &locations, &manifest.strings)?;
        manifest.check()?;
        Ok(manifest)
    }
}

fn check_version(metadata: &BTreeMap<String, String>) -> Result<(), Error> {
    let found = metadata.get(FORMAT).map(String::as_str).unwrap_or_default();
    match parse_version(found) {
        Some((FORMAT_MAJOR, _)) => Ok(()),
        Some(other) => {
            let writer = metadata.get(WRITER).map(String::as_str).unwrap_or_default();
            Err(other_major("manifest", other, writer))
        }
        None => {
            Err(Error::Corrupt(format!("manifest: metadata {FORMAT:?}: expected <major>.<minor>, found {found:?}")))
        }
    }
}

fn check_required(metadata: &BTreeMap<String, String>) -> Result<(), Error> {
    let Some(found) = metadata.get(REQUIRES) else {
        return Err(Error::Corrupt(format!("manifest: metadata {REQUIRES:?} is missing")));
    };
    requires::check(found, metadata.get(WRITER).map(String::as_str).unwrap_or_default())
}

fn info_metadata(info: &SaveInfo) -> Vec<(String, String)> {
    let mut metadata = vec![
        (FORMAT.to_owned(), format!("{FORMAT_MAJOR}.{FORMAT_MINOR}")),
        (REQUIRES.to_owned(), String::new()),
        (ATTEMPT.to_owned(), info.attempt.clone()),
        (WORLD.to_owned(), info.world.to_string()),
        (CREATED.to_owned(), info.created_unix_ms.to_string()),
        (WRITER.to_owned(), info.writer.clone()),
    ];
    metadata.extend(info.step.map(|step| (STEP.to_owned(), step.to_string())));
    metadata.extend(info.user.iter().map(|(key, value)| (format!("{USER}{key}"), value.clone())));
    metadata
}

fn info_of(metadata: BTreeMap<String, String>) -> Result<SaveInfo, Error> {
    let number = |key: &str| match metadata.get(key) {
        None => Ok(None),
        Some(text) => match decimal_u64(text) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::Corrupt(format!("manifest: metadata {key:?}: expected a number, found {text:?}"))),
        },
    };
    let missing = |key: &str| Error::Corrupt(format!("manifest: metadata {key:?} is missing or out of range"));
    Ok(SaveInfo {
        attempt: metadata.get(ATTEMPT).ok_or_else(|| missing(ATTEMPT))?.clone(),
        step: number(STEP)?,
        world: number(WORLD)?.and_then(|world| u32::try_from(world).ok()).ok_or_else(|| missing(WORLD))?,
        created_unix_ms: number(CREATED)?.ok_or_else(|| missing(CREATED))?,
        writer: metadata.get(WRITER).ok_or_else(|| missing(WRITER))?.clone(),
        user: metadata.into_iter().filter_map(|(k, v)| Some((k.strip_prefix(USER)?.to_owned(), v))).collect(),
    })
}

/// Returns the files, and the location of each.
fn files_of(source: &mut Source<'_>) -> Result<(Vec<FileEntry>, Vec<u32>), Error> {
    let paths = source.strings(PATHS, "files.path_ends")?;
    let locations = source.u32s("files.location")?;
    let bytes = source.u64s("files.bytes")?;
    let data_start = source.u64s("files.data_start")?;
    let header_crc = source.u64s("files.header_crc")?;
    let rows = [paths.ends.len(), locations.len(), bytes.len(), data_start.len(), header_crc.len()];
    super::check::same_rows("files", &rows)?;
    let entry = |i: usize| FileEntry {
        path: paths.get(i as u32).to_owned(),
        bytes: bytes[i],
        data_start: data_start[i],
        header_crc: header_crc[i],
    };
    Ok(((0..bytes.len()).map(entry).collect(), locations))
}

/// Checks that every file lies in the checkpoint itself.
fn check_locations(files: &[FileEntry], locations: &[u32], strings: &Strings) -> Result<(), Error> {
    let Some((file, location)) = files.iter().zip(locations).find(|(_, location)| **location != HERE) else {
        return Ok(());
    };
    let (path, row) = (&file.path, location - 1);
    if row as usize >= strings.ends.len() {
        let rows = strings.ends.len();
        return Err(Error::Corrupt(format!("manifest: file {path}: there is no string {row}, only {rows}")));
    }
    Err(Error::Unsupported(format!(
        "manifest: file {path}: expected it in the checkpoint itself, found that it lies in {:?}; upgrade shardfast",
        strings.get(row)
    )))
}

/// Columns that are being written to a file.
#[derive(Default)]
struct Columns {
    entries: Vec<(&'static str, DType, u64, (u64, u64))>,
    data: Vec<u8>,
}

impl Columns {
    fn u64s(&mut self, name: &'static str, values: impl Iterator<Item = u64>) {
        self.push(name, DType::U64, |data| values.for_each(|value| data.extend_from_slice(&value.to_le_bytes())));
    }

    fn u32s(&mut self, name: &'static str, values: &[u32]) {
        self.push(name, DType::U32, |data| {
            values.iter().for_each(|value| data.extend_from_slice(&value.to_le_bytes()))
        });
    }

    fn u8s(&mut self, name: &'static str, values: &[u8]) {
        self.push(name, DType::U8, |data| data.extend_from_slice(values));
    }

    fn push(&mut self, name: &'static str, dtype: DType, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.data.len() as u64;
        write(&mut self.data);
        let end = self.data.len() as u64;
        self.entries.push((name, dtype, (end - start) / dtype.size_bytes(), (start, end)));
    }

    fn into_file(self, metadata: &[(String, String)]) -> Vec<u8> {
        let metadata = metadata.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let entries =
            self.entries.iter().map(|&(name, dtype, rows, span)| (name, dtype, Dims::from_slice(&[rows]), span));
        let json = container::json(metadata, entries);
        let data_start = (LENGTH_BYTES + json.len() as u64).next_multiple_of(COLUMN_ALIGNMENT);
        let mut file = container::frame(&json, data_start);
        file.extend_from_slice(&self.data);
        file
    }
}

/// Columns that are being read from a file.
struct Source<'a> {
    parsed: Container,
    bytes: &'a [u8],
}

impl Source<'_> {
    /// Removes a column and returns its bytes.
    fn column(&mut self, name: &str, dtype: DType) -> Result<&[u8], Error> {
        let Some(place) = self.parsed.entries.iter().position(|entry| entry.name == name) else {
            return Err(Error::Corrupt(format!("manifest: the column {name} is missing")));
        };
        let Entry { dtype: found, shape, span: (start, end), .. } = self.parsed.entries.swap_remove(place);
        if found != Ok(dtype) || shape.len() != 1 {
            let found = found.map_or_else(|name| name, |dtype| dtype.to_string());
            return Err(Error::Corrupt(format!(
                "manifest: column {name}: expected a 1-D {dtype}, found {found} {shape:?}"
            )));
        }
        // `container::parse` has checked that the spans end with the file.
        let data_start = self.parsed.data_start;
        Ok(&self.bytes[(data_start + start) as usize..(data_start + end) as usize])
    }

    fn u8s(&mut self, name: &str) -> Result<Vec<u8>, Error> {
        Ok(self.column(name, DType::U8)?.to_vec())
    }

    fn u32s(&mut self, name: &str) -> Result<Vec<u32>, Error> {
        let (values, _) = self.column(name, DType::U32)?.as_chunks();
        Ok(values.iter().map(|value| u32::from_le_bytes(*value)).collect())
    }

    fn u64s(&mut self, name: &str) -> Result<Vec<u64>, Error> {
        let (values, _) = self.column(name, DType::U64)?.as_chunks();
        Ok(values.iter().map(|value| u64::from_le_bytes(*value)).collect())
    }

    fn text(&mut self, name: &str) -> Result<String, Error> {
        String::from_utf8(self.u8s(name)?).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            Error::Corrupt(format!("manifest: column {name}: expected UTF-8, found something else at byte {at}"))
        })
    }

    fn strings(&mut self, text: &str, ends: &str) -> Result<Strings, Error> {
        let strings = Strings { text: self.text(text)?, ends: self.u64s(ends)? };
        strings.check(ends)?;
        Ok(strings)
    }

    /// Checks that no unknown column is left that may change the meaning of the others.
    fn expect_nothing_else(&self) -> Result<(), Error> {
        match self.parsed.entries.iter().map(|entry| &entry.name).find(|name| !name.starts_with(INFORMATION)) {
            Some(name) => Err(Error::Unsupported(format!(
                "manifest: expected the columns of format {FORMAT_MAJOR}.{FORMAT_MINOR}, found the column {name:?} of \
                 another one; upgrade shardfast"
            ))),
            None => Ok(()),
        }
    }
}
