//! The sources of this repository as a test sees them. The rules are in `tests/`.
//!
//! A rule collects every place where it is broken and fails once, with all of them.

use std::path::{Path, PathBuf};

/// The folder that holds the workspace's Cargo.toml.
///
/// # Panics
/// When this crate lies elsewhere than in `crates/<group>/<name>`.
#[must_use]
pub fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).expect("three folders up");
    assert!(root.join("Cargo.lock").is_file(), "{} is no workspace", root.display());
    root.to_owned()
}

/// A text file of the repository.
#[derive(Debug)]
pub struct Source {
    /// Its path from [`root`], with slashes.
    pub path: String,
    pub text: String,
}

impl Source {
    /// `path:line`, lines counted from 1.
    #[must_use]
    pub fn place(&self, index: usize) -> String {
        format!("{}:{}", self.path, index + 1)
    }
}

/// Folders that a build or an editor makes, and vectors and data that are not ours to format.
const NOT_OURS: [&str; 4] = ["target", ".git", "data", "vectors"];

/// Every file with one of these extensions, in order of its path.
///
/// # Panics
/// When a folder or file cannot be read.
#[must_use]
pub fn sources(extensions: &[&str]) -> Vec<Source> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of the repository") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|it| it.to_str()).unwrap_or_default();
            if path.is_dir() && !path.is_symlink() {
                if !NOT_OURS.contains(&name) {
                    folders.push(path);
                }
            } else if extensions.iter().any(|it| path.extension().is_some_and(|ext| ext == *it)) {
                let text = std::fs::read_to_string(&path).expect("sources are UTF-8");
                let path = path.strip_prefix(&root).expect("below the root").display().to_string();
                found.push(Source { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(!found.is_empty(), "no file of {extensions:?} below {}", root.display());
    found
}

/// The sources of the product, without those of its tests.
#[must_use]
pub fn of_the_product() -> Vec<Source> {
    let mut sources = sources(&["rs"]);
    sources.retain(|it| it.path.starts_with("crates/") && !it.path.contains("/tests/"));
    sources
}

/// Fails with every place where `rule` is broken.
///
/// # Panics
/// When there is one.
pub fn require_none(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}; broken in {}:\n  {}", broken.len(), broken.join("\n  "));
}
