//! Lists the implementations that can be repeated bit for bit, as data.
//!
//! Sources: PyTorch 2.15, `aten/src/ATen/native/cpu/Fused{Adam,SGD,Adagrad}Kernel.cpp`,
//! `aten/src/ATen/native/cuda/{fused_adam_utils,fused_adagrad_utils,DeviceAddCmulCdiv,ForeachFunctors}.cuh`,
//! `FusedSgdKernel.cu`, `aten/src/ATen/native/Lerp.h`, `torch/optim/{adam,sgd,adagrad}.py`. Where compilers contract
//! `a * b + c` was found by experiment for CPUs; for CUDA it follows the compiler's rule that it always does.

use crate::dtype::Dtypes;
use crate::kind::{Device, Kind};
use crate::sequence::{
    AdagradSequence, AdagradUpdate, AdamSequence, AdamUpdate, Complement, Decay, FirstMoment, Largest, LionSequence,
    MulAdd, Narrowing, SecondMoment, SgdSequence, TwoProducts,
};

/// Rounding of one implementation of an optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variant {
    pub(crate) name: &'static str,
    pub(crate) device: Device,
    pub(crate) dtypes: Dtypes,
    /// Number of elements of the implementation's vectors: the last `numel % lanes` elements of a tensor are its tail.
    pub(crate) lanes: u64,
    pub(crate) sequences: Sequences,
}

/// Sequences for whole vectors and for the tail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts<S> {
    /// Sequence for whole vectors.
    pub body: S,
    /// Sequence for the tail.
    pub tail: S,
}

/// Sequences of one optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequences {
    /// Sequences of Adam and AdamW.
    Adam(Parts<AdamSequence>),
    /// Sequences of stochastic gradient descent.
    Sgd(Parts<SgdSequence>),
    /// Sequences of Adagrad.
    Adagrad(Parts<AdagradSequence>),
    /// Sequences of Lion.
    Lion(Parts<LionSequence>),
}

impl Variant {
    /// Returns the name in manifests and errors.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the optimizer.
    pub fn kind(&self) -> Kind {
        match self.sequences {
            Sequences::Adam(_) => Kind::Adam,
            Sequences::Sgd(_) => Kind::Sgd,
            Sequences::Adagrad(_) => Kind::Adagrad,
            Sequences::Lion(_) => Kind::Lion,
        }
    }

    /// Returns whether Adam's bias corrections must come from the device.
    pub fn takes_bias_of_device(&self) -> bool {
        matches!(&self.sequences, Sequences::Adam(parts) if parts.body.update.is_of_device())
    }

    /// Returns whether one kernel makes the whole step.
    pub fn is_fused(&self) -> bool {
        self.name.split('.').nth(1).is_some_and(|implementation| implementation.starts_with("fused"))
    }

    /// Returns the device on which the implementation runs.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the dtypes of the arrays that it steps.
    pub fn dtypes(&self) -> Dtypes {
        self.dtypes
    }

    /// Returns the rounding.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// Returns every variant.
    pub fn all() -> &'static [Variant] {
        &VARIANTS
    }

    /// Returns the variant called `name`.
    pub fn named(name: &str) -> Option<&'static Variant> {
        VARIANTS.iter().find(|variant| variant.name == name)
    }

    /// Returns the variants that a rehearsal tries for an optimizer, likely ones first. The one that agrees with the
    /// training's own steps in every bit is taken; if none does, this optimizer cannot be replayed.
    pub fn candidates(kind: Kind, dtypes: Dtypes, device: Device) -> impl Iterator<Item = &'static Variant> {
        let fits = move |variant: &&Variant| (variant.kind(), variant.dtypes, variant.device) == (kind, dtypes, device);
        VARIANTS.iter().filter(fits)
    }
}

const ADAM_FUSED_CPU: AdamSequence = AdamSequence {
    decay: Decay::Factor,
    l2: MulAdd::Once,
    first: FirstMoment::LerpOfVectors(MulAdd::Once),
    second: SecondMoment::ScaledGradient(TwoProducts::SecondInSum),
    largest: Largest::SecondIfEqual,
    update: AdamUpdate::ScaledMoment,
    narrowing: Narrowing::AtStore,
};

