use crate::equiv::{EquivError, Exactness, Options, Report, Scope, Verdict, check};
use crate::ir::Program;
use crate::text;

/// A program whose weights cannot be read.
fn program(body: &str, outputs: &str) -> Program {
    let signature = "tensor<int32, [1]> position, tensor<fp16, [1, 64]> x, state<tensor<fp16, [8, 64]>> cache";
    let source = format!(
        "program(1.3) [specificationVersion = 9] {{ func main<CoreML8>({signature}) {{ {body} }} -> ({outputs}); }}"
    );
    text::parse(&source).unwrap_or_else(|e| panic!("{e}\n{source}"))
}

/// A layer: a product with a weight, then what `middle` makes of it.
fn layer(n: usize, from: &str, middle: &str) -> String {
    let blob = format!("tensor<fp16, [64, 64]>(BLOBFILE(\"@model_path/weights/weight.bin\", {}))", 64 * (n + 1));
    format!("tensor<fp16, [1, 64]> h{n} = linear(x = {from}, weight = {blob}); {}", middle.replace('#', &n.to_string()))
}

const TWICE: &str = "tensor<fp16, [1, 64]> y# = add(x = h#, y = h#);";
const DOUBLED: &str = "tensor<fp16, [1, 64]> y# = mul(x = h#, y = fp16(2.0));";
const TRIPLED: &str = "tensor<fp16, [1, 64]> y# = mul(x = h#, y = fp16(3.0));";

/// Three layers.
fn layers(middles: [&str; 3]) -> Program {
    let body: String =
        (0..3).map(|n| layer(n, &n.checked_sub(1).map_or("x".into(), |m| format!("y{m}")), middles[n])).collect();
    program(&body, "y2")
}

fn locally(a: &Program, b: &Program) -> Report {
    let options = Options { scope: Scope::Local, steps: 2, ..Options::default() };
    let mut b = b.clone();
    for f in b.functions_mut() {
        let weights = a.function(f.name()).map(|f| f.weights().clone());
        weights.into_iter().for_each(|w| f.set_weights(w));
    }
    check(a, &b, None, &options).unwrap_or_else(|e| panic!("{e:?}"))
}

#[test]
fn regions_are_compared_without_the_weights_around_them() {
    let (a, b) = (layers([TWICE; 3]), layers([DOUBLED; 3]));
    assert!(matches!(check(&a, &b, None, &Options::default()), Err(EquivError::Run { .. })), "there are no weights");
    let report = locally(&a, &b);
    let main = &report.functions[0];
    assert!(report.verdict == Verdict::Bitwise && report.satisfies(Exactness::Bitwise), "{report}");
    assert_eq!((main.local, main.regions.len(), main.regions[0].count, main.unchanged), (true, 1, 3, 3), "{report}");
    assert_eq!((&main.regions[0].before[0][..], &main.regions[0].after[0][..]), ("add `y0`", "mul `y0`"));
    assert!(locally(&a, &a).functions[0].regions.is_empty(), "nothing differs");
}

#[test]
fn a_wrong_region_is_found_among_right_ones() {
    let report = locally(&layers([TWICE; 3]), &layers([DOUBLED, TRIPLED, DOUBLED]));
    let main = &report.functions[0];
    assert_eq!(report.verdict, Verdict::Different);
    assert!(!report.satisfies(Exactness::Reassociated));
    let d = report.first_divergence().unwrap();
    assert_eq!((d.a.as_str(), d.b.as_str()), ("add `y1`", "mul `y1`"));
    assert_eq!(
        main.regions.iter().map(|r| (r.count, r.verdict)).collect::<Vec<_>>(),
        [(2, Verdict::Bitwise), (1, Verdict::Different)]
    );
}

#[test]
fn weights_of_the_region_itself_are_inputs_of_it() {
    let weight = "tensor<fp16, [64, 64]>(BLOBFILE(\"@model_path/weights/weight.bin\", 64))";
    let product = |flags: &str| format!("tensor<fp16, [1, 64]> y = matmul(x = x, y = {weight}, {flags});");
    let plain = program(&product("transpose_x = false, transpose_y = false"), "y");
    let swapped = format!(
        "tensor<fp16, [64, 64]> w = transpose(x = {weight}, perm = [1, 0]); {}",
        product("transpose_x = false, transpose_y = true").replace(weight, "w")
    );
    assert_eq!(locally(&plain, &program(&swapped, "y")).verdict, Verdict::Bitwise);
    let other = program(&product("transpose_x = false, transpose_y = true"), "y");
    assert_eq!(locally(&plain, &other).verdict, Verdict::Different);
}

