//! MIL text: printing and parsing.
//!
//! The grammar is that of the `model.mil` inside a compiled model, which is read as it is, with a short spelling of
//! constants:
//!
//! ```text
//! program(1.3) [specificationVersion = 9] {
//!   func main<CoreML8>(tensor<fp16, [1, s0, 64]> x, state<tensor<fp16, [1, 8, 512, 64]>> cache) where 1 <= s0 <= 512 {
//!     tensor<fp16, [64, 64]> w = const(val = BLOBFILE("@model_path/weights/weight.bin", 64));
//!     tensor<fp16, [1, s0, 64]> y = matmul(x = x, y = w, transpose_x = false, transpose_y = true);
//!     tensor<fp16, [1, s0, 32]> a, tensor<fp16, [1, s0, 32]> b = split(x = y, axis = 2, num_splits = 2);
//!     tensor<fp16, [1, s0, 64]> z = cond(pred = true) block() { … } -> (y), block() { … } -> (w);
//!   } -> (a, b, z);
//! }
//! ```
//!
//! * **Operands** are names, literals, or a tuple of them in parentheses.
//! * **Literals** are `type(content)`. The type is left out of an int32, bool or string scalar and of a vector of
//!   them (`7`, `[0, 2, 1]`, `"custom"`), and wherever the context gives it (items of lists, `val` of `const`). Floats
//!   re-read to the same bits: decimal, hexadecimal (`0x1.8p+1`), `inf`, `nan`, `nan(0x7e01)`. Content may also be
//!   `BLOBFILE("file", offset)`, `bytes("hex")` and `strings("a", …)` where the bytes do not fill the type, or `absent`.
//! * **Names** that are not identifiers, or are words of the grammar, stand in backticks.
//! * **Unknown sizes** are symbols `s0`, `s1`, … whose bounds follow `where`. A `?` in a file is a symbol of its own.
//! * **Attributes** of ops follow in brackets; `val` of a `const` stands in the parentheses. Opset tags `ios15` to
//!   `ios18` are read as `CoreML5` to `CoreML8`.
//!
//! Two spellings are printed. The *full* one is exact: parsing it gives the same program but for the interface, which
//! is derived from the signature, the metadata and the weights. The *short* one is for people: `const` ops of at most
//! 16 elements are written at their uses, so that they come back as literal bindings, and `name` attributes are left
//! out. Printing what was parsed from either gives the same text again.

mod lex;
mod number;
mod parse;
mod parse_value;
mod print;
mod value;

#[cfg(test)]
mod tests;

pub use lex::ParseError;
pub use parse::parse;
pub use print::{PrintOptions, print_function, print_op, print_program};

/// How deep types, values and blocks may nest in text.
const MAX_DEPTH: usize = 64;

/// Words that cannot be names without backticks, besides the names of element types.
const RESERVED: &[&str] = &["dict", "false", "inf", "list", "nan", "state", "tensor", "true", "tuple"];

/// Opset tags of compiled models and the opsets they stand for.
const OPSET_TAGS: &[(&str, &str)] =
    &[("ios15", "CoreML5"), ("ios16", "CoreML6"), ("ios17", "CoreML7"), ("ios18", "CoreML8")];

/// Whether `name` can be written without backticks.
fn is_plain(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '@')
        && !RESERVED.contains(&name)
        && crate::ir::DType::from_name(name).is_none()
}
