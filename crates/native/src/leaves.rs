//! Leaves and wants as Python gives them: tuples of plain values and addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use shardfast_engine::{
    Capture, Captures, Compared, Engine, Fences, Maker, Memory, Provider, RankSet, Replicas, Sample, Sink, State,
    Strided, Want,
};
use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafKind, LeafName, Manifest, Owner as ValueOwner};
use shardfast_transfer::cuda::{CopyStream, DeviceMemory, DeviceSink};
use shardfast_transfer::digest::Digester;

use crate::deferred_decref::Owner;
use crate::errors::{invalid, raise};
use crate::memory_samples::Spots;
use crate::parts::{Block, blocks};
use crate::values::{Encoded, Value};

/// Runs from this length on are read by the kernel at nearly the speed of a copy.
const GUARDED_RUN_BYTES_MIN: u64 = 4096;

/// A tensor's memory and what keeps it allocated.
pub(crate) struct Held<P> {
    memory: P,
    capture: Capture,
    _owner: Arc<Owner>,
}

impl Held<Memory> {
    /// Makes host memory that is read while the program goes on.
    pub(crate) fn lazily(block: &Strided, owner: &Arc<Owner>) -> Held<Memory> {
        Held { memory: memory(block, true), capture: Capture::Lazy, _owner: Arc::clone(owner) }
    }
}

impl Held<DeviceMemory> {
    /// Makes a device's memory that is read while the program goes on.
    pub(crate) fn on_device(copies: &Arc<CopyStream>, block: &Strided, owner: &Arc<Owner>) -> Held<DeviceMemory> {
        Held { memory: device_memory(copies, block), capture: Capture::Lazy, _owner: Arc::clone(owner) }
    }
}

impl<P: Provider> Provider for Held<P> {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn fill(&self, at: u64, out: &mut [u8], fences: &mut Fences) -> shardfast_engine::Result<()> {
        self.memory.fill(at, out, fences)
    }

    fn fill_blocks(
        &self,
        at: u64,
        out: &mut [u8],
        crcs: &mut [Option<u64>],
        fences: &mut Fences,
    ) -> shardfast_engine::Result<()> {
        self.memory.fill_blocks(at, out, crcs, fences)
    }

    fn sum(&self, at: u64, bytes: u64, slot: &mut [u8]) -> shardfast_engine::Result<u64> {
        self.memory.sum(at, bytes, slot)
    }

    fn on_device(&self, at: u64, bytes: u64) -> Option<(Arc<dyn Digester>, usize)> {
        self.memory.on_device(at, bytes)
    }

    fn capture(&self) -> Capture {
        self.capture
    }

    fn is_torn(&self) -> bool {
        self.memory.is_torn()
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

    fn capture(&self) -> Capture {
        Capture::Inline
    }
}

/// A part of a tensor in memory.
struct Part {
    block: Strided,
    device: Option<u32>,
    /// The samples that are read when a save begins.
    spots: Range<usize>,
}

/// The streams that the program uses, by the number of the device.
pub(crate) type Streams = BTreeMap<u32, u64>;

/// Makes one copy stream for each device of a save or a load.
struct CopyStreams<'a> {
    engine: &'a Engine,
    streams: &'a Streams,
    made: BTreeMap<u32, Arc<CopyStream>>,
}

impl<'a> CopyStreams<'a> {
    fn new(engine: &'a Engine, streams: &'a Streams) -> Self {
        CopyStreams { engine, streams, made: BTreeMap::new() }
    }

    fn of(&mut self, device: u32) -> PyResult<&Arc<CopyStream>> {
        use std::collections::btree_map::Entry;
        match self.made.entry(device) {
            Entry::Occupied(made) => Ok(made.into_mut()),
            Entry::Vacant(place) => {
                let stream = self.streams.get(&device);
                let stream = stream.ok_or_else(|| invalid(format!("cuda:{device}: no stream was given for it")))?;
                // SAFETY: Python's adapters give the handle of the framework's current stream on that device, which
                // lives at least until this call returns.
                #[allow(unsafe_code)]
                let made = unsafe { self.engine.accelerators().copies_after(device, *stream) };
                Ok(place.insert(made.map_err(raise)?))
            }
        }
    }
}

