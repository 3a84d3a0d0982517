//! The pages of a chunk that are to be moved out, and the outcome.

/// The pages of a chunk that are to be moved out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The pages that the victim policy chooses.
    Chosen,
    All,
    /// These, which have just been made the process's own.
    These(u64),
    /// The pages that need a standstill of the program, which there is now.
    Still,
}

impl Wanted {
    /// Whether shared pages among them are made the process's own before anything is moved.
    pub(super) fn may_be_shared(self) -> bool {
        matches!(self, Wanted::Chosen | Wanted::All)
    }
}

/// Pages of a chunk that are made the process's own to be moved out at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Own {
    /// The chunk.
    pub(super) number: usize,
    /// The pages to move out, one bit each, and the shared pages among them.
    pub(super) take: u64,
    pub(super) shared: u64,
}

/// The outcome of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// This many pages have been moved out.
    Moved(i64),
    /// None has: these must first be made the process's own.
    Shared(Own),
}

impl Tried {
    /// Nothing has been claimed.
    pub(super) fn of(own: Own) -> Tried {
        if own.shared == 0 { Tried::Moved(0) } else { Tried::Shared(own) }
    }
}
