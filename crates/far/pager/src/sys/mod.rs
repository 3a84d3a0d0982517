//! The pager's own memory, futexes and threads: everything that must not go through the program's
//! interposed functions.
//!
//! `unsafe` of this crate lives here and below, in [`crate::space`], in [`crate::space::frames`] and in [`crate::sys::rights`].

pub mod apart;
mod memory;
pub mod rights;
mod say;
mod stamp;
pub mod standstill;
mod threads;

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use farpool_pool::Ask;
use farpool_units::at_most;
use rustix::thread::futex;

pub use memory::*;
pub use say::*;
pub use stamp::*;
pub use threads::*;

/// The process whose memory is paged; 0: the calling one. A sidecar is a process of its own in the program's memory.
static PROGRAM: AtomicU32 = AtomicU32::new(0);

/// The pager's threads are a sidecar's, and the program is this process.
pub fn set_program(pid: u32) {
    PROGRAM.store(pid, SeqCst);
}

/// The process whose memory is paged, if it is not the calling one.
pub fn sidecars_program() -> Option<u32> {
    let pid = PROGRAM.load(SeqCst);
    (pid != 0).then_some(pid)
}

/// Process id of the program.
pub fn program_pid() -> u32 {
    sidecars_program().unwrap_or_else(std::process::id)
}

/// The program's number and start, as its keeper knows them: it may be in another process-id
/// namespace than the program.
static TO_KEEPER: OnceLock<(u32, u64)> = OnceLock::new();

/// What the keeper of a sidecar's program calls that. The first call counts.
pub fn set_program_to_keeper(pid: u32, start_ticks: u64) {
    let _ = TO_KEEPER.set((pid, start_ticks));
}

/// What the keeper looks for on the board; None: what this process sees itself.
pub fn program_to_keeper() -> Option<(u32, u64)> {
    TO_KEEPER.get().copied()
}

/// The program's number in /proc, which may be that of another process-id namespace, and then is
/// taken for the keeper's.
pub fn program_in_proc() -> u32 {
    let own = program_pid();
    let Some((outside, _)) = program_to_keeper().filter(|(outside, _)| *outside != own) else {
        return own;
    };
    if proc_has_own_numbers() { own } else { outside }
}

/// Whether /proc is that of the calling process's own process-id namespace.
pub fn proc_has_own_numbers() -> bool {
    let seen = rustix::fs::readlink("/proc/self", Vec::new());
    seen.is_ok_and(|seen| seen.to_bytes() == std::process::id().to_string().as_bytes())
}

/// Who opens connections to blades in this process's stead.
static DIALER: OnceLock<Ask> = OnceLock::new();

/// Has connections to blades opened by whom `ask` asks. The first call counts.
pub fn set_dialer(ask: Ask) {
    let _ = DIALER.set(ask);
}

/// None: this process opens them itself.
pub fn dialer() -> Option<Ask> {
    DIALER.get().copied()
}

/// Ends the program at once: whatever it waits for will not come, and it must not go on without.
pub fn end_program() -> ! {
    kill_program();
    std::process::abort();
}

/// Ends the program of a sidecar, and not the sidecar: a child of the program may wait for pages of it.
pub fn kill_program() {
    let program = sidecars_program().and_then(|pid| i32::try_from(pid).ok());
    if let Some(program) = program.and_then(rustix::process::Pid::from_raw) {
        // Not SIGABRT: the program may catch it, and its handler may need a page that never comes.
        let _ = rustix::process::kill_process(program, rustix::process::Signal::KILL);
    }
}

/// The processor time that the calling thread has used.
pub fn processor_time() -> Duration {
    time_of(rustix::time::ClockId::ThreadCPUTime)
}

/// Waits while `word` holds `expected`, at most for `timeout`.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let timeout = timeout.and_then(|time| futex::Timespec::try_from(time).ok());
    // An error is a wake-up like any other: the caller looks again.
    let _ = futex::wait(word, futex::Flags::PRIVATE, expected, timeout.as_ref());
}

/// Wakes all threads that wait on `word`.
pub fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Whether the calling thread's process may open so many files more: if not, EMFILE.
pub fn find_room_for_files(count: usize) -> Result<(), std::io::Error> {
    use rustix::event::{EventfdFlags, eventfd};
    let files: Result<Vec<_>, _> = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect();
    files.map(drop).map_err(Into::into)
}

/// Kernel id of the calling thread.
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// CPU time that the process has used, with all its threads.
pub fn process_cpu_time() -> Duration {
    time_of(rustix::time::ClockId::ProcessCPUTime)
}

fn time_of(clock: rustix::time::ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    Duration::new(at_most(time.tv_sec), at_most(time.tv_nsec))
}

/// Milliseconds of a clock that all processes of the machine share; wraps.
pub fn shared_clock_ms() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ms = now.tv_sec.wrapping_mul(1000).wrapping_add(now.tv_nsec / 1_000_000);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // It wraps.
    let wrapped = ms as u32;
    wrapped
}

/// Nanoseconds of a clock that all processes of the machine share.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ns = now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec);
    ns.unsigned_abs()
}

/// Sleeps for a moment, so that a thread under SCHED_IDLE gets to what it is waited for.
pub fn pause() {
    std::thread::sleep(Duration::from_micros(20));
}
