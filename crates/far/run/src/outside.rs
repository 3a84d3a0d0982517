//! Processes of the tree that are not held to the limit: which they are, what they hold, and what
//! is done about them (`--when-outside`).
//!
//! Under the sidecar door the keeper learns of them when it cannot put a sidecar in
//! ([`crate::wards`]). Under the preloaded library they are found here: a process that has run one
//! image for a while, and has not the library in it.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::{Board, ProcessState, Slot};
use farpool_units::{PAGE_BYTES_U64, at_most};

use crate::holder::memory_folder;
use crate::proc::{anonymous_bytes, children, start_ticks};
use crate::program;
use crate::say::say;
use crate::talk::printable;

/// Exit code of `farpool run` if it ended the tree because of a process outside.
pub const EXIT_OUTSIDE: i32 = 120;
/// How often the tree is checked. An image that is there at two checks has been through its loader.
const LOOK_STEP: Duration = Duration::from_millis(200);
/// Checking a large tree takes time: the keeper spends at most 2 % of a CPU on it.
const LOOK_PART: u32 = 50;
/// `e_machine` of this build's programs in an ELF header, and where it stands.
#[cfg(target_arch = "x86_64")]
const OWN_MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const OWN_MACHINE: u16 = 183;
const MACHINE_OFFSET: u64 = 18;

/// What is done about a process of the tree that cannot be held to the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenOutside {
    /// It is named once, and runs.
    #[default]
    Warn,
    /// The whole tree is ended, with [`EXIT_OUTSIDE`].
    Fail,
    /// Nothing is said.
    Allow,
}

/// Which processes are outside, and what is done about them.
#[derive(Debug)]
pub struct Outsiders {
    when: WhenOutside,
    /// Those that were reported.
    named: HashSet<u32>,
    must_end: bool,
}

impl Outsiders {
    pub fn new(when: WhenOutside) -> Outsiders {
        Outsiders { when, named: HashSet::new(), must_end: false }
    }

    /// True if the tree must be ended because of a process outside.
    pub fn must_end(&self) -> bool {
        self.must_end
    }

    /// True if a process was named.
    pub fn has_named(&self) -> bool {
        !self.named.is_empty()
    }

    /// Reports a process that cannot be served. `is_final`: nor can it be later.
    pub fn report(&mut self, pid: u32, reason: &dyn std::fmt::Display, is_final: bool) {
        if self.when == WhenOutside::Allow || self.must_end {
            return;
        }
        // It may have been named before for a reason that no longer holds.
        let ends_all = self.when == WhenOutside::Fail && is_final;
        if !self.named.insert(pid) && !ends_all {
            return;
        }
        let who = format!("process {pid} ({})", name(pid));
        let mut reason = reason.to_string();
        if reason.contains(&std::io::Error::from_raw_os_error(libc::EMFILE).to_string()) {
            reason += "; raise its limit of open files (ulimit -n, prlimit -n)";
        }
        if ends_all {
            self.must_end = true;
            say!(
                "farpool: {who} cannot be held to the limit, so all are ended (--when-outside \
                 fail): {reason}"
            );
        } else {
            say!("farpool: {who} is not held to the limit: {reason}");
        }
    }

    /// Puts on the board what those processes of `tree` that are outside hold.
    pub fn publish(
        &mut self,
        board: &Board,
        tree: &HashSet<u32>,
        outside: impl Iterator<Item = u32>,
    ) {
        self.named.retain(|pid| tree.contains(pid));
        let held: Vec<u64> = outside
            .filter(|pid| tree.contains(pid))
            .filter_map(anonymous_bytes)
            .filter(|bytes| *bytes > 0)
            .collect();
        let pages = held.iter().sum::<u64>() / PAGE_BYTES_U64;
        board.header().outside_pages.store(pages, Relaxed);
        board.header().outside_processes.store(at_most(held.len()), Relaxed);
    }
}

/// One image of a process: exec moves the stack, and a process that reuses the number starts later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ImageNumber {
    start_ticks: u64,
    stack: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It may still be in its loader.
    Young,
    Inside,
    Outside,
}

