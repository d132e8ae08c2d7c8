//! Captures ahead of a simulated save: what a rank will save, some steps of an optimizer before.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shardfast_engine::{Engine, Fences, Provider, Result, State};
use shardfast_format::{DType, LeafBody};
use shardfast_multistep::{
    Applied, Array, Captured, Class, Device, Dtype, Dtypes, OptimizerKind, Scalars, SgdScalars, Unit, Variant, Window,
};

use shardfast_store::testing::dice::Dice;

/// Staging memory of a rank whose saves are captured ahead: a window takes none that a save may need.
pub(crate) const STAGING_BYTES: u64 = 160 << 20;

/// A window that copies for longer has stopped.
const HANGS: Duration = Duration::from_secs(60);

/// Most steps of a window.
const STEPS_MAX: u64 = 3;

/// `p - 1.0 * g`, of small whole numbers: nothing is rounded.
const STEP: SgdScalars = SgdScalars {
    lr: 1.0,
    momentum: 0.0,
    dampening: 0.0,
    weight_decay: 0.0,
    nesterov: false,
    maximize: false,
    first: false,
};

/// A parameter that a step changes.
struct Live(Mutex<Vec<u8>>);

impl Live {
    fn set(&self, bytes: Vec<u8>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
    }
}

impl Provider for Live {
    fn bytes(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
        Ok(())
    }
}

/// A step of a unit: what it is afterwards, and the gradient.
struct Stepped {
    live: Arc<Live>,
    after: Vec<u8>,
    gradient: Vec<u8>,
}

/// What this rank's engine captures ahead of the save of this state, and how many bytes; `None` if it can hold nothing,
/// as before it has a plan.
pub(crate) fn captured(engine: &Engine, state: &State, dice: &mut Dice) -> Option<(Captured, u64)> {
    let steps = 1 + dice.below(STEPS_MAX) as usize;
    let mut units = Vec::new();
    // The units' steps, the last one first.
    let mut stepped: Vec<Vec<Stepped>> = (0..steps).map(|_| Vec::new()).collect();
    for (leaf, (of, providers)) in (0..).zip(state.catalog.leaves.iter().zip(&state.providers)) {
        if !matches!(of.body, LeafBody::Tensor { dtype: DType::F32, .. }) {
            continue;
        }
        for (part, provider) in (0..).zip(providers) {
            let mut after = vec![0; provider.bytes() as usize];
            if provider.fill(0, &mut after, &mut Fences::default()).is_err() {
                continue; // one that cannot be read
            }
            let (live, numel) = (Arc::new(Live(Mutex::default())), provider.bytes() / 4);
            for step in &mut stepped {
                let gradient: Vec<f32> = (0..numel).map(|_| dice.below(1000) as f32).collect();
                let undo = |(after, gradient): (&[u8], &f32)| {
                    (f32::from_le_bytes(after.try_into().unwrap_or_default()) + gradient).to_le_bytes()
                };
                let before = after.chunks(4).zip(&gradient).flat_map(undo).collect();
                let gradient = gradient.into_iter().flat_map(f32::to_le_bytes).collect();
                step.push(Stepped { live: Arc::clone(&live), after: std::mem::replace(&mut after, before), gradient });
            }
            live.set(after);
            units.push(Unit { class: 0, numel, arrays: vec![Array { leaf, part, memory: live }] });
        }
    }
    let variant = Variant::named("sgd.fused.cpu.f32");
    let class =
        Class { kind: OptimizerKind::Sgd, dtypes: Dtypes::F32, device: Device::Cpu, is_fused: Some(true), variant };
    let planned = engine.planned(&state.catalog).ok()?;
    let window = Window::open(engine, &state.catalog, &planned, vec![class], units, None).ok()?;
    window.go_on(None).ok()?;
    let begun = Instant::now();
    // All of it, so that chance does not decide what a seed holds.
    while window.figures().left_bytes > 0 {
        assert!(begun.elapsed() < HANGS, "a window copies without end: {:?}, {:?}", window.figures(), window.reason());
        std::thread::yield_now();
    }
    let step = |(unit, Stepped { live, after, gradient }): (usize, Stepped)| {
        live.set(after);
        let gradient: Arc<dyn Provider> = Arc::new(gradient);
        Applied { unit, dtype: Dtype::F32, gradient, factor: None, scalars: Scalars::Sgd(STEP), device_bias: None }
    };
    for of_units in stepped.into_iter().rev() {
        window.stepping(None).ok()?;
        let applied = of_units.into_iter().enumerate().map(step).collect();
        window.stepped(applied, None).ok()?;
        window.go_on(None).ok()?;
    }
    let captured = window.close();
    let held = captured.figures().held_bytes;
    Some((captured, held))
}
