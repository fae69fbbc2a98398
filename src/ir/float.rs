//! Floats of every width: exact values and the nearest one.

use super::types::DType;

/// `x` rounded to nearest even in the float type `dtype`. Values beyond the largest finite one become infinite, or NaN
/// in the type without infinities.
pub fn round_float(dtype: DType, x: f64) -> f64 {
    let (fraction_bits, min_exponent, max) = match dtype {
        DType::F16 => (10, -14, 65504.0),
        DType::BF16 => (7, -126, f64::from(half::bf16::MAX)),
        DType::F8E4M3FN => (3, -6, 448.0),
        DType::F8E5M2 => (2, -14, 57344.0),
        DType::F32 => return f64::from(x as f32),
        _ => return x,
    };
    let rounded = if x == 0.0 || !x.is_finite() {
        x
    } else {
        let unit = libm::ldexp(1.0, libm::ilogb(x).max(min_exponent) - fraction_bits);
        libm::rint(x / unit) * unit
    };
    match rounded.abs() > max {
        true if dtype == DType::F8E4M3FN => f64::NAN,
        true => f64::INFINITY.copysign(rounded),
        false => rounded,
    }
}

/// The bits of `x` rounded as by [`round_float`]; `None` when `dtype` is no float type of at least 16 bits.
pub fn float_bits(dtype: DType, x: f64) -> Option<u64> {
    // The conversions of `half` round twice or not at all, depending on the machine; of rounded values they are exact.
    Some(match dtype {
        DType::F16 => half::f16::from_f64(round_float(dtype, x)).to_bits().into(),
        DType::BF16 => half::bf16::from_f64(round_float(dtype, x)).to_bits().into(),
        DType::F32 => (x as f32).to_bits().into(),
        DType::F64 => x.to_bits(),
        _ => return None,
    })
}

/// The floats packed in `bytes`, exactly.
pub fn unpack_floats(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F16 => bytes.chunks_exact(2).map(|c| half::f16::from_le_bytes([c[0], c[1]]).to_f64()).collect(),
        DType::BF16 => bytes.chunks_exact(2).map(|c| half::bf16::from_le_bytes([c[0], c[1]]).to_f64()).collect(),
        DType::F32 => bytes.chunks_exact(4).map(|c| f64::from(f32::from_le_bytes([c[0], c[1], c[2], c[3]]))).collect(),
        DType::F64 => bytes
            .chunks_exact(8)
            .map(|c| f64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]))
            .collect(),
        DType::F8E4M3FN => bytes.iter().map(|&b| fp8_e4m3fn(b)).collect(),
        DType::F8E5M2 => bytes.iter().map(|&b| half::f16::from_bits(u16::from(b) << 8).to_f64()).collect(),
        _ => Vec::new(),
    }
}

fn fp8_e4m3fn(b: u8) -> f64 {
    let sign = if b & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exp, man) = (i32::from(b >> 3 & 15), f64::from(b & 7));
    match (exp, b & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * man / 8.0 * 2f64.powi(-6),
        _ => sign * (1.0 + man / 8.0) * 2f64.powi(exp - 7),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        // A tie broken only by bits far below single precision.
        assert_eq!(round_float(DType::F16, 1.0 + 2f64.powi(-11)), 1.0);
        assert_eq!(round_float(DType::F16, 1.0 + 2f64.powi(-11) + 2f64.powi(-45)), 1.0 + 2f64.powi(-10));
        assert_eq!(round_float(DType::F16, 65519.9), 65504.0);
        assert_eq!(round_float(DType::F16, -65520.0), f64::NEG_INFINITY);
        assert_eq!(round_float(DType::F16, 2f64.powi(-25)), 0.0);
        assert_eq!(round_float(DType::F16, 1.5 * 2f64.powi(-25)), 2f64.powi(-24));
        assert_eq!(round_float(DType::BF16, 1.00390625), 1.0);
        assert_eq!(round_float(DType::F8E4M3FN, 460.0), 448.0);
        assert!(round_float(DType::F8E4M3FN, 470.0).is_nan());
        assert_eq!(round_float(DType::F8E5M2, 0.9), 0.875);
    }

    #[test]
    fn f16_rounding_agrees_with_half_on_every_f16_midpoint() {
        for bits in 0..0x7bffu16 {
            let (a, b) = (half::f16::from_bits(bits).to_f32(), half::f16::from_bits(bits + 1).to_f32());
            let mid = (a + b) / 2.0;
            assert_eq!(round_float(DType::F16, f64::from(mid)) as f32, half::f16::from_f32(mid).to_f32(), "{mid}");
        }
    }

    #[test]
    fn a_hair_beside_a_tie_decides_it() {
        for bits in 0..0x7bffu16 {
            let (a, b) = (half::f16::from_bits(bits).to_f64(), half::f16::from_bits(bits + 1).to_f64());
            let tie = (a + b) / 2.0;
            for x in [f64::from_bits(tie.to_bits() - 1), tie, f64::from_bits(tie.to_bits() + 1)] {
                let up = x > tie || (x == tie && bits & 1 == 1);
                let want = u64::from(bits + u16::from(up));
                assert_eq!(float_bits(DType::F16, x), Some(want), "{x:e}");
                assert_eq!(float_bits(DType::F16, -x), Some(want | 0x8000), "-{x:e}");
            }
        }
        let tie = 1.0 + 2f64.powi(-8);
        assert_eq!(float_bits(DType::BF16, tie), Some(0x3f80));
        assert_eq!(float_bits(DType::BF16, tie + f64::EPSILON), Some(0x3f81));
        assert_eq!(float_bits(DType::F16, f64::NEG_INFINITY), Some(0xfc00));
        assert_eq!(float_bits(DType::F16, -0.0), Some(0x8000));
        assert_eq!(float_bits(DType::I32, 1.0), None);
    }

    #[test]
    fn fp8_values() {
        assert_eq!(unpack_floats(DType::F8E4M3FN, &[0x38, 0x7e, 0x01, 0xb8]), [1.0, 448.0, 2f64.powi(-9), -1.0]);
        assert!(unpack_floats(DType::F8E4M3FN, &[0x7f])[0].is_nan());
        assert_eq!(unpack_floats(DType::F8E5M2, &[0x3c, 0x7b, 0x7c]), [1.0, 57344.0, f64::INFINITY]);
    }
}
