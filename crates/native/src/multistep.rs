//! Drives captures ahead of a save from Python, which reports the optimizer's steps and their values.

use std::collections::BTreeSet;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use shardfast_engine::{Memory, Provider, Strided};
use shardfast_multistep::{
    Applied, Array, Captured, Class, Device, DeviceCopies, Dtype, Dtypes, OptimizerKind, Pace, Rehearsed, Scalars,
    Unit, Variant,
};
use shardfast_transfer::cuda::ForeignStream;

use crate::deferred_decref::Owner;
use crate::dlpack::{Dense, Lookup};
use crate::errors::{invalid, raise};
use crate::leaves::{Described, Held, PartInRun, Streams};
use crate::process::Own;
use crate::session::Session;

/// Some steps before a save.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Window {
    window: Own<shardfast_multistep::Window>,
    /// The device that has the tensors; `None` for the host.
    device: Option<u32>,
}

/// A class as Python gives it: the optimizer, the dtypes of its parameters and moments, where it steps, whether one
/// kernel makes the whole step, and the variant that the rehearsal found.
type GivenClass = (String, String, String, String, Option<bool>, Option<String>);

/// A unit: the number of its class, its elements, and the address of each array.
type GivenUnit = (usize, u64, Vec<usize>);

/// Values of a step: the number of the unit, the gradient, and the number of its scalars.
type GivenStep<'py> = (usize, Bound<'py, PyAny>, usize);

/// Place of a gradient, from an adapter: address, elements, dtype, and the number of its device.
type GivenPlace = (usize, u64, String, Option<u32>);

/// The kind of an optimizer, its numbers, and the factor of the gradients.
type GivenScalars = (String, Vec<f64>, Option<f32>);

#[pymethods]
impl Window {
    /// Opens a window over these units of what is described, as far as each array is all of a part that is captured
    /// lazily, in one run of the host's memory or of one device's, which `owner` keeps allocated: over samples whose
    /// gradients are kept, if the classes have no variants, else over all that this rank will write. `is_waited`: a
    /// device's gradients are overwritten before the next step. `pace` is what an earlier window measured.
    #[new]
    #[allow(clippy::too_many_arguments)] // what Python names
    fn new(
        session: &Session,
        described: &Described,
        owner: Py<PyAny>,
        classes: Vec<GivenClass>,
        units: Vec<GivenUnit>,
        streams: Streams,
        is_waited: bool,
        pace: Option<(f64, f64)>,
    ) -> PyResult<Window> {
        let classes = classes.iter().map(class).collect::<PyResult<Vec<_>>>()?;
        let (runs, owner) = (described.runs(), Arc::new(Owner::new(owner)));
        let engine = session.engine()?;
        let places = units.iter().flat_map(|(.., addresses)| addresses).filter_map(|address| runs.get(address));
        let devices: BTreeSet<Option<u32>> = places.map(|part| part.device).collect();
        if devices.len() > 1 {
            return Err(invalid("what is stepped lies on several devices, and is captured in one step"));
        }
        let device = devices.into_iter().next().flatten();
        let on = foreign(device, &streams)?;
        let pace = pace.map(|(bytes_per_ms, room_ms)| Pace { bytes_per_ms, room_ms });
        let beside = device.zip(on).map(|(device, on)| DeviceCopies::new(engine, device, on, is_waited, pace));
        let beside = beside.transpose().map_err(raise)?;
        let unit = |(class, numel, addresses): GivenUnit| {
            let Class { dtypes, .. } =
                classes.get(class).ok_or_else(|| invalid(format!("there is no class {class}")))?;
            let array = |(number, address): (usize, &usize)| {
                let dtype = if number == 0 { dtypes.parameter } else { dtypes.moments };
                let bytes = numel * dtype.bytes() as u64;
                let &PartInRun { leaf, part, block, .. } =
                    runs.get(address).filter(|part| part.block.total_bytes() == bytes)?;
                let memory: Arc<dyn Provider> = match &beside {
                    Some(beside) => Arc::new(Held::on_device(beside.tiles(), block, &owner)),
                    None => Arc::new(Held::lazily(block, &owner)),
                };
                Some(Array { leaf, part, memory })
            };
            // What is captured otherwise, such as small tensors in the call, is not captured ahead.
            let arrays: Option<Vec<Array>> = addresses.iter().enumerate().map(array).collect();
            let arrays = arrays.unwrap_or_default();
            Ok(Unit { class, numel, arrays })
        };
        let units = units.into_iter().map(unit).collect::<PyResult<Vec<_>>>()?;
        let catalog = described.catalog();
        let window = match classes.iter().all(|class| class.variant.is_some()) {
            true => {
                let planned = engine.planned(catalog).map_err(raise)?;
                shardfast_multistep::Window::open(engine, catalog, &planned, classes, units, beside).map_err(raise)?
            }
            false => shardfast_multistep::Window::rehearsal(engine, catalog, classes, units, beside),
        };
        Ok(Window { window: Own::new("this capture ahead of a save", window), device })
    }

