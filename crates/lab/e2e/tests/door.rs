//! Which door `farpool run` takes: the sidecar if it can work, otherwise the preloaded library,
//! with the reason. A user who may use sidecars by a capability of farpool's file gets no access to
//! others' processes by it.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use farpool_e2e::jobs::{OpenDevice, PATIENCE, compile_c, scratch};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{binaries, have, skip, tree, turn, wait_until};

/// A user id that no real user has.
const USER: u32 = 4343;
const LIMIT: &str = "24MiB";
const EFFECTIVE: &str = "CapEff:";
const PERMITTED: &str = "CapPrm:";
const SYS_PTRACE: u64 = 1 << 19;

/// Fills and checks more memory than the limit, prints that, and waits until it is killed.
const FILL: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    size_t bytes = 64 << 20;
    unsigned char *memory = malloc(bytes);
    for (int round = 0; round < 3; round++)
        for (size_t at = 0; at < bytes; at += 4096) {
            if (round && memory[at] != (unsigned char)(at >> 12)) return 9;
            memory[at] = at >> 12;
        }
    const char *path = getenv("LD_LIBRARY_PATH");
    printf("checked %s\n", path ? path : "");
    fflush(stdout);
    for (;;) pause();
}
"#;

/// A separate user with a directory, a copy of farpool in it, and access to /dev/userfaultfd.
struct Stage {
    directory: tempfile::TempDir,
    _device: OpenDevice,
}

impl Stage {
    /// Sets it up. Returns None, and skips the test with the reason, if that is not possible.
    fn make() -> Option<Stage> {
        if !have("gcc") {
            return None;
        }
        let Some(device) = OpenDevice::make() else {
            skip("/dev/userfaultfd cannot be opened to another user (needs root)");
            return None;
        };
        let directory = scratch();
        for name in ["farpool", "libfarpool_preload.so"] {
            std::fs::copy(binaries::program(name), directory.path().join(name)).expect("a copy");
        }
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(directory.path(), open).expect("chmod");
        std::fs::create_dir(directory.path().join("own")).expect("mkdir");
        let own = directory.path().join("own");
        std::os::unix::fs::chown(&own, Some(USER), Some(USER)).expect("chown");
        Some(Stage { directory, _device: device })
    }

    /// Like [`Stage::make`], and the copy has CAP_SYS_PTRACE, permitted but not effective.
    fn with_right() -> Option<Stage> {
        if !have("setcap") {
            return None;
        }
        let stage = Stage::make()?;
        let flags = rustix::fs::statvfs(stage.directory.path()).expect("statvfs").f_flag;
        if flags.contains(rustix::fs::StatVfsMountFlags::NOSUID) {
            skip("the directory for temporary files lets no file bring rights (nosuid)");
            return None;
        }
        let mut setcap = Command::new("setcap");
        let set = setcap.arg("cap_sys_ptrace=p").arg(stage.farpool()).output().expect("setcap");
        if !set.status.success() {
            skip("the directory for temporary files keeps no capabilities of files");
            return None;
        }
        Some(stage)
    }

