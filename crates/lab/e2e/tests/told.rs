//! What `farpool run` and `farpool stat` report about a limit that cannot hold: the program works
//! on more memory, part of its memory cannot be moved, or processes of the tree cannot be served.

use std::path::{Path, PathBuf};
use std::time::Instant;

use farpool_e2e::jobs::{PATIENCE, compile_c, scratch};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{have, skip, tree, turn, wait_until};
use farpool_units::MIB;

/// Part of the line that says how much memory would suffice, once the whole working set was seen.
const KNOWN: &str = "much of its time goes to pages that come and go: about ";
/// The exit code of `farpool run --when-outside fail` if a process is outside.
const OUTSIDE: i32 = 120;

/// Fills memory and reads pages of a part of it, in random order or cyclically, for a number of
/// reads or for ever.
const WALK: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
int main(int count, char **words) {
    size_t all = atol(words[1]) << 20, used = atol(words[2]) << 8;
    int is_round = words[3][0] == 'c';
    unsigned long most = atol(words[4]), x = 88172645463325252UL, at = 0;
    unsigned char *memory = mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t page = 0; page < all >> 12; page++) memory[page << 12] = page;
    puts("filled");
    fflush(stdout);
    for (unsigned long reads = 0; !most || reads < most; reads++) {
        x ^= x << 13; x ^= x >> 7; x ^= x << 17;
        at = is_round ? (at + 1) % used : x % used;
        if (memory[at << 12] != (unsigned char)at) return 9;
    }
    return 0;
}
"#;

/// Touches memory, then waits for ever. Its first argument selects shared memory, locked memory, or
/// strict seccomp.
const HOLD: &str = r#"
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(int count, char **words) {
    size_t bytes = 80 << 20;
    int ends[2];
    char byte;
    if (pipe(ends)) return 1;
    int kind = strcmp(words[1], "shared") ? MAP_PRIVATE : MAP_SHARED;
    char *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
    if (!strcmp(words[1], "lock") && mlock(memory, bytes)) return 2;
    if (!strcmp(words[1], "strict") && prctl(PR_SET_SECCOMP, 1)) return 3;
    for (size_t at = 0; at < bytes; at += 4096) memory[at] = 1;
    return read(ends[0], &byte, 1) != 1;
}
"#;

fn start_walk(door: Door, directory: &Path, limit: &str, words: [&str; 4]) -> Running {
    let program = compile_c("walk", WALK, &[], directory);
    Run::through(door, limit).program(program).args(words).patience(PATIENCE).start()
}

fn mib_in(line: &str, before: &str) -> u64 {
    let after = line.split(before).nth(1).unwrap_or_default();
    let number = after.split_whitespace().next().unwrap_or_default();
    number.parse().unwrap_or_else(|_| panic!("no size after {before:?} in {line:?}"))
}

fn is_told_what_would_hold(door: Door, all: &str, used: &str, walk: &str, needs_mib: u64) {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let mut running = start_walk(door, directory.path(), "64MiB", [all, used, walk, "0"]);
    running.wait_for_output("filled", 1);
    // On a busy machine there may be a guess before ("perhaps"), as the working set was not fully
    // seen yet.
    let line = running.wait_for_line(KNOWN);
    let told_mib = mib_in(&line, "about ");
    assert!(told_mib.abs_diff(needs_mib) * 4 <= needs_mib, "{line}");
    let told =
        wait_until("stat to know it", PATIENCE, || running.told()?["working_set_bytes"].as_u64());
    assert!((told / MIB).abs_diff(needs_mib) * 4 <= needs_mib, "{told}");
    tree::signal(running.pid(), libc::SIGTERM);
    let outcome = running.finish();
    let said = outcome.stderr;
    assert_eq!(said.matches(KNOWN).count(), 1, "{said}");
    let all_lines = said.matches("works on more memory than it has").count();
    assert!(all_lines <= 2, "guessed once, and known once: {said}");
    assert_eq!(said.matches("worked on more memory than it had").count(), 1, "{said}");
}

#[test]
fn a_random_walk_over_twice_the_limit_is_told_its_size() {
    is_told_what_would_hold(Door::Usual, "128", "128", "random", 128);
    is_told_what_would_hold(Door::Preload, "128", "128", "random", 128);
}

#[test]
fn a_walk_round_and_round_is_told_its_size() {
    is_told_what_would_hold(Door::Usual, "128", "128", "cyclic", 128);
}

#[test]
fn what_is_not_used_is_not_counted() {
    is_told_what_would_hold(Door::Usual, "256", "96", "random", 96);
}

#[test]
fn a_program_that_fits_is_told_nothing() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    // It runs for some seconds, with most of its memory far.
    let words = ["200", "40", "random", "700000000"];
    let running = start_walk(Door::Usual, directory.path(), "64MiB", words);
    let began = Instant::now();
    let outcome = running.finish();
    outcome.require_success();
    assert!(outcome.counter("evictions") > 0 && began.elapsed().as_secs() > 1);
    assert!(!outcome.stderr.contains("more memory than"), "{}", outcome.stderr);
}

