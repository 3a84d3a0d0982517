//! Sidecars in real programs: they work, and the programs notice nothing.

mod common;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Host, Link, ask, await_end, await_zombieless, image};
use farpool_inject::{InjectError, Setup, inject};
use rustix::process::{Signal, kill_process};

/// Injections of the repeated test.
const INJECTIONS: usize = 200;
/// User nobody.
const NOBODY: u32 = 65534;

/// A sidecar that does all it can, while the host checks itself; then the host's own verdict.
fn works_in(mut host: Host) {
    let injected = host.injected();
    assert_eq!(ask(&injected, "WORK"), "WORK ok");
    assert_eq!(ask(&injected, "NET"), "NET over");
    assert!(ask(&injected, "MAPS").starts_with("MAPS "));
    assert_eq!(host.finish(), "ok");
    await_end(&injected);
}

fn works_in_c(link: Link, arguments: &[&str]) {
    if let Some(host) = Host::c(link, arguments) {
        works_in(host);
    }
}

#[test]
fn works_in_a_static_program() {
    works_in_c(Link::Static, &["check"]);
}

#[test]
fn works_in_a_static_pie_program() {
    works_in_c(Link::StaticPie, &["check"]);
}

#[test]
fn works_in_a_dynamic_program() {
    works_in_c(Link::Dynamic, &["check"]);
}

#[test]
fn works_in_a_program_whose_threads_come_and_go() {
    works_in_c(Link::Dynamic, &["makers", "8"]);
}

#[test]
fn works_in_a_program_whose_first_thread_ended() {
    works_in_c(Link::Dynamic, &["leaderless"]);
}

#[test]
fn works_in_a_static_go_program() {
    let go = Path::new("/usr/local/go/bin/go");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/host.go");
    let made = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("host-go");
    let mut build = Command::new(go);
    build.args(["build", "-o"]).arg(&made).arg(source).env("CGO_ENABLED", "0");
    match build.status() {
        Ok(status) if status.success() => works_in(Host::start(&mut Command::new(made))),
        outcome => farpool_testkit::skip(&format!("go built no program: {outcome:?}")),
    }
}

#[test]
fn works_in_python() {
    let script = "import sys\nprint('ready', flush=True)\nn = 0\nwhile n < 300000: n += 1\n\
                  sys.stdin.read()\nprint('ok' if n == 300000 and len('x' * n) == n else 'bad')";
    match Command::new("python3").arg("--version").status() {
        Ok(status) if status.success() => {
            works_in(Host::start(Command::new("python3").args(["-c", script])));
        }
        outcome => farpool_testkit::skip(&format!("python3 does not run: {outcome:?}")),
    }
}

#[test]
fn works_in_a_program_of_another_user_and_has_its_rights_only() {
    let program = match common::c_host(Link::Static) {
        Ok(program) => program,
        Err(reason) => return farpool_testkit::skip(&reason.to_string()),
    };
    if !rustix::process::geteuid().is_root() {
        return farpool_testkit::skip("only root can start a program of nobody");
    }
    let readable = std::env::temp_dir().join(format!("farpool-host-{}", std::process::id()));
    std::fs::copy(program, &readable).expect("a copy that nobody can run");
    let host = Host::start(Command::new(&readable).arg("check").uid(NOBODY).gid(NOBODY));
    std::fs::remove_file(&readable).expect("the copy goes");
    let injected = host.injected();
    let status = std::fs::read_to_string(format!("/proc/{}/status", injected.pid.as_raw_nonzero()));
    let status = status.expect("the sidecar's status");
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"));
    works_in(host);
}

/// Also for a root program's sidecar: no capability is left, no signal gets through, and its
/// descriptors are the ones handed to it.
#[test]
fn the_sidecar_has_nothing_of_the_program() {
    let Some(mut host) = Host::c(Link::Static, &["obey"]) else { return };
    let injected = host.injected();
    let own = format!("/proc/{}", injected.pid.as_raw_nonzero());
    let status = std::fs::read_to_string(format!("{own}/status")).expect("its status");
    let value = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect(name);
        line.split_whitespace().last().unwrap_or_default().to_owned()
    };
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:", "SigCgt:"] {
        assert_eq!(u64::from_str_radix(&value(set), 16), Ok(0), "{set}");
    }
    assert_eq!((value("NoNewPrivs:"), value("Name:")), ("1".into(), "farpool-sidecar".into()));
    assert_eq!(value("SigBlk:"), "fffffffffffbfeff");
    let fds = std::fs::read_dir(format!("{own}/fd")).expect("its descriptors");
    let mut fds: Vec<_> = fds.flatten().map(|fd| fd.file_name().into_string()).collect();
    fds.sort();
    assert_eq!(fds, ["0", "1", "2", "3", "4"].map(|fd| Ok(fd.to_owned())));
    assert_eq!(host.finish(), "ok");
}

fn goes_on(mode: &str, wake: impl Fn(&mut Host)) {
    let Some(mut host) = Host::c(Link::Dynamic, &[mode]) else { return };
    host.await_sleep();
    // On a slow machine a timed call may be over first: then there is nothing to see, but no error.
    let injected = match host.inject() {
        Ok(injected) => Some(injected),
        Err(error @ (InjectError::NoProcess { .. } | InjectError::Died { .. })) => {
            farpool_testkit::skip(&format!("{mode} ended first: {error}"));
            None
        }
        Err(error) => panic!("{mode}: {error}"),
    };
    wake(&mut host);
    assert_eq!(host.line(), "ok", "{mode}");
    drop(host);
    injected.iter().for_each(|injected| {
        await_end(injected);
    });
}

