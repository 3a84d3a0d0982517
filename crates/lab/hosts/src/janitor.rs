//! The process that cleans up after the hosts, also when the process that made them is killed.
//!
//! It is a shell that reads from a pipe whose other end only this process holds. The pipe ends when
//! the hosts are dropped or when this process ends, by whatever signal. PR_SET_PDEATHSIG on what
//! runs in the hosts would not do: it fires when the *thread* that started a process ends, and
//! tests are threads.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::{HostsError, Namespace};

const SCRIPT: &str = include_str!("janitor.sh");

/// The janitor process. Dropping this makes it clean up, and waits until that is done.
#[derive(Debug)]
pub(crate) struct Janitor {
    child: Child,
}

impl Janitor {
    /// Starts a janitor for processes in these namespaces and in these control groups, which need
    /// not exist yet.
    pub(crate) fn start(
        namespaces: &[Namespace],
        groups: &[std::path::PathBuf],
    ) -> Result<Self, HostsError> {
        let child = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "farpool-janitor"])
            .args(namespaces.iter().map(Namespace::identity))
            .arg("--")
            .args(groups)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A signal to this process's group, as Ctrl-C sends it, must not end it too.
            .process_group(0)
            .spawn()
            .map_err(HostsError::os("start a shell that cleans up"))?;
        Ok(Self { child })
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It ends by itself; nothing more can be done if it cannot be waited for.
        let _ = self.child.wait();
    }
}
