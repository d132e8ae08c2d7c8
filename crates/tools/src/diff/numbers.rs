//! Elements compared bit by bit, and floating-point ones by how far they are apart.

use shardfast_format::DType;

use super::Elements;

/// Differences between two tensors of one dtype and shape.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    elements: u64,
    bytes: u64,
    first: Option<u64>,
    max_abs: Option<f64>,
    non_finite: u64,
}

impl Tally {
    /// Compares two runs that begin at the flat index `start`.
    pub(super) fn count(&mut self, dtype: DType, start: u64, a: &[u8], b: &[u8]) {
        if a == b {
            return;
        }
        let item = dtype.size_bytes() as usize;
        for ((i, a), b) in (start..).zip(a.chunks_exact(item)).zip(b.chunks_exact(item)) {
            if a == b {
                continue;
            }
            self.elements += 1;
            self.bytes += a.iter().zip(b).filter(|(a, b)| a != b).count() as u64;
            self.first.get_or_insert(i);
            let (Some(a), Some(b)) = (number(dtype, a), number(dtype, b)) else { continue };
            if a.is_finite() && b.is_finite() {
                // Two finite numbers can be further apart than any number is large.
                let apart = (a - b).norm().min(f64::MAX);
                self.max_abs = Some(self.max_abs.map_or(apart, |max| max.max(apart)));
            } else {
                self.non_finite += 1;
            }
        }
    }

    /// Returns the differences, if there are any.
    pub(super) fn elements(&self, dtype: DType, shape: &[u64]) -> Option<Elements> {
        let mut flat = self.first?;
        let mut first = vec![0; shape.len()];
        for (index, &length) in first.iter_mut().zip(shape).rev() {
            *index = flat % length;
            flat /= length;
        }
        Some(Elements {
            dtype: dtype.name(),
            elements: shape.iter().product(),
            elements_different: self.elements,
            bytes_different: self.bytes,
            first,
            max_abs_difference: self.max_abs,
            non_finite: self.non_finite,
        })
    }
}

/// A real or complex number.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Number {
    real: f64,
    imaginary: f64,
}

impl Number {
    fn is_finite(self) -> bool {
        self.real.is_finite() && self.imaginary.is_finite()
    }

    fn norm(self) -> f64 {
        self.real.hypot(self.imaginary)
    }
}

impl std::ops::Sub for Number {
    type Output = Number;

    fn sub(self, other: Number) -> Number {
        Number { real: self.real - other.real, imaginary: self.imaginary - other.imaginary }
    }
}

/// Returns the number of an element, for floating-point types (pairs of 4-bit floats are none).
fn number(dtype: DType, le: &[u8]) -> Option<Number> {
    let bits = le.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
    let single = |bits: u64| f64::from(f32::from_bits(bits as u32));
    let real = match dtype {
        DType::F64 => f64::from_bits(bits),
        DType::F32 => single(bits),
        DType::BF16 => single(bits << 16),
        DType::F16 => small(bits, 5, 10, 15, Special::Ieee),
        DType::F8E5M2 => small(bits, 5, 2, 15, Special::Ieee),
        DType::F8E4M3 => small(bits, 4, 3, 7, Special::AllOnesNan),
        DType::F8E5M2Fnuz => small(bits, 5, 2, 16, Special::NegativeZeroNan),
        DType::F8E4M3Fnuz => small(bits, 4, 3, 8, Special::NegativeZeroNan),
        DType::F8E8M0 if bits == 0xff => f64::NAN,
        DType::F8E8M0 => power_of_two(bits as i32 - 127),
        DType::C64 => return Some(Number { real: single(bits & 0xffff_ffff), imaginary: single(bits >> 32) }),
        DType::Bool
        | DType::U8
        | DType::I8
        | DType::F4x2
        | DType::U16
        | DType::I16
        | DType::U32
        | DType::I32
        | DType::U64
        | DType::I64 => return None,
    };
    Some(Number { real, imaginary: 0.0 })
}

/// Bits of a small float that are no numbers.
#[derive(Clone, Copy, PartialEq)]
enum Special {
    /// The highest exponent, as in IEEE 754.
    Ieee,
    /// Exponent and mantissa all ones; there is no infinity (OCP 8-bit floating point, E4M3).
    AllOnesNan,
    /// NaN in place of the negative zero; no infinity (the FNUZ types).
    NegativeZeroNan,
}

