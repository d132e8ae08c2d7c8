//! The implementations that can be repeated bit for bit, as data.
//!
//! Sources: PyTorch 2.15, `aten/src/ATen/native/cpu/Fused{Adam,SGD,Adagrad}Kernel.cpp`,
//! `aten/src/ATen/native/cuda/{fused_adam_utils,fused_adagrad_utils,DeviceAddCmulCdiv,ForeachFunctors}.cuh`,
//! `FusedSgdKernel.cu`, `aten/src/ATen/native/Lerp.h`, `torch/optim/{adam,sgd,adagrad}.py`. Where compilers contract
//! `a * b + c` was found by experiment for CPUs; for CUDA it follows the compiler's rule that it always does.

use std::fmt;

use crate::block::Dtypes;
use crate::sequence::{
    AdagradSequence, AdamSequence, AdamUpdate, Decay, FirstMoment, Largest, LionSequence, MulAdd, Narrowing,
    SecondMoment, SgdSequence, TwoProducts,
};

/// An optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Adam and AdamW.
    Adam,
    /// Stochastic gradient descent.
    Sgd,
    /// Adagrad.
    Adagrad,
    /// Lion.
    Lion,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Adam => "Adam",
            Kind::Sgd => "SGD",
            Kind::Adagrad => "Adagrad",
            Kind::Lion => "Lion",
        })
    }
}

/// Where the training steps its optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// On a processor like this one.
    Cpu,
    /// On a CUDA device.
    Cuda,
}

/// How one implementation of an optimizer rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variant {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    pub(crate) dtypes: Dtypes,
    /// Elements of the implementation's vectors: the last `numel % lanes` elements of a tensor are its tail.
    pub(crate) lanes: u64,
    pub(crate) sequences: Sequences,
}

/// What is done to whole vectors and to the tail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts<S> {
    /// To whole vectors.
    pub body: S,
    /// To the tail.
    pub tail: S,
}

impl<S: Copy> Parts<S> {
    const fn same(sequence: S) -> Parts<S> {
        Parts { body: sequence, tail: sequence }
    }
}

/// The sequences of one optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequences {
    /// Adam and AdamW.
    Adam(Parts<AdamSequence>),
    /// Stochastic gradient descent.
    Sgd(Parts<SgdSequence>),
    /// Adagrad.
    Adagrad(Parts<AdagradSequence>),
    /// Lion.
    Lion(Parts<LionSequence>),
}

impl Variant {
    /// What a manifest and an error call it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The optimizer.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where the implementation runs.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The arrays that it steps.
    pub fn dtypes(&self) -> Dtypes {
        self.dtypes
    }

    /// How it rounds.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// Every variant.
    pub fn all() -> &'static [Variant] {
        &VARIANTS
    }

    /// The variant of that name.
    pub fn named(name: &str) -> Option<&'static Variant> {
        VARIANTS.iter().find(|variant| variant.name == name)
    }

    /// The variants that a rehearsal tries for an optimizer, likely ones first: one that agrees with the training's own
    /// steps in every bit is taken; if none does, this optimizer cannot be replayed.
    pub fn candidates(kind: Kind, dtypes: Dtypes, device: Device) -> impl Iterator<Item = &'static Variant> {
        let fits = move |variant: &&Variant| (variant.kind, variant.dtypes, variant.device) == (kind, dtypes, device);
        VARIANTS.iter().filter(fits)
    }
}

const FUSED_CPU: AdamSequence = AdamSequence {
    decay: Decay::Factor,
    l2: MulAdd::Once,
    first: FirstMoment::Lerp(MulAdd::Once),
    second: SecondMoment::ScaledGradient(TwoProducts::SecondInSum),
    largest: Largest::SecondIfEqual,
    update: AdamUpdate::ScaledMoment,
    narrowing: Narrowing::AtStore,
};

const FUSED_CPU_TAIL: AdamSequence = AdamSequence {
    second: SecondMoment::ScaledGradient(TwoProducts::FirstInSum),
    largest: Largest::FirstIfEqual,
    ..FUSED_CPU
};

const FUSED_CPU_WITHOUT_FMA: AdamSequence = AdamSequence {
    l2: MulAdd::Twice,
    first: FirstMoment::Lerp(MulAdd::Twice),
    second: SecondMoment::ScaledGradient(TwoProducts::Separate),
    ..FUSED_CPU
};

const FUSED_CPU_WITHOUT_FMA_TAIL: AdamSequence =
    AdamSequence { largest: Largest::FirstIfEqual, ..FUSED_CPU_WITHOUT_FMA };

static VARIANTS: [Variant; 2] = [
    Variant {
        name: "adam.fused.cpu.avx2",
        kind: Kind::Adam,
        device: Device::Cpu,
        dtypes: Dtypes::F32,
        lanes: 8,
        sequences: Sequences::Adam(Parts { body: FUSED_CPU, tail: FUSED_CPU_TAIL }),
    },
    Variant {
        name: "adam.fused.cpu.default",
        kind: Kind::Adam,
        device: Device::Cpu,
        dtypes: Dtypes::F32,
        lanes: 8,
        sequences: Sequences::Adam(Parts { body: FUSED_CPU_WITHOUT_FMA, tail: FUSED_CPU_WITHOUT_FMA_TAIL }),
    },
];
