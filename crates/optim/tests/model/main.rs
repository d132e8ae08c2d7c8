//! Compares every variant with the model, with each set of instructions, on values of every kind.

mod random;
mod refusals;
mod sequences;

use shardfast_optim::{
    AdagradScalars, Device, Dtype, Dtypes, Gradient, Instructions, Kind, Scalars, Step, Tile, Variant, replay,
};

use random::Random;
use sequences::{Element, bf16};

/// A tensor, the gradients of some steps, and the model's result.
struct Case {
    variant: &'static Variant,
    numel: usize,
    parameter: Vec<u8>,
    moments: Vec<Vec<u8>>,
    steps: Vec<Option<(GradientOwned, Scalars)>>,
    expected: Vec<Element>,
}

struct GradientOwned {
    dtype: Dtype,
    values: Vec<u8>,
    factor: Option<f32>,
}

fn bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
    }
}

fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.chunks(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
        Dtype::Bf16 => {
            bytes.chunks(2).map(|x| f32::from_bits(u32::from(u16::from_le_bytes([x[0], x[1]])) << 16)).collect()
        }
    }
}

/// Draws random values as an array of this dtype can hold them.
fn random_values(random: &mut Random, dtype: Dtype, numel: usize) -> Vec<f32> {
    (0..numel).map(|_| if dtype == Dtype::F32 { random.value() } else { bf16(random.value()) }).collect()
}

impl Case {
    fn new(variant: &'static Variant, numel: usize, random: &mut Random) -> Case {
        let (dtypes, flags) = (variant.dtypes(), random.next());
        let lanes = if variant.name().contains(".cpu") { 32 / dtypes.parameter.bytes() } else { 1 };
        let count = random.scalars(variant, flags).moments();
        let parameter = random_values(random, dtypes.parameter, numel);
        let moments: Vec<_> = (0..count).map(|_| random_values(random, dtypes.moments, numel)).collect();
        let element = |i: usize| {
            let mut state = [0.0; 3];
            moments.iter().enumerate().for_each(|(place, moment)| state[place] = moment[i]);
            Element { p: parameter[i], state, g: 0.0 }
        };
        let mut expected: Vec<Element> = (0..numel).map(element).collect();
        let mut steps = Vec::new();
        for _ in 0..random.below(5) {
            if random.below(6) == 0 {
                steps.push(None);
                continue;
            }
            let scalars = random.scalars(variant, flags);
            let is_narrow = dtypes.parameter == Dtype::Bf16;
            let dtype = if is_narrow || random.flag() { Dtype::Bf16 } else { Dtype::F32 };
            let factor = (!is_narrow && random.flag()).then(|| 1.0 / (1.5 + random.below(100) as f32));
            let gradient = random_values(random, dtype, numel);
            for (i, element) in expected.iter_mut().enumerate() {
                element.g = gradient[i] * factor.unwrap_or(1.0);
                sequences::step(variant.name(), &scalars, i >= numel - numel % lanes, element);
            }
            steps.push(Some((GradientOwned { dtype, values: bytes(dtype, &gradient), factor }, scalars)));
        }
        let moments = moments.iter().map(|moment| bytes(dtypes.moments, moment)).collect();
        Case { variant, numel, parameter: bytes(dtypes.parameter, &parameter), moments, steps, expected }
    }

    /// Replays tiles that begin at `cuts`, shared among `threads`; returns the arrays afterwards.
    fn replayed(&self, on: Instructions, cuts: &[usize], threads: usize) -> (Vec<u8>, Vec<Vec<u8>>) {
        let dtypes = self.variant.dtypes();
        let (mut parameter, mut moments) = (self.parameter.clone(), self.moments.clone());
        let mut tiles = Vec::new();
        let (mut rest, mut state_rest) =
            (parameter.as_mut_slice(), moments.iter_mut().map(|m| m.as_mut_slice()).collect::<Vec<_>>());
        for (index, &start) in cuts.iter().enumerate() {
            let elements = cuts.get(index + 1).unwrap_or(&self.numel) - start;
            let (own, behind) = rest.split_at_mut(elements * dtypes.parameter.bytes());
            rest = behind;
            let mut state = Vec::new();
            for moment in &mut state_rest {
                let (own, behind) = std::mem::take(moment).split_at_mut(elements * dtypes.moments.bytes());
                *moment = behind;
                state.push(own);
            }
            tiles.push((start, elements, own, state));
        }
        let mut of_threads: Vec<Vec<_>> = (0..threads).map(|_| Vec::new()).collect();
        tiles.into_iter().enumerate().for_each(|(index, tile)| of_threads[index % threads].push(tile));
        std::thread::scope(|scope| {
            for tiles in of_threads {
                scope.spawn(move || {
                    for (start, elements, parameter, mut moments) in tiles {
                        let steps: Vec<Step<'_>> = self.steps.iter().map(|step| cut(step, start, elements)).collect();
                        let (offset, numel) = (start as u64, self.numel as u64);
                        let mut tile = Tile { offset, numel, dtypes, parameter, moments: &mut moments };
                        replay(on, self.variant, &mut tile, &steps).expect("the arrays fit together");
                    }
                });
            }
        });
        (parameter, moments)
    }

