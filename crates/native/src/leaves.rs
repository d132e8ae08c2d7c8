//! Leaves and wants as Python gives them: tuples of plain values and addresses.

use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use shardfast_engine::{Fences, Memory, Provider, Sink, State, Strided, Want, row_major_strides};
use shardfast_format::region::checked_numel;
use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafKind, LeafName, Manifest, Region};

use crate::errors::{invalid, raise};
use crate::values::Value;

/// When a tensor's bytes are copied.
#[derive(Clone, Copy, PartialEq)]
enum Capture {
    /// In the call that begins the save, here.
    Now,
    /// In the background, first of all: the caller waits for it.
    Soon,
    /// In the background, at leisure: the caller vouches that nobody wrote meanwhile.
    Lazily,
    /// In the background, at leisure: nobody else has the memory.
    Whenever,
}

/// A tensor's memory and what keeps it allocated.
struct Held {
    memory: Memory,
    is_urgent: bool,
    _owner: Arc<Py<PyAny>>,
}

impl Provider for Held {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> shardfast_engine::Result<()> {
        self.memory.fill(at, out, fences)
    }

    fn is_urgent(&self) -> bool {
        self.is_urgent
    }
}

/// Bytes that were copied in the call.
struct Copied {
    buffer: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl Provider for Copied {
    fn bytes(&self) -> u64 {
        self.range.len() as u64
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> shardfast_engine::Result<()> {
        let at = self.range.start + at as usize;
        out.copy_from_slice(&self.buffer[at..at + out.len()]);
        Ok(())
    }
}

/// A region and where its elements lie.
struct Block {
    region: Region,
    address: usize,
    strides_bytes: Vec<i64>,
}

/// What a state holds and where its tensors lie, said once for all the saves during which both stay the same.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Described {
    catalog: Arc<Catalog>,
    /// In the catalog's order.
    bodies: Vec<Body>,
    is_lazy: bool,
}

/// Where a leaf's bytes come from.
enum Body {
    Tensor(Capture, Vec<Strided>),
    /// The number of the value among the objects, in the order given.
    Object(usize),
    Alias,
}

#[pymethods]
impl Described {
    /// From leaves: `("tensor", key, name, layout, dtype, shape, parts, when)` with parts `(offsets, lengths, pointer,
    /// strides_bytes)` or `("flat", start, stop, pointer)` and `when` one of "now", "soon", "lazily" and
    /// "whenever";
    /// `("object", key, name, layout, per_rank)`; or `("alias", key, name, layout, of_key, of_name)`.
    #[new]
    fn new(leaves: &Bound<'_, PyAny>) -> PyResult<Described> {
        let (mut out, mut objects) = (Vec::<(Leaf, Body)>::new(), 0);
        for leaf in leaves.try_iter()? {
            let leaf = leaf?.cast_into::<PyTuple>()?;
            let (kind, key, name, layout): (String, String, String, String) = leaf.get_slice(0, 4).extract()?;
            let name = LeafName::new(key, name);
            let rest = leaf.get_slice(4, leaf.len());
            let (body, from) = match kind.as_str() {
                "tensor" => tensor(&rest, &name)?,
                "object" => {
                    let (per_rank,): (bool,) = rest.extract()?;
                    objects += 1;
                    (LeafBody::Object { per_rank }, Body::Object(objects - 1))
                }
                "alias" => {
                    let (key, name): (String, String) = rest.extract()?;
                    (LeafBody::Alias { of: LeafName::new(key, name) }, Body::Alias)
                }
                other => return Err(invalid(format!("expected a tensor, object or alias, found {other:?}"))),
            };
            out.push((Leaf { name, body, layout }, from));
        }
        out.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        let (leaves, bodies): (Vec<_>, Vec<_>) = out.into_iter().unzip();
        let is_lazy = bodies.iter().any(|body| matches!(body, Body::Tensor(Capture::Lazily, _)));
        Ok(Described { catalog: Arc::new(Catalog { leaves }), bodies, is_lazy })
    }
}

impl Described {
    /// The state as it is now. `values` are those of the objects, in the order in which these were given; `owner` keeps
    /// the memory of all tensors allocated that are not copied here.
    pub(crate) fn state(&self, values: &[PyRef<'_, Value>], owner: Py<PyAny>) -> PyResult<State> {
        let owner = Arc::new(owner);
        let buffer = self.copied_now()?;
        let mut copied = 0;
        let mut providers = Vec::with_capacity(self.bodies.len());
        for (body, leaf) in self.bodies.iter().zip(&self.catalog.leaves) {
            providers.push(match body {
                Body::Alias => Vec::new(),
                Body::Object(number) => {
                    let value = values.get(*number).ok_or_else(|| invalid(format!("leaf {}: no value", leaf.name)))?;
                    vec![Arc::clone(&value.encoded) as Arc<dyn Provider>]
                }
                Body::Tensor(Capture::Now, parts) => parts
                    .iter()
                    .map(|part| {
                        let range = copied..copied + part.total_bytes() as usize;
                        copied = range.end;
                        Arc::new(Copied { buffer: Arc::clone(&buffer), range }) as Arc<dyn Provider>
                    })
                    .collect(),
                Body::Tensor(when, parts) => parts
                    .iter()
                    .map(|part| {
                        let (memory, is_urgent) = (memory(part), *when == Capture::Soon);
                        Arc::new(Held { memory, is_urgent, _owner: Arc::clone(&owner) }) as Arc<dyn Provider>
                    })
                    .collect(),
            });
        }
        Ok(State { catalog: Arc::clone(&self.catalog), providers, is_vouched_for: self.is_lazy })
    }

    /// The bytes of all tensors that are copied in the call, in the catalog's order.
    fn copied_now(&self) -> PyResult<Arc<Vec<u8>>> {
        let now = || {
            self.bodies.iter().flat_map(|body| match body {
                Body::Tensor(Capture::Now, parts) => parts.as_slice(),
                _ => &[],
            })
        };
        let mut buffer = vec![0; now().map(Strided::total_bytes).sum::<u64>() as usize];
        let mut rest = buffer.as_mut_slice();
        for part in now() {
            let (out, behind) = rest.split_at_mut(part.total_bytes() as usize);
            memory(part).fill(0, out, &mut Fences::default()).map_err(raise)?;
            rest = behind;
        }
        Ok(Arc::new(buffer))
    }
}

fn memory(block: &Strided) -> Memory {
    // SAFETY: Python's adapters give the address of memory that they found allocated just before the save was begun in
    // the same call, and that its `owner` keeps so; the caller of `save` does not write it before the save is staged,
    // or vouches for no save during which somebody did. The engine reads nothing after that.
    #[allow(unsafe_code)]
    unsafe {
        Memory::new(block.clone())
    }
}

fn tensor(leaf: &Bound<'_, PyTuple>, name: &LeafName) -> PyResult<(LeafBody, Body)> {
    let (dtype, shape, given, when): (String, Vec<u64>, Vec<Bound<'_, PyTuple>>, String) = leaf.extract()?;
    let dtype = DType::from_name(&dtype).ok_or_else(|| invalid(format!("leaf {name}: there is no dtype {dtype:?}")))?;
    let when = match when.as_str() {
        "now" => Capture::Now,
        "soon" => Capture::Soon,
        "lazily" => Capture::Lazily,
        "whenever" => Capture::Whenever,
        other => return Err(invalid(format!("leaf {name}: captured at an unknown time, {other:?}"))),
    };
    let (mut parts, mut memory) = (Vec::new(), Vec::new());
    for part in given {
        for block in blocks(&part, &shape, dtype, name)? {
            let item_bytes = dtype.size_bytes();
            memory.push(Strided::new(block.address, &block.region.lengths, &block.strides_bytes, item_bytes));
            parts.push(block.region);
        }
    }
    let body = LeafBody::Tensor { dtype, shape: Dims::from_slice(&shape), parts };
    Ok((body, Body::Tensor(when, memory)))
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
