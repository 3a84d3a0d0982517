//! What /proc reports of a process, and its memory.

use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::FileExt;

use farpool_inject::Halted;
use farpool_units::{PAGE_BYTES, PAGE_BYTES_U64};

use crate::copy::Source;
use crate::error::CoreError;
use crate::mappings::{self, FILTER_DEFAULT, Mapping};
use crate::notes::{OTHER_SETS, PRSTATUS, Process, Thread};
use crate::sys;

/// Name prefix of a preloaded pager's threads.
const PAGERS_THREADS: &str = "farpool-";
const PRELOAD_NAME: &[u8] = b"/libfarpool_preload.so";

/// Fields of /proc/PID/stat from the state on, which is number 3 in proc(5).
struct Stat(Vec<String>);

impl Stat {
    fn read(path: &str) -> Result<Stat, Error> {
        let text = String::from_utf8_lossy(&fs::read(path)?).into_owned();
        let behind = text.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
        Ok(Stat(behind.split_ascii_whitespace().map(str::to_owned).collect()))
    }

    fn number<T: std::str::FromStr + Default>(&self, field: usize) -> T {
        self.0.get(field - 3).and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// Times in user mode, in the kernel, and both of children.
    fn times(&self) -> [[i64; 2]; 4] {
        let per_second = sys::ticks_per_second();
        [14, 15, 16, 17].map(|field| {
            let ticks: i64 = self.number(field);
            [ticks / per_second, ticks % per_second * 1_000_000 / per_second]
        })
    }
}

/// A line of /proc/PID/status.
fn status_word<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()
}

fn read_status(path: &str) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

/// True if it is a process: threads have numbers of the same kind.
pub fn is_process(pid: u32) -> bool {
    let status = read_status(&format!("/proc/{pid}/status"));
    status_word(&status, "Tgid").and_then(|word| word.parse().ok()) == Some(pid)
}

/// The threads of a process that bring its pages, if its pager is a preloaded library.
pub fn pagers_threads(pid: u32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let threads = tasks.filter_map(|task| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        let thread = task.file_name().to_str()?.parse().ok()?;
        name.starts_with(PAGERS_THREADS).then_some(thread)
    });
    let threads: Vec<i32> = threads.collect();
    // Read through one of them: the first thread of the process may have ended, and then has no
    // memory.
    let maps = threads.first().and_then(|thread| fs::read(format!("/proc/{thread}/maps")).ok());
    let maps = maps.unwrap_or_default();
    let has_pager = maps.split(|byte| *byte == b'\n').any(|line| line.ends_with(PRELOAD_NAME));
    if has_pager { threads } else { Vec::new() }
}

/// Collects facts about the process. `task` is one of its living threads.
pub fn describe(pid: u32, task: i32) -> Result<Process, Error> {
    let stat = Stat::read(&format!("/proc/{pid}/stat"))?;
    let status = read_status(&format!("/proc/{pid}/status"));
    let of = |name| status_word(&status, name).and_then(|word| word.parse().ok()).unwrap_or(0);
    let mut arguments = fs::read(format!("/proc/{task}/cmdline"))?;
    while arguments.last() == Some(&0) {
        arguments.pop();
    }
    arguments.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b' ');
    Ok(Process {
        pid: pid.cast_signed(),
        parent: stat.number(4),
        group: stat.number(5),
        session: stat.number(6),
        state: stat.0.first().and_then(|state| state.bytes().next()).unwrap_or(b'S'),
        nice: stat.number(19),
        flags: stat.number(9),
        user: of("Uid"),
        user_group: of("Gid"),
        name: fs::read(format!("/proc/{pid}/comm"))?.trim_ascii_end().to_vec(),
        arguments,
        auxiliary: fs::read(format!("/proc/{task}/auxv"))?,
    })
}

