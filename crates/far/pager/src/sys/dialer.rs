//! Opens connections to blades on behalf of this process.

use std::sync::{Arc, OnceLock};

use farpool_pool::Opener;

/// Who opens connections to blades on behalf of this process.
static DIALER: OnceLock<Arc<dyn Opener>> = OnceLock::new();

/// Makes connections to blades be opened by `opener`. The first call counts.
pub fn set_dialer(opener: Arc<dyn Opener>) {
    let _ = DIALER.set(opener);
}

/// Who was set by [`set_dialer`]. None: this process opens connections itself.
pub fn dialer() -> Option<Arc<dyn Opener>> {
    DIALER.get().cloned()
}
