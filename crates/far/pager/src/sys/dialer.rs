//! The process that opens connections to blades in this process's stead.

use std::sync::OnceLock;

use farpool_pool::Ask;

/// The process that opens connections to blades in this process's stead.
static DIALER: OnceLock<Ask> = OnceLock::new();

/// Has connections to blades opened by whom `ask` asks. The first call counts.
pub fn set_dialer(ask: Ask) {
    let _ = DIALER.set(ask);
}

/// None: this process opens them itself.
pub fn dialer() -> Option<Ask> {
    DIALER.get().copied()
}
