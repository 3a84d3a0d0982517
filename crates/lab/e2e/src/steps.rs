//! A process that is followed from one system call to the next, by ptrace, and killed at a chosen
//! one.
//!
//! All of it is done in one thread: the kernel tells of a process's stops only that thread which
//! traces it.

use std::collections::BTreeSet;
use std::io::Error;
use std::time::{Duration, Instant};

use crate::tree;

/// What ptrace calls a stop at a system call when PTRACE_O_TRACESYSGOOD is on.
const SYSTEM_CALL: i32 = libc::SIGTRAP | 0x80;
/// Between two looks for stops.
const PAUSE: Duration = Duration::from_micros(20);
/// A thread stops within this, also on a busy machine.
const STOP_TIME: Duration = Duration::from_secs(20);

/// Where a process was when it was killed.
#[derive(Clone, Debug)]
pub struct Step {
    pub thread: String,
    pub call: u64,
    /// Before the call; otherwise after it.
    pub is_entry: bool,
}

/// The threads of one process, traced by the calling thread.
#[derive(Debug)]
pub struct Steps {
    pid: u32,
    threads: BTreeSet<i32>,
    /// Those that stand still.
    stopped: BTreeSet<i32>,
}

impl Steps {
    /// Stops all threads of a process. Those that it starts later are followed, too.
    pub fn stop(pid: u32) -> Result<Steps, Error> {
        let mut steps = Steps { pid, threads: BTreeSet::new(), stopped: BTreeSet::new() };
        let until = Instant::now() + STOP_TIME;
        loop {
            let new: Vec<i32> =
                threads(pid).into_iter().filter(|tid| !steps.threads.contains(tid)).collect();
            for tid in &new {
                let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE;
                request(libc::PTRACE_SEIZE, *tid, options)?;
                request(libc::PTRACE_INTERRUPT, *tid, 0)?;
                steps.threads.insert(*tid);
            }
            while steps.stopped.len() < steps.threads.len() {
                if steps.next_stop()?.is_none() {
                    std::thread::sleep(PAUSE);
                }
                if Instant::now() > until {
                    return Err(std::io::ErrorKind::TimedOut.into());
                }
            }
            if new.is_empty() {
                return Ok(steps);
            }
        }
    }

    /// To be called by a thread that ends then. Lets the process go on and kills it (SIGKILL) when
    /// its threads have come to `wanted` stops at system calls. None: within `patience` they did
    /// not, or `is_over` said so, or it has ended; then it goes on untraced.
    pub fn kill_at(
        mut self,
        wanted: usize,
        patience: Duration,
        is_over: impl Fn() -> bool,
    ) -> Result<Option<Step>, Error> {
        for tid in std::mem::take(&mut self.stopped) {
            go_on(tid, 0);
        }
        let (until, mut seen) = (Instant::now() + patience, 0);
        while Instant::now() < until && !self.threads.is_empty() && !is_over() {
            let Some((tid, status)) = self.next_stop()? else {
                std::thread::sleep(PAUSE);
                continue;
            };
            let is_call = libc::WSTOPSIG(status) == SYSTEM_CALL;
            if is_call && seen == wanted {
                let step = self.look(tid);
                tree::signal(self.pid, libc::SIGKILL);
                // Its end is reported to the process that started it, once the calling thread has
                // ended.
                return Ok(Some(step));
            }
            seen += usize::from(is_call);
            self.stopped.remove(&tid);
            let is_signal = !is_call && status >> 16 == 0;
            go_on(tid, if is_signal { libc::WSTOPSIG(status) } else { 0 });
        }
        // A traced task goes on when its tracing thread ends, wherever it is stopped.
        Ok(None)
    }

    /// The next thread that has stopped, and how. One that has ended is forgotten.
    fn next_stop(&mut self) -> Result<Option<(i32, i32)>, Error> {
        let mut status = 0;
        let flags = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
        // SAFETY: the status is written to a live variable.
        let tid = unsafe { libc::waitpid(-1, &raw mut status, flags) };
        if tid < 0 {
            let error = Error::last_os_error();
            return if error.raw_os_error() == Some(libc::ECHILD) {
                self.threads.clear();
                Ok(None)
            } else {
                Err(error)
            };
        }
        if tid == 0 {
            return Ok(None);
        }
        if !libc::WIFSTOPPED(status) {
            self.threads.remove(&tid);
            self.stopped.remove(&tid);
            return Ok(None);
        }
        self.threads.insert(tid);
        self.stopped.insert(tid);
        Ok(Some((tid, status)))
    }

    fn look(&self, tid: i32) -> Step {
        // Zeros are a value of it, and the kernel fills in what it knows.
        // SAFETY: plain data of the C library's.
        let mut known: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
        let bytes = size_of_val(&known);
        // SAFETY: the kernel writes at most `bytes` to it.
        let told =
            unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, tid, bytes, &raw mut known) };
        let is_entry = told > 0 && known.op == libc::PTRACE_SYSCALL_INFO_ENTRY;
        // SAFETY: at an entry this part of the union is the one that is filled in.
        let call = if is_entry { unsafe { known.u.entry.nr } } else { u64::MAX };
        let name = std::fs::read_to_string(format!("/proc/{}/task/{tid}/comm", self.pid));
        Step { thread: name.unwrap_or_default().trim().to_owned(), call, is_entry }
    }
}

fn threads(pid: u32) -> Vec<i32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// To the next system call. A thread that was killed meanwhile is reported by the next wait.
fn go_on(tid: i32, signal: i32) {
    let _ = request(libc::PTRACE_SYSCALL, tid, signal);
}

fn request(what: u32, tid: i32, data: i32) -> Result<(), Error> {
    let nothing = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: none of these requests touches memory of this process.
    let result = unsafe { libc::ptrace(what, tid, nothing, data.cast_unsigned() as usize) };
    if result < 0 { Err(Error::last_os_error()) } else { Ok(()) }
}
