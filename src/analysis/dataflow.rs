//! The graph of a block as petgraph sees it: reachability, order, DOT.

use std::collections::HashMap;

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::{Dfs, Reversed};

use crate::ir::{BlockId, Function, OpId, ValueId};

/// The ops of one block and the values that flow between them. A use in a nested block counts at the op that owns it.
#[derive(Clone, Debug)]
pub struct Dataflow {
    graph: DiGraph<OpId, ValueId>,
    nodes: HashMap<OpId, NodeIndex>,
}

impl Dataflow {
    /// The graph of block `b`.
    pub fn of(f: &Function, b: BlockId) -> Dataflow {
        let mut graph = DiGraph::new();
        let nodes: HashMap<OpId, NodeIndex> = f.ops(b).map(|op| (op, graph.add_node(op))).collect();
        for op in f.ops(b) {
            for &v in f.op(op).results() {
                let mut readers: Vec<OpId> = f.users(v).into_iter().filter_map(|user| f.ancestor_in(user, b)).collect();
                readers.dedup();
                for reader in readers {
                    graph.add_edge(nodes[&op], nodes[&reader], v);
                }
            }
        }
        Dataflow { graph, nodes }
    }

    /// The petgraph graph: ops, and an edge per value and reader.
    pub fn graph(&self) -> &DiGraph<OpId, ValueId> {
        &self.graph
    }

    /// Whether values can be computed in some order, and whether the order in the block is one.
    pub fn is_acyclic(&self) -> bool {
        !petgraph::algo::is_cyclic_directed(&self.graph)
    }

    /// Everything that `op` depends on, itself included.
    pub fn ancestors(&self, op: OpId) -> Vec<OpId> {
        let Some(&start) = self.nodes.get(&op) else { return Vec::new() };
        let reversed = Reversed(&self.graph);
        let mut dfs = Dfs::new(reversed, start);
        let mut out = Vec::new();
        while let Some(n) = dfs.next(reversed) {
            out.push(self.graph[n]);
        }
        out.sort_unstable();
        out
    }

    /// Everything that depends on `op`, itself included.
    pub fn descendants(&self, op: OpId) -> Vec<OpId> {
        let Some(&start) = self.nodes.get(&op) else { return Vec::new() };
        let mut dfs = Dfs::new(&self.graph, start);
        let mut out = Vec::new();
        while let Some(n) = dfs.next(&self.graph) {
            out.push(self.graph[n]);
        }
        out.sort_unstable();
        out
    }

    /// The graph in Graphviz' language, an op a node and a value an edge.
    pub fn dot(&self, f: &Function) -> String {
        let mut out = String::from("digraph {\n  node [shape=box];\n");
        for n in self.graph.node_indices() {
            let op = self.graph[n];
            out.push_str(&format!("  n{} [label={:?}];\n", n.index(), f.describe(op)));
        }
        for e in self.graph.edge_indices() {
            if let Some((a, b)) = self.graph.edge_endpoints(e) {
                let v = self.graph[e];
                out.push_str(&format!("  n{} -> n{} [label={:?}];\n", a.index(), b.index(), f.ty(v).to_string()));
            }
        }
        out.push_str("}\n");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;
    use crate::opset::Builder;

    #[test]
    fn values_lead_from_producers_to_readers() {
        let mut b = Builder::new("main", "CoreML8");
        let x = b.input("x", DType::F16, &[2]).unwrap();
        let left = b.op("relu", [("x", x.into())]).unwrap();
        let right = b.op("exp", [("x", x.into())]).unwrap();
        let sum = b.op("add", [("x", left.into()), ("y", right.into())]).unwrap();
        let f = b.finish(&[("y", sum)]).unwrap();
        let op = |kind: &str| f.all_ops().into_iter().find(|&op| f.op(op).kind() == kind).unwrap();
        let graph = Dataflow::of(&f, f.body());
        assert!(graph.is_acyclic());
        assert_eq!(graph.graph().edge_count(), 2);
        assert_eq!(graph.ancestors(op("add")), [op("relu"), op("exp"), op("add")]);
        assert_eq!(graph.descendants(op("exp")), [op("exp"), op("add")]);
        assert_eq!(graph.ancestors(op("exp")), [op("exp")]);
        assert_eq!(graph.dot(&f).matches(" -> ").count(), 2);
    }
}