/// Leaves of a state and places of its tensors, described once for all saves while both stay the same.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Described {
    catalog: Arc<Catalog>,
    /// Present if the holders of all tensors are known.
    replicas: Option<Arc<Replicas>>,
    /// Saves that compare the replicas of each leaf.
    compared: Arc<Vec<Compared>>,
    makers: Arc<Vec<Maker>>,
    /// Contents of the leaves, in the catalog's order.
    bodies: Arc<Vec<Body>>,
    /// The samples that are read when a save begins.
    spots: Spots,
    captures: Captures,
    /// Coordinates of this rank in the meshes that the state shows.
    coordinates: Vec<(String, u64)>,
}

/// A part of a leaf whose bytes lie in one run.
pub(crate) struct PartInRun<'a> {
    /// The number of the leaf, and of the part.
    pub(crate) leaf: u32,
    pub(crate) part: u32,
    pub(crate) block: &'a Strided,
    /// The CUDA device that has the part; `None` for the host.
    pub(crate) device: Option<u32>,
}

/// State of one save, beside its tensors' places.
struct Now {
    values: Vec<Arc<Encoded>>,
    copied: Arc<Vec<u8>>,
    copies: BTreeMap<u32, Arc<CopyStream>>,
    /// The bytes of each spot, if this save samples them.
    samples: Vec<Sample>,
    owner: Arc<Owner>,
    blocking: bool,
}

impl Now {
    /// Returns the bytes of each leaf's parts, leaf by leaf.
    fn providers(&self, bodies: &[Body]) -> Vec<Vec<Arc<dyn Provider>>> {
        let mut copied = 0;
        let of = |body: &Body| match body {
            Body::Alias => Vec::new(),
            Body::Object(number) => vec![Arc::clone(&self.values[*number]) as Arc<dyn Provider>],
            Body::Tensor(Capture::Inline, parts) => parts
                .iter()
                .map(|part| {
                    let range = copied..copied + part.block.total_bytes() as usize;
                    copied = range.end;
                    Arc::new(Copied { buffer: Arc::clone(&self.copied), range }) as Arc<dyn Provider>
                })
                .collect(),
            Body::Tensor(capture, parts) => parts.iter().map(|part| self.held(*capture, part)).collect(),
        };
        bodies.iter().map(of).collect()
    }

    fn held(&self, capture: Capture, part: &Part) -> Arc<dyn Provider> {
        let _owner = Arc::clone(&self.owner);
        match part.device {
            Some(device) => {
                let memory = device_memory(&self.copies[&device], &part.block);
                Arc::new(Held { memory, capture, _owner })
            }
            None => {
                let memory = memory(&part.block, capture == Capture::Lazy && !self.blocking);
                let memory = memory.sampled(self.samples.get(part.spots.clone()).unwrap_or_default().to_vec());
                Arc::new(Held { memory, capture, _owner })
            }
        }
    }
}

/// Sets of ranks, each once.
#[derive(Default)]
struct Groups<'py> {
    sets: Vec<RankSet>,
    /// Indices of the sets, by the addresses of the Python tuples, which are kept: most leaves give the same tuple.
    known: HashMap<usize, (Bound<'py, PyAny>, u32)>,
}

impl<'py> Groups<'py> {
    /// The index of the set that Python gives as a tuple of ranks; `None` for `None`.
    fn of(&mut self, ranks: &Bound<'py, PyAny>) -> PyResult<Option<u32>> {
        if ranks.is_none() {
            return Ok(None);
        }
        let address = ranks.as_ptr() as usize;
        if let Some((_, index)) = self.known.get(&address) {
            return Ok(Some(*index));
        }
        let set = RankSet::new(ranks.extract::<Vec<u32>>()?);
        let index = self.sets.iter().position(|known| *known == set).unwrap_or_else(|| {
            self.sets.push(set);
            self.sets.len() - 1
        });
        self.known.insert(address, (ranks.clone(), index as u32));
        Ok(Some(index as u32))
    }
}

