//! Runs the real binary as a person would, with nothing of this machine's configuration.

use std::path::Path;
use std::process::{Command, Output};

/// The binary, with an empty home and none of our variables.
pub fn farpool(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farpool"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FARPOOL_") {
            command.env_remove(name);
        }
    }
    command.env("HOME", home).env_remove("XDG_CONFIG_HOME").env_remove("NOTIFY_SOCKET");
    command
}

/// Runs to the end: exit code, standard output, standard error.
pub fn ended(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("what it prints is text");
    (status.code().expect("it exits by itself"), text(stdout), text(stderr))
}
