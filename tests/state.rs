//! `analysis::state`: versions, regions and hazards.

mod support;

use milopt::analysis::state::{EmissionRule, Region, States, breaches};
use milopt::ir::Program;
use petgraph::visit::EdgeRef;
use support::{main, program};

const SIGNATURE: &str = "tensor<int32, [1]> p, int32 at, tensor<fp16, [1, 2, 8, 4]> row, tensor<fp16, [1, 2, 1, 4]> one, \
                         tensor<fp16, [2, 4]> flat, state<tensor<fp16, [4, 2, 8, 4]>> cache";

fn written(update: &str) -> Program {
    let body = format!(
        "tensor<int32, [1]> e = add(x = p, y = [1]);
         tensor<int32, [1]> at1 = expand_dims(x = at, axes = [0]);
         tensor<int32, [1]> ate = add(x = at1, y = [1]);
         tensor<fp16, [4, 2, 8, 4]> r = read_state(input = cache);
         {update}
         write_state(input = cache, data = u);
         tensor<fp16, [1, 2, 1, 4]> out = relu(x = one);"
    );
    program(SIGNATURE, &body, "out")
}

/// A region as text: `begin+extent` for each axis, `*` for all of it; the position input is `p`, the scalar one `at`.
fn spell(p: &Program, region: &Region) -> String {
    let f = main(p);
    let name = |v: &str| f.input(v).map(|v| format!("1*{v}[0]")).unwrap();
    let span = |s: &milopt::analysis::state::Span| match s.whole {
        true => "*".to_string(),
        false if s.stride == 1 => format!("{}+{}", s.begin, s.extent),
        false => format!("{}+{}/{}", s.begin, s.extent, s.stride),
    };
    let text = region.0.iter().map(span).collect::<Vec<_>>().join(" ");
    text.replace(&name("p"), "p").replace(&name("at"), "at")
}

#[test]
fn updates_change_the_box_that_their_bounds_and_masks_say() {
    for (bounds, update, region) in [
        ("update = row, begin = [2, 0, 0, 0], end = [3, 2, 8, 4]", "", "2+1 * * *"),
        // Ends that mean nothing under a mask or where the axis is squeezed.
        (
            "update = row, begin = [3, 0, 0, 0], end = [1, 0, 0, 0], end_mask = [true, true, true, true]",
            "",
            "3+1 * * *",
        ),
        (
            "update = flat, begin = b, end = [0, 0, 0, 0], end_mask = [false, true, true, true], squeeze_mask = [true, false, true, false]",
            "tensor<int32, [4]> b = concat(values = ([1], [0], p, [0]), axis = 0, interleave = false);",
            "1+1 * p+1 *",
        ),
        ("update = row, begin = [-2, 0, 0, 0], end = [-1, 2, 8, 4]", "", "2+1 * * *"),
        (
            "update = one, begin = b, end = t, begin_mask = [false, true, false, true], end_mask = [false, true, false, true]",
            "tensor<int32, [4]> b = concat(values = ([0, 7], p, [9]), axis = 0, interleave = false);
             tensor<int32, [4]> t = concat(values = ([1], [0], e, [0]), axis = 0, interleave = false);",
            "0+1 * p+1 *",
        ),
        (
            "update = one, begin = b, end = t",
            "tensor<int32, [4]> b = concat(values = ([0], [0], at1, [0]), axis = 0, interleave = false);
             tensor<int32, [4]> t = concat(values = ([1], [2], ate, [4]), axis = 0, interleave = false);",
            "0+1 * at+1 *",
        ),
        ("update = row, begin = [1, 0, 0, 0], end = [4, 2, 8, 4], stride = [3, 1, 1, 1]", "", "1+1/3 * * *"),
    ] {
        let p = written(&format!("{update}\ntensor<fp16, [4, 2, 8, 4]> u = slice_update(x = r, {bounds});"));
        let states = States::of(main(&p));
        let (_, _, found) = states.chains()[0].writes().next().unwrap();
        assert_eq!(spell(&p, &found.unwrap_or_else(|| panic!("{bounds}")).region), region, "{bounds}");
    }
}

#[test]
fn an_update_of_an_older_snapshot_is_none() {
    let p = written(
        "tensor<fp16, [4, 2, 8, 4]> u0 = slice_update(x = r, update = row, begin = [0, 0, 0, 0], end = [1, 2, 8, 4]);
         write_state(input = cache, data = u0);
         tensor<fp16, [4, 2, 8, 4]> u = slice_update(x = r, update = row, begin = [1, 0, 0, 0], end = [2, 2, 8, 4]);",
    );
    let states = States::of(main(&p));
    let updates: Vec<bool> = states.chains()[0].writes().map(|(_, _, u)| u.is_some()).collect();
    assert_eq!(updates, [true, false], "the second write also puts row 0 back");
}