/// A maker, as Python gives it.
type GivenMaker = (String, String, String, String, Vec<String>, Vec<String>);

/// Source of a leaf's bytes.
enum Body {
    Tensor(Capture, Vec<Part>),
    /// The number of the value among the objects, in the order given.
    Object(usize),
    Alias,
}

fn owner_of_value(said: &Bound<'_, PyAny>) -> PyResult<ValueOwner> {
    if let Ok((index, count)) = said.extract::<(u32, u32)>() {
        return Ok(ValueOwner::Piece { index, count });
    }
    match &*said.extract::<String>()? {
        "job" => Ok(ValueOwner::Job),
        "rank" => Ok(ValueOwner::Rank),
        other => Err(invalid(format!("expected the owner of a value, found {other:?}"))),
    }
}

#[pymethods]
impl Described {
    /// Takes leaves: `("tensor", key, name, layout, dtype, shape, parts, capture, holders, compared)` with parts
    /// `(offsets, lengths, pointer, strides_bytes)`, `("flat", start, stop, pointer)` or, in a box,
    /// `("flat", start, stop, pointer, (offsets, lengths))`, behind it the number of a CUDA device if the memory is
    /// one's, `capture` the name of a [`Capture`], `holders` the ranks that hold the same parts
    /// or `None`, and `compared` when their copies are compared, one of "first save", "on request", "every save" and
    /// "never"; `("object", key, name, layout, owner)` with `owner` as "job", "rank"
    /// or the piece `(index, count)`; or `("alias", key, name, layout, of_key, of_name)`.
    /// From makers: `(key, name, class, kind, made, unmade)`, by the name of a value. `coordinates` are this rank's in
    /// the meshes of its job, by the name of the dimension.
    #[new]
    #[pyo3(signature = (leaves, makers = vec![], coordinates = vec![]))]
    fn new<'py>(
        leaves: &Bound<'py, PyAny>,
        makers: Vec<GivenMaker>,
        coordinates: Vec<(String, u64)>,
    ) -> PyResult<Described> {
        let made = |(key, name, class, kind, made, unmade): GivenMaker| Maker {
            value: LeafName::new(key, name),
            class,
            kind,
            made,
            unmade,
        };
        let makers = Arc::new(makers.into_iter().map(made).collect());
        let (mut out, mut objects) = (Vec::<((Leaf, Option<u32>, Compared), Body)>::new(), 0);
        let mut groups = Groups::default();
        for leaf in leaves.try_iter()? {
            let leaf = leaf?.cast_into::<PyTuple>()?;
            let (kind, key, name, layout): (String, String, String, String) = leaf.get_slice(0, 4).extract()?;
            let name = LeafName::new(key, name);
            let rest = leaf.get_slice(4, leaf.len());
            let (mut group, mut compared) = (None, Compared::default());
            let (body, from) = match kind.as_str() {
                "tensor" => {
                    group = groups.of(&rest.get_item(4)?)?;
                    compared = when_compared(rest.get_item(5)?.extract()?, &name)?;
                    tensor(&rest.get_slice(0, 4), &name)?
                }
                "object" => {
                    objects += 1;
                    (LeafBody::Object { owner: owner_of_value(&rest.get_item(0)?)? }, Body::Object(objects - 1))
                }
                "alias" => {
                    let (key, name): (String, String) = rest.extract()?;
                    (LeafBody::Alias { of: LeafName::new(key, name) }, Body::Alias)
                }
                other => return Err(invalid(format!("expected a tensor, object or alias, found {other:?}"))),
            };
            out.push(((Leaf { name, body, layout }, group, compared), from));
        }
        out.sort_by(|a, b| a.0.0.name.cmp(&b.0.0.name));
        let (leaves, mut bodies): (Vec<_>, Vec<_>) = out.into_iter().unzip();
        let mut spots = Spots::default();
        for body in &mut bodies {
            if let Body::Tensor(Capture::Lazy, parts) = body {
                let on_host = parts.iter_mut().filter(|part| part.device.is_none());
                on_host.for_each(|part| part.spots = spots.add(&part.block));
            }
        }
        let compared = Arc::new(leaves.iter().map(|(_, _, compared)| *compared).collect());
        let (leaves, known): (Vec<Leaf>, Vec<_>) = leaves.into_iter().map(|(leaf, group, _)| (leaf, group)).unzip();
        let captures = bodies.iter().filter_map(|body| match body {
            Body::Tensor(capture, _) => Some(*capture),
            Body::Object(_) | Body::Alias => None,
        });
        let captures = captures.collect();
        // With one tensor of unknown holders ranks need rank 0's plan, and then for all tensors.
        let has_parts = |leaf: &Leaf| matches!(&leaf.body, LeafBody::Tensor { parts, .. } if !parts.is_empty());
        let is_unknown = |(leaf, group): (&Leaf, &Option<u32>)| group.is_none() && has_parts(leaf);
        let replicas = (!leaves.iter().zip(&known).any(is_unknown))
            .then(|| Arc::new(Replicas { groups: groups.sets, leaves: known }));
        let (catalog, bodies) = (Arc::new(Catalog { leaves }), Arc::new(bodies));
        Ok(Described { catalog, replicas, compared, makers, bodies, spots, captures, coordinates })
    }

    /// Returns the numbers of the devices on which tensors lie.
    #[getter]
    fn devices(&self) -> BTreeSet<u32> {
        self.device_bytes().into_keys().collect()
    }
}

