use DType::{F16, I32};

use super::graph::{Graph, ty};
use super::*;
use crate::ir::{DType, Literal};

fn program(g: Graph) -> Program {
    let mut p = Program::new(9);
    p.add_function(g.f);
    p
}

fn compare(a: Graph, b: Graph) -> Result<Report, EquivError> {
    check(&program(a), &program(b), None, &Options::default())
}

fn half(x: f64) -> Literal {
    Literal::floats(F16, &[], &[x])
}

/// `y = kind(x, constant)` over 64 halves.
fn binary(kind: &str, constant: f64) -> Graph {
    let mut g = Graph::new();
    let t = ty(F16, &[8, 8]);
    let x = g.input("x", t.clone());
    let y = g.op(kind, "y", t, vec![("x", x.into()), ("y", half(constant).into())]);
    g.output(y);
    g
}

/// Writes a row into a cache at `position + offset` and gives the whole cache.
fn cache(offset: i64) -> Graph {
    let mut g = Graph::new();
    let position = g.input("position", ty(I32, &[1]));
    let row = g.input("row", ty(F16, &[1, 4]));
    let t = ty(F16, &[6, 4]);
    let state = g.state("cache", t.clone());
    let old = g.op("read_state", "old", t.clone(), vec![("input", state.into())]);
    let at = g.op("add", "at", ty(I32, &[1]), vec![("x", position.into()), ("y", [offset][..].into())]);
    let end = g.op("add", "end", ty(I32, &[1]), vec![("x", at.into()), ("y", [1][..].into())]);
    let mut args = vec![("x", old.into()), ("update", row.into())];
    for (param, v) in [("begin", at), ("end", end)] {
        let values = vec![("values", vec![v.into(), [0][..].into()]), ("axis", vec![0.into()])];
        let vector = g.variadic("concat", &format!("{param}_at"), ty(I32, &[2]), values);
        args.push((param, vector.into()));
    }
    args.push(("end_mask", Literal::bools(&[false, true]).into()));
    let new = g.op("slice_update", "new", t.clone(), args);
    g.write_state(state, new);
    let y = g.op("read_state", "y", t, vec![("input", state.into())]);
    g.output(y);
    g
}

#[test]
fn a_program_equals_itself() {
    for make in [|| binary("add", 0.5), || cache(0)] {
        let report = compare(make(), make()).unwrap();
        assert!(report.verdict == Verdict::Bitwise && report.satisfies(Exactness::Bitwise), "{report}");
        let main = &report.functions[0];
        assert_eq!(
            (main.steps, main.outputs[0].storage.elements),
            (4, 4 * if main.states.is_empty() { 64 } else { 24 })
        );
        assert!(main.outputs[0].storage.finite == main.outputs[0].storage.elements && main.notes.is_empty());
    }
}

#[test]
fn another_constant_is_different_and_located() {
    let after = |constant| {
        let mut g = binary("add", constant);
        let t = ty(F16, &[8, 8]);
        let y = g.f.find_value("y").unwrap();
        let z = g.op("relu", "z", t, vec![("x", y.into())]);
        g.output(z);
        g
    };
    let report = compare(after(0.5), after(1.0)).unwrap();
    assert_eq!(report.verdict, Verdict::Different);
    let main = &report.functions[0];
    let y = &main.outputs[0];
    assert_eq!((y.name.as_str(), y.storage.differing, y.storage.elements), ("y", 256, 256));
    assert!((y.storage.max_abs - 0.5).abs() < 4e-3, "half, rounded to fp16");
    let first = y.storage.first.as_ref().unwrap();
    assert_eq!((first.step, &first.index[..]), (0, &[0, 0][..]));
    assert!((first.b - first.a - 0.5).abs() < 4e-3);
    let d = main.first_divergence.as_ref().unwrap();
    assert_eq!((d.step, d.a.as_str(), d.b.as_str()), (0, "add `y`", "add `y`"));
}

