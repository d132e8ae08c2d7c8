//! Models every variant slowly, one element at a time, written from the sources that `variant.rs` names. Each operation
//! of `f32` is done in `f64` and then rounded, which is the same for sums, products, quotients and roots (53 bits are
//! more than 2 x 24 + 1). The model shares nothing with the crate but the scalars.

use shardfast_optim::{AdagradScalars, AdamScalars, Bias, LionScalars, Scalars, SgdScalars};

/// Parameter, moments and gradient of one element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Element {
    pub(crate) p: f32,
    pub(crate) state: [f32; 3],
    pub(crate) g: f32,
}

fn add(a: f32, b: f32) -> f32 {
    (f64::from(a) + f64::from(b)) as f32
}

fn sub(a: f32, b: f32) -> f32 {
    (f64::from(a) - f64::from(b)) as f32
}

fn mul(a: f32, b: f32) -> f32 {
    (f64::from(a) * f64::from(b)) as f32
}

fn div(a: f32, b: f32) -> f32 {
    (f64::from(a) / f64::from(b)) as f32
}

fn sqrt(a: f32) -> f32 {
    f64::from(a).sqrt() as f32
}

fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// Returns the nearest value of 16 bits: the nearer neighbour, of equally near ones the even one.
pub(crate) fn bf16(x: f32) -> f32 {
    if !x.is_finite() {
        return if x.is_nan() { f32::NAN } else { x };
    }
    let below = x.to_bits() >> 16;
    // What lies behind the largest finite value counts as the next power of two.
    let value = |bits: u32| {
        let finite = f32::from_bits(bits << 16);
        if finite.is_infinite() { 2f64.powi(128).copysign(f64::from(x)) } else { f64::from(finite) }
    };
    let (toward, away) = ((value(below) - f64::from(x)).abs(), (value(below + 1) - f64::from(x)).abs());
    let up = away < toward || (away == toward && below % 2 == 1);
    f32::from_bits((below + u32::from(up)) << 16)
}

fn same(x: f32) -> f32 {
    x
}

/// Does one step of the variant called `name` on `e`; `is_tail` is the element's place in its tensor.
pub(crate) fn step(name: &str, scalars: &Scalars, is_tail: bool, e: &mut Element) {
    let (implementation, dtype) = name.rsplit_once('.').expect("names end in a dtype");
    let narrow: fn(f32) -> f32 = if dtype == "bf16" { bf16 } else { same };
    match (scalars, implementation) {
        (Scalars::Adam(s), "adam.fused.cpu") => adam_fused_cpu(s, e, is_tail),
        (Scalars::Adam(s), "adam.fused.cpu-default") => adam_fused_cpu_default(s, e, is_tail),
        (Scalars::Adam(s), "adam.fused.cuda") => adam_fused_cuda(s, e, true),
        (Scalars::Adam(s), "adam.fused-separate.cuda") => adam_fused_cuda(s, e, false),
        (Scalars::Adam(s), _) => adam_by_operations(s, e, implementation, narrow),
        (Scalars::Sgd(s), _) => sgd(s, e, implementation, is_tail, narrow),
        (Scalars::Adagrad(s), "adagrad.fused.cuda") => adagrad_fused_cuda(s, e, true),
        (Scalars::Adagrad(s), "adagrad.fused-separate.cuda") => adagrad_fused_cuda(s, e, false),
        (Scalars::Adagrad(s), _) => adagrad(s, e, implementation, narrow),
        (Scalars::Lion(s), _) => lion(s, e, implementation, narrow),
    }
    // What is stored is narrow in any case.
    if dtype == "bf16" {
        e.p = bf16(e.p);
    }
    if dtype != "f32" {
        e.state = e.state.map(bf16);
    }
}

fn host(s: &AdamScalars) -> (f64, f64) {
    match s.bias {
        Bias::Host { correction1, correction2_sqrt } => (correction1, correction2_sqrt),
        Bias::Device { .. } => panic!("corrections of the device"),
    }
}

fn device(s: &AdamScalars) -> (f32, f32) {
    match s.bias {
        Bias::Device { correction1, correction2_sqrt } => (correction1, correction2_sqrt),
        Bias::Host { .. } => panic!("corrections of the host"),
    }
}

