//! Runs the real binary as a user would, without this machine's configuration.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// The longest run: a process that hangs is killed, so that one test fails and not the whole run.
const LONGEST_RUN: Duration = Duration::from_secs(300);

/// Name of the folder for flash's bookkeeping in a home, if the home has one.
pub(crate) const BOOKS: &str = "books";

/// The binary, with an empty home and none of our variables.
pub(crate) fn farpool(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farpool"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FARPOOL_") {
            command.env_remove(name);
        }
    }
    command.env("HOME", home).env_remove("XDG_CONFIG_HOME").env_remove("NOTIFY_SOCKET");
    command.env_remove("RUNTIME_DIRECTORY");
    let books = home.join(BOOKS);
    if books.exists() {
        command.env("RUNTIME_DIRECTORY", books);
    }
    command.stdin(Stdio::null());
    command
}

/// Runs the command to its end. Returns exit code, standard output and standard error.
pub(crate) fn ended(command: &mut Command) -> (i32, String, String) {
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let pid = Pid::from_child(&child);
    let (done, end) = mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if end.recv_timeout(LONGEST_RUN) == Err(mpsc::RecvTimeoutError::Timeout) {
            // It makes no difference if it has just ended.
            let _ = kill_process(pid, Signal::KILL);
        }
    });
    let Output { status, stdout, stderr } = child.wait_with_output().expect("it is our child");
    drop(done);
    watch.join().expect("the watch ends");
    let text = |bytes| String::from_utf8(bytes).expect("what it prints is text");
    (status.code().expect("it exits by itself, in time"), text(stdout), text(stderr))
}
