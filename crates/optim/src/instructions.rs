//! Chooses the processor's vector instructions when the program runs.

use crate::optimizer::Optimizer;
use crate::piece::{Emulated, Fma, Instruction};
use crate::task::Task;

/// Instructions that this processor has. The result is the same with each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instructions(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    /// Instructions that the program was compiled for.
    Compiled,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// `true` if the program was compiled for processors that round `a * b + c` once.
const HAS_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

impl Instructions {
    /// Returns the fastest instructions.
    pub fn best() -> Instructions {
        let all = Instructions::all();
        all[all.len() - 1]
    }

    /// Returns all sets, the slowest first.
    pub fn all() -> Vec<Instructions> {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut sets = vec![Instructions(Set::Compiled)];
        #[cfg(target_arch = "x86_64")]
        {
            use std::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") {
                sets.push(Instructions(Set::Avx2));
                if has!("avx512f") && has!("avx512vl") {
                    sets.push(Instructions(Set::Avx512));
                }
            }
        }
        sets
    }

    /// Runs `task` with these instructions.
    #[allow(unsafe_code)] // calls functions that only some processors can run
    pub(crate) fn run<O: Optimizer>(self, task: Task<'_, '_, O>) {
        match self.0 {
            Set::Compiled if HAS_FMA => compiled::<Instruction, O>(task),
            Set::Compiled => compiled::<Emulated, O>(task),
            // SAFETY: `all` alone makes this value, where the processor has AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { avx2(task) },
            // SAFETY: `all` alone makes this value, where the processor has AVX-512F and VL, AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { avx512(task) },
        }
    }
}

#[inline(never)]
fn compiled<F: Fma, O: Optimizer>(task: Task<'_, '_, O>) {
    task.run::<F>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<O: Optimizer>(task: Task<'_, '_, O>) {
    task.run::<Instruction>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
fn avx512<O: Optimizer>(task: Task<'_, '_, O>) {
    task.run::<Instruction>();
}