fn small(bits: u64, exponent_bits: u32, mantissa_bits: u32, bias: i32, special: Special) -> f64 {
    let mantissa_max = (1u64 << mantissa_bits) - 1;
    let exponent_max = (1u64 << exponent_bits) - 1;
    let mantissa = bits & mantissa_max;
    let exponent = bits >> mantissa_bits & exponent_max;
    let is_negative = bits >> (mantissa_bits + exponent_bits) & 1 == 1;
    let magnitude = match special {
        Special::Ieee if exponent == exponent_max && mantissa == 0 => f64::INFINITY,
        Special::Ieee if exponent == exponent_max => f64::NAN,
        Special::AllOnesNan if exponent == exponent_max && mantissa == mantissa_max => f64::NAN,
        Special::NegativeZeroNan if is_negative && exponent == 0 && mantissa == 0 => f64::NAN,
        _ => {
            let (significand, power) =
                if exponent == 0 { (mantissa, 1) } else { (mantissa | (mantissa_max + 1), exponent as i32) };
            significand as f64 * power_of_two(power - bias - mantissa_bits as i32)
        }
    };
    if is_negative { -magnitude } else { magnitude }
}

/// Returns 2 to a power that a normal number can have.
fn power_of_two(power: i32) -> f64 {
    f64::from_bits(((power + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn real(dtype: DType, bits: u64) -> f64 {
        number(dtype, &bits.to_le_bytes()[..dtype.size_bytes() as usize]).unwrap().real
    }

    #[test]
    fn small_floats_have_their_published_values() {
        for (bits, expected) in
            [(0x3c00, 1.0), (0xc000, -2.0), (0x7bff, 65504.0), (1, 2f64.powi(-24)), (0x3555, 0.333251953125)]
        {
            assert_eq!(real(DType::F16, bits), expected);
        }
        assert_eq!(real(DType::F16, 0x7c00), f64::INFINITY);
        assert!(real(DType::F16, 0x7c01).is_nan());
        assert_eq!(real(DType::BF16, 0x3f80), 1.0);
        assert_eq!(real(DType::BF16, 0xc040), -3.0);
        assert_eq!(real(DType::F8E4M3, 0x7e), 448.0);
        assert_eq!(real(DType::F8E4M3, 0x01), 2f64.powi(-9));
        assert!(real(DType::F8E4M3, 0xff).is_nan());
        assert_eq!(real(DType::F8E5M2, 0x7b), 57344.0);
        assert_eq!(real(DType::F8E5M2, 0xfc), f64::NEG_INFINITY);
        assert_eq!(real(DType::F8E4M3Fnuz, 0x7f), 240.0);
        assert_eq!(real(DType::F8E5M2Fnuz, 0x7f), 57344.0);
        assert!(real(DType::F8E4M3Fnuz, 0x80).is_nan());
        assert_eq!(real(DType::F8E8M0, 127), 1.0);
        assert_eq!(real(DType::F8E8M0, 0), 2f64.powi(-127));
    }

    #[test]
    fn differences_are_counted_and_measured() {
        let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
        let a = bytes(&[0.0, 1.0, 2.0, f32::NAN, 4.0, f32::INFINITY]);
        let b = bytes(&[-0.0, 1.0, 2.5, 3.0, 4.0, f32::INFINITY]);
        let mut tally = Tally::default();
        tally.count(DType::F32, 0, &a, &a);
        assert!(tally.elements(DType::F32, &[2, 6]).is_none());
        tally.count(DType::F32, 6, &a, &b);
        let found = tally.elements(DType::F32, &[2, 6]).unwrap();
        assert_eq!((found.elements, found.elements_different, found.non_finite), (12, 3, 1));
        assert_eq!((found.first, found.max_abs_difference), (vec![1, 0], Some(0.5)));
        // -0.0: the sign's byte; 2.5: one; NaN against 3.0: two.
        assert_eq!(found.bytes_different, 4);
    }

    #[test]
    fn complex_numbers_and_extremes_have_a_distance() {
        let complex = |real: f32, imaginary: f32| [real.to_le_bytes(), imaginary.to_le_bytes()].concat();
        let mut tally = Tally::default();
        tally.count(DType::C64, 0, &complex(1.0, 1.0), &complex(4.0, 5.0));
        assert_eq!(tally.elements(DType::C64, &[]).unwrap().max_abs_difference, Some(5.0));
        let mut tally = Tally::default();
        tally.count(DType::F64, 0, &f64::MAX.to_le_bytes(), &f64::MIN.to_le_bytes());
        assert_eq!(tally.elements(DType::F64, &[]).unwrap().max_abs_difference, Some(f64::MAX));
        let mut tally = Tally::default();
        tally.count(DType::I64, 0, &1i64.to_le_bytes(), &2i64.to_le_bytes());
        assert_eq!(tally.elements(DType::I64, &[1]).unwrap().max_abs_difference, None);
    }
}
