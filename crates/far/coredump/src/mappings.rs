//! The mappings of a process, and what of each goes into its core. Pure.
//!
//! As in the kernel, by the process's own coredump_filter: what is in a file anyway is left to the
//! file, and the note of files says where it is.

use farpool_units::PAGE_BYTES_U64;

use crate::elf::{RIGHT_EXECUTE, RIGHT_READ, RIGHT_WRITE};

/// A mapping in /proc/PID/smaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    pub rights: u32,
    pub is_shared: bool,
    pub file_offset: u64,
    /// 0 without a file.
    pub inode: u64,
    pub name: Vec<u8>,
    /// Bytes of the process's own there, in memory or swap.
    pub own_bytes: u64,
    /// Two letters each, followed by a space.
    pub flags: String,
}

/// What of a mapping is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Nothing,
    /// The first page: in a program's file it identifies the build.
    Head,
    /// The pages that the kernel has for the process; others are zeros.
    Present,
    /// Every page: far pages are fetched when they are read.
    Everything,
}

/// Bits of /proc/PID/coredump_filter, in pairs: private and shared.
pub const FILTER_ALL: u64 = 0x1ff;
/// The kernel's default filter.
pub const FILTER_DEFAULT: u64 = 0x33;
const ANONYMOUS: u64 = 1 << 0;
const SHARED_ANONYMOUS: u64 = 1 << 1;
const FILES: u64 = 1 << 2;
const SHARED_FILES: u64 = 1 << 3;
const ELF_HEADS: u64 = 1 << 4;

impl Mapping {
    pub fn is_of_a_file(&self) -> bool {
        self.inode != 0
    }

    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    pub fn is_readable(&self) -> bool {
        self.rights & RIGHT_READ != 0
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.split_ascii_whitespace().any(|word| word == flag)
    }

    /// True if a userfaultfd brings its pages.
    pub fn is_paged(&self) -> bool {
        self.has("um")
    }

    /// The pager's own buffers: registered, but never for write protection as the program's memory
    /// is, not inherited, not in huge pages. A missing page there must stay missing.
    fn is_pagers_buffer(&self) -> bool {
        self.has("um") && self.has("dc") && self.has("nh") && !self.has("uw")
    }

    /// What is read of it with this filter.
    pub fn content(&self, filter: u64) -> Content {
        let is_special = self.has("io") || self.has("pf") || self.has("dd");
        if is_special || self.is_pagers_buffer() {
            return Content::Nothing;
        }
        if self.name == b"[vdso]" {
            return Content::Everything;
        }
        if self.is_shared {
            // A shared mapping without a name in any folder is anonymous memory, or practically so.
            let is_nameless = self.name.is_empty() || self.name.ends_with(b" (deleted)");
            let wanted = if is_nameless { SHARED_ANONYMOUS } else { SHARED_FILES };
            return if filter & wanted != 0 && self.is_readable() {
                Content::Everything
            } else {
                Content::Nothing
            };
        }
        self.private_content(filter)
    }

    fn private_content(&self, filter: u64) -> Content {
        let is_changed = self.own_bytes > 0 || self.is_paged();
        let wanted = if self.is_of_a_file() { FILES } else { ANONYMOUS };
        if filter & wanted != 0 || (is_changed && filter & ANONYMOUS != 0) {
            return match () {
                () if !self.is_of_a_file() && !is_changed => Content::Nothing,
                // Its protection stops process_vm_readv, and a pager's pages cannot be had
                // otherwise.
                () if !self.is_readable() => Content::Present,
                () if self.is_of_a_file() || self.is_paged() => Content::Everything,
                () => Content::Present,
            };
        }
        let is_head = self.is_of_a_file() && self.file_offset == 0 && self.is_readable();
        if is_head && filter & ELF_HEADS != 0 { Content::Head } else { Content::Nothing }
    }

    /// How many bytes of the core file it takes.
    pub fn file_bytes(&self, content: Content) -> u64 {
        match content {
            Content::Nothing => 0,
            Content::Head => PAGE_BYTES_U64.min(self.bytes()),
            Content::Present | Content::Everything => self.bytes(),
        }
    }
}

/// Reads /proc/PID/smaps.
pub fn parse(smaps: &[u8]) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.split(|byte| *byte == b'\n') {
        if let Some(mapping) = head(line) {
            mappings.push(mapping);
        } else if let Some(mapping) = mappings.last_mut() {
            detail(mapping, line);
        }
    }
    // The page of old system calls (vsyscall) is no memory of the process, and cannot be read.
    mappings.retain(|mapping| mapping.name != b"[vsyscall]");
    mappings
}

