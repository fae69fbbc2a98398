//! Attention blocks with one condition of the rewrites broken: whatever is done to them, they compute the same.

use milopt::analysis::traffic::Traffic;
use milopt::text;
use proptest::prelude::*;
use proptest::sample::Index;

use super::blocks::{Block, Consumer, Graph, Side, Spelling, block, repeat, resized};
use super::cases;
use super::support::{DEFAULT, main, optimize};

/// The condition that is broken.
#[derive(Clone, Debug)]
enum Miss {
    /// Keys or values are not what they are in a block that can be folded.
    Copies(Side, Copies),
    /// The scores go through an op that does not treat heads and rows alike.
    Scores(Scores),
    /// A value inside is returned.
    Returned(Index),
    /// Something else reads a value inside.
    Read(Index, &'static str),
}

#[derive(Clone, Debug)]
enum Copies {
    /// Heads in any order, by a gather or by pieces.
    Order(Vec<Index>, bool),
    /// Another operand differs from head to head: an op with an input of this rank.
    PerHead(&'static str, usize),
    /// The positions are repeated, the heads are whole.
    Positions,
    /// More heads are made than read: from this one on.
    Cut(Index),
    /// Copies of two values, one after the other.
    TwoValues,
    /// The sum of copies in two orders.
    TwoOrders,
    /// The other order.
    Spelled(Spelling),
    /// Fewer copies of more heads.
    Group(Index),
    /// One copy of every head.
    NoGroup,
    /// The repetitions come from a table.
    RunTimeReps,
    /// Where the copies begin comes from a table: on the axis of the heads or of the positions.
    RunTimeBegin(bool),
    /// The axes change places before they are joined.
    Transposed(Vec<usize>),
    /// Copies of a state that is written before or after they are made.
    State(bool),
}

#[derive(Clone, Debug)]
enum Scores {
    /// Along the heads or the rows.
    Along(&'static str, bool),
    /// An operand of this shape, counted from the right; sizes are those of the scores or 1.
    Operand(Vec<bool>),
    /// In another order of axes, and back.
    Transposed(Vec<usize>),
    /// Reshaped to a matrix of rows over all heads, and back.
    Flat,
    /// Reduced along an axis that goes, and broadcast from the right where that fits.
    RankDown(usize),
}

fn miss() -> impl Strategy<Value = Miss> {
    let side = prop::sample::select(vec![Side::Keys, Side::Values]);
    let shuffled = |n: usize| Just((0..n).collect::<Vec<usize>>()).prop_shuffle();
    let copies = prop_oneof![
        (prop::collection::vec(any::<Index>(), 16), any::<bool>()).prop_map(|(o, pieces)| Copies::Order(o, pieces)),
        (prop::sample::select(vec!["add", "mul", "maximum"]), 3usize..5)
            .prop_map(|(op, rank)| Copies::PerHead(op, rank)),
        Just(Copies::Positions),
        any::<Index>().prop_map(Copies::Cut),
        Just(Copies::TwoValues),
        Just(Copies::TwoOrders),
        prop::sample::select(Spelling::ALL.to_vec()).prop_map(Copies::Spelled),
        any::<Index>().prop_map(Copies::Group),
        Just(Copies::NoGroup),
        Just(Copies::RunTimeReps),
        any::<bool>().prop_map(Copies::RunTimeBegin),
        shuffled(5).prop_map(Copies::Transposed),
        any::<bool>().prop_map(Copies::State),
    ];
    let along = ["softmax", "reduce_max", "reduce_sum", "cumsum", "concat", "reverse", "roll", "cut", "shift", "pad"];
    let scores = prop_oneof![
        (prop::sample::select(along.to_vec()), any::<bool>()).prop_map(|(op, rows)| Scores::Along(op, rows)),
        prop::collection::vec(any::<bool>(), 0..5).prop_map(Scores::Operand),
        shuffled(4).prop_map(Scores::Transposed),
        Just(Scores::Flat),
        (0usize..4).prop_map(Scores::RankDown),
    ];
    prop_oneof![
        3 => (side, copies).prop_map(|(side, copies)| Miss::Copies(side, copies)),
        3 => scores.prop_map(Miss::Scores),
        1 => any::<Index>().prop_map(Miss::Returned),
        1 => (any::<Index>(), prop::sample::select(vec!["relu", "matmul", "reshape", "reduce_sum", "softmax"]))
            .prop_map(|(i, op)| Miss::Read(i, op)),
    ]
}

impl Copies {
    /// Adds the copies of one side to the graph.
    fn write(&self, block: &Block, graph: &mut Graph, side: Side) {
        let (shape, axis) = block.once(side);
        let (once, to, heads) = (format!("{}_once", side.name()), side.name(), block.heads());
        let all = resized(&shape, axis, heads);
        let spelling = block.spellings[side as usize];
        let from = |graph: &mut Graph, shape: &[u64]| graph.input("fp16", &once, shape);
        let part = format!("{to}_part");
        match self {
            Copies::Order(order, pieces) => {
                from(graph, &shape);
                let order: Vec<usize> =
                    (0..heads as usize).map(|i| order[i % order.len()].index(block.kv_heads as usize)).collect();
                if *pieces {
                    let names: Vec<String> = (0..heads).map(|i| format!("{part}{i}")).collect();
                    for (name, &head) in names.iter().zip(&order) {
                        let mut begin = vec![0; 4];
                        begin[axis] = head;
                        let size = resized(&shape, axis, 1);
                        graph.op(
                            name,
                            &size,
                            &format!("slice_by_size(x = {once}, begin = {begin:?}, size = {size:?})"),
                        );
                    }
                    let call = format!("concat(values = ({}), axis = {axis}, interleave = false)", names.join(", "));
                    graph.op(to, &all, &call);
                } else {
                    let call = format!("gather(x = {once}, indices = {order:?}, axis = {axis}, batch_dims = 0)");
                    graph.op(to, &all, &call);
                }
            }
            Copies::PerHead(op, rank) => {
                from(graph, &shape);
                repeat(graph, spelling, block.group, (&shape, axis), &once, &part);
                let ones = resized(&[1; 4], axis, heads);
                let operand = &ones[(4 - rank).min(axis)..];
                graph.input("fp16", &format!("{to}_bias"), operand);
                graph.op(to, &all, &format!("{op}(x = {part}, y = {to}_bias)"));
            }
            Copies::Positions => {
                let position = block.position_axis(side);
                let times = (2..=block.keys).find(|n| block.keys.is_multiple_of(*n)).unwrap_or(1);
                from(graph, &resized(&all, position, block.keys / times));
                let reps = resized(&[1; 4], position, times);
                graph.op(to, &all, &format!("tile(x = {once}, reps = {reps:?})"));
            }
            Copies::Cut(first) => {
                from(graph, &shape);
                repeat(graph, spelling, block.group + 1, (&shape, axis), &once, &part);
                let first = first.index(block.kv_heads as usize + 1) as u64;
                let begin = resized(&[0; 4], axis, first);
                let end = resized(&all, axis, first + heads);
                graph.op(to, &all, &format!("slice_by_index(x = {part}, begin = {begin:?}, end = {end:?})"));
            }
            Copies::TwoValues => {
                from(graph, &shape);
                graph.input("fp16", &format!("{to}_other"), &shape);
                let values: Vec<String> =
                    (0..block.group).map(|i| if i == 1 { format!("{to}_other") } else { once.clone() }).collect();
                let at = axis + usize::from(spelling.is_grouped());
                let wide = [&shape[..at], &[block.group], &shape[at..]].concat();
                graph.op(&part, &wide, &format!("stack(values = ({}), axis = {at})", values.join(", ")));
                graph.op(to, &all, &format!("reshape(x = {part}, shape = {all:?})"));
            }
            Copies::TwoOrders => {
                from(graph, &shape);
                graph.input("fp16", &format!("{to}_other"), &shape);
                repeat(graph, Spelling::Expand, block.group, (&shape, axis), &once, &part);
                let (other, again) = (format!("{to}_other"), format!("{to}_again"));
                repeat(graph, Spelling::HeadTile, block.group, (&shape, axis), &other, &again);
                graph.op(to, &all, &format!("add(x = {part}, y = {again})"));
            }
            Copies::Spelled(spelling) => {
                from(graph, &shape);
                repeat(graph, *spelling, block.group, (&shape, axis), &once, to);
            }
            Copies::Group(pick) => {
                let groups: Vec<u64> = (1..=heads).filter(|n| heads.is_multiple_of(*n)).collect();
                let group = groups[pick.index(groups.len())];
                let shape = resized(&shape, axis, heads / group);
                from(graph, &shape);
                repeat(graph, spelling, group, (&shape, axis), &once, to);
            }
            Copies::NoGroup => {
                from(graph, &all);
                repeat(graph, spelling, 1, (&all, axis), &once, to);
            }
            Copies::RunTimeReps => {
                from(graph, &shape);
                let reps = resized(&[1; 4], axis, block.group);
                let call = from_table(graph, to, [reps.clone(), reps]);
                graph.typed("int32", &format!("{to}_reps"), &[4], &call);
                // Every size that the file does not know is a symbol of its own.
                let symbols = if side == Side::Keys { "s0, s1, s2, s3" } else { "s4, s5, s6, s7" };
                graph.text(&format!("tensor<fp16, [{symbols}]> {part} = tile(x = {once}, reps = {to}_reps);"));
                graph.op(to, &all, &format!("reshape(x = {part}, shape = {all:?})"));
            }
            Copies::RunTimeBegin(of_heads) => {
                let position = block.position_axis(side);
                let cut = if *of_heads { axis } else { position };
                let shape = resized(&shape, cut, shape[cut] + 1);
                from(graph, &shape);
                repeat(graph, spelling, block.group, (&shape, axis), &once, &part);
                let call = from_table(graph, to, [vec![0; 4], resized(&[0; 4], cut, 1)]);
                graph.typed("int32", &format!("{to}_begin"), &[4], &call);
                graph.op(to, &all, &format!("slice_by_size(x = {part}, begin = {to}_begin, size = {all:?})"));
            }
            Copies::Transposed(perm) => {
                from(graph, &shape);
                let with = |n: u64| [&shape[..axis + 1], &[n], &shape[axis + 1..]].concat();
                let (one, wide) = (with(1), with(block.group));
                let turned: Vec<u64> = perm.iter().map(|&p| wide[p]).collect();
                let reps = resized(&[1; 5], axis + 1, block.group);
                graph.op(&format!("{part}0"), &one, &format!("expand_dims(x = {once}, axes = [{}])", axis + 1));
                graph.op(&format!("{part}1"), &wide, &format!("tile(x = {part}0, reps = {reps:?})"));
                graph.op(&format!("{part}2"), &turned, &format!("transpose(x = {part}1, perm = {perm:?})"));
                graph.op(to, &all, &format!("reshape(x = {part}2, shape = {all:?})"));
            }
            Copies::State(first) => {
                graph.state(&format!("{to}_cache"), &shape);
                graph.input("fp16", &format!("{to}_fresh"), &shape);
                graph.op(&once, &shape, &format!("read_state(input = {to}_cache)"));
                let write = format!("write_state(input = {to}_cache, data = {to}_fresh);");
                if *first {
                    graph.text(&write);
                }
                repeat(graph, spelling, block.group, (&shape, axis), &once, to);
                if !*first {
                    graph.text(&write);
                }
            }
        }
    }
}

/// A row of a table, picked by an input.
fn from_table(graph: &mut Graph, name: &str, rows: [Vec<u64>; 2]) -> String {
    graph.input("int32", &format!("{name}_row"), &[]);
    graph.typed("int32", &format!("{name}_table"), &[2, 4], &format!("const(val = {rows:?})"));
    format!("gather(x = {name}_table, indices = {name}_row, axis = 0, batch_dims = 0)")
}

impl Scores {
    /// Adds ops behind the scores; gives the name of the last.
    fn write(&self, block: &Block, graph: &mut Graph, s: &str) -> String {
        let shape = block.scores();
        match self {
            Scores::Along(op, rows) => along(op, block.axes()[if *rows { 2 } else { 1 }], &shape, graph, s),
            Scores::Operand(whole) => {
                let missing = 4 - whole.len();
                let sizes: Vec<u64> =
                    whole.iter().zip(&shape[missing..]).map(|(&w, &n)| if w { n } else { 1 }).collect();
                graph.input("fp16", "odd", &sizes);
                graph.op("broken", &shape, &format!("add(x = {s}, y = odd)"));
            }
            Scores::Transposed(perm) => {
                let turned: Vec<u64> = perm.iter().map(|&p| shape[p]).collect();
                let back: Vec<usize> = (0..4).map(|i| perm.iter().position(|&p| p == i).unwrap()).collect();
                graph.op("turned", &turned, &format!("transpose(x = {s}, perm = {perm:?})"));
                graph.op("summed", &turned, "cumsum(x = turned, axis = 3, exclusive = false, reverse = false)");
                graph.op("broken", &shape, &format!("transpose(x = summed, perm = {back:?})"));
            }
            Scores::Flat => {
                let flat = [shape[0], shape[1..].iter().product()];
                graph.op("flat", &flat, &format!("reshape(x = {s}, shape = {flat:?})"));
                graph.op("summed", &flat, "softmax(x = flat, axis = 1)");
                graph.op("broken", &shape, &format!("reshape(x = summed, shape = {shape:?})"));
            }
            Scores::RankDown(axis) => {
                let mut low = shape.clone();
                low.remove(*axis);
                if !low.iter().zip(&shape[1..]).all(|(a, b)| a == b || *a == 1) {
                    return s.into();
                }
                graph.op("lower", &low, &format!("reduce_max(x = {s}, axes = [{axis}], keep_dims = false)"));
                graph.op("broken", &shape, &format!("sub(x = {s}, y = lower)"));
            }
        }
        "broken".into()
    }
}

/// `broken`: the scores after an op that works along an axis.
fn along(op: &str, axis: usize, shape: &[u64], graph: &mut Graph, s: &str) {
    let (n, zeros) = (shape[axis], [0u64; 4]);
    let begin = resized(&zeros, axis, n - 1);
    match op {
        "softmax" => graph.op("broken", shape, &format!("softmax(x = {s}, axis = {axis})")),
        "cumsum" => {
            graph.op("broken", shape, &format!("cumsum(x = {s}, axis = {axis}, exclusive = false, reverse = false)"));
        }
        "reverse" => graph.op("broken", shape, &format!("reverse(x = {s}, axes = [{axis}])")),
        "concat" => {
            let twice = resized(shape, axis, 2 * n);
            graph.op("twice", &twice, &format!("concat(values = ({s}, {s}), axis = {axis}, interleave = false)"));
            let end = resized(shape, axis, 2 * n - 1);
            graph.op("broken", shape, &format!("slice_by_index(x = twice, begin = {begin:?}, end = {end:?})"));
        }
        "roll" => {
            let order: Vec<u64> = (0..n).map(|i| (i + 1) % n).collect();
            graph.op("broken", shape, &format!("gather(x = {s}, indices = {order:?}, axis = {axis}, batch_dims = 0)"));
        }
        "cut" => {
            let (head, tail) = (resized(shape, axis, n / 2), resized(shape, axis, n - n / 2));
            if n < 2 {
                return graph.op("broken", shape, &format!("relu(x = {s})"));
            }
            let half = resized(&zeros, axis, n / 2);
            graph.op("head", &head, &format!("slice_by_index(x = {s}, begin = {zeros:?}, end = {head:?})"));
            graph.op("tail", &tail, &format!("slice_by_index(x = {s}, begin = {half:?}, end = {shape:?})"));
            graph.op("broken", shape, &format!("concat(values = (tail, head), axis = {axis}, interleave = false)"));
        }
        "shift" => {
            let one = resized(shape, axis, 1);
            graph.op("last", &one, &format!("slice_by_size(x = {s}, begin = {begin:?}, size = {one:?})"));
            graph.op("broken", shape, &format!("sub(x = {s}, y = last)"));
        }
        "pad" => {
            let mut amounts = [0u64; 8];
            amounts[2 * axis] = 1;
            let wide = resized(shape, axis, n + 1);
            let call = format!("pad(x = {s}, pad = {amounts:?}, mode = \"constant\", constant_val = fp16(0.5))");
            graph.op("padded", &wide, &call);
            graph.op("broken", shape, &format!("slice_by_size(x = padded, begin = {zeros:?}, size = {shape:?})"));
        }
        reduce => {
            let one = resized(shape, axis, 1);
            graph.op("reduced", &one, &format!("{reduce}(x = {s}, axes = [{axis}], keep_dims = true)"));
            graph.op("broken", shape, &format!("sub(x = {s}, y = reduced)"));
        }
    }
}

/// Adds another reader of a value, whose result is returned.
fn read(graph: &mut Graph, (value, shape): (String, Vec<u64>), op: &str) {
    let volume: u64 = shape.iter().product();
    let (to, call) = match op {
        "matmul" => {
            let mut square = shape.clone();
            square[shape.len() - 1] = shape[shape.len() - 2];
            (square, format!("matmul(x = {value}, y = {value}, transpose_x = false, transpose_y = true)"))
        }
        "reshape" => (vec![volume], format!("reshape(x = {value}, shape = [{volume}])")),
        "reduce_sum" => (resized(&shape, 1, 1), format!("reduce_sum(x = {value}, axes = [1], keep_dims = true)")),
        "softmax" => (shape, format!("softmax(x = {value}, axis = 1)")),
        op => (shape, format!("{op}(x = {value})")),
    };
    graph.op("also", &to, &call);
    graph.outputs.push("also".into());
}

/// The block with its broken condition.
fn broken(block: &Block, miss: &Miss) -> Graph {
    let mut graph = block.graph_with(
        |block, graph, side| match miss {
            Miss::Copies(of, copies) if *of == side => copies.write(block, graph, side),
            _ => block.copies(graph, side),
        },
        |block, graph, s| match miss {
            Miss::Scores(scores) => scores.write(block, graph, s),
            _ => s.into(),
        },
    );
    match miss {
        Miss::Returned(i) => {
            let name = graph.values[i.index(graph.values.len())].0.clone();
            if !graph.outputs.contains(&name) {
                graph.outputs.push(name);
            }
        }
        Miss::Read(i, op) => {
            let value = graph.values[i.index(graph.values.len())].clone();
            read(&mut graph, value, op);
        }
        _ => {}
    }
    graph
}

/// The block with sizes and a consumer that let the condition be broken at all.
fn fitted(block: Block, miss: &Miss) -> Block {
    let heads = block.heads();
    match (miss, block.consumer) {
        // Axes that move to the right by one meet others of their size.
        (Miss::Scores(Scores::RankDown(_)), _) => {
            Block { batch: 1, q_len: heads, keys: heads, consumer: Consumer::Queries, ..block }
        }
        // The fused op has no scores.
        (Miss::Scores(_), Consumer::Fused) => Block { consumer: Consumer::Queries, ..block },
        _ => block,
    }
}

proptest! {
    #![proptest_config(cases(1000))]

    /// What misses a condition keeps every bit of every output and state, over several steps, and copies that stay are
    /// explained.
    #[test]
    fn near_misses_keep_every_bit(block in block(), miss in miss()) {
        let block = fitted(block, &miss);
        let (after, report) = optimize(&broken(&block, &miss).program(), DEFAULT);
        let copies = Traffic::of(main(&after)).repeats.count;
        prop_assert!(copies == 0 || !report.explain().is_empty(), "{}", text::print_program(&after));
    }
}
