//! Replays AdamW on parameters, moments and gradients of `f32` beside a loop of the same loads and stores without
//! arithmetic, by turns.
//!
//! `replay <elements> <threads> <gradients in a pass> <repetitions>` prints seconds, a line for each repetition: of the
//! replay, and of the loop.

use std::time::Instant;

use shardfast_optim::{
    AdamScalars, Bias, Block, Dtype, Dtypes, Gradient, Instructions, Scalars, Step, Variant, replay,
};

/// Bytes of an array in one block, as the engine cuts them: with two moments, about 4 MiB in all.
const BLOCK_BYTES: usize = 4 << 18;

const SCALARS: Scalars = Scalars::Adam(AdamScalars {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.01,
    decoupled: true,
    maximize: false,
    amsgrad: false,
    bias: Bias::Host { correction1: 0.1, correction2_sqrt: 0.0316 },
});

/// The arrays of a part of the parameters: parameter, both moments, gradients.
type Part<'a> = ([&'a mut [u8]; 3], Vec<&'a [u8]>);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = std::env::args().skip(1).map(|word| word.parse()).collect::<Result<Vec<usize>, _>>()?;
    let [elements, threads, gradients, repetitions] = arguments[..] else {
        return Err("expected four numbers: elements, threads, gradients in a pass, repetitions".into());
    };
    let array = |first: f32| -> Vec<u8> {
        (0..elements).flat_map(|i| (first + (i % 1000) as f32 * 1e-4).to_le_bytes()).collect()
    };
    let mut arrays = [array(0.1), array(0.01), array(1e-4)];
    let gradients: Vec<Vec<u8>> = (0..gradients).map(|number| array(number as f32 * 0.1 - 0.05)).collect();
    let variant = Variant::named("adam.fused.cpu.f32").ok_or("no such variant")?;
    for _ in 0..repetitions {
        let replayed = timed(&mut arrays, &gradients, threads, |part, offset| step(variant, elements, part, offset))?;
        let moved = timed(&mut arrays, &gradients, threads, |part, _| {
            move_bytes(part);
            Ok(())
        })?;
        println!("{replayed} {moved}");
    }
    Ok(())
}

/// Seconds until `threads` have done `work` to all blocks, each to a run of its own.
fn timed(
    arrays: &mut [Vec<u8>; 3],
    gradients: &[Vec<u8>],
    threads: usize,
    work: impl Fn(Part<'_>, usize) -> Result<(), shardfast_optim::Error> + Sync,
) -> Result<f64, shardfast_optim::Error> {
    let length = arrays[0].len();
    let run = length.div_ceil(threads).next_multiple_of(BLOCK_BYTES);
    let [p, m, v] = arrays;
    let runs = p.chunks_mut(run).zip(m.chunks_mut(run)).zip(v.chunks_mut(run)).enumerate();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let work = &work;
        let spawned: Vec<_> = runs
            .map(|(number, ((p, m), v))| {
                scope.spawn(move || {
                    let blocks =
                        p.chunks_mut(BLOCK_BYTES).zip(m.chunks_mut(BLOCK_BYTES)).zip(v.chunks_mut(BLOCK_BYTES));
                    for (index, ((p, m), v)) in blocks.enumerate() {
                        let start = number * run + index * BLOCK_BYTES;
                        let of_block = gradients.iter().map(|gradient| &gradient[start..start + p.len()]).collect();
                        work(([p, m, v], of_block), start / 4)?;
                    }
                    Ok(())
                })
            })
            .collect();
        spawned.into_iter().try_for_each(|thread| thread.join().expect("a replay does not panic"))
    })?;
    Ok(begun.elapsed().as_secs_f64())
}

fn step(
    variant: &Variant,
    elements: usize,
    ([parameter, m, v], gradients): Part<'_>,
    offset: usize,
) -> Result<(), shardfast_optim::Error> {
    let gradient = |values| Gradient { dtype: Dtype::F32, values, factor: None };
    let steps: Vec<Step<'_>> =
        gradients.iter().map(|values| Step::Taken { gradient: gradient(values), scalars: SCALARS }).collect();
    let (offset, numel) = (offset as u64, elements as u64);
    let mut block = Block { offset, numel, dtypes: Dtypes::F32, parameter, moments: &mut [m, v] };
    replay(Instructions::best(), variant, &mut block, &steps)
}

/// Loads all arrays and stores parameter and moments: each gets the bits of another one, the last those of all
/// gradients.
fn move_bytes(([p, m, v], gradients): Part<'_>) {
    const PIECE: usize = 256;
    for at in (0..p.len()).step_by(PIECE) {
        let end = (at + PIECE).min(p.len());
        let (p, m, v) = (&mut p[at..end], &mut m[at..end], &mut v[at..end]);
        for ((p, m), v) in p.iter_mut().zip(m.iter_mut()).zip(v.iter_mut()) {
            (*p, *m, *v) = (*m, *v, *p);
        }
        for gradient in &gradients {
            for (v, g) in v.iter_mut().zip(&gradient[at..end]) {
                *v ^= g;
            }
        }
    }
}