const ADAM_FUSED_CPU_PARTS: Sequences = Sequences::Adam(Parts {
    body: ADAM_FUSED_CPU,
    tail: AdamSequence {
        first: FirstMoment::Lerp(MulAdd::Once),
        second: SecondMoment::ScaledGradient(TwoProducts::FirstInSum),
        largest: Largest::FirstIfEqual,
        ..ADAM_FUSED_CPU
    },
});

const ADAM_FUSED_CPU_DEFAULT: AdamSequence = AdamSequence {
    l2: MulAdd::Twice,
    first: FirstMoment::LerpOfVectors(MulAdd::Twice),
    second: SecondMoment::ScaledGradient(TwoProducts::Separate),
    ..ADAM_FUSED_CPU
};

const ADAM_FUSED_CPU_DEFAULT_PARTS: Sequences = Sequences::Adam(Parts {
    body: ADAM_FUSED_CPU_DEFAULT,
    tail: AdamSequence {
        first: FirstMoment::Lerp(MulAdd::Twice),
        largest: Largest::FirstIfEqual,
        ..ADAM_FUSED_CPU_DEFAULT
    },
});

const ADAM_FOREACH: AdamSequence = AdamSequence {
    first: FirstMoment::Lerp(MulAdd::Once),
    second: SecondMoment::ScaledSquare,
    update: AdamUpdate::Quotient,
    narrowing: Narrowing::EveryOperation,
    ..ADAM_FUSED_CPU
};

const ADAM_FOR_LOOP: AdamSequence =
    AdamSequence { largest: Largest::PositiveZero, update: AdamUpdate::QuotientOfReciprocal, ..ADAM_FOREACH };

const ADAM_CAPTURABLE_FOREACH: AdamSequence = AdamSequence { update: AdamUpdate::StepInDenominator, ..ADAM_FOREACH };

const ADAM_CAPTURABLE_FOR_LOOP: AdamSequence = AdamSequence { update: AdamUpdate::StepInParts, ..ADAM_FOR_LOOP };

const ADAM_FUSED_CUDA: AdamSequence = AdamSequence {
    decay: Decay::Subtracted(MulAdd::Once),
    l2: MulAdd::Once,
    first: FirstMoment::Nested,
    second: SecondMoment::Nested,
    largest: Largest::FirstIfEqual,
    update: AdamUpdate::ScaledMomentOfDevice,
    narrowing: Narrowing::AtStore,
};

const ADAM_FUSED_CUDA_SEPARATE: AdamSequence =
    AdamSequence { decay: Decay::Subtracted(MulAdd::Twice), l2: MulAdd::Twice, ..ADAM_FUSED_CUDA };

const SGD_FUSED_CPU: SgdSequence = SgdSequence {
    decay: MulAdd::Once,
    buffer: TwoProducts::SecondInSum,
    dampening: Complement::Double,
    nesterov: MulAdd::Once,
    update: MulAdd::Once,
    narrowing: Narrowing::AtStore,
};

const SGD_FUSED_CPU_PARTS: Sequences = Sequences::Sgd(Parts {
    body: SGD_FUSED_CPU,
    tail: SgdSequence { buffer: TwoProducts::FirstInSum, ..SGD_FUSED_CPU },
});

const SGD_FUSED_CPU_DEFAULT: SgdSequence = SgdSequence {
    decay: MulAdd::Twice,
    buffer: TwoProducts::Separate,
    nesterov: MulAdd::Twice,
    update: MulAdd::Twice,
    ..SGD_FUSED_CPU
};

const SGD_FOREACH: SgdSequence = SgdSequence { narrowing: Narrowing::EveryOperation, ..SGD_FUSED_CPU };

const fn sgd_fused_cuda(buffer: TwoProducts) -> Sequences {
    sgd(SgdSequence { buffer, dampening: Complement::Single, ..SGD_FUSED_CPU })
}

const ADAGRAD_FUSED_CPU: AdagradSequence = AdagradSequence {
    decay: MulAdd::Once,
    square: MulAdd::Once,
    update: AdagradUpdate::ScaledGradient,
    narrowing: Narrowing::AtStore,
};

