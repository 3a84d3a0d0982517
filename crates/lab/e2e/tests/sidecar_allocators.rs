//! The sidecar door with allocators and C libraries other than glibc's: only the kernel sees their
//! memory calls.

use std::path::{Path, PathBuf};
use std::process::Command;

use farpool_e2e::jobs::{PATIENCE, compile, compile_c, require_limit, scratch};
use farpool_e2e::run::{Door, Run};
use farpool_e2e::tree::Peak;
use farpool_e2e::{have, skip, turn};

const LIMIT_MIB: u64 = 24;
const SOURCE: &str = include_str!("sidecar/churn.c");

/// The path at which the compiler finds a library. Returns None, and skips the test, if it does not
/// find it.
fn library(name: &str) -> Option<PathBuf> {
    let mut gcc = Command::new("gcc");
    let said = gcc.arg(format!("-print-file-name={name}")).output().ok()?;
    let path = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
    // gcc prints a name that it does not find unchanged.
    if path.is_absolute() && path.exists() {
        return Some(path);
    }
    skip(&format!("{name} is not installed"));
    None
}

/// Runs the program. Every block must keep its contents, and the limit must hold.
fn churns(program: &Path, preload: Option<&Path>) {
    let _turn = turn();
    let mut run = Run::through(Door::Sidecar, &format!("{LIMIT_MIB}MiB"));
    if let Some(library) = preload {
        run = run.env("LD_PRELOAD", library);
    }
    let running = run.program(program).patience(PATIENCE).start();
    let peak = Peak::watch(running.pid());
    let outcome = running.finish();
    let (peak_bytes, looks) = peak.end();
    println!(
        "peak {} MiB at a limit of {LIMIT_MIB} MiB, {looks} looks, {} fetches",
        peak_bytes >> 20,
        outcome.counter("demand_fetches")
    );
    outcome.require_success().require_far();
    assert_eq!(outcome.stdout, "0 wrong\n");
    require_limit(&outcome, peak_bytes, LIMIT_MIB);
}

fn made_by_gcc(options: &[&str]) {
    let directory = scratch();
    churns(&compile_c("churn", SOURCE, options, directory.path()), None);
}

fn preloaded(name: &str) {
    if !have("gcc") {
        return;
    }
    let Some(library) = library(name) else { return };
    let directory = scratch();
    churns(&compile_c("churn", SOURCE, &[], directory.path()), Some(&library));
}

#[test]
fn jemalloc_in_a_static_program() {
    if !have("gcc") {
        return;
    }
    let Some(library) = library("libjemalloc.a") else { return };
    made_by_gcc(&["-static", &library.to_string_lossy(), "-lm", "-lstdc++"]);
}

#[test]
fn jemalloc_in_the_executable() {
    if !have("gcc") {
        return;
    }
    let Some(library) = library("libjemalloc.a") else { return };
    let all = ["-Wl,--whole-archive", &library.to_string_lossy(), "-Wl,--no-whole-archive"];
    made_by_gcc(&[&all[..], &["-lm", "-ldl", "-lstdc++"]].concat());
}

#[test]
fn jemalloc_preloaded() {
    preloaded("libjemalloc.so.2");
}

#[test]
fn tcmalloc_preloaded() {
    preloaded("libtcmalloc.so.4");
}

#[test]
fn musl_static_and_dynamic() {
    if !have("musl-gcc") {
        return;
    }
    for options in [&["-static"][..], &[]] {
        let directory = scratch();
        std::fs::write(directory.path().join("churn.c"), SOURCE).expect("source");
        let words = [&["-O1", "-pthread", "churn.c", "-o", "churn"], options].concat();
        compile("musl-gcc", &words, directory.path());
        churns(&directory.path().join("churn"), None);
    }
}