/// Collects facts about the threads that stand still.
pub fn describe_threads(pid: u32, halted: &Halted) -> Vec<Thread> {
    let of_thread = |tid: i32| {
        let general = halted.registers(tid, PRSTATUS)?;
        let stat = Stat::read(&format!("/proc/{pid}/task/{tid}/stat")).ok()?;
        let status = read_status(&format!("/proc/{pid}/task/{tid}/status"));
        let bits = |name| {
            let word = status_word(&status, name);
            word.and_then(|word| u64::from_str_radix(word, 16).ok()).unwrap_or(0)
        };
        let others = OTHER_SETS.iter().filter_map(|(name, kind)| {
            halted.registers(tid, *kind).map(|bytes| (*name, *kind, bytes))
        });
        let (pending, blocked) = (bits("SigPnd"), bits("SigBlk"));
        Some(Thread {
            tid,
            pending,
            blocked,
            times: stat.times(),
            general,
            others: others.collect(),
        })
    };
    halted.threads().into_iter().filter_map(of_thread).collect()
}

pub fn read_mappings(task: i32) -> Result<Vec<Mapping>, Error> {
    fs::read(format!("/proc/{task}/smaps")).map(|text| mappings::parse(&text))
}

/// The process's filter for its core dumps.
pub fn filter(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/coredump_filter")).unwrap_or_default();
    u64::from_str_radix(text.trim(), 16).unwrap_or(FILTER_DEFAULT)
}

/// The memory of a process.
#[derive(Debug)]
pub struct Memory {
    pid: u32,
    task: i32,
    pagemap: File,
    /// For memory that the process itself may not read.
    memory: File,
    /// The mapping being read is readable, and a pager brings its pages.
    pub is_readable: bool,
}

impl Memory {
    pub fn open(pid: u32, task: i32) -> Result<Memory, Error> {
        let open = |name| File::open(format!("/proc/{task}/{name}"));
        Ok(Memory { pid, task, pagemap: open("pagemap")?, memory: open("mem")?, is_readable: true })
    }

    fn failed(&self, what: &'static str, error: Error) -> CoreError {
        match error.raw_os_error() {
            Some(libc::ESRCH) => CoreError::Ended { pid: self.pid },
            Some(libc::EPERM | libc::EACCES) => CoreError::NotPermitted { pid: self.pid },
            _ => CoreError::NotRead { pid: self.pid, what, error },
        }
    }

    /// Reads page by page, regardless of the process's protection; never far memory.
    fn read_forbidden(&self, address: u64, pages: &mut [u8]) -> Result<usize, CoreError> {
        for (index, page) in pages.chunks_mut(PAGE_BYTES).enumerate() {
            match self.memory.read_exact_at(page, address + (index * PAGE_BYTES) as u64) {
                Ok(()) => {}
                // No bytes at all: the address space is gone.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Err(CoreError::Ended { pid: self.pid });
                }
                Err(_) => return Ok(index),
            }
        }
        Ok(pages.len() / PAGE_BYTES)
    }
}

impl Source for Memory {
    fn read(&mut self, address: u64, pages: &mut [u8]) -> Result<usize, CoreError> {
        if !self.is_readable {
            return self.read_forbidden(address, pages);
        }
        match sys::read_memory(self.task, address, pages) {
            Ok(bytes) => Ok(bytes / PAGE_BYTES),
            // A page that was lost with its blade, a truncated file, a mapping that is gone.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EFAULT | libc::EIO | libc::EHWPOISON)
                ) =>
            {
                Ok(0)
            }
            Err(error) => Err(self.failed("the memory", error)),
        }
    }

    fn present(&mut self, address: u64, pages: usize) -> Result<u64, CoreError> {
        const ENTRY_BYTES: usize = size_of::<u64>();
        const PRESENT: u64 = 1 << 63;
        const SWAPPED: u64 = 1 << 62;
        let mut entries = [0; 64 * ENTRY_BYTES];
        let entries = &mut entries[..pages.min(64) * ENTRY_BYTES];
        let offset = address / PAGE_BYTES_U64 * ENTRY_BYTES as u64;
        self.pagemap.read_exact_at(entries, offset).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => CoreError::Ended { pid: self.pid },
            _ => self.failed("the page map", error),
        })?;
        let words = entries.chunks_exact(ENTRY_BYTES).enumerate();
        Ok(words.fold(0, |bits, (page, bytes)| {
            let entry = bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
            bits | u64::from(entry & (PRESENT | SWAPPED) != 0) << page
        }))
    }
}