    /// No optimizer steps before the next call of `stepping`: copies begin.
    fn go_on(&self, py: Python<'_>, streams: Streams) -> PyResult<()> {
        let (window, on) = (self.window.get()?, foreign(self.device, &streams)?);
        py.detach(|| window.go_on(on)).map_err(raise)
    }

    /// An optimizer is about to step: waits for the tile under way.
    fn stepping(&self, py: Python<'_>, streams: Streams) -> PyResult<()> {
        let (window, on) = (self.window.get()?, foreign(self.device, &streams)?);
        py.detach(|| window.stepping(on)).map_err(raise)
    }

    /// An optimizer has stepped. `applied` are the units that took part: the number of each, its gradient, and the
    /// number of its scalars. `place` tells where a gradient lies that DLPack's exchange table does not describe. The
    /// gradients must stay as they are during the call; it keeps a device's allocated for as long as it needs them.
    fn stepped<'py>(
        &self,
        applied: Bound<'py, PyList>,
        scalars: Vec<GivenScalars>,
        place: &Bound<'py, PyAny>,
        streams: Streams,
    ) -> PyResult<()> {
        let (py, window, on) = (applied.py(), self.window.get()?, foreign(self.device, &streams)?);
        let known = |(kind, of, factor): &GivenScalars| Ok((scalars_of(kind, of)?, *factor));
        let scalars = scalars.iter().map(known).collect::<PyResult<Vec<_>>>()?;
        let mut lookup = Lookup::default();
        let mut used = Vec::with_capacity(applied.len());
        for one in &applied {
            let (unit, gradient, number): GivenStep<'py> = one.extract()?;
            let unknown = || invalid(format!("there is no unit {unit}, or there are no scalars {number}"));
            let (Some(numel), Some(&((scalars, device_bias), factor))) = (window.numel(unit), scalars.get(number))
            else {
                return Err(unknown());
            };
            let found = match lookup.dense(&gradient) {
                Some(found) => found,
                None => dense(place.call1((&gradient,))?.extract()?)?,
            };
            if found.numel != numel || found.device != self.device {
                return Err(invalid("a gradient has another size than its parameter, or lies on another device"));
            }
            let Dense { address, dtype, .. } = found;
            let block = Strided::new(address, &[numel], &[dtype.bytes() as i64], dtype.bytes() as u64);
            let gradient: Arc<dyn Provider> = match window.gradients() {
                Some(copies) => Arc::new(Held::on_device(copies, &block, &Arc::new(Owner::new(gradient.unbind())))),
                None => {
                    // SAFETY: the gradient is a tensor of so many elements in one run, which the caller holds and does
                    // not write during this call; it is not read after that.
                    #[allow(unsafe_code)]
                    Arc::new(unsafe { Memory::new(block) })
                }
            };
            used.push(Applied { unit, dtype, gradient, factor, scalars, device_bias });
        }
        py.detach(|| window.stepped(used, on)).map_err(raise)
    }

    /// Returns by class the name of the variant that has the training's bits, or why there is none, and whether that is
    /// known.
    fn rehearse(&self, py: Python<'_>, streams: Streams) -> PyResult<Vec<(Option<&'static str>, String, bool)>> {
        let (window, on) = (self.window.get()?, foreign(self.device, &streams)?);
        let found = py.detach(|| window.rehearse(on)).map_err(raise)?;
        let one = |one| match one {
            Rehearsed::By(variant) => (Some(variant.name()), String::new(), true),
            Rehearsed::ByNone(why) => (None, why, true),
            Rehearsed::Unknown(why) => (None, why, false),
        };
        Ok(found.into_iter().map(one).collect())
    }

    /// Returns whether a device's gradients stayed as they were until the next step, as a rehearsal saw.
    fn are_gradients_left(&self) -> PyResult<bool> {
        Ok(self.window.get()?.are_gradients_left())
    }

    /// Bytes that a device copies in a millisecond, and milliseconds between two steps; `None` if that is not known.
    fn pace(&self) -> PyResult<Option<(f64, f64)>> {
        Ok(self.window.get()?.pace().map(|pace| (pace.bytes_per_ms, pace.room_ms)))
    }

    /// Releases all held tiles.
    fn release(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let window = self.window.get()?;
        py.detach(|| window.release(reason));
        Ok(())
    }

    /// Returns the reason why a tile was released; `None` if none was.
    fn reason(&self) -> PyResult<Option<String>> {
        Ok(self.window.get()?.reason())
    }

    /// Returns whether a save found other bits than those that were rolled forward.
    fn is_refuted(&self) -> PyResult<bool> {
        Ok(self.window.get()?.is_refuted())
    }

    /// Returns the figures so far, as JSON.
    fn figures(&self) -> PyResult<String> {
        serde_json::to_string(&self.window.get()?.figures()).map_err(|error| invalid(error.to_string()))
    }
}