impl Described {
    /// Returns the coordinates of this rank in the meshes that the state shows.
    pub(crate) fn coordinates(&self) -> &[(String, u64)] {
        &self.coordinates
    }

    /// The devices on which tensors lie, and how many bytes of them.
    pub(crate) fn device_bytes(&self) -> BTreeMap<u32, u64> {
        let mut bytes = BTreeMap::new();
        for body in self.bodies.iter() {
            let Body::Tensor(_, parts) = body else { continue };
            for Part { device, block, .. } in parts {
                if let Some(device) = device {
                    *bytes.entry(*device).or_default() += block.total_bytes();
                }
            }
        }
        bytes
    }

    /// The function that assembles the present state, on any thread. `values` are those of the objects, in the order
    /// in which these were given; `owner` keeps the memory of all tensors allocated that are not copied here.
    /// In a `blocking` save nothing else goes on meanwhile.
    pub(crate) fn state(
        &self,
        engine: &Engine,
        values: &[PyRef<'_, Value>],
        owner: Py<PyAny>,
        streams: &Streams,
        blocking: bool,
    ) -> PyResult<impl FnOnce() -> State + Send + 'static> {
        let objects = self.bodies.iter().filter(|body| matches!(body, Body::Object(_))).count();
        if values.len() != objects {
            return Err(invalid(format!("expected the values of {objects} objects, found {}", values.len())));
        }
        let mut copies = CopyStreams::new(engine, streams);
        self.devices().into_iter().try_for_each(|device| copies.of(device).map(|_| ()))?;
        let now = Now {
            values: values.iter().map(|value| Arc::clone(&value.encoded)).collect(),
            copied: self.copied_inline()?,
            copies: copies.made,
            samples: if blocking { Vec::new() } else { self.spots.look() },
            owner: Arc::new(Owner::new(owner)),
            blocking,
        };
        let (catalog, replicas, bodies) = (Arc::clone(&self.catalog), self.replicas.clone(), Arc::clone(&self.bodies));
        let (compared, makers) = (Arc::clone(&self.compared), Arc::clone(&self.makers));
        Ok(move || {
            let providers = now.providers(&bodies);
            State { catalog, providers, replicas, compared, makers, ahead_since: None, file_bytes_max: None }
        })
    }

