//! Laws of folding.

use milopt::analysis::traffic::Traffic;
use milopt::passes::Report;
use proptest::prelude::*;

use super::blocks::{Consumer, Graph, Spelling, block, repeat};
use super::cases;
use super::costs::of_fold;
use super::support::{DEFAULT, count, main, optimize};

proptest! {
    #![proptest_config(cases(250))]

    /// `gqa-fold` keeps every bit, whatever it does, and leaves no copy where it can fold.
    #[test]
    fn folding_is_exact(
        [b, h, g, m, n, k] in [1u64..4, 1u64..4, 1u64..5, 1u64..4, 1u64..9, 1u64..40],
        [transpose_x, transpose_y, left] in [any::<bool>(), any::<bool>(), any::<bool>()],
        spelling in prop::sample::select(Spelling::ALL.to_vec()),
    ) {
        let pair = |flag: bool, rows: u64, columns: u64| if flag { [columns, rows] } else { [rows, columns] };
        let ([xr, xc], [yr, yc]) = (pair(transpose_x, m, k), pair(transpose_y, k, n));
        let ([p, q], [r, c]) = if left { ([xr, xc], [yr, yc]) } else { ([yr, yc], [xr, xc]) };
        let mut graph = Graph::default();
        graph.input("fp16", "keys", &[b, h, p, q]);
        graph.input("fp16", "query", &[b, h * g, r, c]);
        repeat(&mut graph, spelling, g, (&[b, h, p, q], 1), "keys", "r");
        let (x, y) = if left { ("r", "query") } else { ("query", "r") };
        let product = format!("matmul(x = {x}, y = {y}, transpose_x = {transpose_x}, transpose_y = {transpose_y})");
        graph.op("out", &[b, h * g, m, n], &product);
        graph.outputs.push("out".into());
        let (after, report) = optimize(&graph.program(), DEFAULT);
        let views_only = if left { n == 1 } else { m == 1 || !transpose_x };
        if (spelling.is_grouped() || h == 1) && views_only && g > 1 {
            let copies = count(&after, "tile") + count(&after, "stack") + count(&after, "gather");
            prop_assert_eq!(copies, 0, "{}", report.explain());
        }
    }
}

proptest! {
    #![proptest_config(cases(600))]

    /// Whole attention blocks keep every bit, and copies are left only where folding would move more than it saves.
    #[test]
    fn attention_is_folded_exactly(block in block()) {
        let (after, report) = optimize(&block.graph().program(), DEFAULT);
        let costs = refused_for_cost(&report);
        for &(second, told) in &costs {
            let (saved, moved) = of_fold(&block, second);
            prop_assert_eq!(told, (saved, moved), "{}", report.explain());
            prop_assert!(moved >= saved);
        }
        // A fused op reads keys and values, the products one of them each.
        let left = costs.len() as u64 * if block.consumer == Consumer::Fused { 2 } else { 1 };
        let copies = Traffic::of(main(&after)).repeats.count;
        prop_assert!(copies >= left && (copies == 0) == (left == 0), "{} copies\n{}", copies, report.explain());
    }
}

/// Products that were not folded for their cost: whether it is the second of the block, and the bytes that are saved and
/// moved according to the report.
fn refused_for_cost(report: &Report) -> Vec<(bool, (u64, u64))> {
    let declined = report.functions.iter().flat_map(|f| &f.passes).flat_map(|p| &p.declined);
    declined
        .filter_map(|d| {
            let (saved, moved) = d.reason.strip_prefix("no bytes gained: ")?.split_once(" saved, ")?;
            let moved = moved.strip_suffix(" moved instead")?;
            Some((d.op.ends_with("`out`"), (saved.parse().ok()?, moved.parse().ok()?)))
        })
        .collect()
}