const ADAGRAD_FUSED_CPU_DEFAULT: AdagradSequence =
    AdagradSequence { decay: MulAdd::Twice, square: MulAdd::Twice, ..ADAGRAD_FUSED_CPU };

const ADAGRAD_FOREACH: AdagradSequence = AdagradSequence { narrowing: Narrowing::EveryOperation, ..ADAGRAD_FUSED_CPU };

const ADAGRAD_FOR_LOOP: AdagradSequence = AdagradSequence { update: AdagradUpdate::Quotient, ..ADAGRAD_FOREACH };

const ADAGRAD_FUSED_CUDA: AdagradSequence = AdagradSequence { update: AdagradUpdate::Double, ..ADAGRAD_FUSED_CPU };

const ADAGRAD_FUSED_CUDA_SEPARATE: AdagradSequence =
    AdagradSequence { decay: MulAdd::Twice, square: MulAdd::Twice, ..ADAGRAD_FUSED_CUDA };

/// Computed as `m.mul(b1).add(g, alpha=1 - b1)`.
const LION_ADDED: LionSequence = LionSequence {
    update: TwoProducts::SecondInSum,
    moment: TwoProducts::SecondInSum,
    narrowing: Narrowing::EveryOperation,
};

/// Computed as `m * b1 + g * (1 - b1)`.
const LION_MULTIPLIED: LionSequence = LionSequence { update: TwoProducts::Separate, ..LION_ADDED };

const LION_DEFAULT: LionSequence = LionSequence { moment: TwoProducts::Separate, ..LION_MULTIPLIED };

const fn adam(sequence: AdamSequence) -> Sequences {
    Sequences::Adam(Parts { body: sequence, tail: sequence })
}

const fn sgd(sequence: SgdSequence) -> Sequences {
    Sequences::Sgd(Parts { body: sequence, tail: sequence })
}

const fn adagrad(sequence: AdagradSequence) -> Sequences {
    Sequences::Adagrad(Parts { body: sequence, tail: sequence })
}

const fn lion(sequence: LionSequence) -> Sequences {
    Sequences::Lion(Parts { body: sequence, tail: sequence })
}

/// Makes an implementation for processors, whose vectors have 32 bytes.
const fn cpu(name: &'static str, dtypes: Dtypes, sequences: Sequences) -> Variant {
    let lanes = 32 / dtypes.parameter.bytes() as u64;
    Variant { name, device: Device::Cpu, dtypes, lanes, sequences }
}

/// Makes an implementation for CUDA devices, which treat all elements alike.
const fn cuda(name: &'static str, dtypes: Dtypes, sequences: Sequences) -> Variant {
    Variant { name, device: Device::Cuda, dtypes, lanes: 1, sequences }
}

const F32: Dtypes = Dtypes::F32;
const BF16: Dtypes = Dtypes::BF16;
const MIXED: Dtypes = Dtypes::MIXED;

