//! Parts of tensors as Python gives them: regions, and where their elements lie.

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use shardfast_engine::row_major_strides;
use shardfast_format::region::checked_numel;
use shardfast_format::{DType, Region};

use crate::errors::invalid;

/// A region, and the address of its elements.
pub(crate) struct Block {
    pub(crate) region: Region,
    pub(crate) address: usize,
    pub(crate) strides_bytes: Vec<i64>,
    /// The number of the CUDA device that has the memory; `None` for the host.
    pub(crate) device: Option<u32>,
}

/// The numbers in a tuple at `place` of a part. Tuples are read without further type checks, since thousands of parts
/// are converted at a time.
fn numbers<'py, T>(part: &Bound<'py, PyTuple>, place: usize) -> PyResult<Vec<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    let numbers = part.get_item(place)?;
    match numbers.cast::<PyTuple>() {
        Ok(numbers) => numbers.iter().map(|number| number.extract()).collect(),
        Err(_) => numbers.extract(),
    }
}

/// The regions and memory of one part: `(offsets, lengths, pointer, strides_bytes)`, `("flat", start, stop, pointer)`
/// or `("flat", start, stop, pointer, (offsets, lengths))`, a run through that box; and behind it the number of a
/// device if it is one's.
pub(crate) fn blocks(
    part: &Bound<'_, PyTuple>,
    shape: &[u64],
    dtype: DType,
    name: &impl std::fmt::Display,
) -> PyResult<Vec<Block>> {
    let is_flat = part.get_item(0)?.is_instance_of::<PyString>();
    let is_in_box = is_flat && part.len() > 4 && part.get_item(4)?.is_instance_of::<PyTuple>();
    let fields = if is_in_box { 5 } else { 4 };
    let device = (part.len() > fields).then(|| part.get_item(fields)?.extract::<u32>()).transpose()?;
    if is_flat {
        let (_, start, stop, pointer): (String, u64, u64, usize) = part.get_slice(0, 4).extract()?;
        let frame = match is_in_box {
            true => {
                let frame = part.get_item(4)?.cast_into::<PyTuple>()?;
                boxed(&numbers::<u64>(&frame, 0)?, &numbers::<u64>(&frame, 1)?, shape, name)?
            }
            false => Region::whole(shape),
        };
        return run(&frame, start..stop, pointer, device, dtype.size_bytes(), name);
    }
    let (offsets, lengths): (Vec<u64>, Vec<u64>) = (numbers(part, 0)?, numbers(part, 1)?);
    let (address, strides_bytes): (usize, Vec<i64>) = (part.get_item(2)?.extract()?, numbers(part, 3)?);
    let region = boxed(&offsets, &lengths, shape, name)?;
    if strides_bytes.len() != shape.len() {
        let found = strides_bytes.len();
        return Err(invalid(format!("leaf {name}: expected {} strides, found {found}", shape.len())));
    }
    Ok(vec![Block { region, address, strides_bytes, device }])
}

/// Makes a box in a tensor of `shape`.
fn boxed(offsets: &[u64], lengths: &[u64], shape: &[u64], name: &impl std::fmt::Display) -> PyResult<Region> {
    if [offsets.len(), lengths.len()] != [shape.len(); 2] {
        let (expected, offsets, lengths) = (shape.len(), offsets.len(), lengths.len());
        return Err(invalid(format!(
            "leaf {name}: expected {expected} offsets and lengths, found {offsets} and {lengths}"
        )));
    }
    let region = Region::new(offsets, lengths);
    if !region.fits(shape) {
        return Err(invalid(format!("leaf {name}: the region {region} is outside of the shape {shape:?}")));
    }
    Ok(region)
}