    fn farpool(&self) -> PathBuf {
        self.directory.path().join("farpool")
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A farpool command that runs as the user.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.farpool());
        command.args(words).uid(USER).gid(USER).current_dir(self.path().join("own"));
        command.env("XDG_RUNTIME_DIR", self.path().join("own"));
        command
    }

    fn output(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("farpool")
    }

    /// The door's check in the output of `farpool doctor`.
    fn door(&self) -> serde_json::Value {
        let doctor = self.output(&["doctor", "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
        let checks = report["checks"].as_array().expect("checks");
        checks.iter().find(|check| check["name"] == "door").expect("the door").clone()
    }

    /// Starts a program that fills memory, linked with `options`, under `farpool run` with the
    /// options `words`.
    fn fill(&self, options: &[&str], words: &[&str]) -> Running {
        let program = compile_c("fill", FILL, options, self.path());
        let words = [&["run", "--local", LIMIT], words, &["--"]].concat();
        let mut command = self.command(&words);
        command.arg(program).env("LD_LIBRARY_PATH", "/nowhere");
        let mut running = Run::with(command, None, None).patience(PATIENCE).start();
        running.wait_for_output("checked", 1);
        running
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A hexadecimal number in a task's status.
fn capabilities(status: &Path, name: &str) -> u64 {
    let text = std::fs::read_to_string(status).expect("a status");
    let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    u64::from_str_radix(line.trim(), 16).expect("a number")
}

fn end(running: Running) {
    tree::signal(running.program_pid(), libc::SIGTERM);
    assert_eq!(running.finish().code, 128 + libc::SIGTERM);
}

#[test]
fn root_has_sidecars_without_asking() {
    if !have("gcc") || !rustix::process::geteuid().is_root() {
        return skip("only root has sidecars without asking");
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("fill", FILL, &[], directory.path());
    let mut running = Run::through(Door::Usual, LIMIT).program(program).start();
    running.wait_for_output("checked", 1);
    assert_eq!(tree::sidecars_in(running.program_pid()).len(), 1, "{}", running.stderr());
    assert_eq!(running.stderr(), "", "nothing is said of the door");
    end(running);
}

#[test]
fn a_user_without_the_right_gets_the_library_and_one_line_that_says_why() {
    let _turn = turn();
    let Some(stage) = Stage::make() else { return };
    let running = stage.fill(&[], &[]);
    let program = running.program_pid();
    assert_eq!(tree::sidecars_in(program), [0_u32; 0]);
    let maps = std::fs::read_to_string(format!("/proc/{program}/maps")).expect("maps");
    assert!(maps.contains("libfarpool_preload.so"));
    let stderr = running.stderr();
    let line = stderr.lines().find(|line| line.contains("the preloaded library is used"));
    let line = line.unwrap_or_else(|| panic!("no line in {stderr}"));
    assert!(line.contains("no CAP_SYS_PTRACE") && line.contains("setcap"), "{line}");
    end(running);
    let quiet = stage.output(&["run", "--quiet", "--local", LIMIT, "--", "true"]);
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{}", said(&quiet));
    let door = stage.door();
    assert!(door["found"].as_str().is_some_and(|found| found.starts_with("preload")), "{door}");
    assert!(door["remedy"].as_str().is_some_and(|remedy| remedy.contains("setcap")), "{door}");
}

#[test]
fn a_sidecar_that_cannot_work_is_refused_before_the_program_starts() {
    let _turn = turn();
    let Some(stage) = Stage::make() else { return };
    let words = ["run", "--door", "sidecar", "--local", LIMIT, "--", "touch", "started"];
    let refused = stage.output(&words);
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    let line = said(&refused);
    assert!(line.contains("no CAP_SYS_PTRACE") && line.contains("setcap"), "{line}");
    assert!(!stage.path().join("own/started").exists());
}

#[test]
fn a_user_has_sidecars_by_a_capability_of_the_file_and_no_other_right() {
    let _turn = turn();
    let Some(stage) = Stage::with_right() else { return };
    let door = stage.door();
    assert!(door["found"].as_str().is_some_and(|found| found.starts_with("sidecar")), "{door}");
    // A static program, which no library can be preloaded into.
    let running = stage.fill(&["-static"], &[]);
    let (keeper, program) = (running.pid(), running.program_pid());
    assert!(running.stdout().contains("checked /nowhere"), "{}", running.stdout());
    wait_until("its sidecar", PATIENCE, || (tree::sidecars_in(program).len() == 1).then_some(()));
    let status = |pid: u32| PathBuf::from(format!("/proc/{pid}/status"));
    let servants = tree::sidecars_in(program).into_iter().chain(tree::wardens_in(program));
    for pid in servants.chain([program]) {
        assert_eq!(capabilities(&status(pid), PERMITTED), 0, "process {pid}");
    }
    let tasks = std::fs::read_dir(format!("/proc/{keeper}/task")).expect("tasks").flatten();
    let mut keeping = 0;
    for task in tasks {
        let status = task.path().join("status");
        assert_eq!(capabilities(&status, EFFECTIVE), 0, "{}", status.display());
        let permitted = capabilities(&status, PERMITTED);
        assert_eq!(permitted & !SYS_PTRACE, 0, "{}", status.display());
        keeping += u32::from(permitted == SYS_PTRACE);
    }
    assert_eq!(keeping, 1, "one thread keeps the capability");
    nothing_is_gained(&stage, keeper);
    end(running);
}

/// Checks that the user can access neither root's processes nor the keeper itself.
fn nothing_is_gained(stage: &Stage, keeper: u32) {
    let roots = Run::local("sleep").arg("1000").start();
    for pid in [roots.pid(), keeper] {
        let number = pid.to_string();
        for words in [&["attach", "--local", LIMIT, &number][..], &["core", &number, "core"][..]] {
            let refused = stage.output(words);
            assert_eq!(refused.status.code(), Some(1), "{words:?}: {}", said(&refused));
        }
        let mut reader = Command::new("head");
        reader.args(["-c1", &format!("/proc/{pid}/maps")]).uid(USER).gid(USER);
        assert!(!reader.output().expect("head").status.success(), "the memory of {pid} is closed");
    }
}
