//! Which processes belong to a program: it and all below it.

use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashMap;
use std::fs;

/// Process names of a sidecar and of its warden.
const SERVANTS: [&str; 2] = ["farpool-sidecar", "farpool-warden"];

/// Whether a process of this name is a sidecar or its warden: its memory is that of a program.
#[must_use]
pub fn is_servant(name: &str) -> bool {
    SERVANTS.contains(&name)
}

/// A process, with its start time, since ids are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub id: u32,
    started: u64,
    /// Whether it is a sidecar or warden, in the memory of the program that it serves.
    pub is_sidecar: bool,
}

/// The fields of /proc/pid/stat that are used.
struct Stat {
    process: Process,
    parent: u32,
    is_zombie: bool,
}

impl Process {
    /// Kills the process with SIGKILL, if it is still alive.
    pub(super) fn kill(self) {
        let pid = i32::try_from(self.id).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|_| self.is_alive()) {
            // It may have ended since, which is what is wanted.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Whether it may hold memory: false once it has ended, reaped or not.
    pub(super) fn is_alive(self) -> bool {
        look_at(self.id).is_some_and(|stat| stat.process == self && !stat.is_zombie)
    }
}

/// Returns the process and all below it. Returns an empty list if it is gone.
pub(super) fn tree(root: u32) -> Vec<Process> {
    let mut children: HashMap<u32, Vec<Process>> = HashMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for id in entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        if let Some(stat) = look_at(id) {
            children.entry(stat.parent).or_default().push(stat.process);
        }
    }
    let mut found: Vec<_> = look_at(root).map(|stat| stat.process).into_iter().collect();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        found.extend(children.remove(&process.id).unwrap_or_default());
        next += 1;
    }
    found
}

fn look_at(id: u32) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name may hold anything, parentheses included; the other fields follow the last
    // parenthesis: the state is the first of them, the parent the second, the start time the
    // twentieth.
    let (start, rest) = stat.rsplit_once(')')?;
    let (_, name) = start.split_once('(')?;
    let fields: Vec<_> = rest.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(Stat {
        process: Process { id, started: number(19)?, is_sidecar: is_servant(name) },
        parent: u32::try_from(number(1)?).ok()?,
        is_zombie: fields.first() == Some(&"Z"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_child_is_found_and_one_that_ended_is_not_killed_again() {
        let mut child = Command::new("sleep").arg("100").spawn().expect("sleep starts");
        let found = tree(std::process::id());
        let sleep = found.into_iter().find(|process| process.id == child.id());
        let sleep = sleep.expect("it is below this process");
        assert!(sleep.is_alive());
        assert!(!Process { started: sleep.started + 1, ..sleep }.is_alive(), "a later one");
        sleep.kill();
        child.wait().expect("it ends");
        assert!(!sleep.is_alive());
        sleep.kill();
        assert!(tree(sleep.id).is_empty());
    }
}
