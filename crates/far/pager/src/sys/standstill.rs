//! Memory that may not be written to is moved out during a standstill of the program.
//!
//! UFFDIO_MOVE takes pages of writable memory only, and dropping such a page after it was copied,
//! as with MADV_DONTNEED, is not safe in a running program: the kernel releases the address space's
//! lock between its two lookups, and by then something else can be mapped there. So the evictor
//! gives the memory other rights for a moment (mprotect), moves pages out as always, and restores
//! the rights. Meanwhile nothing else may run in that address space:
//!
//! 1. the evictor has enough to do, has no write under way, and asks ([`Standstill::ask`]);
//! 2. the keeper stops all threads of the program, and says so on the control socket;
//! 3. the control thread passes that on to the evictor and waits ([`Standstill::begin`]);
//! 4. the evictor works for some milliseconds, and ends the standstill (it drops [`Standing`]);
//! 5. the keeper gets its answer and lets the program continue. The moved pages are written then.
//!
//! The steward asks, too, where a program changes its memory all the time: at a standstill all its
//! changes can be reported, so that the state of new memory is certain.
//!
//! Invariant: rights differ from the program's only between 3 and 4. If that took longer than the
//! keeper waits, the program would run with them, so the process is then ended ([`MAX_STANDING`]).

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::futex::{wait, wake};

/// The longest that one standstill may last. The keeper waits twice as long for its end.
pub const MAX_STANDING: Duration = Duration::from_secs(5);

/// The program runs for this many times as long as it stood still before it is stopped again: it
/// loses at most a tenth of its time.
pub const PAUSE_PARTS: u32 = 10;

const IDLE: u32 = 0;
const WANTED: u32 = 1;
const STANDING: u32 = 2;

/// The program stands still until this is dropped.
#[derive(Debug)]
pub struct Standing<'a> {
    standstill: &'a Standstill,
    pub since: Instant,
    _turn: MutexGuard<'a, ()>,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct Standstill {
    state: AtomicU32,
    /// Held by the thread that has asked.
    turn: Mutex<()>,
    /// Asks the keeper. None: there is no keeper to ask.
    asker: OnceLock<fn()>,
}

impl Standstill {
    /// Sets the asker. The first call counts.
    pub fn set_asker(&self, asker: fn()) {
        let _ = self.asker.set(asker);
    }

    /// Whether the program stands still for this pager.
    pub fn is_on(&self) -> bool {
        self.state.load(SeqCst) == STANDING
    }

    /// Makes the program stand still. None: it did not come to that within `most`, or another
    /// thread of the pager has already asked.
    pub fn ask(&self, most: Duration) -> Option<Standing<'_>> {
        let asker = self.asker.get()?;
        let turn = self.turn.try_lock().ok()?;
        self.state.store(WANTED, SeqCst);
        asker();
        let until = Instant::now() + most;
        while self.state.load(SeqCst) == WANTED {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() && self.state.compare_exchange(WANTED, IDLE, SeqCst, SeqCst).is_ok() {
                return None;
            }
            wait(&self.state, WANTED, Some(left));
        }
        Some(Standing { standstill: self, since: Instant::now(), _turn: turn })
    }

    /// To be called when the program stands still: returns when it may continue, at once if no
    /// thread waits for the standstill any more. True if one did.
    pub fn begin(&self) -> bool {
        if self.state.compare_exchange(WANTED, STANDING, SeqCst, SeqCst).is_err() {
            return false;
        }
        wake(&self.state);
        while self.state.load(SeqCst) == STANDING {
            wait(&self.state, STANDING, None);
        }
        true
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        self.standstill.state.store(IDLE, SeqCst);
        wake(&self.standstill.state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    static ASKED: AtomicBool = AtomicBool::new(false);

    #[test]
    fn the_program_goes_on_when_the_evictor_has_ended() {
        let standstill = Standstill::default();
        assert!(standstill.ask(Duration::ZERO).is_none(), "there is no keeper");
        standstill.set_asker(|| ASKED.store(true, SeqCst));
        assert!(!standstill.begin(), "nobody wants it");
        std::thread::scope(|scope| {
            let keeper = scope.spawn(|| {
                while !ASKED.load(SeqCst) {
                    std::thread::yield_now();
                }
                standstill.begin()
            });
            let standing = standstill.ask(Duration::from_secs(60)).expect("it stands");
            assert!(standstill.is_on());
            assert!(standstill.ask(Duration::ZERO).is_none(), "one at a time");
            drop(standing);
            assert!(keeper.join().expect("no panic"));
        });
        assert!(standstill.ask(Duration::from_millis(1)).is_none(), "nobody answers");
        assert!(!standstill.begin(), "it is too late");
    }
}
