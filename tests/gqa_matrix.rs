//! Every spelling of repeated heads with every consumer, for one query, several, and numbers that are not known.

mod support;

use milopt::analysis::traffic::Traffic;
use milopt::equiv;
use milopt::ir::{Dim, Function, OpId, ValueId};
use milopt::opset::Size;
use milopt::passes::Report;
use milopt::text;
use support::matrix::{self, Axis, Case, Consumer, Lengths};
use support::{DEFAULT, main, optimize_at};

/// Why copies are left in a case, if they are.
fn expected(case: &Case) -> Option<&'static str> {
    const COST: Option<&str> = Some("no bytes gained");
    const UNKNOWN_COST: Option<&str> = Some("would move data of a size that is not known");
    let unknown = |axis| matches!(case.lengths.size(axis), Size::Range { .. });
    let [spelling, _] = case.spellings;
    let whole_copies = spelling.is_interleaved();
    match case.consumer {
        // The group would have to cross another axis, unless that has one element.
        Consumer::Einsum { left, .. } if left == whole_copies && spelling.kv_heads > 1 => match case.lengths {
            Lengths::Decode => None,
            Lengths::Prefill => COST.filter(|_| spelling.name.ends_with("_bshd") && spelling.copies.is_tile()),
            _ => UNKNOWN_COST,
        },
        // The groups would move across the rows.
        Consumer::Fused if unknown(Axis::Rows) => UNKNOWN_COST.filter(|_| whole_copies),
        Consumer::Matmul { .. } if case.batch > 1 => match case.lengths {
            Lengths::Decode => None,
            // There is no axis for the groups but the rows, and those would be moved.
            Lengths::Prefill => COST.filter(|_| whole_copies && !spelling.name.ends_with("_bshd")),
            _ => UNKNOWN_COST.filter(|_| whole_copies),
        },
        _ => None,
    }
}

fn is_product(f: &Function, op: OpId) -> bool {
    matches!(f.op(op).kind().as_str(), "matmul" | "scaled_dot_product_attention" | "einsum")
}

/// The first value between keys or values and a product that has more elements than they have.
fn larger(f: &Function) -> Option<String> {
    for name in ["keys", "values"] {
        let Some(source) = f.input(name) else { continue };
        let elements = |v: ValueId| {
            let ty = f.ty(v);
            let shape = &ty.as_tensor().or(ty.as_state())?.shape;
            Some(Dim::product(shape)?.coef())
        };
        let most = elements(source);
        let mut reached = vec![source];
        let mut at = 0;
        while let Some(&v) = reached.get(at) {
            at += 1;
            for op in f.users(v).into_iter().filter(|&op| !is_product(f, op)) {
                for &r in f.op(op).results() {
                    if elements(r) > most || f.op(op).kind() == "tile" {
                        return Some(f.describe(op));
                    }
                    if !reached.contains(&r) {
                        reached.push(r);
                    }
                }
            }
        }
    }
    None
}

fn highest_rank(f: &Function) -> usize {
    let ops = f.all_ops().into_iter();
    ops.flat_map(|op| f.op(op).results()).filter_map(|&v| f.tensor(v)).map(|t| t.rank()).max().unwrap_or(0)
}

fn left(f: &Function) -> Option<String> {
    let repeats = Traffic::of(f).repeats;
    repeats.ops.first().cloned().or_else(|| larger(f))
}

fn check(case: &Case) -> Result<(), String> {
    let attention = case.build();
    let options: Vec<equiv::Options> =
        attention.shapes.iter().map(|s| equiv::Options { steps: 2, shapes: s.clone(), ..Default::default() }).collect();
    let (after, report): (_, Report) = optimize_at(&attention.program, DEFAULT, &options);
    let (before, after) = (main(&attention.program), main(&after));
    let dump = || format!("{}\n{}\n{}", text::print_function(before), text::print_function(after), report.explain());
    let (was, is) = (highest_rank(before), highest_rank(after));
    if is > 5 || (is > 4 && was <= 4) {
        return Err(format!("{}: rank {is}, was {was}\n{}", case.name, dump()));
    }
    match (left(after), expected(case)) {
        (None, None) => Ok(()),
        (Some(_), Some(reason)) if report.explain().contains(reason) => Ok(()),
        (None, Some(_)) => Err(format!("{}: folded unexpectedly", case.name)),
        (Some(op), _) => {
            Err(format!("{}: {op} is left: {}\n{}", case.name, report.explain().replace('\n', " | "), dump()))
        }
    }
}

fn check_all(lengths: Lengths) {
    let cases = matrix::cases(lengths);
    let failures: Vec<String> = cases.iter().filter_map(|case| check(case).err()).collect();
    let names: Vec<&str> = failures.iter().filter_map(|f| f.lines().next()).collect();
    assert!(
        failures.is_empty(),
        "{} of {} cases\n{}\n{}",
        failures.len(),
        cases.len(),
        names.join("\n"),
        failures.first().map_or("", |f| f)
    );
}

#[test]
fn one_query() {
    check_all(Lengths::Decode);
}

#[test]
fn several_queries() {
    check_all(Lengths::Prefill);
}

#[test]
fn an_unknown_number_of_queries() {
    check_all(Lengths::UnknownRows);
}

#[test]
fn an_unknown_number_of_keys() {
    check_all(Lengths::UnknownKeys);
}

#[test]
fn unknown_numbers_of_queries_and_keys() {
    check_all(Lengths::Unknown);
}
