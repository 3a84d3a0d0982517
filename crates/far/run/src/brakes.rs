//! `--when-full fail` without intercepting the program's calls: while far memory takes no more from
//! a process, its soft RLIMIT_DATA is set to what it has, so that the kernel itself refuses it more
//! private memory (ENOMEM).
//!
//! A limit that was set here is recognized by its low bits, which the kernel ignores: it counts
//! pages. So a limit that a child has inherited is found and taken back as well. The program may
//! change its limit itself at any time; then it is the program's. Nothing is left behind: the
//! program ends with its keeper, and a process that is left has its limit restored before.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::{Board, Counter, WhenFull};
use farpool_inject::Pid;
use farpool_units::PAGE_BYTES_U64;
use rustix::process::{Resource, Rlimit, prlimit};

use crate::holder::memory_folder;

/// How often the limits of the whole tree are checked.
const STEP: Duration = Duration::from_millis(100);
/// How long the tree is checked after the last process got its limit back: a child may have been
/// born with the limit before it was seen in the tree.
const AFTERMATH: Duration = Duration::from_secs(2);
/// The low bits of a limit that was set here.
const MARK: u64 = 0xfa7;

/// Limits on a process's private writable memory, soft and hard; None is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DataLimit {
    soft: Option<u64>,
    hard: Option<u64>,
}

/// See the module's description.
#[derive(Debug, Default)]
pub(crate) struct Brakes {
    /// What a process's limit was before, by the limit that was set.
    before: HashMap<u64, Option<u64>>,
    /// Processes that got no room at the last check.
    short: HashSet<u32>,
    looked: Option<Instant>,
    last_short: Option<Instant>,
}

impl Brakes {
    /// Restricts processes that must get no more memory, and restores the others, if it is time.
    pub fn look(&mut self, board: &Board, tree: &HashSet<u32>) {
        let now = Instant::now();
        let is_due = self.looked.is_none_or(|looked| now - looked >= STEP);
        let slots = board.processes().filter(|slot| slot.get(Counter::WithoutRoom) != 0);
        let mut short: HashSet<u32> = slots.map(|slot| slot.pid.load(Relaxed)).collect();
        short.retain(|pid| tree.contains(pid));
        if short.is_empty() && self.before.is_empty() {
            return;
        }
        if self.before.is_empty() && board.header().settings().when_full == WhenFull::Slow {
            return;
        }
        // A process that is short is held at once; whether it still is, is checked only now and
        // then.
        let known = std::mem::take(&mut self.short);
        short.iter().filter(|pid| is_due || !known.contains(pid)).for_each(|pid| self.hold(*pid));
        if !short.is_empty() {
            self.last_short = Some(now);
        }
        if is_due {
            self.looked = Some(now);
            tree.difference(&short).for_each(|pid| self.release(*pid));
            if self.last_short.is_some_and(|last| now - last > AFTERMATH) {
                self.before.clear();
            }
        }
        self.short = short;
    }

    /// Keeps a process from getting more than it has.
    fn hold(&mut self, pid: u32) {
        let Some(has) = data_limit(pid) else { return };
        if has.soft.is_some_and(|soft| self.before.contains_key(&soft)) {
            return;
        }
        let Some(soft) = data_bytes(pid).map(|bytes| self.limit_for(bytes, has.soft)) else {
            return;
        };
        // The program has chosen a lower limit itself.
        if has.soft.is_some_and(|own| own <= soft) {
            return;
        }
        self.before.insert(soft, has.soft);
        set(pid, DataLimit { soft: Some(soft), ..has });
    }

    /// The limit for a process that has this many bytes and had the limit `before`. It encodes
    /// `before`, so processes with different ones get different limits.
    fn limit_for(&self, bytes: u64, before: Option<u64>) -> u64 {
        let mut soft = limit_of(bytes);
        while self.before.get(&soft).is_some_and(|other| *other != before) && soft > PAGE_BYTES_U64
        {
            soft -= PAGE_BYTES_U64;
        }
        soft
    }

    /// Restores the limit that a process had.
    pub fn release(&mut self, pid: u32) {
        if self.before.is_empty() {
            return;
        }
        let Some(has) = data_limit(pid) else { return };
        let before = has.soft.and_then(|soft| self.before.get(&soft));
        if let Some(before) = before {
            set(pid, DataLimit { soft: *before, ..has });
        }
    }
}