#[test]
fn another_order_of_summation_is_reassociated() {
    let sum = |left: bool| {
        let mut g = Graph::new();
        let t = ty(F16, &[500]);
        let [x, y, z] = ["x", "y", "z"].map(|n| g.input(n, t.clone()));
        let (p, q, r) = if left { (x, y, z) } else { (z, y, x) };
        let part = g.op("add", "part", t.clone(), vec![("x", p.into()), ("y", q.into())]);
        let all = g.op("add", "all", t, vec![("x", part.into()), ("y", r.into())]);
        g.output(all);
        g
    };
    let report = compare(sum(true), sum(false)).unwrap();
    assert_eq!(report.verdict, Verdict::Reassociated);
    assert!(!report.satisfies(Exactness::Bitwise) && report.satisfies(Exactness::Reassociated));
    let all = &report.functions[0].outputs[0];
    assert!(all.storage.differing > 0 && all.storage.max_ulp > 0 && all.storage.max_abs > 1e-4);
    assert!(all.exact.as_ref().unwrap().max_abs < 1e-14);
}

#[test]
fn rounding_that_storage_mode_forgives_is_not_reassociation() {
    let report = compare(binary("mul", 1.0), binary("mul", 1.001)).unwrap();
    let y = &report.functions[0].outputs[0];
    assert!(y.storage.is_within_bound() && !y.exact.as_ref().unwrap().is_within_bound());
    assert_eq!(report.verdict, Verdict::Different);
}

#[test]
fn the_sign_of_zero_counts() {
    let report = compare(binary("mul", 0.0), binary("mul", -0.0)).unwrap();
    let y = &report.functions[0].outputs[0];
    assert_eq!((report.verdict, y.storage.differing, y.storage.max_abs), (Verdict::Reassociated, 256, 0.0));
}

#[test]
fn states_are_compared() {
    let options = Options { ranges: [("position".into(), 0..5)].into(), ..Options::default() };
    let report = check(&program(cache(0)), &program(cache(1)), None, &options).unwrap();
    let main = &report.functions[0];
    assert_eq!((main.states[0].name.as_str(), main.states[0].verdict), ("cache", Verdict::Different));
    assert!(main.states[0].storage.differing > main.outputs[0].storage.differing / 2);
    assert_eq!(main.first_divergence.as_ref().unwrap().b, "add `at`");
}

#[test]
fn positions_fill_the_cache_of_the_first_program() {
    let many = Options { steps: 64, ..Options::default() };
    let [here, next] = [0, 1].map(|offset| program(cache(offset)));
    assert_eq!(check(&here, &here, None, &many).unwrap().verdict, Verdict::Bitwise);
    let e = check(&here, &next, None, &many).unwrap_err();
    assert!(matches!(e, EquivError::Run { program: Side::Second, .. }), "the last position is drawn, one more fails");
}

#[test]
fn poisoned_states_are_drawn_anew() {
    let poison = || {
        let mut g = Graph::new();
        let t = ty(F16, &[4]);
        let state = g.state("s", t.clone());
        let old = g.op("read_state", "old", t.clone(), vec![("input", state.into())]);
        let zero = g.op("mul", "zero", t.clone(), vec![("x", old.into()), ("y", half(0.0).into())]);
        let nan = g.op("real_div", "nan", t, vec![("x", zero.into()), ("y", zero.into())]);
        g.write_state(state, nan);
        g.output(old);
        g.output(nan);
        g
    };
    let report = compare(poison(), poison()).unwrap();
    let main = &report.functions[0];
    assert_eq!(main.outputs[0].storage.finite, 16, "every step starts from finite content");
    assert_eq!((report.verdict, main.states[0].storage.finite), (Verdict::Bitwise, 0));
    assert_eq!(main.notes, ["`nan` never held a finite number"]);
}

