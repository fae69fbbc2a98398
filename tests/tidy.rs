//! Checks on the tree itself.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            out.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
    out
}

/// The modules of `src/lib.rs`, lowest layer first.
fn layers() -> Vec<String> {
    let lib = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    lib.lines()
        .filter_map(|l| l.strip_prefix("pub mod ").or(l.strip_prefix("mod ")))
        .filter_map(|l| l.strip_suffix(';'))
        .map(String::from)
        .filter(|m| m != "error")
        .collect()
}

#[test]
fn a_lower_layer_never_imports_a_higher_one() {
    let layers = layers();
    assert!(layers.len() >= 11, "{layers:?}");
    for (rank, layer) in layers.iter().enumerate() {
        for file in sources(&root().join("src").join(layer)) {
            let text = fs::read_to_string(&file).unwrap();
            // Unit tests may look up: they compare with the layers above.
            let code = text.split("#[cfg(test)]").next().unwrap();
            if file.file_stem().is_some_and(|s| s == "tests") || file.components().any(|c| c.as_os_str() == "tests") {
                continue;
            }
            for higher in &layers[rank + 1..] {
                let used = code.lines().filter(|l| !l.trim_start().starts_with("//")).any(|l| {
                    l.match_indices(&format!("crate::{higher}")).any(|(at, hit)| {
                        !l[at + hit.len()..].starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                    })
                });
                assert!(!used, "{} imports `{higher}`, a higher layer than `{layer}`", file.display());
            }
        }
    }
}

#[test]
fn only_package_and_cli_touch_files() {
    for layer in layers() {
        if layer == "package" || layer == "cli" {
            continue;
        }
        for file in sources(&root().join("src").join(&layer)) {
            let text = fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            assert!(!code.contains("std::fs"), "{} touches files", file.display());
        }
    }
}

#[test]
fn the_library_does_not_depend_on_the_command_line() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    for dependency in ["clap", "indicatif", "zip"] {
        let line = manifest.lines().find(|l| l.starts_with(&format!("{dependency} ="))).unwrap();
        assert!(line.contains("optional = true"), "{line}");
    }
}

#[test]
fn passes_are_called_like_their_files() {
    for pass in milopt::passes::all() {
        let file = root().join("src/passes").join(format!("{}.rs", pass.name.replace('-', "_")));
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        assert!(text.starts_with(&format!("//! `{}`: {}", pass.name, pass.summary)), "{}", file.display());
        for word in ["With: ", "Given:", "Return:", "Exactness: "] {
            assert!(text.contains(&format!("//! {word}")), "{} lacks {word}", file.display());
        }
        assert!(text.contains(&format!("//! Exactness: {}", pass.exactness)), "{}", file.display());
    }
}

#[test]
fn the_readme_lists_every_pass() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    for pass in milopt::passes::all() {
        assert!(readme.contains(&format!("| `{}` |", pass.name)), "{}", pass.name);
    }
}
