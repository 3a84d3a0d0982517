//! The task of a process that has its memory: the first thread, unless that has ended.
//!
//! A program may end its first thread and go on in others (pthread_exit in main). Then what the
//! kernel reports of memory by the process's number is empty (maps, smaps, statm, exe, environ),
//! and kcmp reports all such processes as equal, since none of them has memory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};

use farpool_kernel::lock;

/// Most processes remembered by a thread other than the first; when full, all are forgotten and
/// searched for again.
const MOST_KNOWN: usize = 1024;

/// Pages of a process in local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resident {
    pub anonymous_pages: u64,
    /// Of files and shared memory.
    pub shared_pages: u64,
}

/// See the module's description.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder {
    pid: u32,
    task: u32,
    resident: Resident,
}

impl Holder {
    /// None if there is no such process, or all its threads have ended.
    pub fn of(pid: u32) -> Option<Holder> {
        Holder::by(pid, pid).or_else(|| {
            // Listing many threads takes 0.1 ms.
            let last = known().get(&pid).copied();
            last.and_then(|task| Holder::by(pid, task)).or_else(|| Holder::search(pid))
        })
    }

    fn by(pid: u32, task: u32) -> Option<Holder> {
        Some(Holder { pid, task, resident: resident(&folder(pid, task))? })
    }

    fn search(pid: u32) -> Option<Holder> {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
        let others = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
        let found = others.filter(|task| *task != pid).find_map(|task| Holder::by(pid, task));
        let mut known = known();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        match found {
            Some(Holder { task, .. }) => known.insert(pid, task),
            None => known.remove(&pid),
        };
        found
    }

    pub fn resident(self) -> Resident {
        self.resident
    }

    /// Its folder in /proc, where memory is reported.
    pub fn folder(self) -> PathBuf {
        folder(self.pid, self.task)
    }

    pub fn shares_with(self, other: Holder) -> bool {
        have_one_memory(self.task, other.task)
    }
}

/// Threads by which processes were found whose first ones have ended. It may be out of date: the
/// kernel says whether a thread is one of the process and has memory.
fn known() -> MutexGuard<'static, HashMap<u32, u32>> {
    static KNOWN: OnceLock<Mutex<HashMap<u32, u32>>> = OnceLock::new();
    lock(KNOWN.get_or_init(Mutex::default))
}

/// The folder in /proc that reports a process's memory.
pub(crate) fn memory_folder(pid: u32) -> PathBuf {
    Holder::of(pid).map_or_else(|| folder(pid, pid), Holder::folder)
}

/// True if two processes share one address space. False in doubt: userfaultfd refuses a second
/// registration.
pub(crate) fn share_memory(one: u32, other: u32) -> bool {
    let Some(first) = Holder::of(one) else { return false };
    // The first has memory, so an equal one has it, too.
    have_one_memory(first.task, other)
        || Holder::of(other).is_some_and(|other| first.shares_with(other))
}

/// The other processes that share this one's memory. One whose first thread has ended is not found.
pub(crate) fn sharers(pid: u32) -> Vec<u32> {
    let Some(holder) = Holder::of(pid) else { return Vec::new() };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|other| *other != pid && have_one_memory(holder.task, *other)).collect()
}

fn have_one_memory(one: u32, other: u32) -> bool {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: kcmp compares two tasks by numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) == 0 }
}

fn folder(pid: u32, task: u32) -> PathBuf {
    if task == pid { format!("/proc/{pid}") } else { format!("/proc/{pid}/task/{task}") }.into()
}

/// None if the task has no memory.
fn resident(folder: &Path) -> Option<Resident> {
    resident_in(&std::fs::read_to_string(folder.join("statm")).ok()?)
}

/// Parses a task's `statm`: pages mapped, resident, and shared are the first three. Pure.
fn resident_in(statm: &str) -> Option<Resident> {
    let mut fields = statm.split_ascii_whitespace().map(str::parse::<u64>);
    let mut next = || fields.next()?.ok();
    let (mapped, resident, shared) = (next()?, next()?, next()?);
    let anonymous_pages = resident.checked_sub(shared)?;
    (mapped > 0).then_some(Resident { anonymous_pages, shared_pages: shared })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_without_memory_is_known() {
        let pages = Resident { anonymous_pages: 200, shared_pages: 100 };
        assert_eq!(resident_in("1000 300 100 5 0 60 0\n"), Some(pages));
        assert_eq!(resident_in("0 0 0 0 0 0 0\n"), None);
        assert_eq!(resident_in(""), None);
        assert_eq!(resident_in("1000 100 300 5 0 60 0"), None, "the whole is more than a part");
    }

    /// A child whose first thread has ended; it is killed with the guard.
    struct Headless(u32);

    impl Headless {
        fn start() -> Headless {
            // SAFETY: the child calls nothing but the kernel, and its two threads use no stack of
            // the other's: the new one gets a page of its own.
            let pid = unsafe {
                let stack = libc::mmap(
                    std::ptr::null_mut(),
                    1 << 16,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
                assert_ne!(stack, libc::MAP_FAILED);
                // libc's fork would hold the locks of its allocator until the kernel has reported
                // it, which another test reads.
                let pid = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
                if pid == 0 {
                    let flags = libc::CLONE_VM
                        | libc::CLONE_FS
                        | libc::CLONE_FILES
                        | libc::CLONE_SIGHAND
                        | libc::CLONE_THREAD;
                    libc::clone(waits, stack.byte_add(1 << 16), flags, std::ptr::null_mut());
                    libc::syscall(libc::SYS_exit, 0);
                }
                pid
            };
            let child = Headless(u32::try_from(pid).expect("a child"));
            while resident(&folder(child.0, child.0)).is_some() {
                std::thread::yield_now();
            }
            child
        }
    }

    extern "C" fn waits(_: *mut libc::c_void) -> libc::c_int {
        loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
    }

    impl Drop for Headless {
        fn drop(&mut self) {
            let pid = self.0.cast_signed();
            // SAFETY: ends and awaits the child of this test.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    fn processes_whose_first_threads_have_ended_have_memories_of_their_own() {
        let (one, other, own) = (Headless::start(), Headless::start(), std::process::id());
        assert!(have_one_memory(one.0, other.0), "to the kernel they are equal");
        assert!(!share_memory(one.0, other.0) && !share_memory(one.0, own));
        assert!(share_memory(one.0, one.0) && share_memory(own, own));
        let task = Holder::of(one.0).expect("it lives").task;
        assert!(task != one.0 && share_memory(task, one.0) && share_memory(one.0, task));
        let maps = std::fs::read_to_string(memory_folder(one.0).join("maps")).expect("maps");
        assert!(maps.contains("libc"), "{maps}");
        let folder = memory_folder(one.0);
        drop(one);
        assert!(!folder.exists());
    }

    #[test]
    fn who_has_ended_has_no_memory() {
        let mut child = std::process::Command::new("true").spawn().expect("true");
        let pid = child.id();
        while Holder::of(pid).is_some() {
            std::thread::yield_now();
        }
        assert!(!share_memory(pid, pid), "it is a zombie");
        child.wait().expect("its end");
        assert_eq!(memory_folder(pid), folder(pid, pid));
    }
}