/// The limit that keeps a process with this many bytes from getting more. Pure.
fn limit_of(bytes: u64) -> u64 {
    bytes / PAGE_BYTES_U64 * PAGE_BYTES_U64 + MARK
}

/// A refusal means that the process has ended or has another user by now; then its calls are not
/// refused.
fn set(pid: u32, DataLimit { soft, hard }: DataLimit) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = prlimit(Some(pid), Resource::Data, Rlimit { current: soft, maximum: hard });
    }
}

fn data_limit(pid: u32) -> Option<DataLimit> {
    data_limit_in(&std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?)
}

fn data_bytes(pid: u32) -> Option<u64> {
    data_bytes_in(&std::fs::read_to_string(memory_folder(pid).join("status")).ok()?)
}

/// The limit in a process's `limits`. Pure.
fn data_limit_in(limits: &str) -> Option<DataLimit> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max data size"))?;
    let mut words = line.split_whitespace();
    let mut next = || match words.next()? {
        "unlimited" => Some(None),
        bytes => bytes.parse().ok().map(Some),
    };
    Some(DataLimit { soft: next()?, hard: next()? })
}

/// Private writable memory in a process's `status`, in bytes. Pure.
fn data_bytes_in(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};

    use super::*;

    const NONE: DataLimit = DataLimit { soft: None, hard: None };

    #[test]
    fn limits_and_sizes_are_read() {
        let text =
            "Max file size  unlimited  unlimited  bytes\nMax data size  8192  unlimited  bytes\n";
        assert_eq!(data_limit_in(text), Some(DataLimit { soft: Some(8192), hard: None }));
        assert_eq!(data_limit_in("Max data size  unlimited  4096  bytes").expect("one").soft, None);
        assert_eq!(data_limit_in(""), None);
        assert_eq!(data_bytes_in("VmPeak: 9 kB\nVmData:\t  132 kB\n"), Some(132 << 10));
        // The kernel counts pages: the mark in the low bits allows not a page more.
        assert_eq!(limit_of(8192) / PAGE_BYTES_U64, 2);
    }

    /// A process that has begun and waits; killed when the guard is dropped.
    struct Waits(Child);

    impl Waits {
        fn start() -> Waits {
            let mut cat = Command::new("cat");
            let mut child =
                cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("cat starts");
            // It echoes once its loader is done, and then waits for more.
            let (input, output) = (child.stdin.as_mut(), child.stdout.as_mut());
            input.expect("piped").write_all(b"?").expect("a question");
            output.expect("piped").read_exact(&mut [0]).expect("an answer");
            Waits(child)
        }

        fn limit(&self) -> DataLimit {
            data_limit(self.0.id()).expect("its limits")
        }
    }

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_limit_is_given_back_also_to_who_inherited_it() {
        let (parent, child) = (Waits::start(), Waits::start());
        if parent.limit() != NONE {
            println!("SKIPPED: the limit of private memory is set here");
            return;
        }
        let mut brakes = Brakes::default();
        brakes.hold(parent.0.id());
        let held = parent.limit();
        assert_eq!(held.soft.map(|soft| soft % PAGE_BYTES_U64), Some(MARK));
        brakes.hold(parent.0.id());
        assert_eq!(parent.limit(), held, "it is not made smaller");
        set(child.0.id(), held);
        for process in [&parent, &child] {
            brakes.release(process.0.id());
            assert_eq!(process.limit(), NONE);
        }
    }

    #[test]
    fn who_had_different_limits_gets_different_ones() {
        let mut brakes = Brakes::default();
        let first = brakes.limit_for(8192, None);
        brakes.before.insert(first, None);
        assert_eq!(brakes.limit_for(8192, None), first);
        let other = brakes.limit_for(8192, Some(1 << 30));
        assert_eq!((first - other, other % PAGE_BYTES_U64), (PAGE_BYTES_U64, MARK));
    }

    #[test]
    fn a_limit_of_the_programs_own_is_left_alone() {
        let process = Waits::start();
        let mut brakes = Brakes::default();
        let own = DataLimit { soft: Some(4096), hard: None };
        set(process.0.id(), own);
        brakes.hold(process.0.id());
        assert_eq!(process.limit(), own, "it is held to less already");
        brakes.before.insert(8192 + MARK, None);
        brakes.release(process.0.id());
        assert_eq!(process.limit(), own);
    }
}
