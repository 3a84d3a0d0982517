//! What a program may do with a range of its memory, as set by mprotect. Pure.

/// Rights that mprotect sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    pub can_read: bool,
    pub can_write: bool,
    pub can_execute: bool,
}

impl Protection {
    pub const READ_WRITE: Protection =
        Protection { can_read: true, can_write: true, can_execute: false };

    /// Whether the program has any right at all.
    pub fn is_some(self) -> bool {
        self.can_read || self.can_write || self.can_execute
    }
}

impl Default for Protection {
    fn default() -> Protection {
        Protection::READ_WRITE
    }
}