#[test]
fn readers_are_followed_through_slices_and_views() {
    let body = "
        tensor<fp16, [4, 2, 8, 4]> r = read_state(input = cache);
        tensor<fp16, [2, 8, 4]> layer = slice_by_index(x = r, begin = [3, 0, 0, 0], end = [1, 0, 0, 0],
            end_mask = [false, true, true, true], squeeze_mask = [true, false, false, false]);
        tensor<fp16, [2, 4, 8]> turned = transpose(x = layer, perm = [0, 2, 1]);
        tensor<fp16, [2, 4, 3]> rows = slice_by_size(x = turned, begin = [0, 0, 2], size = [2, 4, 3]);
        tensor<fp16, [2, 4, 3]> out = relu(x = rows);
        tensor<fp16, [4, 2, 8, 4]> whole = relu(x = r);";
    let p = program(SIGNATURE, body, "out, whole");
    let f = main(&p);
    let states = States::of(f);
    let chain = &states.chains()[0];
    let (_, snapshot, version) = chain.reads().next().unwrap();
    assert_eq!(version, 0);
    let mut looks: Vec<String> = states.looks(f, chain, snapshot).iter().map(|l| spell(&p, &l.region)).collect();
    looks.sort();
    assert_eq!(looks, ["* * * *", "3+1 * 2+3 *"]);
}

#[test]
fn hazards_keep_what_may_touch_the_same_elements_in_order() {
    let write = |n: u64, row: u64| {
        format!(
            "tensor<fp16, [4, 2, 8, 4]> r{n} = read_state(input = cache);
             tensor<fp16, [4, 2, 8, 4]> u{n} = slice_update(x = r{n}, update = row, begin = [{row}, 0, 0, 0], end = [{}, 2, 8, 4]);
             write_state(input = cache, data = u{n});\n",
            row + 1
        )
    };
    let body = format!(
        "{}{}
         tensor<fp16, [4, 2, 8, 4]> s = read_state(input = cache);
         tensor<fp16, [1, 2, 8, 4]> x = slice_by_index(x = s, begin = [1, 0, 0, 0], end = [2, 2, 8, 4]);
         tensor<fp16, [1, 2, 8, 4]> out = relu(x = x);
         {}",
        write(0, 0),
        write(1, 1),
        write(2, 1),
    );
    let p = program(SIGNATURE, &body, "out");
    let f = main(&p);
    let states = States::of(f);
    let graph = states.hazards(f, &states.chains()[0]);
    let edges: Vec<(String, String)> =
        graph.edge_references().map(|e| (f.describe(graph[e.source()]), f.describe(graph[e.target()]))).collect();
    // The write of row 1, its read and the second write of row 1; the snapshots that updates take the rest from are free.
    assert_eq!(edges.len(), 3, "{edges:?}");
    assert!(edges.iter().any(|(a, b)| a.starts_with("write_state") && b == "read_state `s`"), "{edges:?}");
    assert!(edges.iter().any(|(a, b)| a == "read_state `s`" && b.starts_with("write_state")), "{edges:?}");
    assert!(edges.iter().any(|(a, b)| a.starts_with("write_state") && b.starts_with("write_state")), "{edges:?}");
}

#[test]
fn broken_rules_are_found() {
    let rules = |update: &str, outputs: &str| {
        let body = format!(
            "tensor<fp16, [4, 2, 8, 4]> r = read_state(input = cache);
             {update}
             write_state(input = cache, data = u);
             tensor<fp16, [1, 2, 1, 4]> out = relu(x = one);"
        );
        let p = program(SIGNATURE, &body, outputs);
        breaches(main(&p)).into_iter().map(|b| b.rule).collect::<Vec<_>>()
    };
    let update = |x: &str| {
        format!(
            "tensor<fp16, [4, 2, 8, 4]> u = slice_update(x = {x}, update = row, begin = [0, 0, 0, 0], end = [1, 2, 8, 4]);"
        )
    };
    assert_eq!(rules(&update("r"), "out"), []);
    let seen = update("r") + "tensor<fp16, [4, 2, 8, 4]> seen = relu(x = r);";
    assert_eq!(rules(&seen, "out, seen"), [EmissionRule::SoleReader]);
    let twice = update("r") + "tensor<fp16, [4, 2, 8, 4]> seen = relu(x = u);";
    assert_eq!(rules(&twice, "out, seen"), [EmissionRule::WrittenOnce]);
    assert_eq!(rules(&update("r"), "out, u"), [EmissionRule::WrittenOnce, EmissionRule::NotReturned]);
    let made = "tensor<fp16, [4, 2, 8, 4]> half = mul(x = r, y = fp16(0.5));".to_string() + &update("half");
    assert_eq!(rules(&made, "out"), [EmissionRule::OwnRead]);
    let fed = "tensor<fp16, [4, 2, 8, 4]> n = relu(x = r);".to_string()
        + &update("r").replace("update = row", "update = row2")
        + "tensor<fp16, [1, 2, 8, 4]> unused = relu(x = row);";
    let fed =
        fed.replace("tensor<fp16, [4, 2, 8, 4]> n = relu(x = r);", "tensor<fp16, [1, 2, 8, 4]> row2 = relu(x = row);");
    assert_eq!(rules(&fed, "out, row2"), [EmissionRule::NotReturned], "an ancestor of what is written is returned");
}
