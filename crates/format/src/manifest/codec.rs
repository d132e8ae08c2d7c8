//! The manifest's columns in a safetensors file.

use std::collections::BTreeMap;

use super::{FileEntry, Leaves, Manifest, Regions, SaveInfo, Strings, Values};
use crate::container::{self, Container, Entry, LENGTH_BYTES};
use crate::digits::decimal_u64;
use crate::dtype::DType;
use crate::error::Error;
use crate::region::Dims;
use crate::version::{FORMAT_MAJOR, FORMAT_MINOR, other_major, parse_version};

pub(super) const KIND_TENSOR: u8 = 0;
pub(super) const KIND_OBJECT: u8 = 1;
pub(super) const KIND_ALIAS: u8 = 2;

const FORMAT: &str = "shardfast.format";
const ATTEMPT: &str = "shardfast.attempt";
const STEP: &str = "shardfast.step";
const WORLD: &str = "shardfast.world";
const CREATED: &str = "shardfast.created_unix_ms";
const WRITER: &str = "shardfast.writer";
const USER: &str = "user.";

/// The columns lie on multiples of this many bytes, so that they can be used where they are.
const COLUMN_ALIGNMENT: u64 = 8;

impl Manifest {
    /// The manifest as a safetensors file of 1-D columns.
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
        out.u64s("values.ranks_end", values.ranks_end.iter().copied());
        out.u64s("values.file_offset", values.offset.iter().copied());
        out.u64s("values.bytes", values.bytes.iter().copied());
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
        out.u8s("files.paths", paths.as_bytes());
        out.into_file(&info_metadata(info))
    }

    /// Reads and checks a manifest. Columns and metadata that this build does not know are ignored.
    ///
    /// # Errors
    /// `Unsupported` for another major version and for leaf kinds and dtypes of a later minor version; `Corrupt` for
    /// everything else, naming the column, leaf or file at fault.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, Error> {
        let mut parsed = container::parse("manifest", bytes, bytes.len() as u64)?;
        check_version(&parsed.metadata)?;
        let info = info_of(std::mem::take(&mut parsed.metadata))?;
        let source = Source { parsed, bytes };
        let paths = Strings { text: source.text("files.paths")?, ends: source.u64s("files.path_ends")? };
        let mut manifest = Manifest {
            info,
            files: files_of(&source, &paths)?,
            strings: Strings { text: source.text("strings.text")?, ends: source.u64s("strings.ends")? },
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
                coords_start: Vec::new(),
            },
            values: Values {
                ranks_end: source.u64s("values.ranks_end")?,
                rank_start: source.u32s("ranks.start")?,
                rank_stop: source.u32s("ranks.stop")?,
                file: source.u32s("values.file")?,
                offset: source.u64s("values.file_offset")?,
                bytes: source.u64s("values.bytes")?,
            },
        };
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

fn info_metadata(info: &SaveInfo) -> Vec<(String, String)> {
    let mut metadata = vec![
        (FORMAT.to_owned(), format!("{FORMAT_MAJOR}.{FORMAT_MINOR}")),
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

fn files_of(source: &Source<'_>, paths: &Strings) -> Result<Vec<FileEntry>, Error> {
    let bytes = source.u64s("files.bytes")?;
    let data_start = source.u64s("files.data_start")?;
    let header_crc = source.u64s("files.header_crc")?;
    super::check::same_rows("files", &[paths.ends.len(), bytes.len(), data_start.len(), header_crc.len()])?;
    paths.check("files.path_ends")?;
    let entry = |i: usize| FileEntry {
        path: paths.get(i as u32).to_owned(),
        bytes: bytes[i],
        data_start: data_start[i],
        header_crc: header_crc[i],
    };
    Ok((0..bytes.len()).map(entry).collect())
}

/// Columns on their way into a file.
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

/// Columns on their way out of a file.
struct Source<'a> {
    parsed: Container,
    bytes: &'a [u8],
}

impl Source<'_> {
    fn column(&self, name: &str, dtype: DType) -> Result<&[u8], Error> {
        let Some(entry) = self.parsed.entries.iter().find(|entry| entry.name == name) else {
            return Err(Error::Corrupt(format!("manifest: the column {name} is missing")));
        };
        let Entry { dtype: found, shape, span: (start, end), .. } = entry;
        if *found != Ok(dtype) || shape.len() != 1 {
            let found = found.as_ref().map_or_else(|name| name.clone(), |dtype| dtype.to_string());
            return Err(Error::Corrupt(format!(
                "manifest: column {name}: expected a 1-D {dtype}, found {found} {shape:?}"
            )));
        }
        // `container::parse` has checked that the spans end with the file.
        let data_start = self.parsed.data_start;
        Ok(&self.bytes[(data_start + start) as usize..(data_start + end) as usize])
    }

    fn u8s(&self, name: &str) -> Result<Vec<u8>, Error> {
        Ok(self.column(name, DType::U8)?.to_vec())
    }

    fn u32s(&self, name: &str) -> Result<Vec<u32>, Error> {
        let (values, _) = self.column(name, DType::U32)?.as_chunks();
        Ok(values.iter().map(|value| u32::from_le_bytes(*value)).collect())
    }

    fn u64s(&self, name: &str) -> Result<Vec<u64>, Error> {
        let (values, _) = self.column(name, DType::U64)?.as_chunks();
        Ok(values.iter().map(|value| u64::from_le_bytes(*value)).collect())
    }

    fn text(&self, name: &str) -> Result<String, Error> {
        String::from_utf8(self.u8s(name)?).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            Error::Corrupt(format!("manifest: column {name}: expected UTF-8, found something else at byte {at}"))
        })
    }
}
