//! The processes of a capture that follows children: which are in the trace, and which are not.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::ring::Begun;
use crate::record::{PROCESS_SHIFT, TracedProcess};

/// Which children of the program are recorded, and programs that they become by `exec`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Children {
    /// Only processes of this program, by its file's or its own name; all if None.
    pub only: Option<String>,
}

/// What is known of the processes so far.
#[derive(Debug, Default)]
pub(super) struct Processes {
    recorded: Vec<TracedProcess>,
    /// How many of each program were followed and not recorded.
    others: BTreeMap<String, u64>,
    /// The kernel's numbers of all, with their programs; the last program of each counts.
    pids: BTreeMap<u32, String>,
}

/// How long a process may take to become another program, which a busy machine may stop meanwhile.
const EXEC_WAIT: Duration = Duration::from_secs(1);
/// How often that is looked at.
const EXEC_STEP: Duration = Duration::from_millis(1);

impl Processes {
    /// A process begins, or becomes another program.
    pub(super) fn begin(&mut self, begun: Begun) {
        let Begun { number, pid, is_recorded, program } = begun;
        self.pids.insert(pid, name_of(&program));
        if is_recorded {
            self.recorded.push(TracedProcess { number, program });
        } else {
            *self.others.entry(name_of(&program)).or_insert(0) += 1;
        }
    }

    /// The processes in the trace, in the order of their numbers.
    pub(super) fn recorded(&mut self) -> Vec<TracedProcess> {
        self.recorded.sort_by_key(|process| process.number);
        self.recorded.clone()
    }

    /// Lists what the trace contains of them, and what it does not; `ring` is the capture file.
    pub(super) fn notes(&self, ring: &Path) -> Vec<String> {
        let mut notes = Vec::new();
        if self.recorded.len() > 1 {
            notes.push(format!(
                "{} processes; page numbers carry theirs above bit {PROCESS_SHIFT}",
                self.recorded.len()
            ));
        }
        if !self.others.is_empty() {
            notes.push(format!("followed and not recorded: {}", self.others()));
        }
        let living: Vec<&str> = self
            .pids
            .iter()
            .filter(|(pid, _)| is_running(**pid, ring))
            .map(|(_, program)| program.as_str())
            .chain(self.unknown(ring).map(|_| "a child that had not begun"))
            .collect();
        if !living.is_empty() {
            notes.push(format!(
                "recording ended with the first process; these ran on: {}",
                living.join(", ")
            ));
        }
        notes
    }

    /// Processes that were forked and have not run yet: nothing was heard of them.
    fn unknown(&self, ring: &Path) -> impl Iterator<Item = u32> {
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter(move |pid| !self.pids.contains_key(pid) && names(*pid, ring) == Some(true))
    }

    /// The programs that were followed and not recorded.
    pub(super) fn others(&self) -> String {
        let told = |(program, count): (&String, &u64)| format!("{program} ({count})");
        self.others.iter().map(told).collect::<Vec<_>>().join(", ")
    }
}

/// The name of a program, without its folder and its arguments.
fn name_of(program: &str) -> String {
    let word = program.split(' ').next().unwrap_or_default();
    let name = Path::new(word).file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// True for a process that has not ended and runs under QEMU with this capture file. Another
/// process may have got its number by now.
fn is_running(pid: u32, ring: &Path) -> bool {
    let until = Instant::now() + EXEC_WAIT;
    loop {
        match names(pid, ring) {
            Some(named) => return named,
            // While a process becomes another program it has no command line.
            None if has_ended(pid) || Instant::now() > until => return false,
            None => std::thread::sleep(EXEC_STEP),
        }
    }
}

/// Whether this capture file is on the command line of a process, if that has one.
fn names(pid: u32, ring: &Path) -> Option<bool> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let ring = ring.as_os_str().as_bytes();
    (!line.is_empty()).then(|| line.windows(ring.len()).any(|part| part == ring))
}

/// True if nothing of a process but its exit code is left.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name (field 2) may hold anything; fields are counted after its closing parenthesis.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_none_or(|state| matches!(state, 'Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_in_the_trace_and_who_is_not_is_told() {
        let mut processes = Processes::default();
        // This process is not on a command line with it: its number is another's.
        let ring = Path::new("/dev/shm/farpool-capture-none");
        let begun = |number, program: &str, is_recorded| Begun {
            number,
            pid: std::process::id(),
            is_recorded,
            program: program.to_owned(),
        };
        processes.begin(begun(0, "/bin/sh -c cc", false));
        processes.begin(begun(3, "cc1 -quiet b.c", true));
        processes.begin(begun(1, "sh", false));
        assert_eq!(processes.notes(ring), ["followed and not recorded: sh (2)"]);
        assert!(!has_ended(std::process::id()));
        assert!(has_ended(u32::MAX), "there is no such process");
        processes.begin(begun(2, "/usr/lib/cc1 a.c", true));
        assert_eq!(processes.notes(ring)[0], "2 processes; page numbers carry theirs above bit 44");
        let numbers: Vec<u64> = processes.recorded().iter().map(|it| it.number).collect();
        assert_eq!(numbers, [2, 3]);
    }
}
