//! Forked children and their sidecars: a child that its parent's sidecar serves is handed over to one of its own.
//!
//! The kernel gives a child's userfaultfd to its parent's sidecar, which keeps a duplicate here. Which process it is of
//! nobody says: the child's own sidecar finds out, for it lives in that address space.

use std::os::fd::AsFd;

use farpool_inject::{Injected, Pid};
use farpool_uffd::Uffd;

use crate::sidecars::{SidecarError, Ward};
use crate::talk::ask;

/// A child that was ceded, and whose own sidecar does not serve it yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inherits {
    /// The sidecar that served it.
    from: Pid,
    /// Its number there.
    number: u64,
}

/// If the process of a new sidecar is a child that one of the relatives serves, has that hand it over. Returns the
/// child's userfaultfd.
pub fn inherit(
    pid: i32,
    sidecar: &Injected,
    relatives: &mut [Ward],
) -> Result<Option<(Uffd, Inherits)>, SidecarError> {
    for ward in relatives {
        let Some((at, uffd)) = claimed(pid, sidecar, ward)? else { continue };
        let number = ward.children[at].0;
        let ceded = ward.ask(&format!("CEDE {number}"), "CEDED");
        let Ok((_, Some(memory))) = ceded else {
            // It has all its pages by now: nobody may hold on to its userfaultfd, if its memory is to have another.
            ask(pid, sidecar, "DISCLAIM", None, "DISCLAIMED")?;
            ward.children.retain(|(other, _)| *other != number);
            return Ok(None);
        };
        let inherits = Inherits { from: ward.sidecar(), number };
        match ask(pid, sidecar, "INHERIT", Some(memory.as_fd()), "INHERITED") {
            Ok(_) => return Ok(Some((uffd, inherits))),
            Err(error) => {
                inherits.give_back(std::slice::from_mut(ward));
                return Err(error);
            }
        }
    }
    Ok(None)
}

/// Which of a ward's children the process of a new sidecar is, if it is one, with a duplicate of its userfaultfd.
fn claimed(
    pid: i32,
    sidecar: &Injected,
    ward: &Ward,
) -> Result<Option<(usize, Uffd)>, SidecarError> {
    for (at, (_, uffd)) in ward.children.iter().enumerate() {
        let (answer, _) = ask(pid, sidecar, "CLAIM", Some(uffd.as_fd()), "")?;
        if answer == "MINE" {
            let duplicate = uffd.as_fd().try_clone_to_owned();
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
        self.tell("TAKEN", wards);
    }

    /// The child's own sidecar does not serve it.
    pub fn give_back(self, wards: &mut [Ward]) {
        self.tell("RETURN", wards);
    }

    fn tell(self, word: &str, wards: &mut [Ward]) {
        // If the other sidecar has ended, it owes nothing to anybody.
        if let Some(ward) = wards.iter().find(|ward| ward.sidecar() == self.from) {
            let _ = ward.tell(&format!("{word} {}", self.number));
        }
    }
}

impl Ward {
    /// Takes note of what a sidecar tells of a child; false: it tells something else.
    pub(crate) fn hears_of_child(
        &mut self,
        text: &str,
        descriptor: Option<std::os::fd::OwnedFd>,
    ) -> bool {
        if text == "TAKEN" {
            self.serves_inherited = true;
            return true;
        }
        let (word, number) = text.split_once(' ').unwrap_or((text, ""));
        let (Ok(number), "CHILD" | "SETTLED") = (number.parse(), word) else { return false };
        match descriptor {
            Some(uffd) => self.children.push((number, Uffd::adopt(uffd))),
            None => self.children.retain(|(other, _)| *other != number),
        }
        true
    }
}