/// Models `FusedAdamKernel.cpp`, vectors and tail, as compilers contract them.
fn adam_fused_cpu(s: &AdamScalars, e: &mut Element, is_tail: bool) {
    let (correction1, root) = host(s);
    let g = if s.maximize { mul(e.g, -1.0) } else { e.g };
    let decays = s.weight_decay != 0.0;
    let g = if decays && !s.decoupled { fma(e.p, s.weight_decay as f32, g) } else { g };
    if decays && s.decoupled {
        e.p = mul(e.p, (1.0 - s.lr * s.weight_decay) as f32);
    }
    let [m, v, largest] = &mut e.state;
    let weight = (1.0 - s.beta1) as f32;
    let difference = sub(g, *m);
    *m = match (weight.abs() < 0.5, is_tail) {
        (true, _) => fma(weight, difference, *m),
        (false, true) => fma(-difference, sub(1.0, weight), g),
        (false, false) => fma(sub(weight, 1.0), difference, g),
    };
    let scaled = mul((1.0 - s.beta2) as f32, g);
    let beta2 = s.beta2 as f32;
    *v = if is_tail { fma(*v, beta2, mul(scaled, g)) } else { fma(scaled, g, mul(*v, beta2)) };
    let mut under_root = *v;
    if s.amsgrad {
        *largest = if is_tail { std_max(*largest, *v) } else { vector_max(*largest, *v) };
        under_root = *largest;
    }
    let d = add(div(sqrt(under_root), root as f32), s.eps as f32);
    let step = (-(s.lr / correction1)) as f32;
    e.p = add(e.p, div(mul(step, *m), d));
}

/// Models the same kernel compiled for processors without FMA.
fn adam_fused_cpu_default(s: &AdamScalars, e: &mut Element, is_tail: bool) {
    let (correction1, root) = host(s);
    let mut g = if s.maximize { -e.g } else { e.g };
    if s.weight_decay != 0.0 && s.decoupled {
        e.p = mul(e.p, (1.0 - s.lr * s.weight_decay) as f32);
    } else if s.weight_decay != 0.0 {
        g = add(g, mul(e.p, s.weight_decay as f32));
    }
    let weight = (1.0 - s.beta1) as f32;
    let difference = sub(g, e.state[0]);
    e.state[0] = match (weight < 0.5, is_tail) {
        (true, _) => add(e.state[0], mul(weight, difference)),
        (false, true) => sub(g, mul(difference, sub(1.0, weight))),
        (false, false) => add(mul(sub(weight, 1.0), difference), g),
    };
    e.state[1] = add(mul(e.state[1], s.beta2 as f32), mul(mul((1.0 - s.beta2) as f32, g), g));
    if s.amsgrad {
        let larger = if is_tail { std_max } else { vector_max };
        e.state[2] = larger(e.state[2], e.state[1]);
    }
    let under_root = e.state[if s.amsgrad { 2 } else { 1 }];
    let d = add(div(sqrt(under_root), root as f32), s.eps as f32);
    e.p = sub(e.p, div(mul((s.lr / correction1) as f32, e.state[0]), d));
}

/// Models `adam_math` of `fused_adam_utils.cuh`; all `f32`.
fn adam_fused_cuda(s: &AdamScalars, e: &mut Element, contracts: bool) {
    let (correction1, root) = device(s);
    let (lr, beta1, beta2, decay) = (s.lr as f32, s.beta1 as f32, s.beta2 as f32, s.weight_decay as f32);
    let mut g = if s.maximize { -e.g } else { e.g };
    if s.weight_decay != 0.0 {
        match (s.decoupled, contracts) {
            (false, true) => g = fma(e.p, decay, g),
            (false, false) => g = add(g, mul(e.p, decay)),
            (true, true) => e.p = fma(-mul(lr, decay), e.p, e.p),
            (true, false) => e.p = sub(e.p, mul(mul(lr, decay), e.p)),
        }
    }
    let [m, v, largest] = &mut e.state;
    *m = fma(beta1, *m, fma(-beta1, g, g));
    *v = fma(beta2, *v, fma(-beta2, mul(g, g), mul(g, g)));
    let step = div(lr, correction1);
    if s.amsgrad {
        *largest = std_max(*largest, *v);
    }
    let d = add(div(sqrt(if s.amsgrad { *largest } else { *v }), root), s.eps as f32);
    e.p = sub(e.p, div(mul(step, *m), d));
}

