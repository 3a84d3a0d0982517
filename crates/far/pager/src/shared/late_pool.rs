//! The pool of a process, which is connected only after the process's memory is registered: near
//! the limit growth must stop at once, and a blade takes its time to answer (10 to 200 ms were seen
//! with 64 threads growing on 2 CPUs).

use std::ops::Deref;
use std::sync::OnceLock;

use farpool_board::Blades;
use farpool_pool::Pool;

use crate::abort::fail_closed;
use crate::sys::Latch;

/// See the module's description.
#[derive(Debug, Default)]
pub struct LatePool {
    pool: OnceLock<(Pool, Blades)>,
    connected: Latch,
}

impl LatePool {
    /// Hands the pool, connected to these blades, to all threads that wait for it. Only the first
    /// call counts.
    pub fn set(&self, (pool, blades): (Pool, Blades)) {
        let _ = self.pool.set((pool, blades));
        self.connected.open();
    }

    /// Whether there is a pool, so that pages may be far. Before that none is.
    pub fn is_set(&self) -> bool {
        self.pool.get().is_some()
    }

    /// The blades that the pool was first connected to.
    pub fn first_blades(&self) -> Blades {
        self.get().1.clone()
    }

    fn get(&self) -> &(Pool, Blades) {
        let Some(pool) = self.pool.get() else {
            fail_closed("a page is looked for on blades before any was connected to");
        };
        pool
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
        &self.get().0
    }
}