    /// The parts that are captured lazily and lie in one run, by their addresses.
    pub(crate) fn runs(&self) -> HashMap<usize, PartInRun<'_>> {
        let mut runs = HashMap::new();
        for (leaf, body) in (0..).zip(self.bodies.iter()) {
            let Body::Tensor(Capture::Lazy, parts) = body else { continue };
            for (part, &Part { ref block, device, .. }) in (0..).zip(parts) {
                let run = block.run_at(0).filter(|(_, bytes)| *bytes as u64 == block.total_bytes());
                if let Some((address, _)) = run {
                    runs.insert(address, PartInRun { leaf, part, block, device });
                }
            }
        }
        runs
    }

    /// Returns the catalog of a save.
    pub(crate) fn catalog(&self) -> &Arc<Catalog> {
        &self.catalog
    }

    /// Returns how its tensors are captured.
    pub(crate) fn captures(&self) -> Captures {
        self.captures
    }

    /// Returns the bytes of all tensors that are copied in the call, in the catalog's order.
    fn copied_inline(&self) -> PyResult<Arc<Vec<u8>>> {
        let now = || {
            let parts = self.bodies.iter().flat_map(|body| match body {
                Body::Tensor(Capture::Inline, parts) => parts.as_slice(),
                _ => &[],
            });
            parts.map(|part| &part.block)
        };
        let mut buffer = vec![0; now().map(Strided::total_bytes).sum::<u64>() as usize];
        let mut rest = buffer.as_mut_slice();
        for part in now() {
            let (out, behind) = rest.split_at_mut(part.total_bytes() as usize);
            memory(part, false).fill(0, out, &mut Fences::default()).map_err(raise)?;
            rest = behind;
        }
        Ok(Arc::new(buffer))
    }
}

/// Makes memory of a block; with `is_lazy` it may be gone when it is read.
fn memory(block: &Strided, is_lazy: bool) -> Memory {
    // SAFETY: Python's adapters give the address of memory that they found allocated just before the save was begun in
    // the same call, and that its `owner` keeps so; the caller of `save` does not write it before the save is staged,
    // or confirms no save during which it was written. The engine reads nothing after that.
    #[allow(unsafe_code)]
    unsafe {
        if is_lazy { Memory::guarded(block.clone()) } else { Memory::new(block.clone()) }
    }
}

fn device_memory(copies: &Arc<CopyStream>, block: &Strided) -> DeviceMemory {
    // SAFETY: as in `memory`, of a device's memory.
    #[allow(unsafe_code)]
    unsafe {
        DeviceMemory::new(copies, block.clone())
    }
}

fn when_compared(word: &str, name: &LeafName) -> PyResult<Compared> {
    match word {
        "first save" => Ok(Compared::FirstSave),
        "on request" => Ok(Compared::OnRequest),
        "every save" => Ok(Compared::EverySave),
        "never" => Ok(Compared::Never),
        other => Err(invalid(format!("leaf {name}: compared at an unknown time, {other:?}"))),
    }
}