/// Models `_single_tensor_adam` and `_multi_tensor_adam` of `adam.py`, operation by operation.
fn adam_by_operations(s: &AdamScalars, e: &mut Element, implementation: &str, narrow: fn(f32) -> f32) {
    let mut g = if s.maximize { -e.g } else { e.g };
    if s.weight_decay != 0.0 {
        if s.decoupled {
            e.p = narrow(mul(e.p, (1.0 - s.lr * s.weight_decay) as f32));
        } else {
            g = narrow(fma(s.weight_decay as f32, e.p, g));
        }
    }
    let weight = (1.0 - s.beta1) as f32;
    let [m, v, largest] = &mut e.state;
    *m = narrow(if weight < 0.5 { fma(weight, sub(g, *m), *m) } else { fma(-sub(g, *m), sub(1.0, weight), g) });
    *v = narrow(mul(*v, s.beta2 as f32));
    *v = narrow(fma((1.0 - s.beta2) as f32, mul(g, g), *v));
    let mut under_root = *v;
    if s.amsgrad {
        let of_lists = implementation.contains("foreach");
        *largest = if of_lists { vector_max(*largest, *v) } else { device_max(*largest, *v) };
        under_root = *largest;
    }
    let (eps, root) = (s.eps as f32, narrow(sqrt(under_root)));
    let lr = s.lr as f32;
    e.p = match implementation {
        "adam.foreach.cuda" => {
            let (correction1, correction2_sqrt) = host(s);
            let d = narrow(add(narrow(div(root, correction2_sqrt as f32)), eps));
            fma(-((s.lr / correction1) as f32), div(*m, d), e.p)
        }
        "adam.for-loop.cuda" => {
            let (correction1, correction2_sqrt) = host(s);
            let d = narrow(add(narrow(mul(root, div(1.0, correction2_sqrt as f32))), eps));
            fma((-(s.lr / correction1)) as f32, div(*m, d), e.p)
        }
        "adam.capturable-foreach.cuda" => {
            let (correction1, correction2_sqrt) = device(s);
            let step = div(1.0, div(-correction1, lr));
            let d = div(add(div(root, correction2_sqrt), eps), step);
            add(e.p, div(*m, d))
        }
        "adam.capturable-for-loop.cuda" => {
            let (correction1, correction2_sqrt) = device(s);
            let step = -mul(div(1.0, correction1), lr);
            let d = add(div(root, mul(correction2_sqrt, step)), mul(div(1.0, step), eps));
            add(e.p, div(*m, d))
        }
        other => panic!("no model of {other}"),
    };
}

/// Returns the larger one as `std::max` does.
fn std_max(a: f32, b: f32) -> f32 {
    if a < b { b } else { a }
}

/// Returns the larger one as vectors and lists of tensors take it: the second of equal ones.
fn vector_max(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => a,
        (_, true) => b,
        _ if a > b => a,
        _ => b,
    }
}

/// Returns the larger one as `fmaxf` of a device takes it, but keeps NaNs.
fn device_max(a: f32, b: f32) -> f32 {
    match (a.is_nan() || b.is_nan(), a == 0.0 && b == 0.0) {
        (true, _) => f32::NAN,
        (_, true) if a.is_sign_positive() || b.is_sign_positive() => 0.0,
        _ => vector_max(a, b),
    }
}