impl Window {
    /// Ends the copies for the save of the state as it is now.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<Captured> {
        let window = self.window.get()?;
        Ok(py.detach(|| window.close()))
    }
}

/// Returns the stream that the program uses on the device.
fn foreign(device: Option<u32>, streams: &Streams) -> PyResult<Option<ForeignStream>> {
    let Some(device) = device else { return Ok(None) };
    let stream = streams.get(&device).ok_or_else(|| invalid(format!("cuda:{device}: no stream was given for it")))?;
    // SAFETY: Python's adapters give the handle of the framework's current stream on that device, which lives at least
    // until the call returns, and is not used after that.
    #[allow(unsafe_code)]
    Ok(Some(unsafe { ForeignStream::new(*stream) }))
}

fn dense((address, numel, dtype, device): GivenPlace) -> PyResult<Dense> {
    Ok(Dense { address, numel, dtype: dtype_of(&dtype)?, device })
}

fn kind_of(name: &str) -> PyResult<OptimizerKind> {
    match name {
        "adam" => Ok(OptimizerKind::Adam),
        "sgd" => Ok(OptimizerKind::Sgd),
        "adagrad" => Ok(OptimizerKind::Adagrad),
        "lion" => Ok(OptimizerKind::Lion),
        other => Err(invalid(format!("there is no kind of steps {other:?}"))),
    }
}

fn class((kind, parameter, moments, device, is_fused, variant): &GivenClass) -> PyResult<Class> {
    let kind = kind_of(kind)?;
    let dtypes = Dtypes { parameter: dtype_of(parameter)?, moments: dtype_of(moments)? };
    let device = if device == "cpu" { Device::Cpu } else { Device::Cuda };
    let known = |name: &String| Variant::named(name).ok_or_else(|| invalid(format!("there is no variant {name:?}")));
    let variant = variant.as_ref().map(known).transpose()?;
    Ok(Class { kind, dtypes, device, is_fused: *is_fused, variant })
}

fn dtype_of(name: &str) -> PyResult<Dtype> {
    match name {
        "F32" => Ok(Dtype::F32),
        "BF16" => Ok(Dtype::Bf16),
        other => Err(invalid(format!("expected F32 or BF16, found {other:?}"))),
    }
}

/// Parses the scalars of a step, in the order of their fields; flags are 0 or 1. Those of Adam are followed by its bias
/// corrections as a device computes them, which are `f32`.
fn scalars_of(name: &str, of: &[f64]) -> PyResult<(Scalars, Option<[f32; 2]>)> {
    let kind = kind_of(name)?;
    let (own, device_bias) = match (kind, of) {
        (OptimizerKind::Adam, [own @ .., correction1, correction2_sqrt]) if own.len() == 10 => {
            (own, Some([*correction1 as f32, *correction2_sqrt as f32]))
        }
        _ => (of, None),
    };
    let scalars = Scalars::from_numbers(kind, own);
    Ok((scalars.ok_or_else(|| invalid(format!("{} numbers are no scalars of {name:?}", of.len())))?, device_bias))
}
