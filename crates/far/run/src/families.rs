//! Forked children and their sidecars: a child that is served by its parent's sidecar is handed
//! over to a sidecar of its own.
//!
//! The kernel gives a child's userfaultfd to its parent's sidecar, which leaves a duplicate here.
//! It does not say which process it belongs to: the child's own sidecar finds out, since it lives
//! in that address space.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use farpool_inject::Injected;
use farpool_uffd::Uffd;

use crate::inherits::Inherits;
use crate::sidecar_error::SidecarError;
use crate::sidecars::Ward;
use crate::talk::{ANSWER_TIME, SETTLED, TAKEN, WARDEN, ask, ask_until, refused};
use crate::warden::Warden;

/// A sidecar that reports more children than there can be processes (Linux's usual pid_max) would
/// use up this process's descriptors; it is killed.
const MOST_CHILDREN: usize = 1 << 15;

/// If the process of a new sidecar is a child served by one of the relatives, has that relative
/// hand it over. Returns the child's userfaultfd.
pub fn inherit(
    pid: i32,
    sidecar: &Injected,
    relatives: &mut [Ward],
) -> Result<Option<(Uffd, Inherits)>, SidecarError> {
    // The new sidecar is asked about each child of each relative; all share one deadline.
    let until = Instant::now() + ANSWER_TIME;
    for ward in relatives {
        ward.gather_children();
        let Some((at, uffd)) = claimed(until, pid, sidecar, ward)? else { continue };
        let number = ward.children[at].0;
        let inherits = Inherits { from: ward.sidecar(), number };
        let handed = match ward.ask(&format!("CEDE {number}"), "CEDED") {
            Ok((_, Some(memory))) => hand_over(pid, sidecar, memory.as_fd()),
            Ok((_, None)) => Err(refused(pid, "what it inherits did not arrive")),
            Err(SidecarError::Refused { reason, .. }) if reason == SETTLED => {
                // All references to its userfaultfd must go before its memory can have another.
                ask(pid, sidecar, "DISCLAIM", None, "DISCLAIMED", &mut Vec::new())?;
                ward.children.retain(|(other, _)| *other != number);
                return Ok(None);
            }
            // Served or waited for: it still belongs to its parent's sidecar.
            Err(error) => Err(SidecarError::NotYet { pid, reason: error.to_string() }),
        };
        return match handed {
            Ok(()) => Ok(Some((uffd, inherits))),
            Err(error) => {
                inherits.give_back(std::slice::from_mut(ward));
                Err(error)
            }
        };
    }
    Ok(None)
}

fn hand_over(pid: i32, sidecar: &Injected, memory: BorrowedFd<'_>) -> Result<(), SidecarError> {
    ask(pid, sidecar, "INHERIT", Some(memory), "INHERITED", &mut Vec::new()).map(drop)
}

/// Which of a ward's children the process of a new sidecar is, if any, with a duplicate of its
/// userfaultfd.
fn claimed(
    until: Instant,
    pid: i32,
    sidecar: &Injected,
    ward: &Ward,
) -> Result<Option<(usize, Uffd)>, SidecarError> {
    for (at, (_, uffd)) in ward.children.iter().enumerate() {
        let (uffd, aside) = (uffd.as_fd(), &mut Vec::new());
        let (answer, _) = ask_until(until, (pid, sidecar), "CLAIM", Some(uffd), "", aside)?;
        if answer == "MINE" {
            let duplicate = uffd.try_clone_to_owned();
            let duplicate = duplicate
                .map_err(|error| SidecarError::Kernel { what: "a child's userfaultfd", error })?;
            return Ok(Some((at, Uffd::adopt(duplicate))));
        }
    }
    Ok(None)
}

impl Inherits {
    /// The child's own sidecar serves it.
    pub fn is_taken(self, wards: &mut [Ward]) {
        self.tell(TAKEN, wards);
    }

    /// The child's own sidecar does not serve it.
    pub fn give_back(self, wards: &mut [Ward]) {
        self.tell("RETURN", wards);
    }

    fn tell(self, word: &str, wards: &mut [Ward]) {
        // If the other sidecar has ended, there is nothing to tell it.
        if let Some(ward) = wards.iter().find(|ward| ward.sidecar() == self.from) {
            let _ = ward.tell(&format!("{word} {}", self.number));
        }
    }
}

impl Ward {
    /// Handles a sidecar's report about a child, or about its warden. False if the message is
    /// something else.
    pub(crate) fn hears_of_child(
        &mut self,
        text: &str,
        descriptor: Option<std::os::fd::OwnedFd>,
    ) -> bool {
        if text == WARDEN {
            self.warden = descriptor.and_then(Warden::adopt);
            return true;
        }
        if text == TAKEN {
            self.serves_inherited = true;
            return true;
        }
        let (word, number) = text.split_once(' ').unwrap_or((text, ""));
        let (Ok(number), "CHILD" | "SETTLED") = (number.parse(), word) else { return false };
        match descriptor {
            Some(_) if self.children.len() >= MOST_CHILDREN => self.abandon(),
            Some(uffd) => self.children.push((number, Uffd::adopt(uffd))),
            None => self.children.retain(|(other, _)| *other != number),
        }
        true
    }
}
