//! What /proc reports of a process. Read as bytes and searched: names in it may be any bytes.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Error;
use std::os::unix::fs::FileExt;

use crate::arch;
use crate::task::Tid;

/// Most bytes of /proc/PID/auxv that are read; it has some 20 pairs of words.
const MAX_AUXV_BYTES: usize = 4096;
/// Most bytes of one executable mapping that are searched for a system call instruction.
const MAX_SEARCH_BYTES: usize = 1 << 20;

/// Lines "Name:\tvalue" of /proc/PID/status.
#[derive(Debug)]
pub struct Status(HashMap<String, String>);

impl Status {
    pub fn read(tid: Tid) -> Result<Self, Error> {
        let bytes = fs::read(format!("/proc/{}/status", tid.0))?;
        let text = String::from_utf8_lossy(&bytes);
        let pairs = text.lines().filter_map(|line| line.split_once(':'));
        Ok(Self(pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()))
    }

    pub fn number(&self, name: &str) -> Option<i32> {
        self.0.get(name)?.parse().ok()
    }

    /// The process id in its own, innermost namespace.
    pub fn own_pid(&self) -> Option<i32> {
        self.0.get("NStgid")?.split_whitespace().last()?.parse().ok()
    }

    pub fn bits(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.0.get(name)?, 16).ok()
    }

    /// The state letter: R, S, D, T, t, Z, X.
    pub fn state(&self) -> Option<char> {
        self.0.get("State")?.chars().next()
    }
}

/// True if the thread no longer runs: gone, or a zombie (a first thread that exited before others).
pub fn has_ended(tid: Tid) -> bool {
    Status::read(tid).map_or(true, |status| matches!(status.state(), Some('Z' | 'X') | None))
}

/// True if the thread waits only for a processor, or for something that a stop interrupts.
pub fn is_runnable(tid: Tid) -> bool {
    Status::read(tid).is_ok_and(|status| matches!(status.state(), Some('R' | 'S')))
}

/// True if any memory of the process is locked (mlock, mlockall).
pub fn locks_memory(tid: Tid) -> Result<bool, Error> {
    let status = Status::read(tid)?;
    // A kernel without the field locks no memory.
    Ok(status.0.get("VmLck").is_some_and(|text| !text.starts_with("0 ")))
}

/// True if the mapping that begins at an address is locked.
pub fn is_locked(tid: Tid, start: u64) -> Result<bool, Error> {
    let smaps = fs::read(format!("/proc/{}/smaps", tid.0))?;
    Ok(is_locked_in(&String::from_utf8_lossy(&smaps), start))
}

fn is_locked_in(smaps: &str, start: u64) -> bool {
    let head = format!("{start:x}-");
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&head));
    // The first flags after the mapping's header are its own.
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "lo"))
}

/// The process's present threads.
pub fn threads(pid: Tid) -> Result<Vec<Tid>, Error> {
    let entries = fs::read_dir(format!("/proc/{}/task", pid.0))?;
    let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(names.map(Tid).collect())
}

/// A running thread of the process. Its first one may have ended: then that has no memory, no
/// program file and no seccomp filter any more.
pub fn living(pid: Tid) -> Tid {
    let others = || threads(pid).ok()?.into_iter().find(|tid| !has_ended(*tid));
    if has_ended(pid) { others().unwrap_or(pid) } else { pid }
}

/// True if children of the thread would be born into another process-id namespace.
pub fn births_elsewhere(tid: Tid) -> bool {
    let link = |name| fs::read_link(format!("/proc/{}/ns/{name}", tid.0));
    matches!((link("pid"), link("pid_for_children")), (Ok(own), Ok(next)) if own != next)
}

/// The start of the program file, to tell its architecture. None if it may not be read.
pub fn program_start(tid: Tid) -> Option<[u8; 20]> {
    let mut start = [0; 20];
    let file = File::open(format!("/proc/{}/exe", tid.0)).ok()?;
    file.read_exact_at(&mut start, 0).ok()?;
    Some(start)
}

/// End of the addresses that a program has unless it asks for more.
const USER_END: u64 = 1 << 47;
/// What is put into a gap begins at a multiple of this, so that its page tables are not shared with
/// other mappings.
const GAP_ALIGN_BYTES: u64 = 2 << 20;

/// A line of /proc/PID/maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    pub executable: bool,
    pub readable: bool,
    pub name: String,
}

fn mapping(line: &str) -> Option<Mapping> {
    let mut parts = line.splitn(6, ' ');
    let (start, end) = parts.next()?.split_once('-')?;
    let rights = parts.next()?;
    let name = parts.nth(3).unwrap_or("").trim().to_owned();
    let number = |text| u64::from_str_radix(text, 16).ok();
    let executable = rights.contains('x');
    let readable = rights.starts_with('r');
    Some(Mapping { start: number(start)?, end: number(end)?, executable, readable, name })
}

pub fn mappings(tid: Tid) -> Result<Vec<Mapping>, Error> {
    let bytes = fs::read(format!("/proc/{}/maps", tid.0))?;
    Ok(String::from_utf8_lossy(&bytes).lines().filter_map(mapping).collect())
}

