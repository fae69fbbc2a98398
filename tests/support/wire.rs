//! Edits of a model file at the level of protobuf bytes, to make what no converter writes.

use std::ops::Range;

/// From the model file to each op: the program, its functions, a map entry's value, its blocks, a map entry's value,
/// the ops.
const OPS: [u64; 6] = [502, 2, 2, 3, 2, 3];

/// The model file with every op that produces `output` changed by `edit`.
#[track_caller]
pub fn edit_op(model: &[u8], output: &str, edit: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let edited = edit_at(model, &OPS, &|op| match produces(op, output) {
        true => edit(op),
        false => op.to_vec(),
    });
    assert!(edited != model, "no op produces `{output}`");
    edited
}

/// The model file with every described state changed by `edit`, in the single-function form.
pub fn edit_states(model: &[u8], edit: impl Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    edit_at(model, &[2, 13], &edit)
}

/// The bytes of the op that produces `output`.
pub fn op_bytes(model: &[u8], output: &str) -> Vec<u8> {
    messages(model, &OPS).into_iter().find(|op| produces(op, output)).expect("some op produces it").to_vec()
}

/// The op with a field that no schema knows.
pub fn with_unknown_field(op: &[u8]) -> Vec<u8> {
    let mut out = op.to_vec();
    put(&mut out, 777, b"from the future");
    out
}

/// The op with the weights of its attributes at another offset.
pub fn with_blob_offset(op: &[u8], offset: u64) -> Vec<u8> {
    // Attributes, a map entry's value, `blobFileValue`; of two offsets the last counts.
    edit_at(op, &[5, 2, 5], &|blob| {
        let mut out = blob.to_vec();
        put_varint(&mut out, 2 << 3);
        put_varint(&mut out, offset);
        out
    })
}

/// The message with every message at the end of `path` changed by `edit`.
fn edit_at(message: &[u8], path: &[u64], edit: &dyn Fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let Some((&number, rest)) = path.split_first() else { return edit(message) };
    let mut out = Vec::new();
    for field in fields(message) {
        match field.number == number && field.is_message {
            true => put(&mut out, number, &edit_at(&message[field.payload], rest, edit)),
            false => out.extend_from_slice(&message[field.whole]),
        }
    }
    out
}

/// The messages at the end of `path`.
fn messages<'m>(message: &'m [u8], path: &[u64]) -> Vec<&'m [u8]> {
    let Some((&number, rest)) = path.split_first() else { return vec![message] };
    let found = fields(message).into_iter().filter(|f| f.number == number && f.is_message);
    found.flat_map(|f| messages(&message[f.payload], rest)).collect()
}

/// Whether an op has an output (field 3) of this name (field 1).
fn produces(op: &[u8], output: &str) -> bool {
    messages(op, &[3, 1]).contains(&output.as_bytes())
}

struct Field {
    number: u64,
    is_message: bool,
    whole: Range<usize>,
    payload: Range<usize>,
}

fn fields(message: &[u8]) -> Vec<Field> {
    let (mut out, mut at) = (Vec::new(), 0);
    while at < message.len() {
        let start = at;
        let tag = varint(message, &mut at);
        let len = match tag & 7 {
            0 => {
                let mut end = at;
                varint(message, &mut end);
                end - at
            }
            1 => 8,
            2 => varint(message, &mut at) as usize,
            5 => 4,
            wire => panic!("wire type {wire}"),
        };
        let payload = at..at + len;
        at = payload.end;
        out.push(Field { number: tag >> 3, is_message: tag & 7 == 2, whole: start..at, payload });
    }
    out
}

fn varint(bytes: &[u8], at: &mut usize) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = bytes[*at];
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn put(out: &mut Vec<u8>, number: u64, payload: &[u8]) {
    put_varint(out, number << 3 | 2);
    put_varint(out, payload.len() as u64);
    out.extend_from_slice(payload);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