#[test]
fn a_timed_call_goes_on_and_ends_in_time() {
    for mode in ["nanosleep", "poll", "futex", "epoll", "recv", "sigtimedwait"] {
        goes_on(mode, |_| {});
    }
}

#[test]
fn a_waiting_call_goes_on_and_gets_what_it_waits_for() {
    goes_on("read", |host| host.write("x"));
    goes_on("epoll_read", |host| host.write("x"));
    goes_on("sigsuspend", |host| kill_process(host.pid(), Signal::USR1).expect("kill"));
}

/// Its child ends only when the input does, so the parent is in wait4 all the time.
#[test]
fn a_program_that_waits_for_any_child_sees_its_own_only() {
    let Some(mut host) = Host::c(Link::Dynamic, &["parent"]) else { return };
    host.await_sleep();
    let sidecars: Vec<_> = (0..5).map(|_| host.injected()).collect();
    kill_process(sidecars[0].pid, Signal::KILL).expect("kill");
    await_end(&sidecars[0]);
    assert_eq!(host.finish(), "ok");
    for sidecar in &sidecars {
        await_end(sidecar);
    }
}

#[test]
fn a_fork_does_not_inherit_the_sidecar() {
    let Some(mut host) = Host::c(Link::Static, &["obey"]) else { return };
    let injected = host.injected();
    host.write("f");
    let line = host.line();
    assert!(line.ends_with(", 0 in the child") && !line.starts_with("0 "), "{line}");
    assert_eq!(ask(&injected, "WORK"), "WORK ok");
    assert_eq!(host.finish(), "ok");
}

/// Memory that the sidecar's C library and Rust's allocator map is known, too, and hidden from
/// forks.
#[test]
fn all_memory_of_the_sidecar_is_known_and_hidden_from_forks() {
    let Some(mut host) = Host::c(Link::Static, &["obey"]) else { return };
    let before = common::mappings(host.pid());
    let injected = host.injected();
    assert_eq!(ask(&injected, "WORK"), "WORK ok");
    let ranges = common::ranges(&ask(&injected, "RANGES"));
    assert!(ranges.iter().any(|range| range.contains(&injected.span.start)));
    for (mapping, flags) in common::mappings(host.pid()) {
        let is_new = !before.iter().any(|(old, _)| *old == mapping);
        if is_new && !flags.name.starts_with('[') {
            let is_known = ranges.iter().any(|r| r.start <= mapping.start && mapping.end <= r.end);
            assert!(is_known, "{mapping:x?} is not known: {ranges:x?}");
            assert!(flags.is_hidden, "{mapping:x?} {flags:?} goes into forks");
            assert!(!flags.is_writable_text, "{mapping:x?} can be written and executed");
        }
    }
    assert_eq!(host.finish(), "ok");
}

#[test]
fn two_hundred_injections_leave_a_checking_program_right() {
    let Some(mut host) = Host::c(Link::Dynamic, &["check", "1"]) else { return };
    for _ in 0..INJECTIONS {
        let injected = host.injected();
        kill_process(injected.pid, Signal::KILL).expect("kill");
        await_end(&injected);
    }
    assert_eq!(host.finish(), "ok");
}

#[test]
fn the_end_of_the_program_ends_the_sidecar() {
    let Some(host) = Host::c(Link::Static, &["obey"]) else { return };
    let injected = host.injected();
    kill_process(host.pid(), Signal::KILL).expect("kill");
    assert!(await_end(&injected).as_millis() < 1000);
    await_zombieless(injected.pid);
}

#[test]
fn an_exec_of_the_program_ends_the_sidecar() {
    let Some(mut host) = Host::c(Link::Static, &["obey"]) else { return };
    let injected = host.injected();
    host.write("e");
    assert_eq!(host.line(), "ready");
    assert!(await_end(&injected).as_millis() < 1000);
    host.write("f");
    assert_eq!(host.line(), "0 mappings here, 0 in the child");
    assert_eq!(host.finish(), "ok");
}

#[test]
fn a_panic_of_the_sidecar_is_told_and_harms_nobody() {
    let Some(mut host) = Host::c(Link::Static, &["check"]) else { return };
    let injected = host.injected();
    assert!(ask(&injected, "PANIC").starts_with("PANIC "));
    await_end(&injected);
    assert_eq!(host.finish(), "ok");
}

#[test]
fn a_userfaultfd_is_made_in_the_program_and_handed_back() {
    let device = match std::fs::File::options().read(true).write(true).open("/dev/userfaultfd") {
        Ok(device) => device,
        Err(error) => return farpool_testkit::skip(&format!("/dev/userfaultfd: {error}")),
    };
    let Some(mut host) = Host::c(Link::Static, &["check"]) else { return };
    let injected = host.injected();
    let made = common::hand_over(&injected, "UFFD", &device);
    let made = made.expect("a userfaultfd");
    let link =
        std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&made)));
    assert_eq!(link.expect("its link").to_string_lossy(), "anon_inode:[userfaultfd]");
    assert_eq!(host.finish(), "ok");
}

#[test]
fn the_sidecar_gets_arguments_and_environment() {
    let Some(mut host) = Host::c(Link::Static, &["obey"]) else { return };
    let setup =
        Setup { arguments: vec!["side".into(), "a b".into()], environment: vec!["X=1".into()] };
    let injected = inject(host.pid(), image(), &setup).expect("a sidecar");
    assert_eq!(ask(&injected, "ARGS"), "ARGS side|a b X=1");
    assert_eq!(host.finish(), "ok");
}
