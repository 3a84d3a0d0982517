//! Safe wrappers of ptrace and waitpid: every `unsafe` of this crate is here.
//!
//! Invariant: all calls on one task come from the thread that seized it (ptrace is per thread).

use std::io::Error;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use farpool_units::exactly;

use crate::arch::Registers;
use crate::procfs;
use crate::task::{Signal, SignalSet, Tid};

/// How long waitpid is polled without a sleep: most stops of a task on another processor arrive
/// within a few microseconds, and a sleep there costs 60. Not longer: a task on this processor
/// cannot run meanwhile, since we may be preferred to it (the keeper has a real-time policy).
const SPIN: Duration = Duration::from_micros(20);
/// Sleep between later polls: as long as a call takes, doubled each time.
const FIRST_NAP: Duration = Duration::from_micros(5);
const LAST_NAP: Duration = Duration::from_micros(100);

const NT_PRSTATUS: usize = 1;
const NT_PRFPREG: usize = 2;
const GETSIGMASK: libc::c_uint = 0x420a;
const SETSIGMASK: libc::c_uint = 0x420b;
const GET_SYSCALL_INFO: libc::c_uint = 0x420e;
const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;
/// PTRACE_O_TRACESYSGOOD: system call stops are distinguished from SIGTRAP.
pub const OPTION_SYSGOOD: usize = 1;
/// PTRACE_O_TRACECLONE: what a task clones is traced from birth.
pub const OPTION_CLONE: usize = 1 << 3;
/// PTRACE_O_EXITKILL: the task dies with its tracer.
pub const OPTION_EXITKILL: usize = 1 << 20;
/// PTRACE_O_SUSPEND_SECCOMP: filters do not run while traced.
pub const OPTION_SUSPEND_SECCOMP: usize = 1 << 21;

/// What stopped a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The task (or its whole process) ended.
    Ended,
    /// A stop requested by interrupt, or the first of a traced newborn, or a group stop.
    Asked,
    /// At the entry or exit of a system call.
    Call,
    /// A clone was reported.
    Cloned,
    /// About to get a signal.
    Signal(Signal),
}

/// `struct ptrace_syscall_info`, up to a call's result.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct CallInfo {
    op: u8,
    pad: [u8; 3],
    arch: u32,
    instruction: u64,
    stack: u64,
    answer: i64,
    is_error: u8,
    pad_end: [u8; 7],
    rest: [u64; 6],
}

const _: () = assert!(size_of::<CallInfo>() == 88);
const OP_ENTRY: u8 = 1;
const OP_EXIT: u8 = 2;

/// `struct ptrace_rseq_configuration`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RseqConfig {
    pub address: u64,
    pub bytes: u32,
    pub signature: u32,
    flags: u32,
    pad: u32,
}

const _: () = assert!(size_of::<RseqConfig>() == 24);

/// `struct ptrace_sud_config`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct DispatchConfig {
    mode: u64,
    selector: u64,
    offset: u64,
    bytes: u64,
}

const _: () = assert!(size_of::<DispatchConfig>() == 32);

/// Which kind of system call stop it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Entry,
    Exit(i64),
    Other,
}

/// ptrace with a pointer that the kernel fills or reads, or a number in its place.
fn ptrace(request: libc::c_uint, tid: Tid, address: usize, data: usize) -> Result<(), Error> {
    // SAFETY: the private callers pass numbers, or pointers to objects of theirs that are of the
    // size the request names and outlive the call.
    match unsafe { libc::ptrace(request, tid.0, address, data) } {
        -1 => Err(Error::last_os_error()),
        _ => Ok(()),
    }
}

fn ask<T: Default>(request: libc::c_uint, tid: Tid, address: usize) -> Result<T, Error> {
    let mut answer = T::default();
    ptrace(request, tid, address, std::ptr::from_mut(&mut answer) as usize)?;
    Ok(answer)
}

pub fn seize(tid: Tid) -> Result<(), Error> {
    ptrace(libc::PTRACE_SEIZE, tid, 0, 0)
}

