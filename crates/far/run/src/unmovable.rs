//! What of a process's memory cannot be moved out, by kind, from its list of mappings
//! (/proc/PID/smaps).

/// Why memory stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kind {
    /// By mlock, mlockall.
    Locked,
    /// The kernel moves only between equal protections, and the pager either may not have
    /// executable frames (a seccomp filter) or is the preloaded library, whose frames are not
    /// executable.
    Executable,
    /// By mseal, where that kept the pager from registering it; else it can be moved like any
    /// other.
    Sealed,
    /// Stacks, small mappings, and with the preloaded library those that are read-only or kept from
    /// children (MADV_DONTFORK).
    Other,
    /// Shared with other processes.
    Shared,
    /// Of files; the kernel drops these by itself where it can.
    Files,
    /// The pager's tables and requests.
    Pager,
}

impl Kind {
    pub const ALL: [Kind; farpool_board::UNMOVABLE_KINDS] = [
        Kind::Locked,
        Kind::Executable,
        Kind::Sealed,
        Kind::Other,
        Kind::Shared,
        Kind::Files,
        Kind::Pager,
    ];

    /// The kind's name in JSON.
    pub fn key(self) -> &'static str {
        match self {
            Kind::Locked => "locked",
            Kind::Executable => "executable",
            Kind::Sealed => "sealed",
            Kind::Other => "other",
            Kind::Shared => "shared",
            Kind::Files => "files",
            Kind::Pager => "pager",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Kind::Locked => "locked (mlock)",
            Kind::Executable => "executable",
            Kind::Sealed => "sealed (mseal)",
            Kind::Other => "stacks, small and unregistered mappings",
            Kind::Shared => "shared memory",
            Kind::Files => "files",
            Kind::Pager => "the pager itself",
        }
    }
}

/// Which memory a pager moves out besides readable and writable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The preloaded library: none, and not what is kept from children.
    Library,
    /// A sidecar: all.
    Sidecar,
    /// A sidecar under a seccomp filter: all but executable memory.
    Filtered,
}

/// Bytes of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmovable([u64; farpool_board::UNMOVABLE_KINDS]);

impl Unmovable {
    pub fn get(&self, kind: Kind) -> u64 {
        self.0[kind as usize]
    }

    pub fn set(&mut self, kind: Kind, bytes: u64) {
        self.0[kind as usize] = bytes;
    }

    /// Reads one process's smaps. The pager's own memory is among [`Kind::Other`], of which
    /// `pager_bytes` are known.
    pub fn of_process(smaps: &str, reach: Reach, pager_bytes: u64) -> Unmovable {
        let mut unmovable = Unmovable::default();
        for mapping in mappings(smaps) {
            if let Some(kind) = mapping.anonymous_kind(reach) {
                unmovable.0[kind as usize] += mapping.anonymous_bytes;
            }
            let kind = if mapping.is_shared_memory() { Kind::Shared } else { Kind::Files };
            unmovable.0[kind as usize] +=
                mapping.resident_bytes.saturating_sub(mapping.anonymous_bytes);
        }
        let pager = unmovable.get(Kind::Other).min(pager_bytes);
        unmovable.0[Kind::Other as usize] -= pager;
        unmovable.set(Kind::Pager, pager);
        unmovable
    }

    /// Anonymous memory that stays, without the pager's.
    pub fn pinned_bytes(&self) -> u64 {
        [Kind::Locked, Kind::Executable, Kind::Sealed, Kind::Other]
            .map(|kind| self.get(kind))
            .iter()
            .sum()
    }

    /// Adds another process of the same tree: files and shared memory are mostly the same ones in
    /// all.
    pub fn add(&mut self, other: &Unmovable) {
        for kind in Kind::ALL {
            let (mine, theirs) = (self.get(kind), other.get(kind));
            let is_common = matches!(kind, Kind::Shared | Kind::Files);
            self.set(kind, if is_common { mine.max(theirs) } else { mine + theirs });
        }
    }

    /// What stays in any case, to be compared with a limit. Of files, which the kernel can drop,
    /// and shared memory at most half of the limit counts against it; shared memory stays all the
    /// same, though it is not counted.
    pub fn staying_bytes(&self, limit_bytes: u64) -> u64 {
        let shared = self.get(Kind::Shared);
        let common = (shared + self.get(Kind::Files)).min(limit_bytes / 2);
        self.pinned_bytes() + self.get(Kind::Pager) + common.max(shared)
    }

    /// As text, the largest first.
    pub fn text(&self) -> String {
        let mut kinds = Kind::ALL.map(|kind| (self.get(kind), kind.words()));
        kinds.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        let shown = kinds.iter().filter(|(bytes, _)| *bytes > 0);
        shown.map(|(bytes, words)| format!("{bytes} {words}")).collect::<Vec<_>>().join(", ")
    }
}

/// The relevant fields of one mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Mapping {
    rights: String,
    path: String,
    flags: Vec<String>,
    resident_bytes: u64,
    anonymous_bytes: u64,
}

