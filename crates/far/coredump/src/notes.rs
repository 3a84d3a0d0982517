//! The contents of a core besides memory: threads with registers, the process, its files. Pure.

use farpool_units::exactly;
use zerocopy::{Immutable, IntoBytes};

use crate::mappings::Mapping;

pub const PRSTATUS: u32 = 1;
pub const FLOAT_REGISTERS: u32 = 2;
const PRPSINFO: u32 = 3;
const AUXV: u32 = 6;
const FILES: u32 = 0x4649_4c45;
/// Sets of registers besides the general ones, with the owner name of their notes.
#[cfg(target_arch = "x86_64")]
pub const OTHER_SETS: [(&str, u32); 2] = [("CORE", FLOAT_REGISTERS), ("LINUX", 0x202)];
#[cfg(target_arch = "aarch64")]
pub const OTHER_SETS: [(&str, u32); 2] = [("CORE", FLOAT_REGISTERS), ("LINUX", 0x401)];

#[cfg(target_arch = "x86_64")]
const GENERAL_BYTES: usize = 27 * 8;
#[cfg(target_arch = "aarch64")]
const GENERAL_BYTES: usize = 34 * 8;

/// `struct elf_prstatus`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct Prstatus {
    signal_information: [i32; 3],
    current_signal: i16,
    pad: i16,
    pending: u64,
    blocked: u64,
    thread: i32,
    parent: i32,
    group: i32,
    session: i32,
    /// Seconds and microseconds: in user mode, in the kernel, and both of the children.
    times: [[i64; 2]; 4],
    registers: [u8; GENERAL_BYTES],
    has_float: i32,
    pad_end: i32,
}

#[cfg(target_arch = "x86_64")]
const _: () = assert!(size_of::<Prstatus>() == 336);
#[cfg(target_arch = "aarch64")]
const _: () = assert!(size_of::<Prstatus>() == 392);

const NAME_BYTES: usize = 16;
const ARGUMENTS_BYTES: usize = 80;

/// `struct elf_prpsinfo`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
struct Prpsinfo {
    state: u8,
    state_letter: u8,
    is_zombie: u8,
    nice: i8,
    pad: u32,
    flags: u64,
    user: u32,
    user_group: u32,
    pid: i32,
    parent: i32,
    group: i32,
    session: i32,
    name: [u8; NAME_BYTES],
    arguments: [u8; ARGUMENTS_BYTES],
}

const _: () = assert!(size_of::<Prpsinfo>() == 136);

/// Facts about a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    pub parent: i32,
    pub group: i32,
    pub session: i32,
    pub state: u8,
    pub nice: i8,
    pub flags: u64,
    pub user: u32,
    pub user_group: u32,
    pub name: Vec<u8>,
    pub arguments: Vec<u8>,
    pub auxiliary: Vec<u8>,
}

/// Facts about a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thread {
    pub tid: i32,
    pub pending: u64,
    pub blocked: u64,
    pub times: [[i64; 2]; 4],
    /// In the kernel's form for [`PRSTATUS`].
    pub general: Vec<u8>,
    /// The available sets of [`OTHER_SETS`].
    pub others: Vec<(&'static str, u32, Vec<u8>)>,
}

/// All notes, one after the other. A debugger shows the first thread.
pub fn notes(process: &Process, threads: &[Thread], mappings: &[Mapping]) -> Vec<u8> {
    let mut notes = Vec::new();
    let mut of_threads = threads.iter();
    if let Some(first) = of_threads.next() {
        add(&mut notes, "CORE", PRSTATUS, prstatus(process, first).as_bytes());
        add(&mut notes, "CORE", PRPSINFO, prpsinfo(process).as_bytes());
        add(&mut notes, "CORE", AUXV, &process.auxiliary);
        add(&mut notes, "CORE", FILES, &files(mappings));
        add_others(&mut notes, first);
    }
    for thread in of_threads {
        add(&mut notes, "CORE", PRSTATUS, prstatus(process, thread).as_bytes());
        add_others(&mut notes, thread);
    }
    notes
}

fn add_others(notes: &mut Vec<u8>, thread: &Thread) {
    for (name, kind, bytes) in &thread.others {
        add(notes, name, *kind, bytes);
    }
}

/// Appends a note: sizes, kind, name with its zero, contents, both padded to a multiple of 4.
fn add(notes: &mut Vec<u8>, name: &str, kind: u32, contents: &[u8]) {
    // The longest note lists the mappings: some 65,000 with a path each, at most 300 MB.
    let size = |bytes: usize| u32::try_from(bytes).expect("a note is shorter than 4 GiB");
    for word in [size(name.len() + 1), size(contents.len()), kind] {
        notes.extend_from_slice(&word.to_le_bytes());
    }
    notes.extend_from_slice(name.as_bytes());
    notes.push(0);
    notes.resize(notes.len().next_multiple_of(4), 0);
    notes.extend_from_slice(contents);
    notes.resize(notes.len().next_multiple_of(4), 0);
}

