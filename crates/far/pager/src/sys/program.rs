//! The process whose memory is paged: its number, as this process and as its keeper see it, and its
//! end.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

/// The process whose memory is paged; 0: the calling one. A sidecar is a process of its own in the
/// program's memory.
static PROGRAM: AtomicU32 = AtomicU32::new(0);

/// Notes that the pager's threads are a sidecar's, of this program.
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

/// Sets the number and start by which the keeper knows a sidecar's program. The first call counts.
pub fn set_program_to_keeper(pid: u32, start_ticks: u64) {
    let _ = TO_KEEPER.set((pid, start_ticks));
}

/// The number and start that the keeper looks for on the board. None: those that this process sees.
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

/// Ends the program at once: it waits for something that will not come, and must not continue
/// without.
pub fn end_program() -> ! {
    kill_program();
    std::process::abort();
}

/// Ends the program of a sidecar, but not the sidecar: a child of the program may wait for pages of
/// it.
pub fn kill_program() {
    let program = sidecars_program().and_then(|pid| i32::try_from(pid).ok());
    if let Some(program) = program.and_then(rustix::process::Pid::from_raw) {
        // Not SIGABRT: the program may catch it, and its handler may need a page that never comes.
        let _ = rustix::process::kill_process(program, rustix::process::Signal::KILL);
    }
}