pub fn interrupt(tid: Tid) -> Result<(), Error> {
    ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

pub fn go_on(tid: Tid, with: Option<Signal>) -> Result<(), Error> {
    ptrace(libc::PTRACE_CONT, tid, 0, signal_word(with))
}

/// Runs to the next entry or exit of a system call.
pub fn to_next_call(tid: Tid) -> Result<(), Error> {
    ptrace(libc::PTRACE_SYSCALL, tid, 0, 0)
}

pub fn detach(tid: Tid) -> Result<(), Error> {
    ptrace(libc::PTRACE_DETACH, tid, 0, 0)
}

pub fn set_options(tid: Tid, options: usize) -> Result<(), Error> {
    ptrace(libc::PTRACE_SETOPTIONS, tid, 0, options)
}

fn signal_word(signal: Option<Signal>) -> usize {
    signal.map_or(0, |Signal(number)| exactly(number))
}

/// The id of the task just cloned, in this process's namespace.
pub fn cloned(tid: Tid) -> Result<Tid, Error> {
    let message: libc::c_ulong = ask(libc::PTRACE_GETEVENTMSG, tid, 0)?;
    i32::try_from(message).map(Tid).map_err(Error::other)
}

pub fn phase(tid: Tid) -> Result<Phase, Error> {
    let info: CallInfo = ask(GET_SYSCALL_INFO, tid, size_of::<CallInfo>())?;
    Ok(match info.op {
        OP_ENTRY => Phase::Entry,
        OP_EXIT => Phase::Exit(info.answer),
        _ => Phase::Other,
    })
}

pub fn signal_mask(tid: Tid) -> Result<SignalSet, Error> {
    ask(GETSIGMASK, tid, size_of::<u64>()).map(SignalSet)
}

pub fn set_signal_mask(tid: Tid, SignalSet(bits): SignalSet) -> Result<(), Error> {
    ptrace(SETSIGMASK, tid, size_of::<u64>(), std::ptr::from_ref(&bits) as usize)
}

/// The registers. None if they have another size, that is, another architecture.
pub fn registers(tid: Tid) -> Result<Option<Registers>, Error> {
    let mut registers = Registers::default();
    let whole = size_of::<Registers>();
    let mut vector =
        libc::iovec { iov_base: std::ptr::from_mut(&mut registers).cast(), iov_len: whole };
    let data = std::ptr::from_mut(&mut vector) as usize;
    ptrace(libc::PTRACE_GETREGSET, tid, NT_PRSTATUS, data)?;
    Ok((vector.iov_len == whole).then_some(registers))
}

/// Most bytes of one set of registers; the largest, with AMX, has 11 KiB.
const MAX_SET_BYTES: usize = 64 << 10;

/// A set of registers by its note number in a core file, in the kernel's form. None if the
/// processor has no such set.
pub fn register_set(tid: Tid, kind: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0_u8; MAX_SET_BYTES];
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let data = std::ptr::from_mut(&mut vector) as usize;
    ptrace(libc::PTRACE_GETREGSET, tid, kind, data).ok()?;
    bytes.truncate(vector.iov_len);
    Some(bytes)
}

pub fn set_registers(tid: Tid, registers: &Registers) -> Result<(), Error> {
    let bytes = size_of::<Registers>();
    set_area(tid, NT_PRSTATUS, std::ptr::from_ref(registers).cast_mut().cast(), bytes)
}

pub fn set_float_registers(tid: Tid, area: &[u8]) -> Result<(), Error> {
    set_area(tid, NT_PRFPREG, area.as_ptr().cast_mut().cast(), area.len())
}

/// `base` is only read: the kernel's vector has no constant form.
fn set_area(tid: Tid, kind: usize, base: *mut libc::c_void, bytes: usize) -> Result<(), Error> {
    let vector = libc::iovec { iov_base: base, iov_len: bytes };
    ptrace(libc::PTRACE_SETREGSET, tid, kind, std::ptr::from_ref(&vector) as usize)
}

