//! Laws, on random programs.

mod attention;
mod blocks;
mod costs;
mod near_misses;
#[path = "../support/mod.rs"]
mod support;
mod views;

use proptest::prelude::ProptestConfig;

fn ty(dtype: &str, shape: &[u64]) -> String {
    format!("tensor<{dtype}, {shape:?}>")
}

/// Random cases: this many, or as many as the environment variable `PROPTEST_CASES` asks for if that is more.
fn cases(at_least: u32) -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { cases: config.cases.max(at_least), ..config }
}
