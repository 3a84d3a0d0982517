//! Tells the binary which commit it was built from, if the sources are in a git repository.

use std::path::Path;
use std::process::Command;

/// Returns what git prints, without the newline; None without git or a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=FARPOOL_COMMIT");
    // A package is built from an archive, so its maker states the commit.
    let told = std::env::var("FARPOOL_COMMIT").ok();
    let commit = told.or_else(|| git(&["rev-parse", "--short=12", "HEAD"]));
    println!("cargo::rustc-env=FARPOOL_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    // Each commit and checkout appends a line to this log.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"])
        && Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
}
