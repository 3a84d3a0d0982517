//! The pool of a process, which is connected to only after its memory is registered: when the limit comes near, growth
//! must stop at once, and a blade takes its time to answer (10 to 200 ms were seen with 64 threads growing on 2 CPUs).

use std::ops::Deref;
use std::sync::OnceLock;

use farpool_pool::Pool;

use crate::serve::fail_closed;
use crate::sys::Latch;

/// See the module's description.
#[derive(Debug, Default)]
pub struct LatePool {
    pool: OnceLock<Pool>,
    connected: Latch,
}

impl LatePool {
    /// Gives the pool to all who wait for it. Only the first one counts.
    pub fn set(&self, pool: Pool) {
        let _ = self.pool.set(pool);
        self.connected.open();
    }

    /// Waits until there is a pool.
    pub fn wait(&self) -> &Pool {
        self.connected.wait();
        self
    }
}

impl Deref for LatePool {
    type Target = Pool;

    fn deref(&self) -> &Pool {
        let Some(pool) = self.pool.get() else {
            fail_closed("a page is looked for on blades before any was connected to");
        };
        pool
    }
}