/// Looks for processes that run without the preloaded library.
#[derive(Debug)]
pub struct Strangers {
    pub outsiders: Outsiders,
    /// The name of the library's file.
    library: String,
    known: HashMap<u32, (ImageNumber, Verdict)>,
    next_look: Instant,
}

impl Strangers {
    pub fn new(when: WhenOutside, library: &Path) -> Strangers {
        Strangers {
            outsiders: Outsiders::new(when),
            library: library.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            known: HashMap::new(),
            next_look: Instant::now() + LOOK_STEP,
        }
    }

    /// Checks the tree below this process if it is time.
    pub fn look(&mut self, board: &Board) {
        let began = Instant::now();
        if began < self.next_look {
            return;
        }
        let tree: HashSet<u32> = descendants().into_iter().collect();
        self.known.retain(|pid, _| tree.contains(pid));
        for pid in &tree {
            self.judge(*pid);
        }
        let is_outside = |(_, verdict): &(ImageNumber, Verdict)| *verdict == Verdict::Outside;
        let outside: Vec<u32> =
            self.known.iter().filter(|(_, known)| is_outside(known)).map(|(pid, _)| *pid).collect();
        let is_stuck = |slot: &&Slot| slot.state() == ProcessState::Outside;
        let stuck: Vec<u32> =
            board.processes().filter(is_stuck).map(|slot| slot.pid.load(Relaxed)).collect();
        let lack = std::io::Error::from_raw_os_error(libc::EMFILE);
        for pid in &stuck {
            self.outsiders.report(*pid, &format!("the pager in it: {lack}"), true);
        }
        // A process with a slot, from before it became another program, counts there.
        let slots: HashSet<u32> = board.processes().map(|slot| slot.pid.load(Relaxed)).collect();
        let unpublished = outside.iter().filter(|pid| !slots.contains(pid));
        let bytes: u64 = unpublished.filter_map(|pid| anonymous_bytes(*pid)).sum();
        board.header().unpublished_pages.store(bytes / PAGE_BYTES_U64, Relaxed);
        self.outsiders.publish(board, &tree, outside.into_iter().chain(stuck));
        let took = began.elapsed();
        self.next_look = began + LOOK_STEP.max(took * LOOK_PART);
    }

    fn judge(&mut self, pid: u32) {
        let stat = std::fs::read_to_string(memory_folder(pid).join("stat")).unwrap_or_default();
        let Some(image) = image_number(&stat) else { return };
        // Threads start later than their process.
        let Some(start_ticks) = start_ticks(pid) else { return };
        let image = ImageNumber { start_ticks, ..image };
        let verdict = match self.known.get(&pid) {
            Some((known, verdict)) if *known == image && *verdict != Verdict::Young => return,
            Some((known, _)) if *known == image => match lack(pid, &self.library) {
                Some(reason) => {
                    self.outsiders.report(pid, &reason, true);
                    Verdict::Outside
                }
                None if has_library(pid, &self.library) => Verdict::Inside,
                None => return,
            },
            _ => Verdict::Young,
        };
        self.known.insert(pid, (image, verdict));
    }
}

/// The processes below this one.
pub fn descendants() -> Vec<u32> {
    let (mut found, mut next) = (Vec::new(), vec![std::process::id()]);
    while let Some(pid) = next.pop() {
        let below = children(pid);
        found.extend_from_slice(&below);
        next.extend(below);
    }
    found
}

/// Kills every living process below this one; to be called until none is left.
pub fn end_all() {
    for pid in descendants() {
        let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        // One that has ended meanwhile is no error.
        let kill = |pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let _ = pid.map(kill);
    }
}

/// Identifies the image that runs, by the `stat` of a process or of one of its threads. None for a
/// process that has ended. Pure.
fn image_number(stat: &str) -> Option<ImageNumber> {
    // The name may hold anything; fields 3, 22 and 28 are the first, 20th and 26th after it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    let number = |index: usize| fields.get(index)?.parse().ok();
    Some(ImageNumber { start_ticks: number(19)?, stack: number(25)? })
}

