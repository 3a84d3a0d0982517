//! A program that takes much of its host's memory and keeps it.

use std::process::{Child, Stdio};

use farpool_hosts::Host;

use crate::tree;

/// The program; it and its children end when it is dropped.
#[derive(Debug)]
pub struct Hog(Child);

impl Hog {
    /// Takes about `bytes` of the host's memory.
    ///
    /// # Panics
    /// If there is no shell.
    pub fn start(host: &Host, bytes: u64) -> Hog {
        let mut command = host.command("sh");
        let script = format!("(head -c {bytes} /dev/zero; sleep 600) | tail");
        command.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null());
        Hog(command.spawn().expect("sh"))
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        tree::end(self.0.id());
        let _ = self.0.wait();
    }
}
