//! Reads the files that `tests/gpu/record.py` writes; its head describes them.

use shardfast_optim::{AdamScalars, Bias, Dtype, Gradient, Instructions, Kind, Scalars, Step, Tile, Variant, replay};

/// A file: steps of one implementation.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// Names of variants, one of which must have the bits of all runs.
    pub(crate) variants: Vec<&'static Variant>,
    gradient: Dtype,
    numels: Vec<usize>,
    pub(crate) runs: Vec<Run>,
}

/// Bytes of arrays: parameter and moments of each tensor.
type Arrays = Vec<Vec<u8>>;

/// Some steps with the same settings.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) settings: String,
    scalars: Vec<Scalars>,
    before: Arrays,
    /// Gradients of all tensors in the first step, then in the next one.
    gradients: Arrays,
    after: Arrays,
}

impl Recorded {
    /// Parses the text of a file.
    pub(crate) fn read(text: &str) -> Result<Recorded, String> {
        let mut parts = text.split("\n\n");
        let head = parts.next().unwrap_or_default();
        let names = only(head, "variants")?;
        let variants = names
            .split(' ')
            .map(|name| Variant::named(name).ok_or_else(|| format!("no variant is called {name}")))
            .collect::<Result<Vec<_>, _>>()?;
        let gradient = match only(head, "gradients")? {
            "F32" => Dtype::F32,
            "BF16" => Dtype::Bf16,
            other => return Err(format!("gradients are F32 or BF16, not {other}")),
        };
        let numels = numbers(only(head, "tensors")?)?;
        let mut recorded = Recorded { variants, gradient, numels, runs: Vec::new() };
        for part in parts {
            let run = recorded.run(part)?;
            recorded.runs.push(run);
        }
        if recorded.runs.is_empty() { Err("no run was recorded".into()) } else { Ok(recorded) }
    }

    fn run(&self, text: &str) -> Result<Run, String> {
        let variant = self.variants[0];
        let (dtypes, kind) = (variant.dtypes(), variant.kind());
        let scalars =
            all(text, "scalars").map(|line| scalars(kind, &numbers(line)?)).collect::<Result<Vec<_>, String>>()?;
        let moments = scalars.first().ok_or("a run has no steps")?.moments();
        let of_tensor: Vec<Dtype> =
            [dtypes.parameter].into_iter().chain(std::iter::repeat_n(dtypes.moments, moments)).collect();
        let read = |word, per_tensor: &[Dtype], times: usize| {
            let once = self.numels.iter().flat_map(|&numel| per_tensor.iter().map(move |&dtype| (numel, dtype)));
            arrays(text, word, &(0..times).flat_map(|_| once.clone()).collect::<Vec<_>>())
        };
        Ok(Run {
            settings: only(text, "run")?.to_owned(),
            before: read("before", &of_tensor, 1)?,
            gradients: read("gradient", &[self.gradient], scalars.len())?,
            after: read("after", &of_tensor, 1)?,
            scalars,
        })
    }

    /// Returns whether the variant leaves the recorded bits in a run. All NaNs count as the same.
    pub(crate) fn has_bits_of(&self, run: &Run, variant: &Variant, on: Instructions) -> bool {
        let dtypes = variant.dtypes();
        let mut before = run.before.clone();
        let tensors = before.chunks_mut(run.before.len() / self.numels.len());
        for (number, (tensor, &numel)) in tensors.zip(&self.numels).enumerate() {
            let gradients = run.gradients.iter().skip(number).step_by(self.numels.len());
            let steps: Vec<Step<'_>> = gradients
                .zip(&run.scalars)
                .map(|(values, &scalars)| Step::Taken {
                    gradient: Gradient { dtype: self.gradient, values, factor: None },
                    scalars,
                })
                .collect();
            let (parameter, moments) = tensor.split_first_mut().expect("a tensor has a parameter");
            let mut moments: Vec<&mut [u8]> = moments.iter_mut().map(Vec::as_mut_slice).collect();
            let mut tile = Tile { offset: 0, numel: numel as u64, dtypes, parameter, moments: &mut moments };
            replay(on, variant, &mut tile, &steps).expect("the recorded arrays fit together");
        }
        let per_tensor = before.len() / self.numels.len();
        before.iter().zip(&run.after).enumerate().all(|(number, (found, expected))| {
            let dtype = if number % per_tensor == 0 { dtypes.parameter } else { dtypes.moments };
            found
                .chunks(dtype.bytes())
                .zip(expected.chunks(dtype.bytes()))
                .all(|(a, b)| a == b || is_nan(a) && is_nan(b))
        })
    }
}

/// Returns the rest of each line that begins with `word`.
fn all<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| line.strip_prefix(word)?.strip_prefix(' '))
}

fn only<'a>(text: &'a str, word: &'a str) -> Result<&'a str, String> {
    let mut lines = all(text, word);
    match (lines.next(), lines.next()) {
        (Some(line), None) => Ok(line),
        _ => Err(format!("expected one line `{word} ...`")),
    }
}

fn numbers<T: std::str::FromStr>(line: &str) -> Result<Vec<T>, String> {
    line.split(' ').map(|text| text.parse().map_err(|_| format!("{text} is no number"))).collect()
}

/// Returns the arrays of the lines that begin with `word`, which must have these numbers of elements and dtypes.
fn arrays(text: &str, word: &str, expected: &[(usize, Dtype)]) -> Result<Arrays, String> {
    let lines: Vec<&str> = all(text, word).collect();
    if lines.len() != expected.len() {
        return Err(format!("expected {} lines `{word} ...`, found {}", expected.len(), lines.len()));
    }
    lines.iter().zip(expected).map(|(line, &(numel, dtype))| array(line, numel, dtype)).collect()
}

fn array(line: &str, numel: usize, dtype: Dtype) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    for digits in line.split(' ') {
        let bits = u32::from_str_radix(digits, 16).map_err(|_| format!("{digits} are no hexadecimal digits"))?;
        if digits.len() != 2 * dtype.bytes() {
            return Err(format!("{digits} are not the bits of {dtype:?}"));
        }
        bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.bytes()]);
    }
    let found = bytes.len() / dtype.bytes();
    if found == numel { Ok(bytes) } else { Err(format!("expected {numel} elements, found {found}")) }
}

/// Parses the scalars of a step: numbers in the order of the fields, for Adam followed by whether its bias is the
/// device's.
fn scalars(kind: Kind, numbers: &[f64]) -> Result<Scalars, String> {
    let (own, of_device) = match (kind, numbers) {
        (Kind::Adam, [own @ .., of_device]) => (own, *of_device != 0.0),
        _ => (numbers, false),
    };
    let found = Scalars::from_numbers(kind, own);
    match found.ok_or_else(|| format!("{} numbers are not the scalars of {kind:?}", numbers.len()))? {
        Scalars::Adam(adam @ AdamScalars { bias: Bias::Host { correction1, correction2_sqrt }, .. }) if of_device => {
            let bias = Bias::Device { correction1: correction1 as f32, correction2_sqrt: correction2_sqrt as f32 };
            Ok(Scalars::Adam(AdamScalars { bias, ..adam }))
        }
        scalars => Ok(scalars),
    }
}

fn is_nan(element: &[u8]) -> bool {
    match *element {
        [a, b] => f32::from_bits(u32::from(u16::from_le_bytes([a, b])) << 16).is_nan(),
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]).is_nan(),
        _ => false,
    }
}
