//! The kernel's list of a process's mappings (/proc/PID/maps), and which mappings can be far. Pure.

use crate::space::registry::Region;
use crate::sys::Protection;

/// One line of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    pub start: usize,
    pub end: usize,
    pub protection: Protection,
    pub is_private: bool,
    /// 0: no file is mapped.
    pub inode: u64,
    /// Path of the file, or the kernel's name for the memory.
    pub name: &'a str,
}

/// What the pager may do with a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eligible {
    pub start: usize,
    pub end: usize,
    pub protection: Protection,
}

impl Eligible {
    /// The range as the registry has it.
    pub fn region(self, pinned: bool) -> Region {
        let Eligible { start, end, protection } = self;
        Region { start, end, protection, pinned, ..Region::default() }
    }
}

/// Parses one line. None: it is not a mapping.
pub fn parse(line: &str) -> Option<Mapping<'_>> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let (rights, rest) = rest.split_once(' ')?;
    let mut fields = rest.splitn(4, ' ');
    let (_offset, _device) = (fields.next()?, fields.next()?);
    let inode = fields.next()?.parse().ok()?;
    let mut rights = rights.chars();
    let mut has = |right: char| rights.next().map(|found| found == right);
    Some(Mapping {
        start: usize::from_str_radix(start, 16).ok()?,
        end: usize::from_str_radix(end, 16).ok()?,
        protection: Protection {
            can_read: has('r')?,
            can_write: has('w')?,
            can_execute: has('x')?,
        },
        is_private: has('p')?,
        inode,
        name: fields.next().unwrap_or("").trim_start(),
    })
}

impl Mapping<'_> {
    /// Whether it is memory that could be far, whatever the program's current rights to it:
    /// anonymous, private, and not the kernel's or a stack that grows.
    fn is_anonymous(&self) -> bool {
        let is_plain =
            self.name.is_empty() || self.name == "[heap]" || self.name.starts_with("[anon:");
        self.is_private && self.inode == 0 && is_plain
    }
}

/// The ranges of a list that can be far, without the pager's own (`own`: start and end, in order).
/// Mappings shorter than `threshold_bytes` stay local. Lines that cannot be parsed are skipped:
/// their mappings stay local.
pub fn eligible(text: &str, own: &[(usize, usize)], threshold_bytes: usize) -> Vec<Eligible> {
    let mut found = Vec::new();
    for mapping in text.lines().filter_map(parse).filter(Mapping::is_anonymous) {
        let protection = mapping.protection;
        if mapping.end - mapping.start < threshold_bytes {
            continue;
        }
        // The kernel joins neighbouring mappings of equal rights: the pager's mapping may be part
        // of a line.
        let mut from = mapping.start;
        for (start, end) in own {
            if *end <= from || *start >= mapping.end {
                continue;
            }
            if *start > from {
                found.push(Eligible { start: from, end: *start, protection });
            }
            from = (*end).min(mapping.end);
        }
        if from < mapping.end {
            found.push(Eligible { start: from, end: mapping.end, protection });
        }
    }
    found
}

/// How many of the ranges, in order, may be read and written and begin where another such range
/// ends: mappings that the kernel has not joined.
pub fn splits(found: &[Eligible]) -> usize {
    let is_split = |pair: &&[Eligible]| {
        let is_plain = pair[0].protection == Protection::READ_WRITE;
        pair[0].end == pair[1].start && is_plain && pair[0].protection == pair[1].protection
    };
    found.windows(2).filter(is_split).count()
}

/// Whether faults at this address are reported to a userfaultfd, by a detailed list
/// (/proc/PID/smaps).
pub fn is_registered(details: &str, address: usize) -> bool {
    let mut is_there = false;
    for line in details.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if is_there {
                return flags.split_ascii_whitespace().any(|flag| flag == "um");
            }
        } else if let Some(mapping) = parse(line) {
            is_there = (mapping.start..mapping.end).contains(&address);
        }
    }
    false
}