/// Parses a line as "7f10-7f20 rw-p 00001000 fe:00 123   /a name".
fn head(line: &[u8]) -> Option<Mapping> {
    let mut words = line.splitn(6, |byte| *byte == b' ');
    let mut word = || std::str::from_utf8(words.next()?).ok();
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = word()?.split_once('-')?;
    let (start, end) = (number(start)?, number(end)?);
    let rights = word()?.as_bytes();
    let file_offset = number(word()?)?;
    let _device = word()?;
    let inode = word()?.parse().ok()?;
    let name = words.next().unwrap_or_default().trim_ascii_start();
    let right = |at: usize, letter, bit| if rights.get(at) == Some(&letter) { bit } else { 0 };
    Some(Mapping {
        start,
        end: end.max(start),
        rights: right(0, b'r', RIGHT_READ)
            | right(1, b'w', RIGHT_WRITE)
            | right(2, b'x', RIGHT_EXECUTE),
        is_shared: rights.get(3) == Some(&b's'),
        file_offset,
        inode,
        name: unescaped(name),
        ..Mapping::default()
    })
}

/// Decodes a name: the kernel writes a newline in it as \012.
fn unescaped(name: &[u8]) -> Vec<u8> {
    const ESCAPED: &[u8] = b"\\012";
    let mut whole = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&byte, behind)) = rest.split_first() {
        let is_escaped = rest.starts_with(ESCAPED);
        whole.push(if is_escaped { b'\n' } else { byte });
        rest = if is_escaped { &rest[ESCAPED.len()..] } else { behind };
    }
    whole
}

fn detail(mapping: &mut Mapping, line: &[u8]) {
    let Some((name, value)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once(':'))
    else {
        return;
    };
    match name {
        "Anonymous" | "Swap" => {
            let kib: u64 = value.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            mapping.own_bytes += kib << 10;
        }
        "VmFlags" => mapping.flags = value.trim().into(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str, own_kib: u64, flags: &str) -> Mapping {
        let text =
            format!("{line}\nSize: 8 kB\nAnonymous: {own_kib} kB\nSwap: 0 kB\nVmFlags: {flags} \n");
        parse(text.as_bytes()).pop().expect("a mapping")
    }

    #[test]
    fn a_mapping_is_read_with_its_details() {
        let mapping =
            one("7f10000-7f12000 rw-p 00001000 fe:00 123      /a name\\012x", 8, "rd wr um uw");
        assert_eq!((mapping.start, mapping.bytes(), mapping.file_offset), (0x7f1_0000, 8192, 4096));
        assert_eq!((mapping.inode, mapping.own_bytes), (123, 8192));
        assert_eq!(mapping.name, b"/a name\nx");
        assert_eq!(mapping.rights, RIGHT_READ | RIGHT_WRITE);
        assert!(mapping.is_paged() && !mapping.is_shared);
    }

    #[test]
    fn what_is_read_of_a_mapping() {
        let content = |line: &str, own, flags| {
            let line = format!("7f10000-7f12000 {line}");
            let mapping = one(&line, own, flags);
            [FILTER_DEFAULT, FILTER_ALL].map(|filter| mapping.content(filter))
        };
        use Content::{Everything, Head, Nothing, Present};
        assert_eq!(content("rw-p 0 00:00 0 ", 8, "rd wr"), [Present; 2]);
        assert_eq!(content("rw-p 0 00:00 0 ", 0, "rd wr"), [Nothing; 2]);
        assert_eq!(content("rw-p 0 00:00 0 ", 0, "rd wr um uw"), [Everything; 2]);
        assert_eq!(content("rw-p 0 00:00 0 ", 8, "rd wr dc um uw"), [Everything; 2]);
        assert_eq!(content("---p 0 00:00 0 ", 8, "mr"), [Present; 2]);
        assert_eq!(content("---p 0 00:00 0 ", 0, "mr"), [Nothing; 2]);
        assert_eq!(content("r--p 0 fe:00 5 /bin/x", 0, "rd"), [Head, Everything]);
        assert_eq!(content("r-xp 1000 fe:00 5 /bin/x", 0, "rd ex"), [Nothing, Everything]);
        assert_eq!(content("rw-p 2000 fe:00 5 /bin/x", 4, "rd wr"), [Everything; 2]);
        assert_eq!(content("rw-s 0 fe:00 5 /data", 0, "rd wr sh"), [Nothing, Everything]);
        assert_eq!(content("rw-s 0 00:01 5 /dev/zero (deleted)", 0, "rd wr sh"), [Everything; 2]);
        assert_eq!(content("rw-p 0 00:00 0 ", 8, "rd wr dd"), [Nothing; 2]);
        assert_eq!(content("r--p 0 00:00 0 [vvar]", 0, "rd io dd"), [Nothing; 2]);
    }

    /// A page that is brought into the pager's buffer would be taken for one of the program's.
    #[test]
    fn the_buffer_of_the_pager_is_left_alone() {
        for own in [0, 8] {
            let buffer = one("7f10000-7f12000 rw-p 0 00:00 0 ", own, "rd wr mr um dc nr nh");
            assert_eq!(buffer.content(FILTER_ALL), Content::Nothing);
        }
    }
}
