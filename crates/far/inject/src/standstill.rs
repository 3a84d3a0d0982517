//! Several processes that stand still while sidecars are put into them, one after the other.
//!
//! Invariant: all that was stopped goes on when the work on it returns, in any case: the thread
//! that stopped it ends then, and the kernel releases all that a thread traces.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::marker::PhantomData;
use std::time::Duration;

use rustix::process::Pid;

use crate::error::InjectError;
use crate::image::Image;
use crate::stop::{self, Stopped};
use crate::task::Tid;
use crate::{Injected, Known, Setup, enter, examine};

/// See the module's description.
#[derive(Debug, Default)]
pub struct Standstill {
    stopped: HashMap<i32, (Known, Stopped)>,
    _stays_in_its_thread: PhantomData<*const ()>,
}

/// Does `work` in a thread of its own, which stops processes. It must not wait for any of these.
pub fn standstill<R: Send>(
    work: impl FnOnce(&mut Standstill) -> R + Send,
) -> Result<R, std::io::Error> {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("farpool-inject".into());
        let thread = builder.spawn_scoped(scope, || work(&mut Standstill::default()))?;
        thread.join().map_err(|_| std::io::Error::other("the thread that stops processes panicked"))
    })
}

impl Standstill {
    /// Stops a process, unless it stands still already.
    pub fn stop(&mut self, pid: Pid) -> Result<(), InjectError> {
        let number = pid.as_raw_nonzero().get();
        if let Entry::Vacant(place) = self.stopped.entry(number) {
            let known = examine(Tid(number))?;
            place.insert((known, stop::stop(Tid(number))?));
        }
        Ok(())
    }

    /// Puts a sidecar into a process, which stands still afterwards. On failure the process goes
    /// on.
    pub fn enter(
        &mut self,
        pid: Pid,
        image: &Image,
        setup: &Setup,
    ) -> Result<Injected, InjectError> {
        self.stop(pid)?;
        let number = pid.as_raw_nonzero().get();
        let Some((known, stopped)) = self.stopped.get_mut(&number) else {
            return Err(InjectError::NoProcess { pid: number });
        };
        let entered = enter(Tid(number), known, stopped, image, setup, true);
        if entered.is_err() {
            self.release(pid);
        }
        entered
    }

    /// How long a process has stood still; zero if it does not.
    pub fn since(&self, pid: Pid) -> Duration {
        let stopped = self.stopped.get(&pid.as_raw_nonzero().get());
        stopped.map_or(Duration::ZERO, |(_, stopped)| stopped.since.elapsed())
    }

    /// The processes that stand still.
    pub fn pids(&self) -> impl Iterator<Item = Pid> + '_ {
        self.stopped.keys().filter_map(|pid| Pid::from_raw(*pid))
    }

    /// Lets a process go on.
    pub fn release(&mut self, pid: Pid) {
        if let Some((_, mut stopped)) = self.stopped.remove(&pid.as_raw_nonzero().get()) {
            stopped.release();
        }
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        self.stopped.values_mut().for_each(|(_, stopped)| stopped.release());
    }
}
