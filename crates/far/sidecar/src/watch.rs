//! When the sidecar must leave: the program ended, or it runs another image (exec).
//!
//! The end shows on a pidfd. An exec shows nowhere that a task without rights may look, except
//! here: the kernel lets any task read the memory of a process *whose address space is its own*
//! (mm_access requires no right then). So the sidecar reads a secret word of its own through the
//! program's pid: as long as it gets the word, the address space is shared.

use crate::raw::read_word_of;

/// The program whose address space this is.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// Its process id as seen from here.
    pub pid: i32,
    /// Address of the secret.
    pub address: usize,
    /// The secret word.
    pub secret: u64,
}

/// The result of checking one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Shared,
    Other,
    /// The task has no memory any more (its process may live on in other threads).
    Ended,
}

impl Host {
    /// True if the program still has this address space. True, too, when /proc is missing or
    /// another namespace's: the pidfd then reports the end.
    pub fn shares_memory(&self) -> bool {
        match self.look() {
            Look::Shared => true,
            Look::Other => false,
            Look::Ended => self.some_thread_shares(),
        }
    }

    /// Checks the program's first thread. Allocates nothing.
    pub fn look(&self) -> Look {
        self.look_at(self.pid)
    }

    fn look_at(&self, task: i32) -> Look {
        match read_word_of(task, self.address) {
            Ok(word) if word == self.secret => Look::Shared,
            Ok(_) => Look::Other,
            Err(error) => match error.raw_os_error() {
                Some(libc::ESRCH) => Look::Ended,
                Some(libc::EFAULT | libc::EPERM | libc::EACCES) => Look::Other,
                // No proof (no memory for the check, perhaps): leaving without cause would be
                // worse.
                _ => Look::Shared,
            },
        }
    }

    fn some_thread_shares(&self) -> bool {
        // The numbers in another namespace's list are other tasks'.
        if !farpool_pager::sys::proc_has_own_numbers() {
            return true;
        }
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else { return true };
        let ids = tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok());
        ids.into_iter().any(|task| self.look_at(task) == Look::Shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static WORD: u64 = 0x5eed;

    fn host(pid: i32, secret: u64) -> Host {
        Host { pid, address: std::ptr::from_ref(&WORD) as usize, secret }
    }

    #[test]
    fn this_process_shares_its_own_memory() {
        let own = i32::try_from(std::process::id()).expect("a process id");
        assert!(host(own, WORD).shares_memory());
    }

    #[test]
    fn another_process_does_not() {
        assert!(!host(1, WORD).shares_memory());
    }
}