    fn check(&self, (parameter, moments): &(Vec<u8>, Vec<Vec<u8>>), what: &str) {
        let dtypes = self.variant.dtypes();
        let name = self.variant.name();
        let is_same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        for (i, (&ours, element)) in values(dtypes.parameter, parameter).iter().zip(&self.expected).enumerate() {
            assert!(
                is_same(ours, element.p),
                "{name}, {what}: p[{i}] of {} is {ours:e}, not {:e}",
                self.numel,
                element.p
            );
        }
        for (place, moment) in moments.iter().enumerate() {
            for (i, (&ours, element)) in values(dtypes.moments, moment).iter().zip(&self.expected).enumerate() {
                let theirs = element.state[place];
                assert!(is_same(ours, theirs), "{name}, {what}: moment {place} [{i}] is {ours:e}, not {theirs:e}");
            }
        }
    }
}

/// Returns the part of a step that a tile gets.
fn cut(step: &Option<(GradientOwned, Scalars)>, start: usize, elements: usize) -> Step<'_> {
    let Some((GradientOwned { dtype, values, factor }, scalars)) = step else { return Step::Skipped };
    let values = &values[start * dtype.bytes()..(start + elements) * dtype.bytes()];
    Step::Taken { gradient: Gradient { dtype: *dtype, values, factor: *factor }, scalars: *scalars }
}

#[test]
fn every_variant_is_the_model_at_every_length() {
    let mut random = Random(1);
    for variant in Variant::all() {
        for numel in (0..=33).chain([63, 64, 65, 200, 255, 256, 257, 600]) {
            for _ in 0..8 {
                let case = Case::new(variant, numel, &mut random);
                for on in Instructions::all() {
                    case.check(&case.replayed(on, &[0], 1), &format!("{on:?}"));
                }
            }
        }
    }
}

#[test]
fn tiles_are_cut_anywhere_and_shared_by_threads() {
    let mut random = Random(2);
    for variant in Variant::all() {
        for threads in 1..=4 {
            for _ in 0..10 {
                let numel = 1 + random.below(900);
                let case = Case::new(variant, numel, &mut random);
                let mut cuts: Vec<usize> = (0..random.below(9)).map(|_| random.below(numel)).collect();
                cuts.push(0);
                cuts.sort_unstable();
                case.check(&case.replayed(Instructions::best(), &cuts, threads), &format!("cut at {cuts:?}"));
            }
        }
    }
}

#[test]
fn names_are_unique_and_found() {
    for variant in Variant::all() {
        assert_eq!(Variant::named(variant.name()), Some(variant));
        let mut candidates = Variant::candidates(variant.kind(), variant.dtypes(), variant.device());
        assert!(candidates.any(|candidate| candidate == variant), "{}", variant.name());
    }
    assert_eq!(Variant::named("adam"), None);
}

#[test]
fn what_cancels_shows_every_bit_of_the_step() {
    let mut random = Random(3);
    for variant in Variant::candidates(Kind::Adagrad, Dtypes::F32, Device::Cuda) {
        for _ in 0..200 {
            let lr = 0.01 + random.below(1000) as f64 * 1e-6;
            // Of a sum that was 0, the step is about `lr`; the parameter is what `f32` keeps of it.
            let (p, g) = (lr as f32, 0.5 + random.below(1000) as f32 * 1e-3);
            let scalars =
                Scalars::Adagrad(AdagradScalars { corrected_lr: lr, eps: 1e-10, weight_decay: 0.0, maximize: false });
            let mut expected = Element { p, state: [0.0; 3], g };
            sequences::step(variant.name(), &scalars, false, &mut expected);
            let gradient = GradientOwned { dtype: Dtype::F32, values: g.to_le_bytes().to_vec(), factor: None };
            let case = Case {
                variant,
                numel: 1,
                parameter: p.to_le_bytes().to_vec(),
                moments: vec![vec![0; 4]],
                steps: vec![Some((gradient, scalars))],
                expected: vec![expected],
            };
            case.check(&case.replayed(Instructions::best(), &[0], 1), "a step that cancels the parameter");
        }
    }
}
