//! The elements of numeric tensors as text, bit for bit.

use crate::ir::{DType, float_bits, pack_ints, unpack_floats, unpack_ints};

/// The bit patterns of `count` packed elements, sign-extended for signed integers; `None` when `bytes` is not exactly
/// the packing of that many elements.
pub(super) fn unpack(dtype: DType, count: u64, bytes: &[u8]) -> Option<Vec<i64>> {
    if dtype.packed_len(count)? != bytes.len() as u64 {
        return None;
    }
    let raw = unpack_ints(dtype, usize::try_from(count).ok()?, bytes);
    let exact = pack_ints(dtype, &raw) == bytes && (dtype != DType::Bool || raw.iter().all(|&b| b == 0 || b == 1));
    exact.then_some(raw)
}

/// One element in text.
pub(super) fn spell(dtype: DType, raw: i64) -> String {
    match dtype {
        DType::Bool => (raw != 0).to_string(),
        DType::U64 => (raw as u64).to_string(),
        _ if dtype.is_float() => spell_float(dtype, raw),
        _ => raw.to_string(),
    }
}

/// The bit pattern that an element in text stands for.
///
/// # Errors
/// A message when the text is no element of this type.
pub(super) fn read(dtype: DType, text: &str) -> Result<i64, String> {
    let wrong = || format!("`{text}` is not an element of type {dtype}");
    match dtype {
        DType::Bool => match text {
            "true" => Ok(1),
            "false" => Ok(0),
            _ => Err(wrong()),
        },
        _ if dtype.is_float() => read_float(dtype, text).ok_or_else(wrong),
        _ => {
            let bits = dtype.bits().ok_or_else(wrong)?;
            let value: i128 = text.parse().map_err(|_| wrong())?;
            let (lo, hi) =
                if dtype.is_signed_int() { (-(1i128 << (bits - 1)), 1i128 << (bits - 1)) } else { (0, 1i128 << bits) };
            if value < lo || value >= hi { Err(wrong()) } else { Ok(value as i64) }
        }
    }
}

fn value_of(dtype: DType, raw: i64) -> f64 {
    unpack_floats(dtype, &pack_ints(dtype, &[raw])).first().copied().unwrap_or(f64::NAN)
}

fn canonical_nan(dtype: DType) -> i64 {
    match dtype {
        DType::F16 => 0x7e00,
        DType::BF16 => 0x7fc0,
        DType::F32 => 0x7fc0_0000,
        DType::F64 => 0x7ff8_0000_0000_0000,
        DType::F8E5M2 => 0x7e,
        _ => 0x7f,
    }
}

/// The shortest decimal that re-reads to the same bits; whole numbers are written out.
fn spell_float(dtype: DType, raw: i64) -> String {
    let value = value_of(dtype, raw);
    if value.is_nan() {
        return if raw == canonical_nan(dtype) { "nan".into() } else { format!("nan({raw:#x})") };
    }
    match dtype {
        DType::F32 => format!("{:?}", value as f32),
        DType::F16 | DType::BF16 if value.is_finite() && value.fract() != 0.0 => (0..17)
            .filter_map(|digits| format!("{value:.digits$e}").parse::<f64>().ok())
            .find(|&short| round(dtype, short) == Some(raw))
            .map_or_else(|| format!("{value:?}"), |short| format!("{short:?}")),
        _ => format!("{value:?}"),
    }
}