fn prstatus(process: &Process, thread: &Thread) -> Prstatus {
    Prstatus {
        signal_information: [0; 3],
        current_signal: 0,
        pad: 0,
        pending: thread.pending,
        blocked: thread.blocked,
        thread: thread.tid,
        parent: process.parent,
        group: process.group,
        session: process.session,
        times: thread.times,
        registers: cut(&thread.general),
        has_float: i32::from(thread.others.iter().any(|(_, kind, _)| *kind == FLOAT_REGISTERS)),
        pad_end: 0,
    }
}

fn prpsinfo(process: &Process) -> Prpsinfo {
    const STATES: &[u8] = b"RSDTZW";
    let state = STATES.iter().position(|letter| *letter == process.state);
    Prpsinfo {
        state: state.map_or(0, exactly),
        state_letter: process.state,
        is_zombie: u8::from(process.state == b'Z'),
        nice: process.nice,
        pad: 0,
        flags: process.flags,
        user: process.user,
        user_group: process.user_group,
        pid: process.pid,
        parent: process.parent,
        group: process.group,
        session: process.session,
        name: text(&process.name),
        arguments: text(&process.arguments),
    }
}

/// The first bytes, padded with zeros.
fn cut<const BYTES: usize>(bytes: &[u8]) -> [u8; BYTES] {
    let mut field = [0; BYTES];
    let count = bytes.len().min(BYTES);
    field[..count].copy_from_slice(&bytes[..count]);
    field
}

/// As [`cut`], but always ends with a zero.
fn text<const BYTES: usize>(bytes: &[u8]) -> [u8; BYTES] {
    cut(&bytes[..bytes.len().min(BYTES.saturating_sub(1))])
}

/// NT_FILE: which file lies where.
fn files(mappings: &[Mapping]) -> Vec<u8> {
    use farpool_units::PAGE_BYTES_U64;
    let of_files: Vec<&Mapping> =
        mappings.iter().filter(|mapping| mapping.is_of_a_file()).collect();
    let mut words = vec![of_files.len() as u64, PAGE_BYTES_U64];
    for mapping in &of_files {
        words.extend([mapping.start, mapping.end, mapping.file_offset / PAGE_BYTES_U64]);
    }
    let mut note: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    for mapping in of_files {
        note.extend_from_slice(&mapping.name);
        note.push(0);
    }
    note
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kind, name and contents of each note.
    fn read(mut notes: &[u8]) -> Vec<(u32, Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        while !notes.is_empty() {
            let word = |at: usize| u32::from_le_bytes(notes[at..at + 4].try_into().expect("four"));
            let (name, bytes) = (word(0) as usize, word(4) as usize);
            let contents = 12 + name.next_multiple_of(4);
            let kind = word(8);
            found.push((
                kind,
                notes[12..12 + name].to_vec(),
                notes[contents..contents + bytes].to_vec(),
            ));
            notes = &notes[contents + bytes.next_multiple_of(4)..];
        }
        found
    }

    #[test]
    fn the_first_thread_comes_before_what_is_told_of_the_process() {
        let thread = |tid| Thread {
            tid,
            general: vec![1; GENERAL_BYTES],
            others: vec![("CORE", FLOAT_REGISTERS, vec![2; 512])],
            ..Thread::default()
        };
        let name = b"a name that is longer than the field".to_vec();
        let process = Process { pid: 7, name, auxiliary: vec![3; 33], ..Process::default() };
        let notes = read(&notes(&process, &[thread(7), thread(8)], &[]));
        let kinds: Vec<u32> = notes.iter().map(|(kind, ..)| *kind).collect();
        assert_eq!(
            kinds,
            [PRSTATUS, PRPSINFO, AUXV, FILES, FLOAT_REGISTERS, PRSTATUS, FLOAT_REGISTERS]
        );
        assert!(notes.iter().all(|(_, name, _)| name == b"CORE\0"));
        assert_eq!(notes[0].2[32..36], 7_i32.to_le_bytes());
        assert_eq!(notes[0].2[112..112 + GENERAL_BYTES], [1; GENERAL_BYTES]);
        assert_eq!(&notes[1].2[40..56], b"a name that is \0");
        assert_eq!(notes[2].2, [3; 33]);
    }

    #[test]
    fn files_are_told_with_their_places() {
        let mapping = Mapping {
            start: 0x1000,
            end: 0x3000,
            file_offset: 0x2000,
            inode: 5,
            name: b"/bin/x".to_vec(),
            ..Mapping::default()
        };
        let note = files(&[mapping.clone(), Mapping { inode: 0, ..mapping }]);
        let words: Vec<u8> =
            [1, 4096, 0x1000, 0x3000, 2_u64].iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(note, [&words[..], b"/bin/x\0"].concat());
    }
}
