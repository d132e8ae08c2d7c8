//! Draws numbers from a seed: scalars of optimizers, and values of every kind.

use shardfast_optim::{AdagradScalars, AdamScalars, Bias, Kind, LionScalars, Scalars, SgdScalars, Variant};

/// Random numbers by SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.below(2) == 1
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns a number between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Returns ordinary numbers, denormals, zeros, huge ones, and sometimes any bits at all.
    pub(crate) fn value(&mut self) -> f32 {
        match self.below(16) {
            0 => self.one_of(&[0.0, -0.0]),
            1 => f32::from_bits(self.next() as u32 & 0x807f_ffff),
            2 => self.unit() * 1e-20,
            3 => self.unit() * 1e25,
            4 => f32::from_bits(self.next() as u32),
            5 => self.unit() * 1e-3,
            6 => self.one_of(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0, -1.0]),
            _ => self.unit(),
        }
    }

    /// Returns scalars of a step of `variant`, with the same flags for the same `flags`.
    pub(crate) fn scalars(&mut self, variant: &Variant, flags: u64) -> Scalars {
        let flag = |bit: u32| (flags >> bit) & 1 == 1;
        let lr = f64::from(self.unit().abs()) * 0.1 + 1e-6;
        let weight_decay = if flag(0) { 0.1 } else { 0.0 };
        let betas = [0.9, 0.95, 0.999, 0.3, 0.5, 0.0];
        match variant.kind() {
            Kind::Adam => {
                let (beta1, beta2) = (self.one_of(&betas), self.one_of(&betas));
                let step = 1 + self.below(50) as i32;
                let correction1 = 1.0 - f64::powi(beta1, step);
                let correction2_sqrt = (1.0 - f64::powi(beta2, step)).sqrt();
                let bias = if variant.takes_bias_of_device() {
                    Bias::Device { correction1: correction1 as f32, correction2_sqrt: correction2_sqrt as f32 }
                } else {
                    Bias::Host { correction1, correction2_sqrt }
                };
                let (decoupled, maximize, amsgrad) = (flag(1), flag(2), flag(3));
                let eps = 1e-8;
                Scalars::Adam(AdamScalars { lr, beta1, beta2, eps, weight_decay, decoupled, maximize, amsgrad, bias })
            }
            Kind::Sgd => Scalars::Sgd(SgdScalars {
                lr,
                momentum: if flag(1) { 0.9 } else { 0.0 },
                dampening: if flag(2) { self.one_of(&[0.3, 0.9, 0.123]) } else { 0.0 },
                weight_decay,
                nesterov: flag(3),
                maximize: flag(4),
                first: self.below(4) == 0,
            }),
            Kind::Adagrad => {
                Scalars::Adagrad(AdagradScalars { corrected_lr: lr, eps: 1e-10, weight_decay, maximize: flag(1) })
            }
            Kind::Lion => {
                let (beta1, beta2) = (self.one_of(&betas), self.one_of(&betas));
                Scalars::Lion(LionScalars { lr, beta1, beta2, weight_decay })
            }
        }
    }
}
