//! Programs that cannot take a sidecar, or not now: the reason is named and the program unharmed.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use common::{Host, Link, ask, await_end, eventually, image};
use farpool_inject::{InjectError, Pid, Setup, inject};
use rustix::process::{Signal, kill_process};

#[test]
fn a_traced_program_is_left_to_its_tracer() {
    let Some(mut host) = Host::c(Link::Static, &["obey"]) else { return };
    let mut strace = Command::new("strace");
    strace.args(["-o", "/dev/null", "-p", &host.child.id().to_string()]).stderr(Stdio::null());
    let mut strace = match strace.spawn() {
        Ok(strace) => strace,
        Err(error) => return farpool_testkit::skip(&format!("strace cannot be started: {error}")),
    };
    let status = format!("/proc/{}/status", host.child.id());
    let is_traced =
        || std::fs::read_to_string(&status).is_ok_and(|text| !text.contains("TracerPid:\t0"));
    eventually("strace traces", is_traced);
    let refused = host.inject();
    let own = i32::try_from(strace.id()).expect("a process id");
    assert!(
        matches!(refused, Err(InjectError::AlreadyTraced { tracer, .. }) if tracer == own),
        "{refused:?}"
    );
    kill_process(Pid::from_child(&strace), Signal::INT).expect("kill");
    strace.wait().expect("strace ends");
    eventually("strace lets go", || !is_traced());
    host.injected();
    assert_eq!(host.finish(), "ok");
}

#[test]
fn a_program_in_vfork_is_busy_and_goes_on() {
    let Some(mut host) = Host::c(Link::Static, &["vfork"]) else { return };
    host.await_state('D');
    let refused = host.inject();
    assert!(matches!(refused, Err(InjectError::Busy { .. })), "{refused:?}");
    assert_eq!(host.finish(), "ok");
}

#[test]
fn a_program_under_strict_seccomp_is_refused() {
    let Some(host) = Host::c(Link::Static, &["strict"]) else { return };
    let status = format!("/proc/{}/status", host.child.id());
    eventually("strict seccomp", || {
        std::fs::read_to_string(&status).is_ok_and(|text| text.contains("Seccomp:\t1"))
    });
    let refused = host.inject();
    assert!(matches!(refused, Err(InjectError::SeccompStrict { .. })), "{refused:?}");
}

#[test]
fn a_program_that_catches_its_own_calls_is_refused() {
    let Some(mut host) = Host::c(Link::Static, &["dispatch"]) else { return };
    host.await_sleep();
    match host.inject() {
        Err(InjectError::Sealed { .. }) => {}
        // The kernel cannot report it (before 6.4), and the call went through: the selector allows
        // all.
        other => {
            farpool_testkit::skip(&format!("the kernel does not tell of user dispatch: {other:?}"))
        }
    }
    assert_eq!(host.finish(), "ok");
}

#[test]
fn a_program_with_a_seccomp_filter_takes_a_sidecar_from_root() {
    let Some(mut host) = Host::c(Link::Static, &["filter"]) else { return };
    let status = format!("/proc/{}/status", host.child.id());
    eventually("the filter", || {
        std::fs::read_to_string(&status).is_ok_and(|text| text.contains("Seccomp:\t2"))
    });
    match host.inject() {
        Ok(injected) => assert_eq!(ask(&injected, "WORK"), "WORK ok"),
        Err(InjectError::Sealed { .. }) => {
            farpool_testkit::skip("filters cannot be suspended here")
        }
        Err(error) => panic!("{error}"),
    }
    assert_eq!(host.finish(), "ok");
}

#[test]
fn a_program_that_its_user_stopped_stays_stopped() {
    let Some(mut host) = Host::c(Link::Dynamic, &["many", "4"]) else { return };
    kill_process(host.pid(), Signal::STOP).expect("kill");
    host.await_state('T');
    let injected = host.injected();
    host.await_state('T');
    kill_process(host.pid(), Signal::CONT).expect("kill");
    host.await_sleep();
    assert_eq!(host.finish(), "ok");
    await_end(&injected);
}

/// The parent counts SIGCHLD while its child takes sidecars, and while they end.
#[test]
fn the_programs_parent_sees_nothing() {
    let Some(mut host) = Host::c(Link::Dynamic, &["family"]) else { return };
    let child = host.line().parse().ok().and_then(Pid::from_raw).expect("the child's process id");
    for _ in 0..5 {
        let injected = inject(child, image(), &Setup::default()).expect("a sidecar");
        assert!(ask(&injected, "PING").starts_with("PONG"));
        kill_process(injected.pid, Signal::KILL).expect("kill");
        await_end(&injected);
    }
    assert_eq!(host.finish(), "ok");
}

#[test]
fn an_injection_that_fails_late_leaves_nothing() {
    let Some(mut host) = Host::c(Link::Static, &["obey"]) else { return };
    let before: Vec<_> = common::mappings(host.pid()).into_iter().map(|(range, _)| range).collect();
    let setup =
        Setup { environment: vec!["X=".to_owned() + &"x".repeat(1 << 17)], ..Setup::default() };
    let refused = inject(host.pid(), image(), &setup);
    assert!(matches!(refused, Err(InjectError::Kernel { .. })), "{refused:?}");
    let after: Vec<_> = common::mappings(host.pid()).into_iter().map(|(range, _)| range).collect();
    assert_eq!(before, after);
    host.injected();
    assert_eq!(host.finish(), "ok");
}

#[test]
fn a_process_that_is_not_there_is_named() {
    let gone = Pid::from_raw(i32::MAX).expect("a number");
    let refused = inject(gone, image(), &Setup::default());
    assert!(matches!(refused, Err(InjectError::NoProcess { pid: i32::MAX })), "{refused:?}");
}

/// A 32-bit program of three instructions in 9 bytes: pause() by int 0x80, for ever.
fn small_i386_program() -> Vec<u8> {
    const BASE: u32 = 0x0804_8000;
    const CODE: [u8; 9] = [0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7];
    let half = |value: u16| value.to_le_bytes().to_vec();
    let word = |value: u32| value.to_le_bytes().to_vec();
    let mut elf = b"\x7fELF\x01\x01\x01".to_vec();
    elf.resize(16, 0);
    [2, 3].iter().for_each(|value| elf.extend(half(*value)));
    [1, BASE + 84, 52, 0, 0].iter().for_each(|value| elf.extend(word(*value)));
    [52, 32, 1, 0, 0, 0].iter().for_each(|value| elf.extend(half(*value)));
    let bytes = 84 + u32::try_from(CODE.len()).expect("small");
    [1, 0, BASE, BASE, bytes, bytes, 5, 4096].iter().for_each(|value| elf.extend(word(*value)));
    elf.extend(CODE);
    elf
}

#[test]
fn a_program_of_another_architecture_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("i386");
    std::fs::write(&path, small_i386_program()).expect("the program is written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it can run");
    let mut child = match Command::new(&path).spawn() {
        Ok(child) => child,
        Err(error) => return farpool_testkit::skip(&format!("no 32-bit programs here: {error}")),
    };
    let refused = inject(Pid::from_child(&child), image(), &Setup::default());
    let _ = child.kill();
    let _ = child.wait();
    assert!(matches!(refused, Err(InjectError::OtherArchitecture { .. })), "{refused:?}");
}