fn read_float(dtype: DType, text: &str) -> Option<i64> {
    if let Some(bits) = text.strip_prefix("nan(0x").and_then(|t| t.strip_suffix(')')) {
        let raw = u64::from_str_radix(bits, 16).ok()?;
        let fits = dtype.bits()? == 64 || raw >> dtype.bits()? == 0;
        return (fits && value_of(dtype, raw as i64).is_nan()).then_some(raw as i64);
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    match digits {
        "nan" if text == "nan" => return Some(canonical_nan(dtype)),
        "inf" => return round(dtype, if text == "inf" { f64::INFINITY } else { f64::NEG_INFINITY }),
        _ if !digits.starts_with(|c: char| c.is_ascii_digit()) => return None,
        _ => {}
    }
    if let Some(hex) = digits.strip_prefix("0x") {
        let value = read_hex(hex)?;
        return round(dtype, if digits.len() < text.len() { -value } else { value });
    }
    match dtype {
        DType::F32 => Some(i64::from(text.parse::<f32>().ok()?.to_bits())),
        _ => round(dtype, text.parse().ok()?),
    }
}

/// The bits of `value` in `dtype`, rounded to nearest even; 8-bit floats must be hit exactly.
fn round(dtype: DType, value: f64) -> Option<i64> {
    match float_bits(dtype, value) {
        Some(bits) => Some(bits as i64),
        None => (0..256).find(|&raw| value_of(dtype, raw).to_bits() == value.to_bits()),
    }
}

/// The digits of a C hexadecimal float after `0x`: `1.8p+1`.
fn read_hex(text: &str) -> Option<f64> {
    let (mantissa, exponent) = text.split_once('p').unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let bits = u64::from_str_radix(&digits, 16).ok()?;
    if bits >> 53 != 0 {
        return None;
    }
    let exponent = exponent.strip_prefix('+').unwrap_or(exponent).parse::<i32>().ok()?;
    let exponent = exponent.checked_sub(i32::try_from(fraction.len()).ok()?.checked_mul(4)?)?;
    Some(libm::ldexp(bits as f64, exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_narrow_float_re_reads_to_its_bits() {
        for dtype in [DType::F16, DType::BF16, DType::F8E4M3FN, DType::F8E5M2] {
            for raw in 0..1i64 << dtype.bits().unwrap() {
                let text = spell(dtype, raw);
                assert_eq!(read(dtype, &text), Ok(raw), "{dtype} {raw:#x} {text}");
            }
        }
    }

    #[test]
    fn floats_are_short_and_whole_numbers_exact() {
        let half = |v: f64| spell(DType::F16, i64::from(half::f16::from_f64(v).to_bits()));
        assert_eq!(half(0.1), "0.1");
        assert_eq!(half(65504.0), "65504.0");
        assert_eq!(half(-10000.0), "-10000.0");
        assert_eq!(half(-0.0), "-0.0");
        assert_eq!(half(f64::NEG_INFINITY), "-inf");
        assert_eq!(spell(DType::F16, 0x0001), "6e-8");
        assert_eq!(spell(DType::F16, 0x7e00), "nan");
        assert_eq!(spell(DType::F16, 0xfe01), "nan(0xfe01)");
        assert_eq!(spell(DType::F32, 0x3dcc_cccd), "0.1");
        assert_eq!(spell(DType::U64, -1), "18446744073709551615");
    }

    #[test]
    fn hexadecimal_floats_and_double_rounding() {
        assert_eq!(read(DType::F32, "0x1p+0"), Ok(0x3f80_0000));
        assert_eq!(read(DType::F16, "-0x1.8p+1"), Ok(0xc200));
        assert_eq!(read(DType::F32, "0x1.4f8b58p-17"), Ok(0x3727_c5ac));
        // 1 + 2^-11 is a tie of fp16; a hair above it rounds up although fp32 does not hold the hair.
        assert_eq!(read(DType::F16, "1.00048828125"), Ok(0x3c00));
        assert_eq!(read(DType::F16, "1.00048828125000001"), Ok(0x3c00), "f64 does not hold this one either");
        assert_eq!(read(DType::F16, "1.000488281250001"), Ok(0x3c01));
        for bad in ["1", "0x", "0x1p+99999999999", "0x1.ffffffffffffffffp+0", "infinity", "nan(0x1)", "e5", ""] {
            assert!(read(DType::F8E4M3FN, bad).is_err() || bad == "1", "{bad}");
        }
        assert!(read(DType::I8, "128").is_err() && read(DType::U4, "-1").is_err() && read(DType::I4, "-8").is_ok());
        assert!(read(DType::F8E4M3FN, "0.3").is_err());
    }
}