#[test]
fn interfaces_must_pair_up() {
    let with = |name: &str, t: crate::ir::TensorType| {
        let mut g = Graph::new();
        let x = g.input(name, t.clone());
        let y = g.op("relu", "y", t, vec![("x", x.into())]);
        g.output(y);
        g
    };
    let message = |a, b| compare(a, b).unwrap_err().to_string();
    let t = || ty(F16, &[4]);
    assert_eq!(
        message(with("x", t()), with("z", t())),
        "could not compare: main: only the second program has the input `z`"
    );
    assert_eq!(
        message(with("x", t()), with("x", ty(F16, &[5]))),
        "could not compare: main: the input `x` is tensor<fp16, [4]> in one program, tensor<fp16, [5]> in the other"
    );
    let (mut more, less) = (with("x", t()), with("x", t()));
    let x = more.f.find_value("x").unwrap();
    let z = more.op("relu", "z", t(), vec![("x", x.into())]);
    more.output(z);
    assert_eq!(message(more, less), "could not compare: main: only the first program has the output `z`");
}

#[test]
fn functions_and_inputs_must_exist() {
    let (a, b) = (program(binary("add", 1.0)), program(binary("add", 1.0)));
    let e = check(&a, &b, Some("prefill"), &Options::default()).unwrap_err();
    assert_eq!(e.to_string(), "could not compare: the first program has no function `prefill`");
    let e = check(&a, &Program::new(9), None, &Options::default()).unwrap_err();
    assert_eq!(e.to_string(), "could not compare: the second program has no function `main`");
    let options = Options { ranges: [("nobody".into(), 0..1)].into(), ..Options::default() };
    assert!(matches!(check(&a, &b, None, &options), Err(EquivError::NoInput(n)) if n == "nobody"));
}

#[test]
fn an_op_that_cannot_be_evaluated_is_no_verdict() {
    let e = compare(binary("add", 1.0), binary("no_such_op", 1.0)).unwrap_err();
    assert!(matches!(e, EquivError::Run { program: Side::Second, step: 0, .. }), "{e}");
}

#[test]
fn free_sizes_are_tried_and_given_up() {
    // One symbol a row axis: unequal rows do not broadcast, so only shapes with equal rows can be run.
    let make = || {
        let mut g = Graph::new();
        let sizes = [(); 2].map(|()| g.dim(1, 9));
        let mut inputs = sizes
            .clone()
            .into_iter()
            .zip(["x", "mask"])
            .map(|(n, name)| g.input(name, crate::ir::TensorType::new(F16, [Dim::known(1), Dim::known(1), n])));
        let (x, mask) = (inputs.next().unwrap(), inputs.next().unwrap());
        drop(inputs);
        let t = crate::ir::TensorType::new(F16, [Dim::known(1), Dim::known(1), sizes[1].clone()]);
        let y = g.op("add", "y", t.clone(), vec![("x", x.into()), ("y", mask.into())]);
        let p = g.op("softmax", "p", t, vec![("x", y.into()), ("axis", (-1).into())]);
        g.output(p);
        g
    };
    let report = compare(make(), make()).unwrap();
    let main = &report.functions[0];
    assert_eq!(report.verdict, Verdict::Bitwise);
    assert_eq!(main.notes, ["not run with the shapes mask [1, 1, 7], x [1, 1, 3]"]);
    assert!(main.outputs[0].storage.elements > 4, "other shapes than the default ran");
}

#[test]
fn the_report_fits_a_screen_and_json() {
    let report = compare(binary("add", 0.5), binary("real_div", 0.0)).unwrap();
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["verdict"], "different");
    assert_eq!(json["functions"][0]["outputs"][0]["storage"]["max_abs"], "inf");
    assert_eq!(json["functions"][0]["first_divergence"]["a"], "add `y`");
    let text = report.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "main: different over 4 steps");
    assert!(
        lines[1].starts_with("  output  y  different      256 of 256 elements (0 finite), max |a-b| inf"),
        "{text}"
    );
    assert_eq!(lines[2], "  first divergence: real_div `y` at step 0, add `y` before");
}
