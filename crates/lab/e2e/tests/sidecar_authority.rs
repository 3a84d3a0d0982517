//! Programs that drop privileges while they have a sidecar: the sidecar must not keep them.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use farpool_e2e::jobs::{compile_c, scratch};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{have, skip, tree, turn, wait_until};

const HELD_MIB: &str = "64";
const LIMIT: &str = "32MiB";
const PATIENCE: Duration = Duration::from_secs(60);
/// The Uid and Gid fields of the program's status after it has dropped its privileges.
const NOBODY: &str = "65534\t65534\t65534\t65534";

fn field(pid: u32, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim_start_matches(':').trim().to_owned())
}

/// Starts a program with far memory that will drop `what` when signalled.
fn far_program(what: &str) -> Option<(tempfile::TempDir, Running)> {
    if !have("gcc") {
        return None;
    }
    if !rustix::process::geteuid().is_root() {
        skip("only root has rights to give up");
        return None;
    }
    let directory = scratch();
    let source = include_str!("sidecar/gives_up.c");
    let program = compile_c("gives_up", source, &[], directory.path());
    let run = Run::through(Door::Sidecar, LIMIT).program(program).args([what, HELD_MIB]);
    let mut running = run.start();
    running.wait_for_output("filled", 1);
    wait_until("a sidecar", PATIENCE, || tree::sidecars_in(running.program_pid()).pop());
    Some((directory, running))
}

/// Waits until the only sidecar satisfies `is_right` and memory is far again, and checks the
/// memory.
fn await_another(running: &mut Running, is_right: impl Fn(u32) -> bool) {
    let pid = running.program_pid();
    wait_until("another sidecar", PATIENCE, || match tree::sidecars_in(pid)[..] {
        [sidecar] if is_right(sidecar) => Some(()),
        _ => None,
    });
    running.wait_until_far_pages();
    tree::signal(pid, libc::SIGUSR2);
    running.wait_for_output("checked", 1);
    assert!(running.stdout().contains("checked 0 wrong"), "{}", running.stdout());
    let told = running.stderr();
    assert_eq!(told.matches("has given up").count(), 1, "{told}");
    assert!(!told.contains("more than its limit"), "{told}");
}

/// Makes a program drop `what`. The field `name` of the sidecar's status must be `before`, and that
/// of its replacement `after`.
fn is_followed(what: &str, name: &str, before: &str, after: &str) {
    let _turn = turn();
    let Some((_directory, mut running)) = far_program(what) else { return };
    let pid = running.program_pid();
    let first = tree::sidecars_in(pid).pop().and_then(|sidecar| field(sidecar, name));
    assert_eq!(first.as_deref(), Some(before));
    tree::signal(pid, libc::SIGUSR1);
    running.wait_for_output("given up", 1);
    await_another(&mut running, |sidecar| field(sidecar, name).as_deref() == Some(after));
    tree::signal(pid, libc::SIGTERM);
    running.finish();
}

#[test]
fn a_sidecar_does_not_stay_root() {
    is_followed("user", "Uid", "0\t0\t0\t0", NOBODY);
}

#[test]
fn a_sidecar_does_not_keep_a_group() {
    is_followed("group", "Gid", "0\t0\t0\t0", NOBODY);
}

#[test]
fn a_sidecar_does_not_go_round_a_filter() {
    is_followed("filter", "Seccomp_filters", "0", "1");
}

#[test]
fn a_sidecar_does_not_stay_outside_of_a_root_directory() {
    let _turn = turn();
    let Some((_directory, mut running)) = far_program("root") else { return };
    let pid = running.program_pid();
    tree::signal(pid, libc::SIGUSR1);
    running.wait_for_output("given up", 1);
    // That directory has no /proc, so that no other sidecar can page.
    running.wait_for_line("is not held to the limit");
    let root = |pid: u32| std::fs::metadata(format!("/proc/{pid}/root")).map(|root| root.ino());
    let is_outside = |sidecar: &u32| root(*sidecar).is_ok_and(|own| Some(own) != root(pid).ok());
    assert!(!tree::sidecars_in(pid).iter().any(is_outside));
    tree::signal(pid, libc::SIGTERM);
    running.finish();
}

/// A sidecar of an attached process does not keep the process's former user, either.
#[test]
fn the_sidecar_of_an_attached_process_follows_it() {
    let _turn = turn();
    if !have("gcc") || !rustix::process::geteuid().is_root() {
        return skip("a compiler and root are needed");
    }
    let directory = scratch();
    let program = compile_c("gives_up", include_str!("sidecar/gives_up.c"), &[], directory.path());
    let mut program = Run::local(program).args(["user", HELD_MIB]).start();
    program.wait_for_output("filled", 1);
    let pid = program.pid();
    let attached = Run::attach(pid, LIMIT).start();
    attached.wait_until_far_pages();
    tree::signal(pid, libc::SIGUSR1);
    program.wait_for_output("given up", 1);
    wait_until("another sidecar", PATIENCE, || match tree::sidecars_in(pid)[..] {
        [sidecar] if field(sidecar, "Uid").as_deref() == Some(NOBODY) => Some(()),
        _ => None,
    });
    attached.wait_until_far_pages();
    tree::signal(pid, libc::SIGUSR2);
    program.wait_for_output("checked 0 wrong", 1);
    tree::signal(pid, libc::SIGTERM);
    program.finish();
    attached.finish();
}
