//! x86-64.

use std::mem::offset_of;

/// EM_X86_64.
pub const ELF_MACHINE: u16 = 62;
/// `syscall`.
pub const GATE: &[u8] = &[0x0f, 0x05];
/// Alignment of instructions.
pub const GATE_ALIGN: usize = 1;
/// AT_PLATFORM.
pub const PLATFORM: &str = "x86_64";

/// Numbers of the system calls made in another task's name.
pub mod number {
    pub const CLOSE: u64 = 3;
    pub const MMAP: u64 = 9;
    pub const MPROTECT: u64 = 10;
    pub const MUNMAP: u64 = 11;
    pub const RT_SIGACTION: u64 = 13;
    pub const MADVISE: u64 = 28;
    pub const RECVMSG: u64 = 47;
    pub const SOCKETPAIR: u64 = 53;
    pub const CLONE: u64 = 56;
    pub const EXIT: u64 = 60;
    pub const WAIT4: u64 = 61;
    pub const CHDIR: u64 = 80;
    pub const SETSID: u64 = 112;
    pub const CAPSET: u64 = 126;
    pub const PRCTL: u64 = 157;
    pub const SET_TID_ADDRESS: u64 = 218;
    pub const SET_ROBUST_LIST: u64 = 273;
    pub const DUP3: u64 = 292;
    pub const PRLIMIT64: u64 = 302;
    pub const RSEQ: u64 = 334;
    pub const CLOSE_RANGE: u64 = 436;
}

/// Calls that return EINTR when a thread is stopped, though no signal handler ran (signal(7)):
/// semop, rt_sigtimedwait, io_getevents, semtimedop, epoll_wait, epoll_pwait, io_pgetevents,
/// io_uring_enter, epoll_pwait2; and on a socket with a timeout (SO_RCVTIMEO, SO_SNDTIMEO) read,
/// write, readv, writev, connect, accept, sendto, recvfrom, sendmsg, recvmsg, accept4, recvmmsg,
/// sendmmsg. A call that did a part returns the amount, not EINTR.
const NOT_RESTARTED: [u64; 22] = [
    65, 128, 208, 220, 232, 281, 333, 426, 441, 0, 1, 19, 20, 42, 43, 44, 45, 46, 47, 288, 299, 307,
];
const EINTR: u64 = (-4i64).cast_unsigned();
/// Kernel-internal: restart unless a handler runs, then EINTR.
const ERESTARTNOHAND: u64 = (-514i64).cast_unsigned();
/// `orig_rax` of a task that is in no system call.
const NO_CALL: u64 = u64::MAX;
/// Interrupts on, and the bit that is always set.
const FLAGS_AT_START: u64 = 0x202;

/// The kernel's user_regs_struct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

const _: () = assert!(size_of::<Registers>() == 216 && offset_of!(Registers, rip) == 128);

impl Registers {
    /// These registers, set up for a system call at `gate`.
    pub fn calling(&self, gate: u64, number: u64, args: [u64; 6]) -> Self {
        let [rdi, rsi, rdx, r10, r8, r9] = args;
        let (rax, orig_rax, rip) = (number, NO_CALL, gate);
        Self { rdi, rsi, rdx, r10, r8, r9, rax, orig_rax, rip, ..*self }
    }

    pub fn stack_pointer(&self) -> u64 {
        self.rsp
    }

    /// A new program's registers, as set by exec; the segments are this task's.
    pub fn starting(&self, entry: u64, stack: u64) -> Self {
        Self {
            rip: entry,
            rsp: stack,
            cs: self.cs,
            ss: self.ss,
            eflags: FLAGS_AT_START,
            orig_rax: NO_CALL,
            ..Self::default()
        }
    }

    /// Makes a call continue that only our stop ended, where the kernel would not restart it. None
    /// if nothing is to be changed. A signal handler that runs first still makes it EINTR.
    pub fn restarted(&self) -> Option<Self> {
        let is_ended = self.rax == EINTR && NOT_RESTARTED.contains(&self.orig_rax);
        is_ended.then_some(Self { rax: ERESTARTNOHAND, ..*self })
    }
}

/// NT_PRFPREG with what exec leaves: x87 control word 0x37f, MXCSR 0x1f80, all else zero.
pub fn fresh_float_registers() -> Vec<u8> {
    let mut area = vec![0; 512];
    area[..2].copy_from_slice(&0x37fu16.to_le_bytes());
    area[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
    area[28..32].copy_from_slice(&0xffffu32.to_le_bytes());
    area
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_our_stop_ended_goes_on() {
        let [epoll_wait, recvfrom, close] = [232, 45, 3];
        let ended = |call| Registers { rax: EINTR, orig_rax: call, ..Registers::default() };
        let goes_on = |call| ended(call).restarted().map(|registers| registers.rax);
        assert_eq!(goes_on(epoll_wait), Some(ERESTARTNOHAND));
        assert_eq!(goes_on(recvfrom), Some(ERESTARTNOHAND));
        assert_eq!(goes_on(close), None);
    }

    #[test]
    fn a_call_keeps_what_it_does_not_use() {
        let before = Registers { rbx: 7, rsp: 8, fs_base: 9, orig_rax: 1, ..Registers::default() };
        let call = before.calling(100, number::MMAP, [1, 2, 3, 4, 5, 6]);
        assert_eq!((call.rip, call.rax, call.orig_rax), (100, 9, NO_CALL));
        assert_eq!((call.rdi, call.r10, call.r9), (1, 4, 6));
        assert_eq!((call.rbx, call.rsp, call.fs_base), (7, 8, 9));
    }
}
