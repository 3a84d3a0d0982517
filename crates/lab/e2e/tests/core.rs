//! `farpool core`: a core dump that includes far memory, read by gdb.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use farpool_e2e::jobs::{allowed_bytes, compile_c, scratch};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{binaries, have, tree, turn, wait_until};

/// The memory of the program, and its limit of local memory.
const HELD_MIB: u64 = 128;
const LIMIT_MIB: u64 = 32;
const LIMIT: &str = "32MiB";
/// How long to wait for a step; each takes some seconds at most.
const PATIENCE: Duration = Duration::from_secs(60);
/// Threads of the program, without those of a preloaded pager.
const THREADS: u64 = 4;

/// A program with most of its memory far.
struct Held {
    running: Running,
    program: PathBuf,
    directory: tempfile::TempDir,
    checks: usize,
}

impl Held {
    fn start(door: Door) -> Held {
        let directory = scratch();
        let source = include_str!("core/held.c");
        let program = compile_c("held", source, &["-g"], directory.path());
        let run = Run::through(door, LIMIT).program(&program).args([HELD_MIB.to_string()]);
        let mut running = run.patience(PATIENCE).start();
        running.wait_for_output("ready", 1);
        let pid = running.program_pid();
        wait_until("most of it to be far", PATIENCE, || {
            (tree::resident_bytes(pid)? <= allowed_bytes(LIMIT_MIB)).then_some(())
        });
        Held { running, program, directory, checks: 0 }
    }

    fn pid(&self) -> u32 {
        self.running.program_pid()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Checks that the program continues and has all its data.
    fn checks(&mut self) {
        tree::signal(self.pid(), libc::SIGUSR1);
        self.checks += 1;
        self.running.wait_for_output("checked, 0 wrong", self.checks);
    }

    fn ends_well(self) {
        tree::signal(self.running.pid(), libc::SIGTERM);
        self.running.finish().require_success();
    }

    /// Checks that gdb finds the stacks of all threads and every byte in the core.
    fn require_whole(&self, core: &Path) {
        let words = self.path("words");
        let _ = std::fs::remove_file(&words);
        let dump =
            format!("dump binary memory {} held_words held_words+held_count", words.display());
        let gdb = Command::new("gdb")
            .args(["-batch", "-nx", "-ex", "thread apply all backtrace", "-ex", &dump])
            .args([&self.program, core])
            .env("DEBUGINFOD_URLS", "")
            .output()
            .expect("gdb");
        let told = String::from_utf8_lossy(&gdb.stdout);
        let all = format!("{told}{}", String::from_utf8_lossy(&gdb.stderr));
        assert_eq!(told.matches("waiting_thread (").count(), 3, "{all}");
        assert!(told.contains("resting_main (waited="), "{all}");
        let words = std::fs::read(words).unwrap_or_else(|error| panic!("{error}: {all}"));
        assert_eq!(words.len() as u64, HELD_MIB << 20);
        let word = |index: u64| (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let wrong = words.chunks_exact(8).zip(0..).filter(|(bytes, index)| *bytes != word(*index));
        assert_eq!(wrong.count(), 0, "words in the core");
    }
}

fn core_command(pid: u32, file: &Path) -> Command {
    let mut farpool = Command::new(binaries::program("farpool"));
    farpool.arg("core").arg(pid.to_string()).arg(file).stdin(Stdio::null());
    farpool
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks a core of a program that runs, or that SIGSTOP has stopped.
fn core_through(door: Door, is_stopped: bool) {
    if !have("gcc") || !have("gdb") {
        return;
    }
    let _turn = turn();
    let mut held = Held::start(door);
    let (pid, core) = (held.pid(), held.path("core"));
    if is_stopped {
        tree::signal(pid, libc::SIGSTOP);
        wait_until("it to be stopped", PATIENCE, || (state(pid) == Some('T')).then_some(()));
    }
    let peak = tree::Peak::watch(held.running.pid());
    let output = core_command(pid, &core).arg("--json").output().expect("farpool core");
    let (peak_bytes, _) = peak.end();
    assert!(output.status.success(), "{}", said(&output));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    println!("peak {} MiB, {told}", peak_bytes >> 20);
    assert!(peak_bytes <= allowed_bytes(LIMIT_MIB), "peak {peak_bytes} bytes while it was read");
    assert_eq!((&told["is_of_one_moment"], &told["unreadable_pages"]), (&true.into(), &0.into()));
    assert!(told["threads"].as_u64() >= Some(THREADS), "{told}");
    let mode = core.metadata().expect("a core").permissions().mode() & 0o777;
    assert_eq!(mode, 0o600, "memory may hold secrets");
    assert_eq!(state(pid) == Some('T'), is_stopped, "it goes on as before");
    if is_stopped {
        tree::signal(pid, libc::SIGCONT);
    }
    held.require_whole(&core);
    held.checks();
    held.ends_well();
}

fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[test]
fn a_core_through_the_preloaded_library() {
    core_through(Door::Preload, false);
}

#[test]
fn a_core_through_the_sidecar() {
    core_through(Door::Sidecar, false);
}

/// SIGSTOP stops the threads of a preloaded pager, too.
#[test]
fn a_core_of_a_stopped_program() {
    for door in [Door::Preload, Door::Sidecar] {
        core_through(door, true);
    }
}

#[test]
fn a_core_while_the_program_runs() {
    if !have("gcc") || !have("gdb") {
        return;
    }
    let _turn = turn();
    let mut held = Held::start(Door::Preload);
    let core = held.path("core");
    let output = core_command(held.pid(), &core).arg("--running").output().expect("farpool core");
    assert!(output.status.success(), "{}", said(&output));
    held.require_whole(&core);
    held.checks();
    held.ends_well();
}

/// If the core is not completed, no part of it is left, and the program continues.
#[test]
fn a_core_that_is_not_written_leaves_nothing() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let mut held = Held::start(Door::Sidecar);
    let folder = held.path("cores");
    std::fs::create_dir(&folder).expect("a folder");
    let core = folder.join("core");
    let mut farpool = core_command(held.pid(), &core);
    let child =
        farpool.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("farpool core");
    wait_until("the file to be begun", PATIENCE, || {
        (std::fs::read_dir(&folder).ok()?.count() > 0).then_some(())
    });
    tree::signal(child.id(), libc::SIGINT);
    let output = child.wait_with_output().expect("its end");
    assert!(!output.status.success() && said(&output).contains("removed"), "{}", said(&output));
    let there = || std::fs::read_dir(&folder).expect("a folder").count();
    assert_eq!(there(), 0, "nothing is left");
    held.checks();
    // An existing file is not overwritten.
    std::fs::write(&core, b"precious").expect("a file");
    let output = core_command(held.pid(), &core).output().expect("farpool core");
    assert!(
        !output.status.success() && said(&output).contains("there already"),
        "{}",
        said(&output)
    );
    assert_eq!(std::fs::read(&core).expect("the file"), b"precious");
    assert_eq!(there(), 1);
    held.ends_well();
}

#[test]
fn a_core_of_nothing() {
    let directory = scratch();
    // Larger than any possible process id.
    let output = core_command(1 << 22, &directory.path().join("core")).output();
    let output = output.expect("farpool core");
    assert!(!output.status.success() && said(&output).contains("no process"), "{}", said(&output));
    assert_eq!(std::fs::read_dir(directory.path()).expect("a folder").count(), 0);
}
