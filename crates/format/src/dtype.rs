//! Element types that PyTorch and safetensors share.

use serde::{Deserialize, Serialize};

/// An element type. Names are those of the safetensors header (`F32`, `BF16`, `F8_E4M3`, …).
///
/// The discriminants are stored in manifests: they are only ever appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
#[allow(missing_docs)] // each variant is its safetensors name
pub enum DType {
    Bool = 0,
    U8 = 1,
    I8 = 2,
    F8E5M2 = 3,
    F8E4M3 = 4,
    F8E8M0 = 5,
    F8E5M2Fnuz = 6,
    F8E4M3Fnuz = 7,
    /// Two 4-bit floats in a byte (torch's `float4_e2m1fn_x2`). The unit is the byte; in a safetensors header the last
    /// dimension counts single values and is twice as long.
    F4x2 = 8,
    U16 = 9,
    I16 = 10,
    F16 = 11,
    BF16 = 12,
    U32 = 13,
    I32 = 14,
    F32 = 15,
    U64 = 16,
    I64 = 17,
    F64 = 18,
    C64 = 19,
}

impl DType {
    /// All types, in the order of the stored discriminants.
    pub const ALL: [DType; 20] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::F8E5M2,
        DType::F8E4M3,
        DType::F8E8M0,
        DType::F8E5M2Fnuz,
        DType::F8E4M3Fnuz,
        DType::F4x2,
        DType::U16,
        DType::I16,
        DType::F16,
        DType::BF16,
        DType::U32,
        DType::I32,
        DType::F32,
        DType::U64,
        DType::I64,
        DType::F64,
        DType::C64,
    ];

    /// Returns the bytes of one element (of one pair, for [`DType::F4x2`]).
    pub const fn size_bytes(self) -> u64 {
        match self {
            DType::Bool
            | DType::U8
            | DType::I8
            | DType::F8E5M2
            | DType::F8E4M3
            | DType::F8E8M0
            | DType::F8E5M2Fnuz
            | DType::F8E4M3Fnuz
            | DType::F4x2 => 1,
            DType::U16 | DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 | DType::C64 => 8,
        }
    }

    /// Returns the name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "BOOL",
            DType::U8 => "U8",
            DType::I8 => "I8",
            DType::F8E5M2 => "F8_E5M2",
            DType::F8E4M3 => "F8_E4M3",
            DType::F8E8M0 => "F8_E8M0",
            DType::F8E5M2Fnuz => "F8_E5M2FNUZ",
            DType::F8E4M3Fnuz => "F8_E4M3FNUZ",
            DType::F4x2 => "F4",
            DType::U16 => "U16",
            DType::I16 => "I16",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::U32 => "U32",
            DType::I32 => "I32",
            DType::F32 => "F32",
            DType::U64 => "U64",
            DType::I64 => "I64",
            DType::F64 => "F64",
            DType::C64 => "C64",
        }
    }

    /// Returns the type with the safetensors name `name`.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns the type with the stored discriminant `code`.
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.get(usize::from(code)).copied()
    }

    /// Returns the stored discriminant.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_dense_and_names_unique() {
        for (code, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), code);
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(DType::from_code(20), None);
        assert_eq!(DType::from_name("F6_E2M3"), None);
    }
}
