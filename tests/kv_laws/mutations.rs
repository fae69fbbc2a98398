//! Controls: a correct result with one mistake planted, which the comparison must find.

use milopt::equiv::{self, Options, Verdict};
use milopt::ir::Program;
use milopt::passes::Preset;
use milopt::{text, verify};

use super::model::{Bounds, Form, Mask, Middle, Model, Position, Products, Repeat};
use super::passes;
use super::support::reassociate;

/// Two layers, two new rows, masks with rows of their own.
fn model(form: Form) -> Model {
    Model {
        form,
        wide: false,
        batch: 1,
        kv_heads: 2,
        groups: 1,
        repeat: Repeat::Tile,
        rows: 2,
        layers: 2,
        shared: false,
        position: Position::Vector,
        bounds: Bounds { masks: true, garbage: 0, squeeze: true, scalars: false },
        mask: Mask::Rows,
        middle: Middle::Softmax,
        products: Products::Matmul,
        writes_first: false,
        one_read: false,
        squeeze_row: false,
    }
}

/// What `-O2` makes of a model, as text to plant mistakes in.
struct Deferred {
    before: Program,
    text: String,
}

impl Deferred {
    fn of(form: Form) -> Deferred {
        let before = model(form).program();
        let (after, _) = reassociate(&before, &passes(Preset::O2, true));
        Deferred { before, text: text::print_program(&after) }
    }

    /// Replaces a part of the line that contains `line`.
    fn with(mut self, line: &str, part: &str, by: &str) -> Deferred {
        let found: Vec<&str> = self.text.lines().filter(|l| l.contains(line)).collect();
        let [only] = found[..] else { panic!("{} lines contain {line:?}:\n{}", found.len(), self.text) };
        assert!(only.contains(part), "{only}");
        self.text = self.text.replace(only, &only.replace(part, by));
        self
    }

    /// Adds ops before the line that contains `line`.
    fn add(self, line: &str, ops: &str) -> Deferred {
        let whole = self.text.lines().find(|l| l.contains(line)).map(String::from).unwrap_or_default();
        self.with(line, &whole, &format!("{ops}\n{whole}"))
    }

    /// A position that is one off, but for the last one.
    fn add_shifted(self, line: &str) -> Deferred {
        self.add(
            line,
            "tensor<int32, [1]> next = add(x = p, y = [1]); tensor<int32, [1]> shifted = minimum(x = next, y = [6]);
             tensor<int32, [1]> behind = add(x = shifted, y = [2]);",
        )
    }

    /// Checks that the comparison finds the mistake, and in the first step that shows it in these outputs and states alone.
    #[track_caller]
    fn differs_in(self, names: &[&str]) {
        let planted = text::parse(&self.text).unwrap_or_else(|e| panic!("{e}\n{}", self.text));
        verify::typed(&planted).unwrap_or_else(|e| panic!("{e}\n{}", self.text));
        let run = |steps| equiv::check(&self.before, &planted, None, &Options { steps, ..Options::default() }).unwrap();
        let report = (1..=8).map(run).find(|report| report.verdict == Verdict::Different);
        let report = report.unwrap_or_else(|| panic!("not found:\n{}", self.text));
        let main = &report.functions[0];
        let found = main.outputs.iter().chain(&main.states).filter(|t| t.verdict == Verdict::Different);
        let found: Vec<&str> = found.map(|t| t.name.as_str()).collect();
        assert_eq!(found, names, "{report}\n{}", self.text);
        assert!(main.first_divergence.is_some(), "{report}");
    }
}

/// What a mistake in the attention of the first layer changes at once: the second layer's entries, too.
const FIRST_LAYER: &[&str] = &["t40", "k_cache", "v_cache"];
const SECOND_LAYER: &[&str] = &["t40"];

fn stacked() -> Deferred {
    Deferred::of(Form::Stacked)
}

