//! `farpool vm`: virtual machines with names, which are listed, limited, suspended and told of,
//! also when they hang, lie or are killed.

use std::process::Command;
use std::time::Duration;

use farpool_e2e::guest::{Guest, Image, MOST_MIB, QEMU, THIRD_MIB, WORK_MIB, with_backend};
use farpool_e2e::jobs::{allowed_bytes, compile_c, require_limit, scratch};
use farpool_e2e::run::Run;
use farpool_e2e::{PATIENCE, binaries, have, tree, turn, wait_until};

/// How long a command about VMs may take: longer than what it waits for QEMU.
const COMMAND_TIME: Duration = Duration::from_secs(20);

/// A name that no other test process uses.
fn own_name(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

/// `farpool vm` with these words: the exit code, and what it said on both outputs.
fn vm(words: &[&str]) -> (i32, String, String) {
    let began = std::time::Instant::now();
    let mut farpool = Command::new(binaries::program("farpool"));
    let output = farpool.arg("vm").args(words).output().expect("farpool vm");
    assert!(began.elapsed() < COMMAND_TIME, "{words:?} took {:?}", began.elapsed());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

/// A guest of this name that has filled its memory, most of which may be local.
fn started(image: &Image, name: &str) -> Guest {
    let run = Run::vm(name, &format!("{MOST_MIB}MiB"));
    let mut guest = Guest::start(image, run, &["-m", "256"], &format!("work={WORK_MIB}"));
    guest.running.wait_for_output("GUEST filled", 1);
    guest
}

/// The VM with this name, as `farpool vm list` tells.
fn listed(name: &str) -> Option<serde_json::Value> {
    let (code, told, error) = vm(&["list", "--json"]);
    assert_eq!(code, 0, "{error}");
    let all: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    all.as_array().expect("a list").iter().find(|vm| vm["name"] == name).cloned()
}

fn wait_until_listed(name: &str, what: &str, is: impl Fn(&serde_json::Value) -> bool) {
    wait_until(what, PATIENCE, || listed(name).filter(&is).map(|_| ()));
}

#[test]
fn a_vm_is_listed_limited_and_gone_with_its_end() {
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let name = own_name("web");
    let mut guest = started(&image, &name);
    let there = listed(&name).expect("it runs");
    assert_eq!(there["state"], "running", "{there}");
    assert_eq!(there["pid"], guest.running.program_pid(), "{there}");
    assert_eq!(there["limit_bytes"], MOST_MIB << 20, "{there}");
    assert!(there["merged_bytes"].is_u64(), "{there}");
    let (code, told, _) = vm(&["stat", &name]);
    assert!(code == 0 && told.contains(&name) && told.contains("running"), "{told}");
    let again = Run::vm(&name, "64MiB").program(QEMU).finish();
    assert!(again.code == 1 && again.stderr.contains("a VM named"), "{}", again.stderr);
    let (code, _, error) = vm(&["limit", "nobody", "64MiB"]);
    assert!(code == 1 && error.contains(&name), "{error}");
    assert_eq!(vm(&["limit", &name, &format!("{THIRD_MIB}MiB")]).0, 0);
    wait_until_listed(&name, "the lower limit to hold", |vm| {
        let (local, far) = (vm["local_bytes"].as_u64(), vm["far_bytes"].as_u64());
        local.is_some_and(|bytes| bytes <= allowed_bytes(THIRD_MIB)) && far > Some(0)
    });
    guest.require_rounds();
    guest.monitor.command("stop");
    wait_until_listed(&name, "it to be paused", |vm| vm["state"] == "paused");
    guest.monitor.command("cont");
    guest.require_rounds();
    guest.end();
    assert_eq!(listed(&name), None);
    let (code, _, error) = vm(&["stat", &name]);
    assert!(code == 1 && error.contains("there is no VM named"), "{error}");
}

/// A QEMU that does not answer is told, nothing waits for it, and its guest goes on afterwards.
#[test]
fn a_vm_that_hangs_is_told_and_not_harmed() {
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let name = own_name("hangs");
    let mut guest = started(&image, &name);
    let qemu = guest.running.program_pid();
    tree::signal(qemu, libc::SIGSTOP);
    let there = listed(&name).expect("it is there");
    assert!(there["state"].is_null() && there["pid"] == qemu, "{there}");
    let error = there["state_error"].as_str().expect("a reason");
    assert!(error.contains("gave no answer within"), "{error}");
    let (code, told, _) = vm(&["stat", &name]);
    assert!(code == 0 && told.contains("unknown") && told.contains("no answer"), "{told}");
    tree::signal(qemu, libc::SIGCONT);
    guest.require_rounds();
    wait_until_listed(&name, "it to run", |vm| vm["state"] == "running");
    guest.end();
}

/// A suspended guest stands still and has hardly any local memory. Resumed it is as before, also if
/// the command was killed while its memory left.
#[test]
fn a_suspended_vm_needs_its_blade_only() {
    const REST_BYTES: u64 = 56 << 20;
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let name = own_name("idle");
    let mut guest = started(&image, &name);
    let mut killed = Command::new(binaries::program("farpool"));
    let mut killed = killed.args(["vm", "suspend", &name]).spawn().expect("farpool vm suspend");
    wait_until_listed(&name, "it to be suspended", |vm| vm["is_suspended"] == true);
    killed.kill().and_then(|()| killed.wait()).expect("its end");
    let suspended = |told: &str| {
        let there = listed(&name).expect("it is there");
        assert_eq!((&there["state"], &there["is_suspended"]), (&"paused".into(), &true.into()));
        assert!(there["local_bytes"].as_u64() <= Some(REST_BYTES), "{told} {there}");
    };
    let as_before = |state: &str| {
        assert_eq!(vm(&["resume", &name]), (0, format!("{name} is resumed\n"), String::new()));
        let there = listed(&name).expect("it is there");
        assert_eq!((&there["state"], &there["is_suspended"]), (&state.into(), &false.into()));
        assert_eq!(there["limit_bytes"], MOST_MIB << 20, "{there}");
    };
    // What the killed one began is completed, and what was before is not forgotten.
    let (code, told, error) = vm(&["suspend", &name]);
    assert!(code == 0 && told.contains("is suspended"), "{told} {error}");
    suspended(&told);
    let (code, _, error) = vm(&["limit", &name, "64MiB"]);
    assert!(code == 1 && error.contains("vm resume"), "{error}");
    as_before("running");
    guest.require_rounds();
    let (code, _, error) = vm(&["resume", &name]);
    assert!(code == 1 && error.contains("is not suspended"), "{error}");
    // A guest that somebody has paused stays paused.
    guest.monitor.command("stop");
    let (code, told, error) = vm(&["suspend", &name, "--json"]);
    assert!(code == 0 && told.contains("\"is_complete\": true"), "{told} {error}");
    suspended(&told);
    as_before("paused");
    guest.monitor.command("cont");
    guest.require_rounds();
    // A QEMU that does not answer is left as it is.
    let qemu = guest.running.program_pid();
    tree::signal(qemu, libc::SIGSTOP);
    let (code, _, error) = vm(&["suspend", &name]);
    assert!(code == 1 && error.contains("gave no answer"), "{error}");
    tree::signal(qemu, libc::SIGCONT);
    wait_until_listed(&name, "it to run", |vm| {
        vm["state"] == "running" && vm["is_suspended"] == false
    });
    guest.require_rounds();
    guest.end();
}

/// Something that takes QEMU's options, listens at its QMP socket, and says the words of the
/// variable SAYS to whoever comes.
const LIAR: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int count, char **words) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    for (int word = 1; word + 1 < count; word++)
        if (!strcmp(words[word], "-qmp")) sscanf(words[word + 1], "unix:%107[^,]", at.sun_path);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 8)) return 1;
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int peer = accept(listener, 0, 0);
        const char *says = getenv("SAYS");
        if (write(peer, says, strlen(says)) < 0) return 1;
    }
}
"#;

