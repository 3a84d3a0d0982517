//! Programs whose environment differs from their keeper's: another root directory, other
//! namespaces, another user, no vDSO. Each checks every page that it reads.

use std::path::{Path, PathBuf};
use std::process::Command;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::jobs::{PATIENCE, allowed_bytes, compile_c, require_limit, scratch};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::tree::Peak;
use farpool_e2e::{binaries, have, skip, tree, turn, wait_until};

const LIMIT_MIB: u64 = 32;
const LIMIT: &str = "32MiB";
/// A command that starts the program, and its arguments before the program.
type Starter<'a> = (&'a str, &'a [&'a str]);

/// A C program in its own directory, which may become its root directory.
struct Program {
    path: PathBuf,
    directory: tempfile::TempDir,
}

impl Program {
    fn new(name: &str, source: &str, options: &[&str]) -> Program {
        let directory = scratch();
        Program { path: compile_c(name, source, options, directory.path()), directory }
    }

    /// A program that fills 96 MiB and checks them.
    fn fills(options: &[&str]) -> Program {
        Program::new("vdso", include_str!("sidecar/vdso.c"), options)
    }

    fn root(&self) -> &Path {
        self.directory.path()
    }
}

/// Runs a command that starts a program elsewhere. The limit must hold, and farpool must print
/// nothing.
fn succeeds(run: Run, (command, words): Starter<'_>, program: &Path, mode: &str) {
    let (outcome, peak_bytes) = run_at(run, (command, words), program, mode);
    outcome.require_success().require_far();
    require_limit(&outcome, peak_bytes, LIMIT_MIB);
    assert_eq!(outcome.stdout, format!("{mode}: 0 wrong\n"), "{}", outcome.stderr);
    assert_eq!(outcome.stderr, "", "{command} {words:?}");
}

fn run_at(run: Run, (command, words): Starter<'_>, program: &Path, mode: &str) -> (Outcome, u64) {
    let run = run.program(command).args(words).arg(program).arg(mode).patience(PATIENCE);
    let running = run.start();
    let peak = Peak::watch(running.pid());
    let outcome = running.finish();
    (outcome, peak.end().0)
}

fn sidecar() -> Run {
    Run::through(Door::Sidecar, LIMIT)
}

/// Whether namespaces can be created; that takes root, who can also change root directories and
/// users.
fn may_go_elsewhere(commands: &[&str]) -> bool {
    if !have("gcc") || !commands.iter().all(|command| have(command)) {
        return false;
    }
    let mut namespaces = Command::new("unshare");
    namespaces.args(["-pnmf", "--mount-proc", "true"]);
    let may = namespaces.output().is_ok_and(|output| output.status.success());
    if !may {
        skip("this user may make no namespaces (needs root)");
    }
    may
}

/// The sidecar shares its program's memory, so it must ask the kernel for the time, not the vDSO.
#[test]
fn a_program_may_unmap_or_move_its_vdso() {
    if !have("gcc") || !have("env") {
        return;
    }
    let _turn = turn();
    for options in [&["-fPIE", "-pie"][..], &["-static"]] {
        let program = Program::fills(options);
        for mode in ["unmap", "move", "late-unmap", "late-move"] {
            succeeds(sidecar(), ("env", &[]), &program.path, mode);
        }
    }
}

/// valgrind loads programs itself, and gives them no vDSO, though the kernel says that they have
/// one.
#[test]
fn a_program_under_valgrind_is_far() {
    if !have("gcc") || !have("valgrind") {
        return;
    }
    let _turn = turn();
    let program = Program::fills(&[]);
    // valgrind itself takes some 30 MiB.
    let run = Run::through(Door::Sidecar, "64MiB");
    let (outcome, peak_bytes) = run_at(run, ("valgrind", &["-q"]), &program.path, "stay");
    outcome.require_success().require_far();
    require_limit(&outcome, peak_bytes, 64);
    assert_eq!(outcome.stdout, "stay: 0 wrong\n", "{}", outcome.stderr);
}

/// Its process ids differ from those that its keeper sees, with its own /proc or the keeper's.
#[test]
fn a_program_in_a_process_id_namespace_is_far() {
    if !may_go_elsewhere(&["unshare"]) {
        return;
    }
    let _turn = turn();
    let program = Program::fills(&["-static"]);
    for words in [&["-pf", "--mount-proc"][..], &["-pf"]] {
        succeeds(sidecar(), ("unshare", words), &program.path, "stay");
    }
}

/// The private blade's socket is not in the program's root directory.
#[test]
fn a_program_with_another_root_directory_is_far() {
    if !may_go_elsewhere(&["unshare", "chroot"]) {
        return;
    }
    let _turn = turn();
    let program = Program::fills(&["-static"]);
    std::fs::create_dir(program.root().join("proc")).expect("mkdir");
    let script = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" /vdso \"$2\"";
    let root = program.root().to_string_lossy().into_owned();
    let words = ["-m", "sh", "-c", script, &root];
    succeeds(sidecar(), ("unshare", &words), &program.path, "stay");
}

/// Without /proc the pager does not know which pages are resident: the program runs without it, and
/// a message says so.
#[test]
fn a_program_without_proc_is_named() {
    if !may_go_elsewhere(&["chroot"]) {
        return;
    }
    let _turn = turn();
    let program = Program::fills(&["-static"]);
    let root = program.root().to_string_lossy().into_owned();
    let (outcome, _) = run_at(sidecar(), ("chroot", &[&root]), Path::new("/vdso"), "stay");
    outcome.require_success();
    assert_eq!(outcome.stdout, "stay: 0 wrong\n");
    assert!(outcome.stderr.contains("mount -t proc proc"), "{}", outcome.stderr);
}

