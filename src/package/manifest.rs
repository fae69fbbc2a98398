//! `Manifest.json`: which file of a package is the model.

use std::path::{Component, Path, PathBuf};

use serde_json::Value;

/// Name of the manifest in a package.
pub(super) const MANIFEST: &str = "Manifest.json";
/// Directory that item paths are relative to.
pub(super) const DATA: &str = "Data";
/// The model file of a new package, relative to [`DATA`].
pub(super) const MODEL: &str = "com.apple.CoreML/model.mlmodel";
/// The weight directory of a new package, relative to [`DATA`].
pub(super) const WEIGHTS: &str = "com.apple.CoreML/weights";

/// Why a manifest does not lead to a model.
#[derive(Debug)]
pub(super) enum ManifestError {
    /// The manifest does not say what it must.
    Invalid(String),
    /// An item lies outside of the package.
    Escapes(PathBuf),
}

/// The path of the root model relative to the package, from the text of its manifest.
pub(super) fn root_model(bytes: &[u8]) -> Result<PathBuf, ManifestError> {
    let invalid = |what: String| ManifestError::Invalid(what);
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let manifest: Value =
        serde_json::from_slice(text).map_err(|e| invalid(format!("its {MANIFEST} is not JSON: {e}")))?;
    let items = manifest.get("itemInfoEntries").and_then(Value::as_object);
    let item_path = |item: &Value| item.get("path").and_then(Value::as_str).map(Path::new).map(Path::to_owned);
    for path in items.into_iter().flat_map(|items| items.values()).filter_map(item_path) {
        if !path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir)) {
            return Err(ManifestError::Escapes(path));
        }
    }
    let root = manifest
        .get("rootModelIdentifier")
        .and_then(Value::as_str)
        .ok_or_else(|| invalid(format!("its {MANIFEST} names no root model")))?;
    let item = items
        .and_then(|items| items.get(root))
        .ok_or_else(|| invalid(format!("its {MANIFEST} has no item for the root model `{root}`")))?;
    let path = item_path(item).ok_or_else(|| invalid(format!("its {MANIFEST} gives the root model no path")))?;
    Ok(Path::new(DATA).join(path))
}

/// The manifest of a new package with a model and a weight directory.
pub(super) fn new_manifest() -> String {
    // Identifiers only have to differ within one manifest; fixed ones keep the output the same every time.
    r#"{
    "fileFormatVersion": "1.0.0",
    "itemInfoEntries": {
        "5f0c4b1e-7d0f-4f7e-9c55-6d696c6f7001": {
            "author": "com.apple.CoreML",
            "description": "CoreML Model Specification",
            "name": "model.mlmodel",
            "path": "com.apple.CoreML/model.mlmodel"
        },
        "5f0c4b1e-7d0f-4f7e-9c55-6d696c6f7002": {
            "author": "com.apple.CoreML",
            "description": "CoreML Model Weights",
            "name": "weights",
            "path": "com.apple.CoreML/weights"
        }
    },
    "rootModelIdentifier": "5f0c4b1e-7d0f-4f7e-9c55-6d696c6f7001"
}
"#
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(text: &str) -> Result<PathBuf, String> {
        root_model(text.as_bytes()).map_err(|e| match e {
            ManifestError::Invalid(what) => what,
            ManifestError::Escapes(path) => format!("escapes: {}", path.display()),
        })
    }

    #[test]
    fn follows_the_root_identifier() {
        assert_eq!(root(&new_manifest()), Ok(Path::new(DATA).join(MODEL)));
        assert_eq!(root(&format!("\u{feff}{}", new_manifest())), Ok(Path::new(DATA).join(MODEL)));
        let lean = r#"{"itemInfoEntries": {"a": {"path": "x/yolo.mlmodel"}}, "rootModelIdentifier": "a"}"#;
        assert_eq!(root(lean), Ok("Data/x/yolo.mlmodel".into()));
    }

    #[test]
    fn refuses_what_leads_nowhere() {
        assert_eq!(root("[]").unwrap_err(), "its Manifest.json names no root model");
        assert_eq!(root(r#"{"rootModelIdentifier": 3}"#).unwrap_err(), "its Manifest.json names no root model");
        assert_eq!(
            root(r#"{"rootModelIdentifier": "a", "itemInfoEntries": {}}"#).unwrap_err(),
            "its Manifest.json has no item for the root model `a`"
        );
        assert_eq!(
            root(r#"{"rootModelIdentifier": "a", "itemInfoEntries": {"a": {}}}"#).unwrap_err(),
            "its Manifest.json gives the root model no path"
        );
        assert!(root("{").unwrap_err().starts_with("its Manifest.json is not JSON"));
        for path in ["../x", "/etc/passwd", "a/../../x"] {
            let text = format!(r#"{{"rootModelIdentifier": "a", "itemInfoEntries": {{"a": {{"path": "{path}"}}}}}}"#);
            assert_eq!(root(&text).unwrap_err(), format!("escapes: {path}"));
        }
    }
}
