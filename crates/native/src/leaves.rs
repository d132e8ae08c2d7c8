//! Leaves and wants as Python gives them: tuples of plain values and addresses.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};
use shardfast_engine::{Fences, Memory, Provider, Sink, State, Strided, Want, row_major_strides};
use shardfast_format::region::checked_numel;
use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafKind, LeafName, Manifest, Region};

use crate::errors::{invalid, raise};

/// A tensor's memory and what keeps it allocated.
struct Held {
    memory: Memory,
    _owner: Arc<Py<PyAny>>,
}

impl Provider for Held {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> shardfast_engine::Result<()> {
        self.memory.fill(at, out, fences)
    }
}

/// A region and where its elements lie.
struct Block {
    region: Region,
    address: usize,
    strides_bytes: Vec<i64>,
}

/// The state that these leaves describe. `owner` keeps all of their memory allocated.
pub(crate) fn state(leaves: &Bound<'_, PyAny>, owner: Py<PyAny>) -> PyResult<State> {
    let owner = Arc::new(owner);
    let mut out: Vec<(Leaf, Vec<Arc<dyn Provider>>)> = Vec::new();
    for leaf in leaves.try_iter()? {
        let leaf = leaf?.cast_into::<PyTuple>()?;
        let kind: String = leaf.get_item(0)?.extract()?;
        out.push(match kind.as_str() {
            "tensor" => tensor(&leaf, &owner)?,
            "object" => {
                let (_, key, name, layout, encoded, per_rank): (
                    String,
                    String,
                    String,
                    String,
                    Bound<'_, PyBytes>,
                    bool,
                ) = leaf.extract()?;
                let body = LeafBody::Object { per_rank };
                let encoded: Arc<dyn Provider> = Arc::new(encoded.as_bytes().to_vec());
                (Leaf { name: LeafName::new(key, name), body, layout }, vec![encoded])
            }
            "alias" => {
                let (_, key, name, layout, of_key, of_name): (String, String, String, String, String, String) =
                    leaf.extract()?;
                let body = LeafBody::Alias { of: LeafName::new(of_key, of_name) };
                (Leaf { name: LeafName::new(key, name), body, layout }, Vec::new())
            }
            other => return Err(invalid(format!("expected a tensor, object or alias, found {other:?}"))),
        });
    }
    out.sort_by(|a, b| a.0.name.cmp(&b.0.name));
    let (leaves, providers) = out.into_iter().unzip();
    Ok(State { catalog: Arc::new(Catalog { leaves }), providers, is_vouched_for: false })
}

fn tensor(leaf: &Bound<'_, PyTuple>, owner: &Arc<Py<PyAny>>) -> PyResult<(Leaf, Vec<Arc<dyn Provider>>)> {
    let (_, key, name, layout, dtype, shape, given): (
        String,
        String,
        String,
        String,
        String,
        Vec<u64>,
        Vec<Bound<'_, PyTuple>>,
    ) = leaf.extract()?;
    let name = LeafName::new(key, name);
    let dtype = DType::from_name(&dtype).ok_or_else(|| invalid(format!("leaf {name}: there is no dtype {dtype:?}")))?;
    let (mut parts, mut providers) = (Vec::new(), Vec::<Arc<dyn Provider>>::new());
    for part in given {
        for block in blocks(&part, &shape, dtype, &name)? {
            let strided = Strided::new(block.address, &block.region.lengths, &block.strides_bytes, dtype.size_bytes());
            // SAFETY: Python's adapters give the address of memory that `owner` keeps allocated, and the caller of
            // `save` promises not to write it before the save is staged; the engine reads nothing after that.
            #[allow(unsafe_code)]
            let memory = unsafe { Memory::new(strided) };
            parts.push(block.region);
            providers.push(Arc::new(Held { memory, _owner: Arc::clone(owner) }));
        }
    }
    let body = LeafBody::Tensor { dtype, shape: Dims::from_slice(&shape), parts };
    Ok((Leaf { name, body, layout }, providers))
}

/// The regions and memory of one part: `(offsets, lengths, pointer, strides_bytes)` or
/// `("flat", start, stop, pointer)`.
fn blocks(
    part: &Bound<'_, PyTuple>,
    shape: &[u64],
    dtype: DType,
    name: &impl std::fmt::Display,
) -> PyResult<Vec<Block>> {
    let item = dtype.size_bytes();
    if part.get_item(0)?.is_instance_of::<PyString>() {
        let (_, start, stop, mut pointer): (String, u64, u64, usize) = part.extract()?;
        let numel = checked_numel(shape);
        if start > stop || numel.is_none_or(|numel| stop > numel) {
            return Err(invalid(format!("leaf {name}: the run {start}..{stop} is outside of the shape {shape:?}")));
        }
        let regions = Region::of_flat_run(shape, start, stop).into_iter().map(|region| {
            let strides_bytes = row_major_strides(&region.lengths, item).iter().map(|&stride| stride as i64).collect();
            let address = pointer;
            pointer += (region.numel() * item) as usize;
            Block { region, address, strides_bytes }
        });
        return Ok(regions.collect());
    }
    let (offsets, lengths, address, strides_bytes): (Vec<u64>, Vec<u64>, usize, Vec<i64>) = part.extract()?;
    if [offsets.len(), lengths.len(), strides_bytes.len()] != [shape.len(); 3] {
        return Err(invalid(format!(
            "leaf {name}: expected {} offsets, lengths and strides, found {}, {} and {}",
            shape.len(),
            offsets.len(),
            lengths.len(),
            strides_bytes.len()
        )));
    }
    let region = Region::new(&offsets, &lengths);
    if !region.fits(shape) {
        return Err(invalid(format!("leaf {name}: the region {region} is outside of the shape {shape:?}")));
    }
    Ok(vec![Block { region, address, strides_bytes }])
}

/// What a load is to fill: `(leaf_index, offsets, lengths, pointer, strides_bytes)` or
/// `(leaf_index, "flat", start, stop, pointer)`.
pub(crate) fn wants(manifest: &Manifest, given: &Bound<'_, PyAny>) -> PyResult<Vec<Want>> {
    let mut out = Vec::new();
    for want in given.try_iter()? {
        let want = want?.cast_into::<PyTuple>()?;
        let leaf: usize = want.get_item(0)?.extract()?;
        if leaf >= manifest.len() {
            return Err(invalid(format!("there is no leaf {leaf} in a manifest of {}", manifest.len())));
        }
        let named = manifest.leaf(leaf);
        let name = format!("{}/{}", named.key, named.name);
        let LeafKind::Tensor { dtype, shape } = named.kind else {
            return Err(invalid(format!("leaf {name} is no tensor")));
        };
        let part = want.get_slice(1, want.len());
        for Block { region, address, strides_bytes } in blocks(&part, shape, dtype, &name)? {
            // SAFETY: Python's adapters give the address of memory that they keep allocated and unshared while `load`
            // runs; `Sink::new` refuses memory whose elements overlap.
            #[allow(unsafe_code)]
            let sink = unsafe { Sink::new(address, &region.lengths, &strides_bytes, dtype.size_bytes()) };
            let sink = sink.map_err(|error| raise(error.within(format!("leaf {name}"))))?;
            out.push(Want { leaf, region, sink });
        }
    }
    Ok(out)
}