/// What is read from outside keeps the relations that a rewrite relies on.
#[test]
fn inputs_that_are_parts_of_each_other_stay_so() {
    let views =
        "tensor<fp16, [1, 1, 64]> e = expand_dims(x = x, axes = [0]); tensor<fp16, [1, 1, 64]> n = relu(x = e);";
    let a = format!("{views} tensor<fp16, [1, 1, 64]> y = add(x = e, y = x);");
    let b = format!("{views} tensor<fp16, [1, 1, 64]> y = add(x = e, y = e);");
    assert_eq!(locally(&program(&a, "n, y"), &program(&b, "n, y")).verdict, Verdict::Bitwise);
    let c = format!("{views} tensor<fp16, [1, 1, 64]> y = add(x = e, y = n);");
    assert_eq!(locally(&program(&a, "n, y"), &program(&c, "n, y")).verdict, Verdict::Different);
}

/// Writes these rows to one place, one after the other.
fn cached(rows: &[&str]) -> Program {
    let write = |row: &str, n: usize| {
        format!(
            "tensor<fp16, [8, 64]> old{n} = read_state(input = cache);
             tensor<fp16, [8, 64]> new{n} = slice_update(x = old{n}, update = {row}, begin = b, end = e);
             write_state(input = cache, data = new{n});"
        )
    };
    let body = format!(
        "tensor<int32, [1]> past = add(x = position, y = [1]);
         tensor<int32, [2]> b = concat(values = (position, [0]), axis = 0, interleave = false);
         tensor<int32, [2]> e = concat(values = (past, [64]), axis = 0, interleave = false);
         tensor<fp16, [1, 64]> z = relu(x = x); {}
         tensor<fp16, [8, 64]> y = read_state(input = cache);",
        rows.iter().enumerate().map(|(n, row)| write(row, n)).collect::<String>()
    );
    program(&body, "y")
}

/// All ops on a state whose order or content a rewrite touches are compared together, over steps.
#[test]
fn states_are_compared_where_they_are_touched() {
    let both = cached(&["x", "z"]);
    assert!(locally(&both, &both).functions[0].regions.is_empty());
    assert_eq!(locally(&both, &cached(&["z", "x"])).verdict, Verdict::Different);
    assert_eq!(locally(&both, &cached(&["x"])).verdict, Verdict::Different);
    let last = locally(&both, &cached(&["z"]));
    assert_eq!(last.verdict, Verdict::Bitwise, "the first row is overwritten: {last}");
    assert_eq!(last.functions[0].regions[0].states.len(), 1);
}

/// What is computed in another layout is inside a region, with what reads it.
#[test]
fn a_value_of_another_type_is_no_border() {
    let sum = |s: &str| format!("{s} tensor<fp16, []> y = reduce_max(x = s, keep_dims = false);");
    let a = program(&sum("tensor<fp16, [1, 64]> s = relu(x = x);"), "y");
    let turned = "tensor<fp16, [64, 1]> t = transpose(x = x, perm = [1, 0]); tensor<fp16, [64, 1]> s = relu(x = t);";
    let report = locally(&a, &program(&sum(turned), "y"));
    assert_eq!(report.verdict, Verdict::Bitwise, "{report}");
    assert_eq!(report.functions[0].regions[0].after.len(), 3);
    assert_eq!(report.functions[0].regions[0].outputs.len(), 1);
}

/// Sizes that follow from the inputs are known in every region, for several shapes of the inputs.
#[test]
fn free_sizes_are_those_of_the_inputs() {
    let source = |op: &str| {
        let signature = "tensor<fp16, [s0, 4]> x";
        let body = format!(
            "tensor<fp16, [s0, 4]> r = relu(x = x); tensor<int32, [2]> s = shape(x = x);
             tensor<fp16, [s0, 4]> y = {op};"
        );
        text::parse(&format!(
            "program(1.3) [specificationVersion = 9] {{ func main<CoreML8>({signature}) {{ {body} }} -> (y); }}"
        ))
        .unwrap()
    };
    let report = locally(&source("add(x = r, y = r)"), &source("mul(x = r, y = fp16(2.0))"));
    assert_eq!(report.verdict, Verdict::Bitwise);
    assert!(report.functions[0].regions.len() > 1, "a region for each shape: {report}");
}