/// Models `FusedSGDKernel.cpp`, `FusedSgdKernel.cu` and `sgd.py`.
fn sgd(s: &SgdScalars, e: &mut Element, implementation: &str, is_tail: bool, narrow: fn(f32) -> f32) {
    let of_operations = !implementation.starts_with("sgd.fused");
    let narrow = if of_operations { narrow } else { same };
    let fused = !implementation.ends_with("cpu-default");
    let mul_add = |a, b, c| if fused { fma(a, b, c) } else { add(mul(a, b), c) };
    let (momentum, decay) = (s.momentum as f32, s.weight_decay as f32);
    let mut g = if s.maximize { -e.g } else { e.g };
    if s.weight_decay != 0.0 {
        g = narrow(mul_add(decay, e.p, g));
    }
    if s.momentum != 0.0 {
        let on_device = implementation.starts_with("sgd.fused") && implementation.ends_with("cuda");
        let weight = if on_device { sub(1.0, s.dampening as f32) } else { (1.0 - s.dampening) as f32 };
        let buffer = e.state[0];
        let (kept, added) = (narrow(mul(buffer, momentum)), mul(g, weight));
        e.state[0] = match implementation {
            _ if s.first => g,
            "sgd.fused.cpu" if is_tail => fma(buffer, momentum, added),
            "sgd.fused.cuda" => fma(momentum, buffer, added),
            "sgd.fused.cpu" | "sgd.foreach.cuda" | "sgd.for-loop.cpu" | "sgd.fused-second.cuda" => {
                narrow(fma(weight, g, kept))
            }
            "sgd.fused.cpu-default" | "sgd.fused-separate.cuda" => add(kept, added),
            other => panic!("no model of {other}"),
        };
        g = if s.nesterov { narrow(mul_add(e.state[0], momentum, g)) } else { e.state[0] };
    }
    e.p = mul_add(g, (-s.lr) as f32, e.p);
}

/// Models `FusedAdagradKernel.cpp` and `adagrad.py`.
fn adagrad(s: &AdagradScalars, e: &mut Element, implementation: &str, narrow: fn(f32) -> f32) {
    let is_fused = implementation.starts_with("adagrad.fused");
    let narrow = if is_fused { same } else { narrow };
    let contracts = !implementation.ends_with("cpu-default");
    let mul_add = |a, b, c| if contracts { fma(a, b, c) } else { add(mul(a, b), c) };
    let mut g = if s.maximize { -e.g } else { e.g };
    if s.weight_decay != 0.0 {
        g = narrow(mul_add(e.p, s.weight_decay as f32, g));
    }
    e.state[0] = narrow(mul_add(g, g, e.state[0]));
    let deviation = narrow(add(narrow(sqrt(e.state[0])), s.eps as f32));
    let rate = s.corrected_lr as f32;
    e.p = if implementation == "adagrad.for-loop.cuda" {
        fma(-rate, div(g, deviation), e.p)
    } else {
        sub(e.p, div(narrow(mul(rate, g)), deviation))
    };
}

/// Models `adagrad_math` of `fused_adagrad_utils.cuh`: scalars are `f64`, and operations with them are, too.
fn adagrad_fused_cuda(s: &AdagradScalars, e: &mut Element, contracts: bool) {
    let mut g = if s.maximize { -e.g } else { e.g };
    if s.weight_decay != 0.0 {
        let (wide, p) = (f64::from(g), f64::from(e.p));
        g = (if contracts { p.mul_add(s.weight_decay, wide) } else { wide + p * s.weight_decay }) as f32;
    }
    e.state[0] = if contracts { fma(g, g, e.state[0]) } else { add(e.state[0], mul(g, g)) };
    let deviation = f64::from(sqrt(e.state[0])) + s.eps;
    e.p = (f64::from(e.p) - s.corrected_lr * f64::from(g) / deviation) as f32;
}

/// Models both published references.
fn lion(s: &LionScalars, e: &mut Element, implementation: &str, narrow: fn(f32) -> f32) {
    let (beta1, weight1) = (s.beta1 as f32, (1.0 - s.beta1) as f32);
    let (beta2, weight2) = (s.beta2 as f32, (1.0 - s.beta2) as f32);
    let (m, g) = (e.state[0], e.g);
    let p = narrow(mul(e.p, (1.0 - s.lr * s.weight_decay) as f32));
    let u = if implementation.starts_with("lion.added") {
        narrow(fma(g, weight1, narrow(mul(m, beta1))))
    } else {
        narrow(add(narrow(mul(m, beta1)), narrow(mul(g, weight1))))
    };
    let rate = s.lr as f32;
    e.p = match u.partial_cmp(&0.0) {
        Some(std::cmp::Ordering::Greater) => sub(p, rate),
        Some(std::cmp::Ordering::Less) => add(p, rate),
        _ => add(p, mul(-rate, 0.0)),
    };
    let kept = narrow(mul(m, beta2));
    e.state[0] =
        if implementation.ends_with("cpu-default") { add(kept, mul(g, weight2)) } else { fma(g, weight2, kept) };
}
