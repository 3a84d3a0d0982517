//! Where the programs under test are.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The directory with `farpool`, its preload library and this crate's programs, all current.
///
/// # Panics
/// When they cannot be built.
pub fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| match std::env::var_os("FARPOOL_E2E_DIR") {
        Some(directory) => std::path::absolute(directory).expect("FARPOOL_E2E_DIR"),
        None => build(),
    })
}

/// One of the programs.
pub fn program(name: &str) -> PathBuf {
    directory().join(name)
}

/// Builds the programs in the profile of the test, as `cargo test -p farpool-e2e` builds neither
/// the binary nor a library that nothing links. Takes almost no time if they are up to date.
fn build() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    // target/PROFILE/deps/NAME
    let directory = test.ancestors().nth(2).expect("a build directory").to_owned();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args([
        "build",
        "--quiet",
        "-p",
        "farpool",
        "-p",
        "farpool-preload",
        "-p",
        "farpool-e2e",
    ]);
    if directory.ends_with("release") {
        command.arg("--release");
    }
    let status = command.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo");
    assert!(status.success(), "the programs under test could not be built");
    directory
}
