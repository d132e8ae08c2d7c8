//! How arrays are stored.

use std::fmt;

/// How an element is stored; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "F32",
            Dtype::Bf16 => "BF16",
        })
    }
}

/// The dtypes of a parameter and of its moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtypes {
    /// Of the parameter.
    pub parameter: Dtype,
    /// Of all moments.
    pub moments: Dtype,
}

impl Dtypes {
    /// `F32` throughout.
    pub const F32: Dtypes = Dtypes { parameter: Dtype::F32, moments: Dtype::F32 };
    /// `BF16` throughout.
    pub const BF16: Dtypes = Dtypes { parameter: Dtype::Bf16, moments: Dtype::Bf16 };
    /// Parameters of `F32` with moments of `BF16`.
    pub const MIXED: Dtypes = Dtypes { parameter: Dtype::F32, moments: Dtype::Bf16 };
}
