//! Faults that are found before a program starts, and other users who might interfere with its
//! memory: full file systems, limits that are too small, blades that do not answer, and folders,
//! boards and sockets of other users.

use std::process::Command;

use farpool_e2e::run::{Outcome, Run};
use farpool_e2e::{binaries, have, skip, turn};

/// The user ids of the victim and of the other user; no real user has them.
const VICTIM: &str = "4343";
const STRANGER: &str = "4242";
/// Options of unshare with which everything started or mounted ends with the first process.
const APART: [&str; 5] = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];

/// Runs a script in its own mount and process namespaces, which end with it. `$F` is a `farpool`
/// that every user may run. Returns None if this machine does not allow that.
fn on_a_stage(script: &str) -> Option<Outcome> {
    let may = Command::new("unshare").args(APART).arg("true").output();
    if !have("setpriv") || !may.is_ok_and(|output| output.status.success()) {
        skip("mount namespaces need root");
        return None;
    }
    let stage = format!(
        "set -e; mount --make-rprivate /; mount -t tmpfs -o mode=755 stage /mnt\n\
         for file in farpool libfarpool_preload.so; do\n\
         touch /mnt/$file; mount --bind \"$1/$file\" /mnt/$file\n\
         done\n\
         mknod /mnt/uffd c 10 $((0x$(stat -c %T /dev/userfaultfd))); chmod 666 /mnt/uffd\n\
         mount --bind /mnt/uffd /dev/userfaultfd; mount -t tmpfs -o mode=1777 stage /tmp\n\
         mkdir -p /run/farpool; unset XDG_RUNTIME_DIR; F=/mnt/farpool; cd /tmp\n\
         as=\"setpriv --clear-groups --regid 9999 --reuid\"\n\
         until_there() {{ n=0; while ! [ -e \"$1\" ]; do n=$((n + 1)); [ $n -lt 3000 ] || exit 99; \
         sleep 0.01; done; }}\n\
         set +e\n{script}"
    );
    let mut command = Command::new("unshare");
    command.args(APART).args(["sh", "-c", &stage, "sh"]).arg(binaries::directory());
    Some(Run::with(command, None, None).finish())
}

/// Requires the exit code, and a line that contains all of these words.
fn require_message(outcome: &Outcome, code: i32, words: &[&str]) {
    assert_eq!(outcome.code, code, "stdout: {} stderr: {}", outcome.stdout, outcome.stderr);
    let is_it = |line: &str| words.iter().all(|word| line.contains(word));
    assert!(outcome.stderr.lines().any(is_it), "{words:?} are not in {}", outcome.stderr);
}

#[test]
fn a_full_file_system_is_told_at_the_start() {
    let _turn = turn();
    for kib in ["16", "64"] {
        let script = format!(
            "mount -t tmpfs -o size={kib}k full /run/farpool || exit 77\n\
             exec $F run --local 32MiB -- true"
        );
        let Some(outcome) = on_a_stage(&script) else { return };
        require_message(&outcome, 1, &["no room for the board", "/run/farpool", "df "]);
    }
}

#[test]
fn a_file_system_that_fills_up_costs_no_process_that_has_its_place() {
    let _turn = turn();
    let script = "mount -t tmpfs -o size=8m full /run/farpool || exit 77\n\
         exec $F run --door preload --local 256MiB -- \
         sh -c 'dd if=/dev/zero of=/run/farpool/fill bs=4k 2>/dev/null\n\
         for i in 1 2 3 4; do (true; true) & done; wait; date >/dev/null && echo well'";
    let Some(outcome) = on_a_stage(script) else { return };
    outcome.require_success();
    assert_eq!(outcome.stdout.trim(), "well");
}

#[test]
fn processes_without_room_on_a_full_file_system_end_with_a_message() {
    let _turn = turn();
    // Each waits for a line, so that all exist at once. None may end by SIGBUS.
    let script = "mount -t tmpfs -o size=8m full /run/farpool || exit 77; mkfifo /tmp/gate\n\
         exec $F run --door preload --local 256MiB -- sh -c 'dd if=/dev/zero of=/run/farpool/fill \
         bs=4k 2>/dev/null\n\
         exec 9<>/tmp/gate; n=0; pids=\n\
         while [ $n -lt 200 ]; do (read line <&9) & pids=\"$pids $!\"; n=$((n + 1)); done\n\
         for pid in $pids; do echo; done >&9\n\
         bus=0; for pid in $pids; do wait $pid; [ $? != 135 ] || bus=$((bus + 1)); done; echo bus \
         $bus'";
    let Some(outcome) = on_a_stage(script) else { return };
    require_message(&outcome, 0, &["no room for more processes", "/run/farpool"]);
    assert_eq!(outcome.stdout.trim(), "bus 0", "{}", outcome.stderr);
}

#[test]
fn a_folder_that_another_user_made_first_is_refused() {
    let _turn = turn();
    let script = format!(
        "$as {STRANGER} sh -c 'umask 0; mkdir -m 777 /tmp/farpool-{VICTIM}'\n\
         $as {VICTIM} $F run --local 16MiB -- sh -c 'echo secret'"
    );
    let Some(outcome) = on_a_stage(&script) else { return };
    let folder = format!("/tmp/farpool-{VICTIM}");
    require_message(&outcome, 1, &[&folder, "user 4242", "mode 777", "XDG_RUNTIME_DIR"]);
    assert_eq!(outcome.stdout, "", "the program did not start");
}

