//! Defines how arrays are stored.

use std::fmt;

/// Storage of an element; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32, four bytes.
    F32,
    /// Upper half of a binary32, two bytes.
    Bf16,
}

impl Dtype {
    /// Returns the bytes of one element.
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

/// Element types of a parameter and of its moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtypes {
    /// Element type of the parameter.
    pub parameter: Dtype,
    /// Element type of all moments.
    pub moments: Dtype,
}

impl Dtypes {
    /// Parameters and moments of `F32`.
    pub const F32: Dtypes = Dtypes { parameter: Dtype::F32, moments: Dtype::F32 };
    /// Parameters and moments of `BF16`.
    pub const BF16: Dtypes = Dtypes { parameter: Dtype::Bf16, moments: Dtype::Bf16 };
    /// Parameters of `F32` with moments of `BF16`.
    pub const MIXED: Dtypes = Dtypes { parameter: Dtype::F32, moments: Dtype::Bf16 };
}