/// The thread's restartable-sequence area, if it has one (and the kernel can report it).
pub fn rseq(tid: Tid) -> Option<RseqConfig> {
    let config = ask(GET_RSEQ_CONFIGURATION, tid, size_of::<RseqConfig>());
    config.ok().filter(|config: &RseqConfig| config.address != 0)
}

/// The address of that area.
pub fn rseq_address(tid: Tid) -> Option<u64> {
    rseq(tid).map(|config| config.address)
}

/// True if the thread catches its own system calls (syscall user dispatch).
pub fn dispatches_calls(tid: Tid) -> bool {
    let size = size_of::<DispatchConfig>();
    ask(GET_SYSCALL_USER_DISPATCH_CONFIG, tid, size).is_ok_and(|c: DispatchConfig| c.mode != 0)
}

fn decode(status: libc::c_int) -> Stop {
    if !libc::WIFSTOPPED(status) {
        return Stop::Ended;
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        libc::PTRACE_EVENT_CLONE => Stop::Cloned,
        libc::PTRACE_EVENT_STOP => Stop::Asked,
        _ if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        _ => Stop::Signal(Signal(signal)),
    }
}

/// Checks once whether a traced task stopped or ended. The end of a child of this process is left
/// to its waiter, which would otherwise never get its exit code.
pub fn look(tid: Tid) -> Result<Option<Stop>, Error> {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    let ends = [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED];
    // The stops of a traced task are reported, too, requested or not.
    let has_ended = wait_id(tid, flags).is_ok_and(|(code, _)| ends.contains(&code));
    if !has_ended {
        let stop = next_stop(tid)?;
        if stop != Some(Stop::Ended) {
            return Ok(stop);
        }
    }
    let parent = procfs::Status::read(tid).ok().and_then(|status| status.number("PPid"));
    if parent.is_none_or(|parent| parent.cast_unsigned() != std::process::id()) {
        // SAFETY: no status is written.
        unsafe { libc::waitpid(tid.0, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) };
    }
    Ok(Some(Stop::Ended))
}

/// Takes a stop, never an end: the task may end at any time.
fn next_stop(tid: Tid) -> Result<Option<Stop>, Error> {
    match wait_id(tid, libc::WSTOPPED | libc::WNOHANG | libc::__WALL) {
        Ok((0, _)) => Ok(None),
        // In the form of waitpid.
        Ok((_, status)) => Ok(Some(decode(status << 8 | 0x7f))),
        // Nothing that could stop is left.
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(Some(Stop::Ended)),
        Err(error) => Err(error),
    }
}

/// What happened, and its status; zeros if nothing did.
fn wait_id(tid: Tid, flags: libc::c_int) -> Result<(libc::c_int, libc::c_int), Error> {
    // SAFETY: zeros are a siginfo_t; the kernel writes one of a child, which has a status.
    unsafe {
        let mut information: libc::siginfo_t = std::mem::zeroed();
        match libc::waitid(libc::P_PID, tid.0.cast_unsigned(), &raw mut information, flags) {
            -1 => Err(Error::last_os_error()),
            _ => Ok((information.si_code, information.si_status())),
        }
    }
}

/// Waits for the next stop of a task until `deadline` (then None). `has_ended` is called now and
/// then: a first thread that exits before the others never reports it.
pub fn wait(
    tid: Tid,
    deadline: Instant,
    has_ended: impl Fn() -> bool,
) -> Result<Option<Stop>, Error> {
    let began = Instant::now();
    let mut nap = FIRST_NAP;
    loop {
        if let Some(stop) = look(tid)? {
            return Ok(Some(stop));
        }
        if began.elapsed() < SPIN {
            std::thread::yield_now();
            continue;
        }
        if has_ended() {
            // It may have become reportable between the two checks, and must be reaped.
            return Ok(Some(look(tid)?.unwrap_or(Stop::Ended)));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(nap);
        nap = LAST_NAP.min(nap * 2);
    }
}

/// Sends a signal to one thread; a thread that is gone needs none.
pub fn send(tid: Tid, Signal(number): Signal) {
    // SAFETY: kill touches no memory of ours.
    let _ = unsafe { libc::kill(tid.0, number) };
}

/// A child of this process that opens itself to its tracer, writes a byte, and then idles until it
/// is killed or the calling thread ends.
pub fn fork_idle(ready: BorrowedFd<'_>) -> Result<Tid, Error> {
    let (ready, parent) = (ready.as_raw_fd(), std::process::id());
    // SAFETY: the child makes system calls and nothing else, and never returns.
    unsafe {
        match libc::fork() {
            -1 => Err(Error::last_os_error()),
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // If the parent had ended by then, it sends no more signal.
                if libc::getppid().cast_unsigned() != parent {
                    libc::_exit(0);
                }
                libc::prctl(libc::PR_SET_DUMPABLE, 1);
                libc::write(ready, [0_u8].as_ptr().cast(), 1);
                libc::close(ready);
                loop {
                    libc::pause();
                }
            }
            child => Ok(Tid(child)),
        }
    }
}

