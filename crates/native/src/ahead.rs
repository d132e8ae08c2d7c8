//! Captures ahead of a save, as Python drives them: it tells when an optimizer steps, and with what.

use std::sync::Arc;

use pyo3::prelude::*;
use shardfast_engine::ahead::{
    self, AdagradScalars, AdamScalars, Applied, Array, Bias, Captured, Class, Device, Dtype, Dtypes, LionScalars,
    OptimizerKind, Rehearsed, Scalars, SgdScalars, Unit, Variant,
};
use shardfast_engine::{Memory, Provider, Strided};

use crate::errors::{invalid, raise};
use crate::leaves::{Described, Held};
use crate::process::Own;
use crate::session::Session;

/// Some steps before a save.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Window {
    window: Own<ahead::Window>,
}

/// A class as Python gives it: the optimizer, the dtypes of its parameters and moments, where it steps, and the variant
/// that the rehearsal found.
type GivenClass = (String, String, String, String, Option<String>);

/// A unit: the number of its class, its elements, and the address of each array.
type GivenUnit = (usize, u64, Vec<usize>);

/// What a step used: the number of the unit, the gradient's address and dtype, and the number of its scalars.
type GivenStep = (usize, usize, String, usize);

#[pymethods]
impl Window {
    /// Opens a window over these units of what is described, as far as each array is all of a part that is captured
    /// lazily, in one run of host memory, which `owner` keeps allocated: over samples whose gradients are kept, if the
    /// classes have no variants, else over all that this rank will write.
    #[new]
    fn new(
        session: &Session,
        described: &Described,
        owner: Py<PyAny>,
        classes: Vec<GivenClass>,
        units: Vec<GivenUnit>,
    ) -> PyResult<Window> {
        let classes = classes.iter().map(class).collect::<PyResult<Vec<_>>>()?;
        let (runs, owner) = (described.runs(), Arc::new(owner));
        let unit = |(class, numel, addresses): GivenUnit| {
            let Class { dtypes, .. } =
                classes.get(class).ok_or_else(|| invalid(format!("there is no class {class}")))?;
            let array = |(number, address): (usize, &usize)| {
                let dtype = if number == 0 { dtypes.parameter } else { dtypes.moments };
                let bytes = numel * dtype.bytes() as u64;
                let &(leaf, part, block) = runs.get(address).filter(|(.., block)| block.total_bytes() == bytes)?;
                Some(Array { leaf, part, memory: Arc::new(Held::lazily(block, &owner)) })
            };
            // What is captured otherwise, such as small tensors in the call, is not captured ahead.
            let arrays: Option<Vec<Array>> = addresses.iter().enumerate().map(array).collect();
            let arrays = arrays.unwrap_or_default();
            Ok(Unit { class, numel, arrays })
        };
        let units = units.into_iter().map(unit).collect::<PyResult<Vec<_>>>()?;
        let (engine, catalog) = (session.engine()?, described.catalog());
        let window = match classes.iter().all(|class| class.variant.is_some()) {
            true => ahead::Window::open(engine, catalog, classes, units).map_err(raise)?,
            false => ahead::Window::rehearsal(engine, catalog, classes, units),
        };
        Ok(Window { window: Own::new("this capture ahead of a save", window) })
    }

    /// An optimizer is about to step: waits for the block under way.
    fn stepping(&self, py: Python<'_>) -> PyResult<()> {
        let window = self.window.get()?;
        py.detach(|| window.stepping());
        Ok(())
    }

    /// An optimizer has stepped. `applied` are the units that took part: the number of each, the address of its
    /// gradient, which must stay as it is during the call, the gradient's dtype, and the number of its scalars.
    fn stepped(&self, py: Python<'_>, applied: Vec<GivenStep>, scalars: Vec<(String, Vec<f64>)>) -> PyResult<()> {
        let window = self.window.get()?;
        let scalars = scalars.iter().map(|(kind, of)| scalars_of(kind, of)).collect::<PyResult<Vec<_>>>()?;
        let one = |(unit, address, dtype, number): GivenStep| {
            let unknown = || invalid(format!("there is no unit {unit}, or there are no scalars {number}"));
            let (Some(numel), Some(&scalars)) = (window.numel(unit), scalars.get(number)) else {
                return Err(unknown());
            };
            let dtype = dtype_of(&dtype)?;
            let block = Strided::new(address, &[numel], &[dtype.bytes() as i64], dtype.bytes() as u64);
            // SAFETY: Python's adapters give the address of a contiguous gradient of so many elements, which they hold
            // and do not write during this call; it is not read after that.
            #[allow(unsafe_code)]
            let gradient: Arc<dyn Provider> = Arc::new(unsafe { Memory::new(block) });
            Ok(Applied { unit, dtype, gradient, scalars })
        };
        let applied = applied.into_iter().map(one).collect::<PyResult<Vec<_>>>()?;
        py.detach(|| window.stepped(&applied));
        Ok(())
    }

