//! Builds `farpool-sidecar` as a static position-independent executable with a nested cargo.
//!
//! Nested, because cargo has no linking mode per package, and because the sidecar is always built
//! in the release profile: it shares the address space of programs that must not be slowed down.
//! Its target directory is below OUT_DIR, so that it waits for no lock of the outer cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

/// How the sidecar is linked: nothing of the host program's C library, at any address.
const RUSTFLAGS: [&str; 3] =
    ["-Ctarget-feature=+crt-static", "-Crelocation-model=pie", "-Cstrip=symbols"];
/// Variables of the outer build that would change the inner one.
const OUTER_ONLY: [&str; 5] = [
    "RUSTFLAGS",
    "CARGO_BUILD_TARGET",
    "CARGO_TARGET_DIR",
    "RUSTC_WORKSPACE_WRAPPER",
    "LD_PRELOAD",
];

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|error| panic!("cargo did not set {name}: {error}"))
}

/// All sources of the sidecar. Cargo.lock is one of them: a new version of a dependency is a new
/// sidecar.
fn watch_sources(workspace: &Path) {
    let crates = [
        "far/sidecar",
        "far/pager",
        "far/uffd",
        "far/board",
        "far/pool",
        "far/seal",
        "far/fabric",
        "far/record",
        "protocol/wire",
        "ground/kernel",
        "ground/policy",
        "ground/units",
    ];
    for source in crates
        .map(|name| format!("crates/{name}"))
        .iter()
        .map(String::as_str)
        .chain(["Cargo.toml", "Cargo.lock"])
    {
        println!("cargo::rerun-if-changed={}", workspace.join(source).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
}

fn build(workspace: &Path, triple: &str, directory: &Path) {
    let mut cargo = Command::new(variable("CARGO"));
    cargo.args(["build", "--release", "--locked", "-p", "farpool-sidecar", "--target", triple]);
    cargo.args(["--features", "injected"]);
    if variable("PROFILE") == "debug" {
        // So that tests see the messages.
        cargo.args(["--features", "test-panics"]);
    }
    cargo.arg("--target-dir").arg(directory).current_dir(workspace);
    for name in OUTER_ONLY {
        cargo.env_remove(name);
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\u{1f}"));
    match cargo.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!(
            "building the sidecar ended with {status}; static linking wants libc.a (Debian: \
             apt-get install libc6-dev)"
        ),
        Err(error) => panic!("the nested cargo could not be started: {error}"),
    }
}

fn main() {
    let workspace = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("../../..");
    let (out, triple) = (PathBuf::from(variable("OUT_DIR")), variable("TARGET"));
    watch_sources(&workspace);
    let directory = out.join("nested");
    build(&workspace, &triple, &directory);
    let made = directory.join(triple).join("release/farpool-sidecar");
    let wanted = out.join("farpool-sidecar");
    if let Err(error) = std::fs::copy(&made, &wanted) {
        panic!("copying {} to {}: {error}", made.display(), wanted.display());
    }
}
