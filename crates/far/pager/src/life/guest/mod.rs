//! The memory of a guest that can move to another host: a process here hands it over, one there
//! takes it, and it stays where it is, on the blades.
//!
//! It is a fork across hosts. The giver writes what is local to the blades and freezes its layers,
//! as for a child; the receiver attaches them and has every page far. Both can read it then, and
//! each writes to layers of its own: whatever ends in between, the other one is right. Which of
//! them may run the guest is another matter, and a baton's ([`farpool_pool::Baton`]).
//!
//! Pages are found by their number in the guest's memory: its superpages have the first ids in
//! both processes ([`crate::space::Space::number_first`]), so it must begin at a superpage.
//!
//! `handed` is what goes from one to the other, `desk` the socket by which a process is told to do
//! so, [`crate::life::steward`] does it.

mod desk;
mod handed;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, OnceLock};

use farpool_kernel::lock;
use farpool_units::PAGE_BYTES;

use crate::life::process::Pager;
use crate::space::units::SUPERPAGE_BYTES;
use crate::sys;

pub(crate) use handed::Handed;

/// The guest's memory of this process, if it has one that can move.
#[derive(Debug, Default)]
pub struct Guest {
    /// Where the desk is to be.
    socket: OnceLock<PathBuf>,
    range: OnceLock<Range<usize>>,
    /// What the desk has for the steward, or the steward for the desk.
    exchange: Mutex<Option<Handed>>,
    /// Why the steward could not do what it was told.
    refusal: Mutex<String>,
    /// It was handed over, and the receiver may still have to attach it.
    is_offered: AtomicBool,
}

impl Guest {
    /// Where the guest's memory is.
    pub(crate) fn range(&self) -> Option<Range<usize>> {
        self.range.get().cloned()
    }

    pub(crate) fn put(&self, handed: Handed) {
        *lock(&self.exchange) = Some(handed);
    }

    pub(crate) fn take(&self) -> Option<Handed> {
        lock(&self.exchange).take()
    }

    /// Notes why something was refused. Returns the errno for it.
    pub(crate) fn refuse(&self, reason: String) -> i32 {
        *lock(&self.refusal) = reason;
        libc::ECANCELED
    }

    fn refusal(&self) -> String {
        std::mem::take(&mut *lock(&self.refusal))
    }

    /// Notes whether it is handed over. Returns whether it was before.
    fn note_offered(&self, is_offered: bool) -> bool {
        self.is_offered.swap(is_offered, SeqCst)
    }
}

impl Pager {
    /// Prepares for a guest's memory of this size, and for a desk at `socket`, before anything is
    /// far. False: too late, or too large.
    pub fn expect_guest(&self, bytes: usize, socket: PathBuf) -> bool {
        self.space.reserve(bytes.div_ceil(SUPERPAGE_BYTES)) && self.guest.socket.set(socket).is_ok()
    }

    /// Notes that the guest's memory is at `[start, end)`, which is far-eligible.
    ///
    /// # Errors
    /// It does not begin at a superpage, or is the second one.
    pub fn set_guest(&'static self, start: usize, end: usize) -> Result<(), std::io::Error> {
        let invalid = |why: &str| std::io::Error::new(std::io::ErrorKind::InvalidInput, why);
        if !start.is_multiple_of(SUPERPAGE_BYTES) || !end.is_multiple_of(PAGE_BYTES) {
            return Err(invalid("the guest's memory does not begin at a multiple of 16 MiB"));
        }
        let whole = start..end.next_multiple_of(SUPERPAGE_BYTES);
        if self.guest.range.set(start..end).is_err() || !self.space.number_first(whole) {
            return Err(invalid("the guest has two memories"));
        }
        self.start_steward();
        Ok(())
    }

    /// Opens the desk of a process that is to have a guest. To be called by the steward, whose
    /// descriptors the desk needs, too.
    pub(crate) fn open_desk(&'static self) -> Result<(), std::io::Error> {
        let Some(socket) = self.guest.socket.get() else { return Ok(()) };
        sys::spawn(c"farpool-guest", false, Box::new(move || desk::serve(self, socket)))?;
        Ok(())
    }
}
