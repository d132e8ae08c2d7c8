//! Tables of numbers in the container of data files: columns by name, each an array, and one checksum of all.

use std::collections::BTreeMap;

use crate::checksum::Crc64;
use crate::container::{self, LENGTH_BYTES};
use crate::digits::hex_u64;
use crate::dtype::DType;
use crate::error::Error;
use crate::region::Dims;

/// Note that holds the CRC-64 of all other notes and of all columns, in the order of their names: of a note its name
/// and text, of a column its name, element type, shape and bytes, each text followed by a zero byte and each length of
/// a shape as 8 little-endian bytes. 16 hexadecimal digits.
const CRC64: &str = "crc64";

/// A number that columns hold.
pub trait Number: Copy {
    /// Element type of the column.
    const DTYPE: DType;

    /// Appends its little-endian bytes.
    fn put(self, bytes: &mut Vec<u8>);

    /// Returns the number of these bytes, as many as the element type has.
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($number:ty, $dtype:ident;)*) => {$(
        impl Number for $number {
            const DTYPE: DType = DType::$dtype;

            fn put(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }

            fn of(bytes: &[u8]) -> Self {
                bytes.try_into().map_or(0, Self::from_le_bytes)
            }
        }
    )*};
}

numbers! { u8, U8; u16, U16; u32, U32; u64, U64; }

/// Columns of numbers and notes about them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Columns {
    /// Texts by name.
    pub notes: BTreeMap<String, String>,
    columns: BTreeMap<String, Column>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Column {
    dtype: DType,
    shape: Dims,
    bytes: Vec<u8>,
}

impl Columns {
    /// Adds a column of rows of `width` numbers each.
    ///
    /// # Errors
    /// `Invalid` if the numbers are no whole rows.
    pub fn add<N: Number>(&mut self, name: &str, width: usize, numbers: &[N]) -> Result<(), Error> {
        if width == 0 || !numbers.len().is_multiple_of(width) {
            let found = numbers.len();
            return Err(Error::Invalid(format!(
                "column {name:?}: expected whole rows of {width}, found {found} numbers"
            )));
        }
        let mut bytes = Vec::with_capacity(size_of_val(numbers));
        numbers.iter().for_each(|number| number.put(&mut bytes));
        let shape = Dims::from_slice(&[(numbers.len() / width) as u64, width as u64]);
        self.columns.insert(name.to_owned(), Column { dtype: N::DTYPE, shape, bytes });
        Ok(())
    }

    /// Returns the number of rows of a column; `None` if there is no such column.
    pub fn rows(&self, name: &str) -> Option<usize> {
        let rows = *self.columns.get(name)?.shape.first()?;
        usize::try_from(rows).ok()
    }

    /// Returns the numbers of a column of `rows` rows, row by row, and how many a row has.
    ///
    /// # Errors
    /// `Corrupt` if there is no such column.
    pub fn get<N: Number>(&self, name: &str, rows: usize) -> Result<(Vec<N>, usize), Error> {
        let wrong =
            |found: String| Error::Corrupt(format!("column {name:?}: expected {rows} rows of {}, {found}", N::DTYPE));
        let Some(Column { dtype, shape, bytes }) = self.columns.get(name) else {
            return Err(wrong("found none".to_owned()));
        };
        match shape[..] {
            [found, width] if found == rows as u64 && width > 0 && *dtype == N::DTYPE => {
                Ok((bytes.chunks_exact(size_of::<N>()).map(N::of).collect(), width as usize))
            }
            _ => Err(wrong(format!("found {dtype} of shape {shape:?}"))),
        }
    }

    /// Returns the bytes of the container.
    pub fn encode(&self) -> Vec<u8> {
        let data: Vec<u8> = self.columns.values().flat_map(|column| &column.bytes).copied().collect();
        let checksum = format!("{:016x}", self.checksum());
        let notes = self.notes.iter().map(|(name, note)| (name.as_str(), note.as_str()));
        let mut start = 0;
        let entries = self.columns.iter().map(|(name, column)| {
            let span = (start, start + column.bytes.len() as u64);
            start = span.1;
            (name.as_str(), column.dtype, column.shape.clone(), span)
        });
        let json = container::json(notes.chain([(CRC64, checksum.as_str())]), entries);
        let mut bytes = container::frame(&json, (LENGTH_BYTES + json.len() as u64).next_multiple_of(8));
        bytes.extend(data);
        bytes
    }