/// The ranges of a detailed list (/proc/PID/smaps) that a child of fork finds empty
/// (MADV_WIPEONFORK).
pub fn wiped_on_fork(details: &str) -> Vec<(usize, usize)> {
    let mut range = None;
    let mut wiped = Vec::new();
    for line in details.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_ascii_whitespace().any(|flag| flag == "wf") {
                wiped.extend(range);
            }
        } else if let Some(mapping) = parse(line) {
            range = Some((mapping.start, mapping.end));
        }
    }
    wiped
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIST: &str = "\
00400000-00452000 r-xp 00000000 08:02 173521                             /usr/bin/dbus-daemon
00e03000-00e24000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
7f0000200000-7f0000300000 rwxp 00000000 00:00 0 
7f0000300000-7f0000400000 ---p 00000000 00:00 0 
7f0000400000-7f0000500000 rw-s 00000000 00:01 2052                       /dev/zero (deleted)
7f0000500000-7f0000501000 rw-p 00000000 00:00 0 
7f0000600000-7f0000700000 rw-p 00000000 00:00 0                          [anon:glibc: malloc arena]
7ffc0000000-7ffc0021000 rw-p 00000000 00:00 0                          [stack]
nonsense
";

    #[test]
    fn anonymous_private_memory_is_eligible() {
        let found = eligible(LIST, &[], 64 << 10);
        let ranges: Vec<(usize, bool)> = found
            .iter()
            .map(|range| (range.start, range.protection == Protection::READ_WRITE))
            .collect();
        assert_eq!(
            ranges,
            [
                (0x00e0_3000, true),
                (0x7f00_0000_0000, true),
                (0x7f00_0020_0000, false),
                (0x7f00_0030_0000, false),
                (0x7f00_0060_0000, true),
            ]
        );
    }

    #[test]
    fn the_pagers_own_ranges_are_cut_out() {
        let own = [(0x7f00_0000_0000, 0x7f00_0001_0000), (0x7f00_0008_0000, 0x7f00_0009_0000)];
        let found = eligible(LIST, &own, 64 << 10);
        let parts: Vec<(usize, usize)> = found
            .iter()
            .filter(|range| range.start < 0x7f00_0010_0000 && range.start >= 0x7f00_0000_0000)
            .map(|range| (range.start, range.end))
            .collect();
        assert_eq!(
            parts,
            [(0x7f00_0001_0000, 0x7f00_0008_0000), (0x7f00_0009_0000, 0x7f00_0010_0000)]
        );
    }

    #[test]
    fn neighbours_that_may_both_be_moved_are_a_split() {
        let range = |start, end, can_write| {
            let protection = Protection { can_write, ..Protection::READ_WRITE };
            Eligible { start, end, protection }
        };
        let found = [range(1, 2, true), range(2, 4, true), range(4, 5, false), range(6, 7, true)];
        assert_eq!(splits(&found), 1);
        assert_eq!(splits(&found[1..]), 0);
    }

    #[test]
    fn registered_memory_is_known_by_its_flag() {
        let details = "\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
Size:               1024 kB
VmFlags: rd wr mr mw me ac sd um uw 
7f0000100000-7f0000300000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me ac wf sd 
";
        assert!(is_registered(details, 0x7f00_000f_f000));
        assert!(!is_registered(details, 0x7f00_0010_0000));
        assert!(!is_registered(details, 0x7f00_0030_0000));
    }

    #[test]
    fn memory_that_a_child_finds_empty_is_known_by_its_flag() {
        let details = "\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 
Size:               1024 kB
VmFlags: rd wr mr mw me ac sd 
7f0000200000-7f0000300000 rw-p 00000000 00:00 0 
Rss:                   4 kB
VmFlags: rd wr mr mw me ac wf sd 
";
        assert_eq!(wiped_on_fork(details), [(0x7f00_0020_0000, 0x7f00_0030_0000)]);
    }

    proptest! {
        #[test]
        fn any_text_can_be_read(text: String) {
            let _ = eligible(&text, &[(0, 4096)], 4096);
        }

        #[test]
        fn no_range_overlaps_the_pagers_own(
            own in proptest::collection::vec((0_usize..256, 1_usize..16), 0..8),
        ) {
            let base = 0x7f00_0000_0000;
            let mut own: Vec<(usize, usize)> = own
                .into_iter()
                .map(|(at, pages)| (base + at * 4096, base + (at + pages) * 4096))
                .collect();
            own.sort_unstable();
            for range in eligible(LIST, &own, 4096) {
                prop_assert!(range.start < range.end);
                prop_assert!(own.iter().all(|(start, end)| range.end <= *start || range.start >= *end));
            }
        }
    }
}
