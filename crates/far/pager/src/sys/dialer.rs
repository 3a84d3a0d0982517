//! Opens connections to blades on behalf of this process.

use std::sync::OnceLock;

use farpool_pool::Ask;

/// The function that opens connections to blades on behalf of this process.
static DIALER: OnceLock<Ask> = OnceLock::new();

/// Makes connections to blades be opened through `ask`. The first call counts.
pub fn set_dialer(ask: Ask) {
    let _ = DIALER.set(ask);
}

/// The function set by [`set_dialer`]. None: this process opens connections itself.
pub fn dialer() -> Option<Ask> {
    DIALER.get().copied()
}