    /// Decodes a container; `what` names it in messages.
    ///
    /// # Errors
    /// `Corrupt` if the bytes are not those of [`encode`](Columns::encode).
    pub fn decode(what: &str, bytes: &[u8]) -> Result<Columns, Error> {
        let mut container = container::parse(what, bytes, bytes.len() as u64)?;
        let data = &bytes[container.data_start as usize..];
        let expected = container.metadata.remove(CRC64).and_then(|digits| hex_u64(digits.as_bytes()));
        let column = |entry: container::Entry| {
            let unknown =
                |name: String| Error::Unsupported(format!("{what}: column {:?} is of type {name}", entry.name));
            let dtype = entry.dtype.map_err(unknown)?;
            let bytes = data.get(entry.span.0 as usize..entry.span.1 as usize).unwrap_or_default().to_vec();
            Ok((entry.name, Column { dtype, shape: entry.shape, bytes }))
        };
        let columns = container.entries.into_iter().map(column).collect::<Result<_, Error>>()?;
        let columns = Columns { notes: container.metadata, columns };
        let found = columns.checksum();
        if expected == Some(found) {
            return Ok(columns);
        }
        let expected = expected.map_or_else(|| "none".to_owned(), |sum| format!("{sum:016x}"));
        Err(Error::Corrupt(format!("{what}: its checksum is {found:016x}, and the header says {expected}")))
    }

    fn checksum(&self) -> u64 {
        let mut sum = Crc64::new();
        let text = |sum: &mut Crc64, text: &str| {
            sum.update(text.as_bytes());
            sum.update(&[0]);
        };
        for (name, note) in &self.notes {
            text(&mut sum, name);
            text(&mut sum, note);
        }
        for (name, Column { dtype, shape, bytes }) in &self.columns {
            text(&mut sum, name);
            text(&mut sum, dtype.name());
            shape.iter().for_each(|length| sum.update(&length.to_le_bytes()));
            sum.update(bytes);
        }
        sum.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> Columns {
        let mut columns = Columns::default();
        columns.notes.insert("kind".to_owned(), "\"a\" & b".to_owned());
        columns.add("wide", 3, &[1_u16, 2, 3, 4, 5, 65535]).unwrap();
        columns.add("long", 1, &[u64::MAX, 7]).unwrap();
        columns.add("none", 2, &[0_u8; 0]).unwrap();
        columns
    }

    #[test]
    fn columns_come_back_as_they_were() {
        let bytes = columns().encode();
        let found = Columns::decode("here", &bytes).unwrap();
        assert_eq!(found, columns());
        assert_eq!(found.get::<u16>("wide", 2).unwrap(), (vec![1, 2, 3, 4, 5, 65535], 3));
        assert_eq!(found.get::<u64>("long", 2).unwrap(), (vec![u64::MAX, 7], 1));
    }

    #[test]
    fn a_column_of_another_type_or_length_is_named() {
        for (name, rows, found) in
            [("wide", 2, "found U16"), ("long", 3, "found U64 of shape [2, 1]"), ("no", 1, "found none")]
        {
            let error = columns().get::<u64>(name, rows).unwrap_err();
            assert!(error.message().contains(name) && error.message().contains(found), "{error}");
        }
        assert!(columns().add("odd", 2, &[1_u8]).unwrap_err().message().contains("whole rows of 2"));
    }

    #[test]
    fn every_flipped_bit_is_found_or_says_the_same() {
        let good = columns().encode();
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = Columns::decode("here", &bytes);
            assert!(found.is_err() || found == Ok(columns()), "bit {bit}: {found:?}");
        }
        for length in 0..good.len() {
            assert!(Columns::decode("here", &good[..length]).is_err(), "{length} bytes");
        }
    }
}
