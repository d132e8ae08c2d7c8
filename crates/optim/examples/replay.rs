//! Replays the steps that standard input describes, and writes the result to standard output, for tests that compare
//! with a framework's own steps.
//!
//! `replay <variant> <dtype of gradients> <factor or -> <steps in a pass> <elements of a tile> <numel>,<numel>,...`
//!
//! Input, all little-endian: the number of steps (`u64`), the scalars of each step (`f64` in the order of the fields,
//! flags as 0 or 1, those of Adam's bias last: first correction, second, whether of the device), then for each
//! tensor its parameter and moments, then for each step the gradients of all tensors. Output: parameter and moments
//! of each tensor after each pass, tiles stepped by two threads where there are several.

use std::error::Error;
use std::io::{Read, Write};

use shardfast_optim::{
    AdagradScalars, AdamScalars, Bias, Dtype, Gradient, Instructions, Kind, LionScalars, Scalars, SgdScalars, Step,
    Tile, Variant, replay,
};

/// Arguments in their order, which the documentation above describes.
struct Arguments {
    variant: &'static Variant,
    gradient: Dtype,
    factor: Option<f32>,
    pass: usize,
    tile: usize,
    numels: Vec<usize>,
}

/// Parameter and moments of a tensor.
type Arrays = Vec<Vec<u8>>;

/// Place, parameter and moments of a tile.
type Cut<'a> = (usize, &'a mut [u8], Vec<&'a mut [u8]>);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = arguments()?;
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input)?;
    let mut rest = input.as_slice();
    let steps = u64::from_le_bytes(*take(&mut rest, 8)?.first_chunk().ok_or("no number of steps")?) as usize;
    let scalars = (0..steps).map(|_| scalars(arguments.variant.kind(), &mut rest)).collect::<Result<Vec<_>, _>>()?;
    let moments = scalars.first().ok_or("no steps")?.moments();
    let dtypes = arguments.variant.dtypes();
    let mut tensors: Vec<Arrays> = Vec::new();
    for numel in &arguments.numels {
        let mut arrays = vec![take(&mut rest, numel * dtypes.parameter.bytes())?.to_vec()];
        for _ in 0..moments {
            arrays.push(take(&mut rest, numel * dtypes.moments.bytes())?.to_vec());
        }
        tensors.push(arrays);
    }
    let mut output = std::io::stdout().lock();
    for pass in scalars.chunks(arguments.pass) {
        let mut gradients = Vec::new();
        for _ in pass {
            for numel in &arguments.numels {
                gradients.push(take(&mut rest, numel * arguments.gradient.bytes())?);
            }
        }
        for (number, arrays) in tensors.iter_mut().enumerate() {
            let of_tensor = gradients.iter().skip(number).step_by(arguments.numels.len());
            let steps: Vec<(Scalars, &[u8])> = pass.iter().copied().zip(of_tensor.copied()).collect();
            step_tensor(&arguments, arguments.numels[number], arrays, &steps)?;
            arrays.iter().try_for_each(|array| output.write_all(array))?;
        }
    }
    Ok(())
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [variant, gradient, factor, pass, tile, numels] = arguments.as_slice() else {
        return Err("expected six arguments; the source says which".into());
    };
    Ok(Arguments {
        variant: Variant::named(variant).ok_or_else(|| format!("no variant is called {variant}"))?,
        gradient: if gradient == "BF16" { Dtype::Bf16 } else { Dtype::F32 },
        factor: if factor == "-" { None } else { Some(factor.parse()?) },
        pass: pass.parse()?,
        tile: tile.parse()?,
        numels: numels.split(',').map(str::parse).collect::<Result<_, _>>()?,
    })
}

/// Takes the next `bytes` bytes of `rest`.
fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], Box<dyn Error>> {
    let (taken, behind) = rest.split_at_checked(bytes).ok_or("the input is too short")?;
    *rest = behind;
    Ok(taken)
}

fn scalars(kind: Kind, rest: &mut &[u8]) -> Result<Scalars, Box<dyn Error>> {
    let mut next = || -> Result<f64, Box<dyn Error>> {
        Ok(f64::from_le_bytes(*take(rest, 8)?.first_chunk().ok_or("the input is too short")?))
    };
    Ok(match kind {
        Kind::Adam => Scalars::Adam(AdamScalars {
            lr: next()?,
            beta1: next()?,
            beta2: next()?,
            eps: next()?,
            weight_decay: next()?,
            decoupled: next()? != 0.0,
            maximize: next()? != 0.0,
            amsgrad: next()? != 0.0,
            bias: match (next()?, next()?, next()? != 0.0) {
                (correction1, correction2_sqrt, false) => Bias::Host { correction1, correction2_sqrt },
                (first, second, true) => Bias::Device { correction1: first as f32, correction2_sqrt: second as f32 },
            },
        }),
        Kind::Sgd => Scalars::Sgd(SgdScalars {
            lr: next()?,
            momentum: next()?,
            dampening: next()?,
            weight_decay: next()?,
            nesterov: next()? != 0.0,
            maximize: next()? != 0.0,
            first: next()? != 0.0,
        }),
        Kind::Adagrad => Scalars::Adagrad(AdagradScalars {
            corrected_lr: next()?,
            eps: next()?,
            weight_decay: next()?,
            maximize: next()? != 0.0,
        }),
        Kind::Lion => Scalars::Lion(LionScalars { lr: next()?, beta1: next()?, beta2: next()?, weight_decay: next()? }),
    })
}

/// Steps one tensor, cut into tiles that two threads share.
fn step_tensor(
    arguments: &Arguments,
    numel: usize,
    arrays: &mut Arrays,
    steps: &[(Scalars, &[u8])],
) -> Result<(), Box<dyn Error>> {
    let dtypes = arguments.variant.dtypes();
    let (parameter, moments) = arrays.split_at_mut(1);
    let mut runs: Vec<_> =
        moments.iter_mut().map(|array| array.chunks_mut(arguments.tile * dtypes.moments.bytes())).collect();
    let mut tiles = Vec::new();
    for (number, parameter) in parameter[0].chunks_mut(arguments.tile * dtypes.parameter.bytes()).enumerate() {
        let moments: Vec<&mut [u8]> = runs.iter_mut().filter_map(Iterator::next).collect();
        tiles.push((number * arguments.tile, parameter, moments));
    }
    let behind = tiles.split_off(tiles.len() / 2);
    let step_all = |tiles: Vec<Cut<'_>>| {
        for (offset, parameter, mut moments) in tiles {
            let elements = parameter.len() / dtypes.parameter.bytes();
            let size = arguments.gradient.bytes();
            let steps: Vec<Step<'_>> = steps
                .iter()
                .map(|(scalars, gradient)| Step::Taken {
                    gradient: Gradient {
                        dtype: arguments.gradient,
                        values: &gradient[offset * size..(offset + elements) * size],
                        factor: arguments.factor,
                    },
                    scalars: *scalars,
                })
                .collect();
            let mut tile =
                Tile { offset: offset as u64, numel: numel as u64, dtypes, parameter, moments: &mut moments };
            replay(Instructions::best(), arguments.variant, &mut tile, &steps)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let other = (!tiles.is_empty()).then(|| scope.spawn(|| step_all(tiles)));
        let own: Result<(), shardfast_optim::Error> = step_all(behind);
        own.and(other.map_or(Ok(()), |thread| thread.join().expect("replay does not panic")))
    })?;
    Ok(())
}