/// The blocks of a run through the elements of a box, which lie one behind the other from `pointer` on.
fn run(
    frame: &Region,
    elements: Range<u64>,
    mut pointer: usize,
    device: Option<u32>,
    item: u64,
    name: &impl std::fmt::Display,
) -> PyResult<Vec<Block>> {
    let (start, stop) = (elements.start, elements.end);
    if start > stop || checked_numel(&frame.lengths).is_none_or(|numel| stop > numel) {
        let shape = &frame.lengths;
        return Err(invalid(format!("leaf {name}: the run {start}..{stop} is outside of the shape {shape:?}")));
    }
    let blocks = Region::flat_run(&frame.lengths, start, stop).map(|mut region| {
        let strides_bytes = row_major_strides(&region.lengths, item).iter().map(|&stride| stride as i64).collect();
        let address = pointer;
        pointer += (region.numel() * item) as usize;
        region.offsets.iter_mut().zip(&frame.offsets).for_each(|(offset, first)| *offset += first);
        Block { region, address, strides_bytes, device }
    });
    Ok(blocks.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block's region, address, strides and device.
    type Fields = (Region, usize, Vec<i64>, Option<u32>);

    /// Returns the blocks of a part, given as Python code, of a tensor of shape [4, 6] and 4 bytes an element.
    fn made(code: &std::ffi::CStr) -> Result<Vec<Fields>, String> {
        Python::initialize();
        Python::attach(|py| {
            let part = py.eval(code, None, None).unwrap().cast_into::<PyTuple>().unwrap();
            let blocks = blocks(&part, &[4, 6], DType::F32, &"model/w");
            let fields = |block: Block| (block.region, block.address, block.strides_bytes, block.device);
            blocks.map(|blocks| blocks.into_iter().map(fields).collect()).map_err(|error| error.value(py).to_string())
        })
    }

    #[test]
    fn a_box_is_one_block() {
        let region = Region::new(&[1, 0], &[2, 6]);
        assert_eq!(made(c"((1, 0), (2, 6), 4096, (24, 4))"), Ok(vec![(region.clone(), 4096, vec![24, 4], None)]));
        assert_eq!(made(c"([1, 0], [2, 6], 4096, [24, 4], 3)"), Ok(vec![(region, 4096, vec![24, 4], Some(3))]));
    }

    #[test]
    fn a_flat_run_is_blocks_that_lie_behind_each_other() {
        let blocks = made(c"('flat', 4, 21, 4096, 1)").unwrap();
        let expected = [
            (Region::new(&[0, 4], &[1, 2]), 4096),
            (Region::new(&[1, 0], &[2, 6]), 4096 + 2 * 4),
            (Region::new(&[3, 0], &[1, 3]), 4096 + 14 * 4),
        ];
        assert_eq!(blocks.len(), expected.len());
        for ((region, address, strides_bytes, device), expected) in blocks.into_iter().zip(expected) {
            assert_eq!(strides_bytes, [region.lengths[1] as i64 * 4, 4]);
            assert_eq!(((region, address), device), (expected, Some(1)));
        }
        assert_eq!(made(c"('flat', 7, 7, 4096)"), Ok(vec![]));
    }

    #[test]
    fn a_flat_run_in_a_box_lies_behind_its_corner() {
        // Rows 1 to 3 and columns 2 to 5: the run begins in its first row and ends in its third.
        let blocks = made(c"('flat', 1, 7, 4096, ((1, 2), (3, 3)), 2)").unwrap();
        let fields = |(region, address, _, device): &Fields| (region.clone(), *address, *device);
        let found: Vec<_> = blocks.iter().map(fields).collect();
        let expected = [
            (Region::new(&[1, 3], &[1, 2]), 4096, Some(2)),
            (Region::new(&[2, 2], &[1, 3]), 4096 + 2 * 4, Some(2)),
            (Region::new(&[3, 2], &[1, 1]), 4096 + 5 * 4, Some(2)),
        ];
        assert_eq!(found, expected);
        assert_eq!(made(c"('flat', 0, 24, 4096, ((0, 0), (4, 6)))"), made(c"('flat', 0, 24, 4096)"));
    }

    #[test]
    fn what_lies_outside_of_the_shape_is_refused() {
        let wrong = [
            (c"('flat', 4, 25, 4096)", "the run 4..25 is outside of the shape [4, 6]"),
            (c"('flat', 5, 4, 4096)", "the run 5..4 is outside"),
            (c"((3, 0), (2, 6), 4096, (24, 4))", "is outside of the shape [4, 6]"),
            (c"((2**64 - 1, 0), (2, 6), 4096, (24, 4))", "is outside of the shape [4, 6]"),
            (c"((1,), (2, 6), 4096, (24, 4))", "expected 2 offsets and lengths, found 1 and 2"),
            (c"((1, 0), (2, 6), 4096, (4,))", "expected 2 strides, found 1"),
            (c"('flat', 0, 10, 4096, ((1, 2), (3, 3)))", "the run 0..10 is outside of the shape [3, 3]"),
            (c"('flat', 0, 4, 4096, ((2, 2), (3, 3)))", "is outside of the shape [4, 6]"),
            (c"((1, 0), (-2, 6), 4096, (24, 4))", "can't convert negative"),
        ];
        for (code, expected) in wrong {
            let message = made(code).expect_err("refused");
            assert!(message.contains(expected), "{code:?}: {message}");
        }
    }
}