#[test]
fn a_program_takes_no_orders_from_another_users_board() {
    let _turn = turn();
    let script = format!(
        "umask 0; $as {STRANGER} $F run --local 16MiB -- sh -c 'touch /tmp/up; exec sleep 600' & \
         run=$!\n\
         until_there /tmp/up; board=$(echo /tmp/farpool-{STRANGER}/run-*/board)\n\
         chmod 755 /tmp/farpool-{STRANGER} ${{board%/board}}; chmod 666 $board\n\
         $as {VICTIM} env LD_PRELOAD=/mnt/libfarpool_preload.so FARPOOL_BOARD=$board sh -c 'echo \
         secret'; rc=$?\n\
         kill $run; wait $run; exit $rc"
    );
    let Some(outcome) = on_a_stage(&script) else { return };
    require_message(&outcome, 134, &["/board belongs to user 4242", "farpool run"]);
    assert_eq!(outcome.stdout, "", "the program did not go on");
}

#[test]
fn a_strangers_blade_is_refused_but_in_a_folder_of_his_own() {
    let _turn = turn();
    let script = |socket: &str| {
        format!(
            "umask 0; $as {STRANGER} mkdir -m 755 /tmp/service\n\
             $as {STRANGER} $F blade --memory 64MiB --listen unix://{socket} >/dev/null 2>&1 & \
             blade=$!\n\
             until_there {socket}; chmod 666 {socket}\n\
             $as {VICTIM} $F run --local 16MiB --blade unix://{socket} -- true; rc=$?\n\
             kill $blade; wait $blade; exit $rc"
        )
    };
    let Some(refused) = on_a_stage(&script("/tmp/blade.sock")) else { return };
    require_message(&refused, 1, &["blade unix:///tmp/blade.sock", "user 4242"]);
    let Some(taken) = on_a_stage(&script("/tmp/service/blade.sock")) else { return };
    assert_eq!(taken.code, 0, "{}", taken.stderr);
}

#[test]
fn userfaultfd_without_permission_is_told_at_the_start() {
    let _turn = turn();
    let script = format!(
        "chmod 600 /mnt/uffd; echo 0 > /proc/sys/vm/unprivileged_userfaultfd 2>/dev/null\n\
         $as {VICTIM} $F run --local 16MiB -- true; rc=$?; $as {VICTIM} $F doctor >&2; exit $rc"
    );
    let Some(outcome) = on_a_stage(&script) else { return };
    require_message(&outcome, 1, &["no permission for /dev/userfaultfd", "chgrp", "udev"]);
    assert!(!outcome.stderr.contains("not offered by this kernel"), "{}", outcome.stderr);
}

/// Runs `farpool run … -- true` under limits that a shell sets.
fn under(limits: &str, options: &[&str]) -> Outcome {
    let script = format!("{limits}; exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh"]).arg(binaries::program("farpool"));
    command.args(["run", "--local", "32MiB"]).args(options).args(["--", "true"]);
    Run::with(command, None, None).finish()
}

#[test]
fn limits_that_are_too_small_are_told_at_the_start() {
    let _turn = turn();
    require_message(&under("ulimit -n 16", &[]), 1, &["may have 16 open files", "ulimit -n"]);
    let soft = under("ulimit -S -n 16", &[]);
    require_message(&soft, 1, &["the program may have 16 open files", "ulimit -n"]);
    // Little less than is asked for: whoever is started all the same has what it needs.
    let few = "ulimit -v 614400";
    require_message(&under(few, &[]), 1, &["600 MiB of address space", "ulimit -v"]);
    let unchecked = under(few, &["--no-check"]);
    assert_eq!(unchecked.code, 0, "{}", unchecked.stderr);
}

#[test]
fn mistakes_are_told_once_and_before_the_program_starts() {
    let _turn = turn();
    let gone = under(":", &["--blade", "unix:///nonexist.sock"]);
    require_message(&gone, 1, &["unix:///nonexist.sock", "check that it runs", "--no-check"]);
    assert_eq!(under(":", &["--no-check", "--blade", "unix:///nonexist.sock"]).code, 0);
    let named = under(":", &["--blade", "tcp://localhost:1"]);
    require_message(&named, 1, &["tcp://127.0.0.1:1", "check that it runs"]);
    let stats = under(":", &["--stats", "/nonexist/x"]);
    require_message(&stats, 1, &["/nonexist/x", "--stats"]);
    let quota = under(":", &["--quota", "5MiB"]);
    require_message(&quota, 1, &["--quota 5242880 is too small", "16MiB"]);
    assert_eq!(quota.stderr.matches("too small").count(), 1, "{}", quota.stderr);
}

#[test]
fn stat_shows_the_limit_and_the_blades_of_a_run() {
    let _turn = turn();
    let blade = farpool_e2e::blade::Blade::start("256MiB");
    let address = blade.address(farpool_e2e::blade::Transport::Unix);
    let mut running = Run::far("16MiB")
        .blade(&address)
        .own_program("farpool-stress")
        .args(["--mib", "64", "--threads", "1", "--progress", "--seconds", "60"])
        .start();
    running.wait_for_output("filled", 1);
    running.wait_until_far();
    let stat = |options: &[&str]| {
        let mut command = Command::new(binaries::program("farpool"));
        let output = command.arg("stat").args(options).output().expect("farpool stat");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let table = stat(&[]);
    for word in ["limit MiB", "fixed MiB", "blades", &address] {
        assert!(table.contains(word), "{word} is not in\n{table}");
    }
    let told: serde_json::Value = serde_json::from_str(&stat(&["--json"])).expect("JSON");
    let runs = told["programs"].as_array().expect("a list");
    let run = runs.iter().find(|run| run["keeper_pid"] == running.pid()).expect("our run");
    assert_eq!(run["limit_bytes"], 16 << 20);
    assert_eq!(run["limit_now_bytes"], 16 << 20);
    assert_eq!(run["blades"][0], address.as_str());
    assert!(run["local_bytes"].as_u64() > Some(0) && run["fixed_now_bytes"].is_u64(), "{run}");
}