    /// By class the name of the variant that has the training's bits, or why there is none, and whether that is known.
    fn rehearse(&self, py: Python<'_>) -> PyResult<Vec<(Option<&'static str>, String, bool)>> {
        let window = self.window.get()?;
        let found = py.detach(|| window.rehearse());
        let one = |one| match one {
            Rehearsed::By(variant) => (Some(variant.name()), String::new(), true),
            Rehearsed::ByNone(why) => (None, why, true),
            Rehearsed::Unknown(why) => (None, why, false),
        };
        Ok(found.into_iter().map(one).collect())
    }

    /// Gives everything back that is held.
    fn let_go(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let window = self.window.get()?;
        py.detach(|| window.let_go(reason));
        Ok(())
    }

    /// Why something was let go; `None` if nothing was.
    fn reason(&self) -> PyResult<Option<String>> {
        Ok(self.window.get()?.reason())
    }

    /// Whether a save found other bits than those that were rolled forward.
    fn is_refuted(&self) -> PyResult<bool> {
        Ok(self.window.get()?.is_refuted())
    }

    /// What it did, as JSON.
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

fn class((kind, parameter, moments, device, variant): &GivenClass) -> PyResult<Class> {
    let kind = match kind.as_str() {
        "adam" => OptimizerKind::Adam,
        "sgd" => OptimizerKind::Sgd,
        "adagrad" => OptimizerKind::Adagrad,
        "lion" => OptimizerKind::Lion,
        other => return Err(invalid(format!("there is no kind of steps {other:?}"))),
    };
    let dtypes = Dtypes { parameter: dtype_of(parameter)?, moments: dtype_of(moments)? };
    let device = if device == "cpu" { Device::Cpu } else { Device::Cuda };
    let known = |name: &String| Variant::named(name).ok_or_else(|| invalid(format!("there is no variant {name:?}")));
    Ok(Class { kind, dtypes, device, variant: variant.as_ref().map(known).transpose()? })
}

fn dtype_of(name: &str) -> PyResult<Dtype> {
    match name {
        "F32" => Ok(Dtype::F32),
        "BF16" => Ok(Dtype::Bf16),
        other => Err(invalid(format!("expected F32 or BF16, found {other:?}"))),
    }
}

/// The scalars of a step, in the order of their fields; flags are 0 or 1.
fn scalars_of(kind: &str, of: &[f64]) -> PyResult<Scalars> {
    let scalars = match (kind, of) {
        (
            "adam",
            &[lr, beta1, beta2, eps, weight_decay, decoupled, maximize, amsgrad, correction1, correction2_sqrt],
        ) => Scalars::Adam(AdamScalars {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            decoupled: decoupled != 0.0,
            maximize: maximize != 0.0,
            amsgrad: amsgrad != 0.0,
            bias: Bias::Host { correction1, correction2_sqrt },
        }),
        ("sgd", &[lr, momentum, dampening, weight_decay, nesterov, maximize, first]) => Scalars::Sgd(SgdScalars {
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov: nesterov != 0.0,
            maximize: maximize != 0.0,
            first: first != 0.0,
        }),
        ("adagrad", &[corrected_lr, eps, weight_decay, maximize]) => {
            Scalars::Adagrad(AdagradScalars { corrected_lr, eps, weight_decay, maximize: maximize != 0.0 })
        }
        ("lion", &[lr, beta1, beta2, weight_decay]) => Scalars::Lion(LionScalars { lr, beta1, beta2, weight_decay }),
        _ => return Err(invalid(format!("{} numbers are no scalars of {kind:?}", of.len()))),
    };
    Ok(scalars)
}
