//! A process that is traced from one system call to the next, by ptrace, and killed at a chosen
//! one.
//!
//! One thread does all of this: the kernel reports a process's stops only to the thread that traces
//! it.

use std::collections::BTreeSet;
use std::io::Error;
use std::time::{Duration, Instant};

use crate::tree;

/// The signal that ptrace reports for a stop at a system call if PTRACE_O_TRACESYSGOOD is set.
const SYSTEM_CALL: i32 = libc::SIGTRAP | 0x80;
/// Pause between two checks for stops.
const PAUSE: Duration = Duration::from_micros(20);
/// How long a thread may take to stop, also on a busy machine.
const STOP_TIME: Duration = Duration::from_secs(20);

/// The stop at which a process was killed.
#[derive(Clone, Debug)]
pub struct Step {
    pub thread: String,
    pub call: u64,
    /// True before the call, false after it.
    pub is_entry: bool,
}

/// The threads of one process, traced by the calling thread.
#[derive(Debug)]
pub struct Steps {
    pid: u32,
    threads: BTreeSet<i32>,
    /// The threads that are stopped.
    stopped: BTreeSet<i32>,
}

impl Steps {
    /// Stops all threads of a process. Threads that it starts later are traced, too.
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

    /// Resumes the process and kills it (SIGKILL) at its threads' system-call stop number `wanted`,
    /// counted from 0. Returns None if there was no such stop within `patience`, or `is_over`
    /// returned true, or the process has ended. If it has not ended, it then continues untraced.
    /// The calling thread must end after this call.
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
                // The kernel reports its end to its parent process once the calling thread has
                // ended.
                return Ok(Some(step));
            }
            seen += usize::from(is_call);
            self.stopped.remove(&tid);
            let is_signal = !is_call && status >> 16 == 0;
            go_on(tid, if is_signal { libc::WSTOPSIG(status) } else { 0 });
        }
        // A traced task continues when its tracing thread ends, wherever it is stopped.
        Ok(None)
    }

    /// Returns the next thread that has stopped and its wait status, or None if there is none yet.
    /// A thread that has ended is forgotten.
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
        // The kernel fills in the fields that apply to the stop.
        // SAFETY: plain data of the C library, for which zeros are valid.
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

/// Resumes a thread until its next system call. A thread that was killed meanwhile is reported by
/// the next wait.
fn go_on(tid: i32, signal: i32) {
    let _ = request(libc::PTRACE_SYSCALL, tid, signal);
}

fn request(what: u32, tid: i32, data: i32) -> Result<(), Error> {
    let nothing = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: none of these requests touches memory of this process.
    let result = unsafe { libc::ptrace(what, tid, nothing, data.cast_unsigned() as usize) };
    if result < 0 { Err(Error::last_os_error()) } else { Ok(()) }
}