/// The middle of the largest unmapped range of addresses, which is no hole that the program has
/// made, or will make.
pub fn middle_of_largest_gap(mappings: &[Mapping]) -> u64 {
    let ends = mappings.iter().map(|mapping| mapping.end);
    let starts = mappings.iter().skip(1).map(|mapping| mapping.start);
    // The kernel's own page at the very end, if present, is no memory of the program.
    let gaps = ends.zip(starts).filter(|(_, start)| *start <= USER_END);
    let (end, start) = gaps.max_by_key(|(end, start)| start.saturating_sub(*end)).unwrap_or((0, 0));
    (end + (start.saturating_sub(end)) / 2).next_multiple_of(GAP_ALIGN_BYTES)
}

/// The auxiliary vector that the kernel gave the program at its start.
pub fn auxiliary(tid: Tid) -> Vec<(u64, u64)> {
    let mut bytes = fs::read(format!("/proc/{}/auxv", tid.0)).unwrap_or_default();
    bytes.truncate(MAX_AUXV_BYTES);
    let words =
        bytes.chunks_exact(8).filter_map(|word| word.try_into().ok()).map(u64::from_le_bytes);
    let words: Vec<u64> = words.collect();
    words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

/// A task's memory, read and written through /proc.
#[derive(Debug)]
pub struct Memory(File);

impl Memory {
    pub fn open(tid: Tid) -> Result<Self, Error> {
        let path = format!("/proc/{}/mem", tid.0);
        File::options().read(true).write(true).open(path).map(Self)
    }

    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.0.read_exact_at(bytes, at)
    }

    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        self.0.write_all_at(bytes, at)
    }
}

/// The address of a system call instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate(pub u64);

/// The offset of a system call instruction in bytes.
fn find_instruction(bytes: &[u8]) -> Option<usize> {
    let places = bytes.windows(arch::GATE.len()).enumerate().step_by(arch::GATE_ALIGN);
    places.into_iter().find(|(_, window)| *window == arch::GATE).map(|(at, _)| at)
}

fn search(memory: &Memory, mapping: &Mapping) -> Option<Gate> {
    let bytes = usize::try_from(mapping.end - mapping.start).ok()?.min(MAX_SEARCH_BYTES);
    let mut text = vec![0; bytes];
    memory.read(mapping.start, &mut text).ok()?;
    Some(Gate(mapping.start + find_instruction(&text)? as u64))
}

/// True if a system call instruction is at `gate`.
pub fn is_gate(memory: &Memory, gate: Gate) -> bool {
    let mut bytes = vec![0; arch::GATE.len()];
    memory.read(gate.0, &mut bytes).is_ok() && bytes == arch::GATE
}

/// Finds a system call instruction: in the vdso, which no program changes, else in any text.
pub fn find_gate(memory: &Memory, mappings: &[Mapping]) -> Option<Gate> {
    let texts = || mappings.iter().filter(|m| m.executable && m.readable);
    let is_vdso = |m: &&Mapping| m.name == "[vdso]";
    let mut ordered = texts().filter(is_vdso).chain(texts().filter(|m| !is_vdso(m)));
    ordered.find_map(|mapping| search(memory, mapping))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_maps_is_read() {
        let line = "7ffe1-7ffe3 r-xp 00000000 00:00 0          [vdso]";
        let read = mapping(line).expect("a mapping");
        assert_eq!((read.start, read.end, read.name.as_str()), (0x7ffe1, 0x7ffe3, "[vdso]"));
        assert!(read.executable && read.readable);
        assert_eq!(mapping("12-13 rw-p 00000000 00:00 0 ").map(|m| m.name), Some(String::new()));
        assert_eq!(mapping("rubbish"), None);
    }

    #[test]
    fn the_middle_of_the_largest_gap_is_far_from_all() {
        let list = "00400000-00401000 r-xp 00000000 00:00 0\n\
            00500000-00600000 rw-p 00000000 00:00 0 [heap]\n\
            7f0000000000-7f0000100000 rw-p 00000000 00:00 0\n\
            7fff00000000-7fff00001000 rw-p 00000000 00:00 0 [stack]\n\
            ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
        let mappings: Vec<Mapping> = list.lines().filter_map(|line| mapping(line.trim())).collect();
        assert_eq!(middle_of_largest_gap(&mappings), 0x3f80_0040_0000);
        assert_eq!(middle_of_largest_gap(&[]), 0, "the kernel's choice");
    }

    #[test]
    fn this_process_has_a_gate_and_a_state() {
        let own = Tid(i32::try_from(std::process::id()).expect("a process id"));
        let memory = Memory::open(own).expect("own memory");
        assert!(find_gate(&memory, &mappings(own).expect("own maps")).is_some());
        let status = Status::read(own).expect("own status");
        assert_eq!(status.own_pid().is_some(), status.state().is_some());
        assert!(auxiliary(own).iter().any(|(key, value)| *key == 6 && *value >= 4096));
    }

    #[test]
    fn a_locked_mapping_is_told_from_its_neighbours() {
        let smaps = "7f00-7f10 rw-p 0 00:00 0\nSize: 4 kB\nVmFlags: rd wr lo \n\
                     7f10-7f20 ---p 0 00:00 0\nSize: 4 kB\nVmFlags: mr mw \n";
        assert!(is_locked_in(smaps, 0x7f00) && !is_locked_in(smaps, 0x7f10));
        assert!(!is_locked_in(smaps, 0x7f30));
    }
}