/// Why a process lacks the preloaded library, in words. None if it has it, may still get it, or
/// cannot be inspected.
fn lack(pid: u32, library: &str) -> Option<String> {
    const REMEDY: &str = "--door sidecar serves such programs";
    let folder = memory_folder(pid);
    let maps = match std::fs::read_to_string(folder.join("maps")) {
        Ok(maps) if maps.is_empty() || maps.contains(library) => return None,
        Ok(maps) => maps,
        Err(error) => {
            let is_closed = error.kind() == std::io::ErrorKind::PermissionDenied;
            return (is_closed && runs_as_another(pid)).then(|| {
                format!(
                    "it changed its user when it started, so no library was put into it; \
                    {REMEDY}, as root"
                )
            });
        }
    };
    let image = File::open(folder.join("exe")).ok()?;
    if machine(&image).is_some_and(|machine| machine != OWN_MACHINE) {
        return Some(
            "it is of another architecture than this farpool; use programs of this one".into(),
        );
    }
    if program::is_static(&image).unwrap_or(false) {
        return Some(format!(
            "it is statically linked, so no library can be put into it; {REMEDY}"
        ));
    }
    let environment = std::fs::read(folder.join("environ")).ok()?;
    if !environment.windows(library.len()).any(|part| part == library.as_bytes()) {
        return Some(format!(
            "it was started without LD_PRELOAD and FARPOOL_BOARD; keep them, or {REMEDY}"
        ));
    }
    // The loader maps preloaded libraries before any C library.
    let is_loaded = maps.contains("libc.so") || maps.contains("musl");
    is_loaded.then(|| {
        format!(
            "its loader put no library into it: it cannot see {library}, changes its user when it \
             starts, or has another C library; {REMEDY}"
        )
    })
}

fn has_library(pid: u32, library: &str) -> bool {
    let maps = std::fs::read_to_string(memory_folder(pid).join("maps"));
    maps.is_ok_and(|maps| maps.contains(library))
}

/// True if a process, of which nothing else may be seen, runs as another user than this one.
fn runs_as_another(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    let effective = ids.split_ascii_whitespace().nth(1).and_then(|id| id.parse::<u32>().ok());
    effective.is_some_and(|id| id != rustix::process::geteuid().as_raw())
}

fn machine(image: &File) -> Option<u16> {
    use std::os::unix::fs::FileExt;
    let (mut magic, mut machine) = ([0; 4], [0; 2]);
    image.read_exact_at(&mut magic, 0).ok()?;
    image.read_exact_at(&mut machine, MACHINE_OFFSET).ok()?;
    (&magic == b"\x7fELF").then(|| u16::from_le_bytes(machine))
}

fn name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    printable(name.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_known_by_its_start_and_its_stack() {
        let fields = |state: &str| {
            let numbers: Vec<String> = (4..=52).map(|number: u32| number.to_string()).collect();
            format!("7 (a) b) {state} {}", numbers.join(" "))
        };
        assert_eq!(image_number(&fields("S")), Some(ImageNumber { start_ticks: 22, stack: 28 }));
        assert_eq!(image_number(&fields("Z")), None);
        assert_eq!(image_number("7 (a) S 1"), None);
        let own = std::fs::read_to_string("/proc/self/stat").expect("stat");
        assert!(image_number(&own).is_some_and(|image| image.stack > 0));
    }

    #[test]
    fn what_a_process_lacks_is_known() {
        let own = std::process::id();
        let image = File::open("/proc/self/exe").expect("exe");
        assert_eq!(machine(&image), Some(OWN_MACHINE));
        assert!(lack(own, "libnowhere.so").is_some_and(|why| why.contains("without LD_PRELOAD")));
        assert!(has_library(own, "libc.so") && lack(own, "libc.so").is_none());
        assert!(!runs_as_another(own));
    }

    #[test]
    fn only_what_stays_so_ends_the_tree() {
        let mut outsiders = Outsiders::new(WhenOutside::Fail);
        outsiders.report(1, &"it is busy", false);
        assert!(!outsiders.must_end());
        outsiders.report(2, &"it is static", true);
        assert!(outsiders.must_end());
        let mut outsiders = Outsiders::new(WhenOutside::Fail);
        outsiders.report(1, &"it is busy", false);
        outsiders.report(1, &"it is static", true);
        assert!(outsiders.must_end(), "it was named before");
        let mut outsiders = Outsiders::new(WhenOutside::Allow);
        outsiders.report(2, &"it is static", true);
        assert!(!outsiders.must_end());
    }
}