/// A child of this process that makes memory executable, and exits with 0 if it may.
pub fn fork_executing() -> Result<Tid, Error> {
    const BYTES: usize = 4096;
    let (data, code) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_READ | libc::PROT_EXEC);
    let map = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the child makes system calls on a mapping of its own and nothing else, and never
    // returns.
    unsafe {
        match libc::fork() {
            -1 => Err(Error::last_os_error()),
            0 => {
                let memory = libc::mmap(std::ptr::null_mut(), BYTES, data, map, -1, 0);
                let may = memory != libc::MAP_FAILED
                    && libc::mprotect(memory, BYTES, data | libc::PROT_EXEC) == 0
                    && libc::mprotect(memory, BYTES, code) == 0;
                libc::_exit(i32::from(!may))
            }
            child => Ok(Tid(child)),
        }
    }
}

/// Checks that the address space of a task can be compared with this one's.
pub fn compare_memory(tid: Tid) -> Result<(), Error> {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: kcmp compares two processes by numbers and touches no memory of ours.
    match unsafe { libc::syscall(libc::SYS_kcmp, std::process::id(), tid.0, KCMP_VM, 0, 0) } {
        -1 => Err(Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Takes a task out of SCHED_IDLE, if it is in it and we may.
pub fn leave_idle(tid: Tid) {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: numbers, and a pointer to a live sched_param.
    unsafe {
        if libc::sched_getscheduler(tid.0) == libc::SCHED_IDLE {
            libc::sched_setscheduler(tid.0, libc::SCHED_OTHER, &raw const parameter);
        }
    }
}

/// How a task is scheduled: its policy, nice value, and slice (`sched_runtime`, ns; kernels before
/// 6.12 have none for ordinary tasks). None if that cannot be read.
pub fn scheduling(tid: Tid) -> Option<libc::sched_attr> {
    let bytes = u32::try_from(size_of::<libc::sched_attr>()).ok()?;
    // SAFETY: all-zero is a value of this plain structure.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: a pointer to a live structure of `bytes` bytes.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_getattr, tid.0, &raw mut attributes, bytes, 0) };
    (result == 0).then_some(attributes)
}

/// Sets how a task is scheduled. True if the kernel allowed it.
pub fn set_scheduling(tid: Tid, attributes: &libc::sched_attr) -> bool {
    // SAFETY: a pointer to a live structure, which holds its own size.
    unsafe { libc::syscall(libc::SYS_sched_setattr, tid.0, &raw const *attributes, 0) == 0 }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// It may end between the check for its end and that for a stop.
    #[test]
    fn the_end_of_a_child_is_left_to_its_parent() {
        let mut child = Command::new("sh").args(["-c", "exit 7"]).spawn().expect("sh");
        let tid = Tid(i32::try_from(child.id()).expect("a process id"));
        while !procfs::has_ended(tid) {
            std::thread::yield_now();
        }
        assert_eq!(next_stop(tid).expect("no error"), Some(Stop::Ended));
        assert_eq!(look(tid).expect("no error"), Some(Stop::Ended));
        assert_eq!(child.wait().expect("its end").code(), Some(7));
    }
}
