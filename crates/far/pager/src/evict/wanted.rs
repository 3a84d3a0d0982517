//! Which pages of a chunk are to be moved out, and what came of it.

/// Which pages of a chunk are to be moved out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Those that the victim policy chooses.
    Chosen,
    All,
    /// These, which have just been made the process's own.
    These(u64),
    /// Those that need a standstill of the program, which there is now.
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
    /// The pages to move out, one bit each, and those of them that are shared.
    pub(super) take: u64,
    pub(super) shared: u64,
}

/// What came of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// So many pages have been moved out.
    Moved(i64),
    /// None has: these must be made the process's own before.
    Shared(Own),
}

impl Tried {
    /// Nothing has been claimed.
    pub(super) fn of(own: Own) -> Tried {
        if own.shared == 0 { Tried::Moved(0) } else { Tried::Shared(own) }
    }
}