/// Only its keeper can reach a blade on loopback.
#[test]
fn a_program_in_a_network_namespace_is_far() {
    if !may_go_elsewhere(&["unshare"]) {
        return;
    }
    let _turn = turn();
    let (program, blade) = (Program::fills(&["-static"]), Blade::start("512MiB"));
    for transport in [Transport::Tcp, Transport::Unix] {
        let run = sidecar().blade(&blade.address(transport));
        succeeds(run, ("unshare", &["-n"]), &program.path, "stay");
    }
}

/// The blade's socket belongs to root and has mode 0600, as blades create it.
#[test]
fn a_program_of_another_user_uses_its_keepers_blade() {
    if !may_go_elsewhere(&["setpriv"]) {
        return;
    }
    let _turn = turn();
    let (program, blade) = (Program::fills(&["-static"]), Blade::start("512MiB"));
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(program.root(), open).expect("chmod");
    let run = sidecar().blade(&blade.address(Transport::Unix));
    let words = ["--reuid", "nobody", "--clear-groups"];
    succeeds(run, ("setpriv", &words), &program.path, "stay");
}

/// All memory moves to a blade that is added later and that, again, only the keeper can reach.
#[test]
fn a_blade_that_is_added_is_reached_by_the_keeper() {
    if !may_go_elsewhere(&["unshare"]) {
        return;
    }
    let _turn = turn();
    let program = Program::new("verify", include_str!("sidecar/verify.c"), &["-static"]);
    let (first, second) = (Blade::start("512MiB"), Blade::start("512MiB"));
    let run = sidecar().blade(&first.address(Transport::Tcp));
    let run = run.program("unshare").arg("-n").arg(&program.path).args(["96", "2"]);
    let mut running = run.patience(PATIENCE).start();
    running.wait_for_output("ready", 1);
    let pid = running.program_pid();
    let (added, left) = (second.address(Transport::Tcp), first.address(Transport::Tcp));
    let mut blades = Command::new(binaries::program("farpool"));
    blades.args(["blades", &pid.to_string(), "--add", &added, "--leave", &left, "--wait"]);
    let output = blades.output().expect("farpool blades");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said} {}", running.stderr());
    drop(first);
    for signal in [libc::SIGUSR1, libc::SIGTERM] {
        tree::signal(pid, signal);
        if signal == libc::SIGUSR1 {
            running.wait_for_output("checked", 1);
        }
    }
    let outcome = running.finish();
    outcome.require_success().require_far();
    assert!(outcome.stdout.ends_with("ends\n"), "{} {}", outcome.stdout, outcome.stderr);
}

/// Attaches to a program that a command starts elsewhere, and detaches from it.
fn is_attached_to_and_left(command: &str, words: &[&str], program: &Path) {
    let run = Run::local(command).args(words).arg(program).args(["96", "1"]);
    let mut running = run.patience(PATIENCE).start();
    running.wait_for_output("ready", 1);
    let is_program = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.trim_end() == "verify")
    };
    let tree = || tree::descendants(running.pid()).into_iter().chain([running.pid()]);
    let pid = wait_until("the program", PATIENCE, || tree().find(is_program));
    let mut keeper = Run::attach(pid, LIMIT).patience(PATIENCE).start();
    keeper.wait_for_output("of local memory now", 1);
    wait_until("the resident set to fit", PATIENCE, || {
        (tree::resident_bytes(pid)? <= allowed_bytes(LIMIT_MIB)).then_some(())
    });
    tree::signal(pid, libc::SIGUSR1);
    running.wait_for_output("checked", 1);
    tree::signal(keeper.pid(), libc::SIGTERM);
    keeper.finish().require_success();
    assert_eq!(tree::sidecars_in(pid), [0; 0], "a sidecar is left");
    tree::signal(pid, libc::SIGTERM);
    let outcome = running.finish();
    assert!(outcome.stdout.ends_with("ends\n"), "{} {}", outcome.stdout, outcome.stderr);
    outcome.require_success();
}

#[test]
fn who_is_elsewhere_is_attached_to_and_left() {
    if !may_go_elsewhere(&["unshare", "chroot"]) {
        return;
    }
    let _turn = turn();
    let program = Program::new("verify", include_str!("sidecar/verify.c"), &["-static"]);
    is_attached_to_and_left("unshare", &["-pf", "--mount-proc", "--kill-child"], &program.path);
    std::fs::create_dir(program.root().join("proc")).expect("mkdir");
    let script = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" /verify \"$2\" \"$3\"";
    let root = program.root().to_string_lossy().into_owned();
    is_attached_to_and_left("unshare", &["-m", "sh", "-c", script, &root], &program.path);
}

/// A process under a seccomp filter may not suspend another process's filter, but a process under
/// the same filter may make the same calls.
#[test]
fn a_tree_in_a_container_that_filters_its_calls() {
    if !have("gcc") || !cfg!(target_arch = "x86_64") {
        return;
    }
    let _turn = turn();
    let container = Program::new("contained", include_str!("sidecar/contained.c"), &[]);
    let source = include_str!("sidecar/protections.c");
    let program = Program::new("protections", source, &["-pthread"]);
    for (filter, rights) in [("plain", "rw"), ("plain", "rwx"), ("plain", "rx"), ("no-code", "r")] {
        let stats = container.root().join("stats.json");
        let mut command = Command::new(&container.path);
        command.arg(filter).arg(binaries::program("farpool")).args(["run", "--door", "sidecar"]);
        command.args(["--local", LIMIT, "--stats"]).arg(&stats).arg("--").arg(&program.path);
        command.args(["settle", rights, "35"]);
        let outcome = Run::with(command, Some(stats), None).patience(PATIENCE).finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.stdout, "0 wrong\n", "{filter} {rights}: {}", outcome.stderr);
    }
}