#[test]
fn locked_memory_that_passes_the_limit_is_told_in_bytes() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("hold", HOLD, &[], directory.path());
    for door in [Door::Usual, Door::Preload] {
        let run = Run::through(door, "48MiB").program(&program).args(["lock"]);
        let running = run.patience(PATIENCE).start();
        let line = running.wait_for_line("cannot be moved, more than its limit");
        let locked = (80 * MIB).to_string();
        assert!(line.contains(&format!("{locked} locked (mlock)")), "{line}");
        let told = wait_until("stat to know it", PATIENCE, || running.told());
        assert_eq!(told["unmovable_bytes"]["locked"], 80 * MIB, "{told}");
        assert!(told["pinned_bytes"].as_u64() >= Some(80 * MIB), "{told}");
    }
}

/// The process has hardly any other memory, so it gets no pager.
#[test]
fn shared_memory_alone_that_passes_the_limit_is_counted_and_told() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("hold", HOLD, &[], directory.path());
    for door in [Door::Sidecar, Door::Preload] {
        let run = Run::through(door, "32MiB").program(&program).args(["shared"]);
        let running = run.patience(PATIENCE).start();
        let line = running.wait_for_line("cannot be moved, more than its limit");
        assert!(line.contains(&format!("{} shared memory", 80 * MIB)), "{line}");
        let told = wait_until("stat to know it", PATIENCE, || running.told());
        assert!(told["unmovable_bytes"]["shared"].as_u64() >= Some(80 * MIB), "{told}");
        assert!(told["local_bytes"].as_u64() >= Some(16 * MIB), "{told}");
        assert_eq!(running.stderr().matches("cannot be moved").count(), 1);
    }
}

/// Compiles a static program that holds memory. Returns None if there is no static C library.
fn static_hold(directory: &Path) -> Option<PathBuf> {
    if !have("gcc") {
        return None;
    }
    std::fs::write(directory.join("empty.c"), "int main(void) { return 0; }").expect("source");
    let mut gcc = std::process::Command::new("gcc");
    let built = gcc.args(["-static", "empty.c", "-o", "empty"]).current_dir(directory).output();
    if !built.is_ok_and(|built| built.status.success()) {
        skip("gcc builds no static programs here (no libc.a)");
        return None;
    }
    Some(compile_c("hold", HOLD, &["-static"], directory))
}

/// Starts a shell that starts a static program, into which the library cannot be preloaded.
fn start_static(program: &Path, when: &str) -> Running {
    let script = format!("{} hold; exit 3", program.display());
    let run = Run::through(Door::Preload, "128MiB").args(["--when-outside", when]);
    run.program("sh").args(["-c", &script]).patience(PATIENCE).start()
}

fn wait_for_outside(running: &Running) {
    wait_until("the process outside to be counted", PATIENCE, || {
        let told = running.told()?;
        (told["outside_bytes"].as_u64()? >= 80 * MIB && told["outside_processes"] == 1)
            .then_some(())
    });
}

#[test]
fn a_static_child_is_named_counted_and_runs() {
    let directory = scratch();
    let Some(program) = static_hold(directory.path()) else { return };
    let _turn = turn();
    let mut running = start_static(&program, "warn");
    let line = running.wait_for_line("is not held to the limit");
    assert!(line.contains("(hold)") && line.contains("statically linked"), "{line}");
    wait_for_outside(&running);
    assert!(running.is_running());
    assert_eq!(running.stderr().matches("is not held").count(), 1, "{}", running.stderr());
}

#[test]
fn a_static_child_that_is_allowed_is_counted_and_not_named() {
    let directory = scratch();
    let Some(program) = static_hold(directory.path()) else { return };
    let _turn = turn();
    let running = start_static(&program, "allow");
    wait_for_outside(&running);
    assert!(!running.stderr().contains("held to the limit"), "{}", running.stderr());
}

#[test]
fn a_static_child_that_must_not_be_ends_the_tree() {
    let directory = scratch();
    let Some(program) = static_hold(directory.path()) else { return };
    let _turn = turn();
    let outcome = start_static(&program, "fail").finish();
    assert_eq!(outcome.code, OUTSIDE, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("(hold)"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("statically linked"), "{}", outcome.stderr);
}

fn start_sealed(program: &Path, when: &str) -> Running {
    let run = Run::through(Door::Sidecar, "32MiB").args(["--when-outside", when]);
    run.program(program).args(["strict"]).patience(PATIENCE).start()
}

#[test]
fn a_sealed_process_is_named_and_counted_or_ends_the_tree() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("hold", HOLD, &[], directory.path());
    let running = start_sealed(&program, "warn");
    let line = running.wait_for_line("is not held to the limit");
    assert!(line.contains("(hold)") && line.contains("strict seccomp"), "{line}");
    wait_for_outside(&running);
    drop(running);
    let outcome = start_sealed(&program, "fail").finish();
    assert_eq!(outcome.code, OUTSIDE, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("strict seccomp"), "{}", outcome.stderr);
}

#[test]
fn a_traced_process_is_named_and_counted() {
    if !have("gcc") || !have("strace") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("hold", HOLD, &[], directory.path());
    let words = ["-o".as_ref(), "/dev/null".as_ref(), program.as_os_str(), "hold".as_ref()];
    let run = Run::through(Door::Sidecar, "32MiB").program("strace").args(words);
    let running = run.patience(PATIENCE).start();
    let line = running.wait_for_line("is not held to the limit");
    assert!(line.contains("(hold)") && line.contains("traced"), "{line}");
    wait_for_outside(&running);
}
