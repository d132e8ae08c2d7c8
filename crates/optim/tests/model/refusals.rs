//! Tests that arguments that contradict each other are refused, and that nothing is written.

use shardfast_optim::{
    AdagradScalars, AdamScalars, Bias, Dtype, Dtypes, Error, Gradient, Instructions, Kind, LionScalars, Scalars, Step,
    Tile, Variant, replay,
};

const ADAM: AdamScalars = AdamScalars {
    lr: 0.1,
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-8,
    weight_decay: 0.0,
    decoupled: true,
    maximize: false,
    amsgrad: false,
    bias: Bias::Host { correction1: 0.1, correction2_sqrt: 0.1 },
};

/// Returns the error of a call with two elements after `change`, and checks that the arrays are as before.
struct Call {
    variant: &'static str,
    dtypes: Dtypes,
    offset: u64,
    numel: u64,
    parameter: usize,
    moments: Vec<usize>,
    gradient: Dtype,
    gradient_bytes: usize,
    factor: Option<f32>,
    scalars: Scalars,
}

impl Call {
    fn of(variant: &'static str) -> Call {
        Call {
            variant,
            dtypes: Dtypes::F32,
            offset: 0,
            numel: 2,
            parameter: 8,
            moments: vec![8, 8],
            gradient: Dtype::F32,
            gradient_bytes: 8,
            factor: None,
            scalars: Scalars::Adam(ADAM),
        }
    }

    fn error(&self) -> Error {
        let (mut parameter, gradient) = (vec![1; self.parameter], vec![1; self.gradient_bytes]);
        let mut arrays: Vec<Vec<u8>> = self.moments.iter().map(|&bytes| vec![1; bytes]).collect();
        let mut moments: Vec<&mut [u8]> = arrays.iter_mut().map(Vec::as_mut_slice).collect();
        let mut tile = Tile {
            offset: self.offset,
            numel: self.numel,
            dtypes: self.dtypes,
            parameter: &mut parameter,
            moments: &mut moments,
        };
        let gradient = Gradient { dtype: self.gradient, values: &gradient, factor: self.factor };
        let steps = [Step::Skipped, Step::Taken { gradient, scalars: self.scalars }];
        let variant = Variant::named(self.variant).expect("a variant's name");
        let error = replay(Instructions::best(), variant, &mut tile, &steps).expect_err("a refusal");
        assert!(parameter.iter().chain(arrays.iter().flatten()).all(|&byte| byte == 1), "{error}");
        error
    }
}

#[test]
fn lengths_and_places() {
    let call = Call::of("adam.fused.cpu.f32");
    assert_eq!(Call { parameter: 7, ..call }.error(), Error::Element { found: 7, element: 4, dtype: Dtype::F32 });
    let call = Call::of("adam.fused.cpu.f32");
    let expected = Error::Length { what: "a moment", expected: 8, found: 4 };
    assert_eq!(Call { moments: vec![8, 4], ..call }.error(), expected);
    let call = Call::of("adam.fused.cpu.f32");
    let expected = Error::Length { what: "a gradient", expected: 8, found: 12 };
    assert_eq!(Call { gradient_bytes: 12, ..call }.error(), expected);
    let call = Call::of("adam.fused.cpu.f32");
    assert_eq!(Call { offset: 1, ..call }.error(), Error::Place { offset: 1, end: 3, numel: 2 });
    let (call, offset) = (Call::of("adam.fused.cpu.f32"), u64::MAX);
    assert_eq!(Call { offset, ..call }.error(), Error::Place { offset, end: u64::MAX, numel: 2 });
}

#[test]
fn moments_and_dtypes() {
    let call = Call::of("adam.fused.cpu.f32");
    let expected = Error::Moments { step: 1, kind: Kind::Adam, expected: 2, found: 3 };
    assert_eq!(Call { moments: vec![8; 3], ..call }.error(), expected);
    let (parameter, moments, gradient) = (Dtype::F32, Dtype::Bf16, Dtype::F32);
    let call = Call { dtypes: Dtypes::MIXED, moments: vec![4; 2], ..Call::of("adam.fused.cpu.f32") };
    assert_eq!(call.error(), Error::Dtypes { variant: call.variant, parameter, moments, gradient });
    let narrow = || Call {
        dtypes: Dtypes::BF16,
        parameter: 4,
        moments: vec![4; 2],
        gradient: Dtype::Bf16,
        gradient_bytes: 4,
        ..Call::of("adam.fused.cpu.bf16")
    };
    let call = Call { gradient: Dtype::F32, gradient_bytes: 8, ..narrow() };
    let (parameter, moments) = (Dtype::Bf16, Dtype::Bf16);
    assert_eq!(call.error(), Error::Dtypes { variant: call.variant, parameter, moments, gradient: Dtype::F32 });
    let call = Call { factor: Some(0.5), ..narrow() };
    assert_eq!(call.error(), Error::Factor { variant: call.variant, step: 1 });
}

#[test]
fn scalars_of_another_optimizer() {
    let scalars = Scalars::Lion(LionScalars { lr: 0.1, beta1: 0.9, beta2: 0.9, weight_decay: 0.0 });
    let call = Call { scalars, ..Call::of("adam.fused.cpu.f32") };
    let (expected, found) = (Kind::Adam, Kind::Lion);
    assert_eq!(call.error(), Error::Scalars { variant: call.variant, step: 1, expected, found });
    let scalars = Scalars::Adagrad(AdagradScalars { corrected_lr: 0.1, eps: 0.1, weight_decay: 0.0, maximize: false });
    let call = Call { scalars, moments: vec![8], ..Call::of("lion.added.cpu.f32") };
    let (expected, found) = (Kind::Lion, Kind::Adagrad);
    assert_eq!(call.error(), Error::Scalars { variant: call.variant, step: 1, expected, found });
}

#[test]
fn bias_corrections_from_elsewhere() {
    let call = Call::of("adam.fused.cuda.f32");
    assert_eq!(call.error(), Error::Bias { variant: call.variant, step: 1, expected: "device" });
    let bias = Bias::Device { correction1: 0.1, correction2_sqrt: 0.1 };
    let call = Call { scalars: Scalars::Adam(AdamScalars { bias, ..ADAM }), ..Call::of("adam.foreach.cuda.f32") };
    assert_eq!(call.error(), Error::Bias { variant: call.variant, step: 1, expected: "host" });
}