static VARIANTS: [Variant; 48] = [
    cpu("adam.fused.cpu.f32", F32, ADAM_FUSED_CPU_PARTS),
    cpu("adam.fused.cpu.bf16", BF16, ADAM_FUSED_CPU_PARTS),
    cpu("adam.fused.cpu-default.f32", F32, ADAM_FUSED_CPU_DEFAULT_PARTS),
    cpu("adam.fused.cpu-default.bf16", BF16, ADAM_FUSED_CPU_DEFAULT_PARTS),
    cuda("adam.foreach.cuda.f32", F32, adam(ADAM_FOREACH)),
    cuda("adam.foreach.cuda.bf16", BF16, adam(ADAM_FOREACH)),
    cuda("adam.fused.cuda.f32", F32, adam(ADAM_FUSED_CUDA)),
    cuda("adam.fused.cuda.bf16", BF16, adam(ADAM_FUSED_CUDA)),
    cuda("adam.fused.cuda.mixed", MIXED, adam(ADAM_FUSED_CUDA)),
    cuda("adam.fused-separate.cuda.f32", F32, adam(ADAM_FUSED_CUDA_SEPARATE)),
    cuda("adam.fused-separate.cuda.bf16", BF16, adam(ADAM_FUSED_CUDA_SEPARATE)),
    cuda("adam.fused-separate.cuda.mixed", MIXED, adam(ADAM_FUSED_CUDA_SEPARATE)),
    cuda("adam.for-loop.cuda.f32", F32, adam(ADAM_FOR_LOOP)),
    cuda("adam.for-loop.cuda.bf16", BF16, adam(ADAM_FOR_LOOP)),
    cuda("adam.capturable-foreach.cuda.f32", F32, adam(ADAM_CAPTURABLE_FOREACH)),
    cuda("adam.capturable-for-loop.cuda.f32", F32, adam(ADAM_CAPTURABLE_FOR_LOOP)),
    cpu("sgd.fused.cpu.f32", F32, SGD_FUSED_CPU_PARTS),
    cpu("sgd.fused.cpu.bf16", BF16, SGD_FUSED_CPU_PARTS),
    cpu("sgd.fused.cpu-default.f32", F32, sgd(SGD_FUSED_CPU_DEFAULT)),
    cpu("sgd.fused.cpu-default.bf16", BF16, sgd(SGD_FUSED_CPU_DEFAULT)),
    cpu("sgd.for-loop.cpu.f32", F32, sgd(SGD_FOREACH)),
    cuda("sgd.foreach.cuda.f32", F32, sgd(SGD_FOREACH)),
    cuda("sgd.foreach.cuda.bf16", BF16, sgd(SGD_FOREACH)),
    cuda("sgd.fused.cuda.f32", F32, sgd_fused_cuda(TwoProducts::FirstInSum)),
    cuda("sgd.fused.cuda.bf16", BF16, sgd_fused_cuda(TwoProducts::FirstInSum)),
    cuda("sgd.fused-second.cuda.f32", F32, sgd_fused_cuda(TwoProducts::SecondInSum)),
    cuda("sgd.fused-second.cuda.bf16", BF16, sgd_fused_cuda(TwoProducts::SecondInSum)),
    cuda("sgd.fused-separate.cuda.f32", F32, sgd_fused_cuda(TwoProducts::Separate)),
    cuda("sgd.fused-separate.cuda.bf16", BF16, sgd_fused_cuda(TwoProducts::Separate)),
    cpu("adagrad.fused.cpu.f32", F32, adagrad(ADAGRAD_FUSED_CPU)),
    cpu("adagrad.fused.cpu.bf16", BF16, adagrad(ADAGRAD_FUSED_CPU)),
    cpu("adagrad.fused.cpu-default.f32", F32, adagrad(ADAGRAD_FUSED_CPU_DEFAULT)),
    cpu("adagrad.fused.cpu-default.bf16", BF16, adagrad(ADAGRAD_FUSED_CPU_DEFAULT)),
    cuda("adagrad.foreach.cuda.f32", F32, adagrad(ADAGRAD_FOREACH)),
    cuda("adagrad.foreach.cuda.bf16", BF16, adagrad(ADAGRAD_FOREACH)),
    cuda("adagrad.for-loop.cuda.f32", F32, adagrad(ADAGRAD_FOR_LOOP)),
    cuda("adagrad.for-loop.cuda.bf16", BF16, adagrad(ADAGRAD_FOR_LOOP)),
    cuda("adagrad.fused.cuda.f32", F32, adagrad(ADAGRAD_FUSED_CUDA)),
    cuda("adagrad.fused.cuda.bf16", BF16, adagrad(ADAGRAD_FUSED_CUDA)),
    cuda("adagrad.fused-separate.cuda.f32", F32, adagrad(ADAGRAD_FUSED_CUDA_SEPARATE)),
    cuda("adagrad.fused-separate.cuda.bf16", BF16, adagrad(ADAGRAD_FUSED_CUDA_SEPARATE)),
    cpu("lion.added.cpu.f32", F32, lion(LION_ADDED)),
    cpu("lion.multiplied.cpu.f32", F32, lion(LION_MULTIPLIED)),
    cpu("lion.separate.cpu-default.f32", F32, lion(LION_DEFAULT)),
    cuda("lion.added.cuda.f32", F32, lion(LION_ADDED)),
    cuda("lion.added.cuda.bf16", BF16, lion(LION_ADDED)),
    cuda("lion.multiplied.cuda.f32", F32, lion(LION_MULTIPLIED)),
    cuda("lion.multiplied.cuda.bf16", BF16, lion(LION_MULTIPLIED)),
];