#[test]
fn a_qmp_socket_that_lies_is_told() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let liar = compile_c("qemu-liar", LIAR, &[], directory.path());
    let name = own_name("liar");
    let greeting = "{\"QMP\": {}}\n{\"return\": {}, \"id\": 1}\n";
    let escape = format!("{greeting}{{\"return\": {{\"status\": \"\\u001b[2J\"}}, \"id\": 2}}\n");
    let other = format!("{greeting}{{\"return\": {{\"status\": \"running\"}}, \"id\": 9}}\n");
    for (says, reason) in [
        ("SSH-2.0-OpenSSH\r\n", "does not speak QMP"),
        (&escape, "does not speak QMP"),
        (&other, "does not speak QMP"),
        (greeting, "gave no answer"),
        ("", "gave no answer"),
    ] {
        let run = Run::vm(&name, "64MiB").env("SAYS", says);
        let mut running = run.program(&liar).args(["-m", "64"]).start();
        running.wait_for_output("ready", 1);
        let there = listed(&name).expect("it is there");
        let error = there["state_error"].as_str().expect("a reason");
        assert!(error.contains(reason), "{says:?}: {error}");
        assert_eq!(vm(&["limit", &name, "128MiB"]).0, 0);
        tree::signal(running.program_pid(), libc::SIGTERM);
        running.finish();
    }
    assert_eq!(listed(&name), None);
}

/// A killed keeper takes QEMU with it and leaves no name behind.
#[test]
fn a_vm_whose_keeper_is_killed_is_gone() {
    if !have(QEMU) {
        return;
    }
    let _turn = turn();
    let name = own_name("killed");
    let options = ["-accel", "tcg", "-m", "64", "-display", "none", "-nodefaults"];
    let run = Run::vm(&name, "64MiB").program(QEMU).args(options);
    let running = run.start();
    wait_until_listed(&name, "it to run", |vm| vm["state"] == "running");
    let qemu = running.program_pid();
    tree::signal(running.pid(), libc::SIGKILL);
    wait_until("QEMU to end", PATIENCE, || (!tree::is_alive(qemu)).then_some(()));
    wait_until("the name to be free", PATIENCE, || listed(&name).is_none().then_some(()));
    running.finish();
}

/// Guest memory that QEMU is told to touch at the start: under `farpool vm run` it does not.
#[test]
fn memory_that_is_allocated_beforehand_keeps_the_limit() {
    let Some(image) = Image::make() else { return };
    let run = Run::vm(&own_name("prealloc"), &format!("{MOST_MIB}MiB"));
    let options = with_backend("memory-backend-ram,prealloc=on");
    let (outcome, peak_bytes) = image.check(run, &options, "rounds=8");
    require_limit(outcome.require_far(), peak_bytes, MOST_MIB);
    assert!(outcome.stderr.contains("prealloc is left out"), "{}", outcome.stderr);
}