impl Mapping {
    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|known| known == flag)
    }

    /// Why its anonymous memory stays. None if it can be moved.
    fn anonymous_kind(&self, reach: Reach) -> Option<Kind> {
        let is_reached = match reach {
            Reach::Library => self.rights.contains('w') && !self.has("dc") && !self.has("wf"),
            Reach::Sidecar | Reach::Filtered => true,
        };
        // Read-only memory is made writable for the move, which its seal forbids.
        let is_stiff = self.has("sl") && !self.rights.contains('w');
        // "um": the pager brings in missing pages.
        if self.has("lo") {
            Some(Kind::Locked)
        } else if self.rights.contains('x') && (reach != Reach::Sidecar || !self.has("um")) {
            Some(Kind::Executable)
        } else if self.has("um") && is_reached && !is_stiff {
            None
        } else if self.has("sl") {
            Some(Kind::Sealed)
        } else {
            Some(Kind::Other)
        }
    }

    fn is_shared_memory(&self) -> bool {
        let is_of_memory = ["/dev/shm/", "/memfd:", "/SYSV", "/dev/zero"];
        self.rights.ends_with('s')
            && (self.path.is_empty()
                || is_of_memory.iter().any(|start| self.path.starts_with(start)))
    }
}

fn mappings(smaps: &str) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if !first.ends_with(':') {
            // Offset, device and inode follow the rights.
            let rights = words.next().unwrap_or_default().to_owned();
            let path = words.skip(3).collect::<Vec<_>>().join(" ");
            found.push(Mapping { rights, path, ..Mapping::default() });
            continue;
        }
        let Some(mapping) = found.last_mut() else { continue };
        let kib = |mut words: std::str::SplitAsciiWhitespace<'_>| {
            words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        match first {
            "Rss:" => mapping.resident_bytes = kib(words),
            "Anonymous:" => mapping.anonymous_bytes = kib(words),
            "VmFlags:" => mapping.flags = words.map(str::to_owned).collect(),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(
        rights: &str,
        path: &str,
        resident_kib: u64,
        anonymous_kib: u64,
        flags: &str,
    ) -> String {
        format!(
            "7f0000000000-7f0000100000 {rights} 00000000 00:01 7 {path}\nSize: 1024 kB\nRss: \
             {resident_kib} kB\n\
             Anonymous: {anonymous_kib} kB\nVmFlags: {flags}\n"
        )
    }

    #[test]
    fn each_mapping_is_counted_as_its_kind() {
        let smaps = [
            entry("rw-p", "[heap]", 100, 100, "rd wr um"),
            entry("rw-p", "", 10, 10, "rd wr lo um"),
            entry("rwxp", "", 20, 20, "rd wr ex um"),
            entry("rw-p", "", 30, 30, "rd wr sl"),
            entry("rw-p", "", 35, 35, "rd wr um sl"),
            entry("r--p", "", 3, 3, "rd um sl"),
            entry("rw-p", "[stack]", 40, 40, "rd wr gd"),
            entry("r--p", "", 2, 2, "rd um"),
            entry("rw-p", "", 50, 50, "rd wr dc um"),
            entry("rw-s", "/memfd:x (deleted)", 60, 0, "rd wr sh"),
            entry("rw-p", "/usr/lib/libc.so.6", 75, 5, "rd wr"),
        ]
        .concat();
        let unmovable = Unmovable::of_process(&smaps, Reach::Library, 7 << 10);
        let kib = Kind::ALL.map(|kind| unmovable.get(kind) >> 10);
        assert_eq!(kib, [10, 20, 33, 40 + 2 + 50 + 5 - 7, 60, 70, 7]);
        let reached = |reach, kind| Unmovable::of_process(&smaps, reach, 0).get(kind) >> 10;
        assert_eq!(reached(Reach::Filtered, Kind::Other), 40 + 5);
        assert_eq!(reached(Reach::Filtered, Kind::Executable), 20);
        assert_eq!(reached(Reach::Sidecar, Kind::Executable), 0);
        assert_eq!(unmovable.staying_bytes(100 << 10) >> 10, 10 + 20 + 33 + 90 + 7 + 60);
        assert_eq!(unmovable.staying_bytes(140 << 10) >> 10, 10 + 20 + 33 + 90 + 7 + 70);
        assert!(unmovable.text().starts_with("92160 stacks, "));
    }

    #[test]
    fn this_process_has_files_and_a_stack() {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let unmovable = Unmovable::of_process(&smaps, Reach::Library, 0);
        assert!(unmovable.get(Kind::Files) > 0 && unmovable.get(Kind::Other) > 0);
    }

    proptest! {
        /// Any text is parsed, and what is said to stay is no more than what is there.
        #[test]
        fn nothing_is_made_up(
            resident in proptest::collection::vec((0_u64..1000, 0_u64..1000), 0..9), junk in "[ \
                -~\n]{0,200}",
        ) {
            let text: String =
                resident.iter().map(|(rss, anonymous)| entry("rw-p", "", rss + anonymous, *anonymous, "rd")).collect();
            let sum: u64 = resident.iter().map(|(rss, anonymous)| (rss + anonymous) << 10).sum();
            let unmovable = Unmovable::of_process(&text, Reach::Library, 0);
            prop_assert_eq!(Kind::ALL.map(|kind| unmovable.get(kind)).iter().sum::<u64>(), sum);
            Unmovable::of_process(&junk, Reach::Sidecar, 1);
        }
    }
}
