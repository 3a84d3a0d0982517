//! The table of trays. Only entries that have been used take memory.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

use crate::space::superpage::Superpage;
use crate::sys;

/// The state of one tray; the bits are explained in [`super`].
#[derive(Debug)]
pub struct Tray {
    pub filled: AtomicU64,
    pub valid: AtomicU64,
    pub writing: AtomicU64,
    pub busy: AtomicU64,
    pub kept: AtomicU64,
    pub superpage: AtomicPtr<Superpage>,
    pub chunk: AtomicU32,
}

/// Makes a table of `count` empty trays. They take memory when they are used.
pub fn table(count: usize) -> Result<&'static [Tray], std::io::Error> {
    let base = sys::map_local(count * size_of::<Tray>())?;
    sys::advise(base, count * size_of::<Tray>(), libc::MADV_NOHUGEPAGE).ok();
    // SAFETY: the mapping is fresh, page-aligned and never unmapped; its zeros are an empty tray's
    // atomics.
    Ok(unsafe { std::slice::from_raw_parts(base as *const Tray, count) })
}

impl Tray {
    /// Whether a frame is present and unused. Busy is read first: a thread that moves a frame away
    /// sets it before it clears the others.
    pub fn is_free(&self, index: usize) -> bool {
        let taken = self.busy.load(SeqCst) | self.writing.load(SeqCst) | self.kept.load(SeqCst);
        self.filled.load(SeqCst) & !taken & (1 << index) != 0
    }
}