#[test]
fn a_stale_mask_that_is_substituted_is_found() {
    for hidden in ["-30000.0", "-10000.0"] {
        let fill = format!("tensor<fp16, [1, 1, 2, 8]>([{}])", [hidden; 16].join(", "));
        let select = format!("select(cond = is_stale, a = {fill}, b = mask)");
        stacked().with("mask_hidden = ", "add(x = mask, y = stale_keys)", &select).differs_in(FIRST_LAYER);
    }
}

#[test]
fn stale_columns_that_are_not_hidden_are_found() {
    stacked().with("stale_keys = ", "-30000.0", "0.0").differs_in(FIRST_LAYER);
    stacked().with("stale_keys = ", "-30000.0", "-1.0").differs_in(FIRST_LAYER);
    stacked().with("keys_run = ", "y = [2]", "y = [3]").differs_in(FIRST_LAYER);
}

#[test]
fn a_position_that_is_one_off_is_found() {
    // Of the columns that are hidden.
    stacked().add_shifted("keys_offset = ").with("keys_offset = ", "y = p", "y = shifted").differs_in(FIRST_LAYER);
    // Of the new keys' mask.
    let begin = "window_begin = ";
    stacked().add_shifted(begin).with(begin, "], p)", "], shifted)").differs_in(FIRST_LAYER);
    // Of what is written.
    let state = "k_cache_old = ";
    let written = stacked().add_shifted(state).with("t5 = ", "p", "shifted").with("t26 = ", "t0", "behind");
    written.differs_in(&["k_cache"]);
}

#[test]
fn a_mask_of_the_first_columns_for_the_new_keys_is_found() {
    stacked().with("mask_new = ", "begin = window_begin", "begin = [0, 0, 0, 0]").differs_in(FIRST_LAYER);
}

#[test]
fn a_write_that_is_dropped_is_found() {
    for state in ["k_cache", "v_cache"] {
        let deferred = stacked();
        let line = format!("input = {state});");
        let write = deferred.text.lines().find(|l| l.contains("write_state") && l.contains(&line)).map(String::from);
        let write = write.unwrap();
        deferred.with(&write, &write, "").differs_in(&[state]);
    }
}

#[test]
fn keys_and_values_that_are_swapped_are_found() {
    // In what is written.
    let update = "update = t31_rows";
    stacked().with(update, update, "update = t27_rows").differs_in(&["v_cache"]);
    stacked()
        .with("k_cache_old = ", "input = k_cache", "input = v_cache")
        .with("v_cache_old = ", "input = v_cache", "input = k_cache")
        .differs_in(FIRST_LAYER);
    // In the new entries of one layer.
    stacked().with("t20_new = ", "y = t3", "y = t2").differs_in(FIRST_LAYER);
    stacked().with("t16_new = ", "y = t2", "y = t3").differs_in(FIRST_LAYER);
    stacked().with("t40_new = ", "y = t23", "y = t22").differs_in(SECOND_LAYER);
}

#[test]
fn rows_in_another_order_are_found() {
    let unified = || Deferred::of(Form::Unified);
    let rows = "values = (t4, t28, t9, t33)";
    unified().with(rows, rows, "values = (t4, t9, t28, t33)").differs_in(&["cache"]);
    unified().with(rows, rows, "values = (t28, t4, t9, t33)").differs_in(&["cache"]);
    // Attention of the second layer looks at the row of the first.
    unified().with("t39_old = ", "begin = [1, ", "begin = [0, ").differs_in(&["t48"]);
}

#[test]
fn a_cut_in_the_wrong_place_is_found() {
    let parts = "tensor<fp16, [1, 2, 2, 8]> t19_part_0, tensor<fp16, [1, 2, 2, 2]> t19_part_1";
    let swapped = "tensor<fp16, [1, 2, 2, 2]> t19_part_1, tensor<fp16, [1, 2, 2, 8]> t19_part_0";
    stacked().with(parts, parts, swapped).with(swapped, "[8, 2]", "[2, 8]").differs_in(FIRST_LAYER);
    stacked().with("t16_all = ", "(t16, t16_new)", "(t16_new, t16)").differs_in(FIRST_LAYER);
}
