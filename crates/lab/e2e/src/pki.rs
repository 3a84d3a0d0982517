//! Certificates of `farpool pki`.

use std::path::Path;
use std::process::{Command, Stdio};

/// Runs `farpool pki` on the authority in `folder`, by a command that runs `farpool`.
///
/// # Panics
/// If it fails.
pub fn pki(mut farpool: Command, folder: &Path, words: &[&str]) {
    farpool.arg("pki").args(words).env("FARPOOL_PKI_DIR", folder);
    let output = farpool.stdin(Stdio::null()).output().expect("farpool pki");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Makes an authority in `folder`, with certificates of a node on this host (`node-n`) and of a
/// program (`program-payroll`).
///
/// # Panics
/// As [`pki`].
pub fn make_authority(farpool: impl Fn() -> Command, folder: &Path) {
    pki(farpool(), folder, &["init", "--name", "rack1"]);
    pki(farpool(), folder, &["issue", "--role", "node", "--name", "n", "--ip", "127.0.0.1"]);
    pki(farpool(), folder, &["issue", "--role", "program", "--tenant", "payroll"]);
}