fn tensor(leaf: &Bound<'_, PyTuple>, name: &LeafName) -> PyResult<(LeafBody, Body)> {
    let (dtype, shape, given, capture): (String, Vec<u64>, Vec<Bound<'_, PyTuple>>, String) = leaf.extract()?;
    let dtype = DType::from_name(&dtype).ok_or_else(|| invalid(format!("leaf {name}: there is no dtype {dtype:?}")))?;
    let unknown = || invalid(format!("leaf {name}: there is no capture {capture:?}"));
    let mut capture = Capture::from_name(&capture).ok_or_else(unknown)?;
    let (mut parts, mut memory) = (Vec::new(), Vec::new());
    for part in given {
        for block in blocks(&part, &shape, dtype, name)? {
            let item_bytes = dtype.size_bytes();
            let strided = Strided::new(block.address, &block.region.lengths, &block.strides_bytes, item_bytes);
            capture = match capture {
                // In the call there is no time to wait for a device.
                Capture::Inline if block.device.is_some() => Capture::Eager,
                // Scattered memory is not read in the background: the kernel would read it element by element.
                Capture::Lazy if block.device.is_none() && !is_quick(&strided) => Capture::Eager,
                capture => capture,
            };
            memory.push(Part { block: strided, device: block.device, spots: 0..0 });
            parts.push(block.region);
        }
    }
    let body = LeafBody::Tensor { dtype, shape: Dims::from_slice(&shape), parts };
    Ok((body, Body::Tensor(capture, memory)))
}

/// Returns whether the kernel reads the block at nearly the speed of a copy.
fn is_quick(block: &Strided) -> bool {
    block.run_bytes() >= GUARDED_RUN_BYTES_MIN.min(block.total_bytes())
}

/// Converts the wants of a load: the index of a leaf, followed by a part as [`blocks`] takes it.
pub(crate) fn wants(
    engine: &Engine,
    manifest: &Manifest,
    given: &Bound<'_, PyAny>,
    streams: &Streams,
) -> PyResult<Vec<Want>> {
    let mut copies = CopyStreams::new(engine, streams);
    let mut out = Vec::new();
    for want in given.try_iter()? {
        let want = want?.cast_into::<PyTuple>()?;
        let leaf: usize = want.get_item(0)?.extract()?;
        if leaf >= manifest.len() {
            return Err(invalid(format!("there is no leaf {leaf} in a manifest of {}", manifest.len())));
        }
        let named = manifest.leaf(leaf);
        let name = format_args!("{}/{}", named.key, named.name);
        let LeafKind::Tensor { dtype, shape } = named.kind else {
            return Err(invalid(format!("leaf {name} is no tensor")));
        };
        let part = want.get_slice(1, want.len());
        for Block { region, address, strides_bytes, device } in blocks(&part, shape, dtype, &name)? {
            let (lengths, item_bytes) = (&region.lengths, dtype.size_bytes());
            #[allow(unsafe_code)]
            let sink = match device {
                Some(device) => {
                    let copies = copies.of(device)?;
                    // SAFETY: Python's adapters give the address of memory that they keep allocated and unshared while
                    // `load` runs; sinks refuse memory whose elements overlap.
                    unsafe { DeviceSink::new(copies, address, lengths, &strides_bytes, item_bytes) }.map(Sink::Device)
                }
                // SAFETY: as above.
                None => unsafe { Sink::new(address, lengths, &strides_bytes, item_bytes) },
            };
            let sink = sink.map_err(|error| raise(error.within(format!("leaf {name}"))))?;
            out.push(Want { leaf, region, sink });
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_and_whole_tensors_are_read_quickly() {
        let quick = |lengths: &[u64], strides: &[i64]| is_quick(&Strided::new(4096, lengths, strides, 4));
        assert!(quick(&[3], &[4]), "one run, though a short one");
        assert!(quick(&[10, 1024], &[8192, 4]), "rows of 4096 bytes");
        assert!(!quick(&[10, 1023], &[8192, 4]), "shorter rows");
        assert!(!quick(&[4096], &[8]), "each element alone");
    }

    /// Returns how a tensor of one part is captured.
    fn capture(word: &str, part: &str) -> Result<Capture, String> {
        Python::initialize();
        Python::attach(|py| {
            let code = std::ffi::CString::new(format!("('F32', (8, 6), [{part}], '{word}')")).unwrap();
            let leaf = py.eval(&code, None, None).unwrap().cast_into::<PyTuple>().unwrap();
            match tensor(&leaf, &LeafName::new("model", "w")) {
                Ok((_, Body::Tensor(capture, _))) => Ok(capture),
                Ok(_) => Err("no tensor".to_owned()),
                Err(error) => Err(error.value(py).to_string()),
            }
        })
    }

    #[test]
    fn a_capture_has_a_name_and_gives_way_to_what_can_be_done() {
        let (whole, on_device) = ("((0, 0), (8, 6), 4096, (24, 4))", "((0, 0), (8, 6), 4096, (24, 4), 0)");
        let scattered = "((0, 0), (8, 6), 4096, (48, 8))";
        let names = [
            ("inline", Capture::Inline),
            ("eager", Capture::Eager),
            ("lazy", Capture::Lazy),
            ("owned", Capture::Owned),
        ];
        for (word, expected) in names {
            assert_eq!(capture(word, whole), Ok(expected));
        }
        assert_eq!(capture("inline", on_device), Ok(Capture::Eager));
        assert_eq!(capture("lazy", on_device), Ok(Capture::Lazy));
        assert_eq!(capture("lazy", scattered), Ok(Capture::Eager));
        assert_eq!(capture("inline", scattered), Ok(Capture::Inline));
        assert_eq!(capture("later", whole), Err("leaf model/w: there is no capture \"later\"".to_owned()));
    }
}
