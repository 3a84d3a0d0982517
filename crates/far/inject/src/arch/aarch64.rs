//! aarch64. Written from the kernel's headers; its encodings are tested, but it was never run.
//!
//! The kernel prepares the restart of an interrupted call before the tracer sees the registers
//! (`do_signal` moves pc back and x0 to its first value), so saving and restoring them is enough.

/// EM_AARCH64.
pub const ELF_MACHINE: u16 = 183;
/// `svc #0`.
pub const GATE: &[u8] = &[0x01, 0x00, 0x00, 0xd4];
/// Alignment of instructions.
pub const GATE_ALIGN: usize = 4;
/// AT_PLATFORM.
pub const PLATFORM: &str = "aarch64";

/// Numbers of the system calls made in another task's name.
pub mod number {
    pub const DUP3: u64 = 24;
    pub const CHDIR: u64 = 49;
    pub const CLOSE: u64 = 57;
    pub const CAPSET: u64 = 91;
    pub const EXIT: u64 = 93;
    pub const SET_TID_ADDRESS: u64 = 96;
    pub const SET_ROBUST_LIST: u64 = 99;
    pub const RT_SIGACTION: u64 = 134;
    pub const SETSID: u64 = 157;
    pub const PRCTL: u64 = 167;
    pub const SOCKETPAIR: u64 = 199;
    pub const RECVMSG: u64 = 212;
    pub const MUNMAP: u64 = 215;
    pub const CLONE: u64 = 220;
    pub const MMAP: u64 = 222;
    pub const MPROTECT: u64 = 226;
    pub const MADVISE: u64 = 233;
    pub const WAIT4: u64 = 260;
    pub const PRLIMIT64: u64 = 261;
    pub const RSEQ: u64 = 293;
    pub const CLOSE_RANGE: u64 = 436;
}

/// The kernel's user_pt_regs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Registers {
    pub x: [u64; 31],
    pub sp: u64,
    pub pc: u64,
    pub pstate: u64,
}

const _: () = assert!(size_of::<Registers>() == 272);

impl Registers {
    /// These registers, set up for a system call at `gate`.
    pub fn calling(&self, gate: u64, number: u64, args: [u64; 6]) -> Self {
        let mut next = Self { pc: gate, ..*self };
        next.x[..6].copy_from_slice(&args);
        next.x[8] = number;
        next
    }

    pub fn stack_pointer(&self) -> u64 {
        self.sp
    }

    /// A new program's registers, as set by exec.
    pub fn starting(&self, entry: u64, stack: u64) -> Self {
        Self { x: [0; 31], sp: stack, pc: entry, pstate: 0 }
    }

    /// Calls that end with EINTR at a stop (epoll_wait and others, signal(7)) cannot be restarted
    /// from here: the call's original x0 is lost. They return EINTR, as after SIGSTOP and SIGCONT.
    pub fn restarted(&self) -> Option<Self> {
        None
    }
}

/// NT_PRFPREG as exec leaves it: all zero (32 registers of 128 bits, two words, padding).
pub fn fresh_float_registers() -> Vec<u8> {
    vec![0; 528]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_keeps_what_it_does_not_use() {
        let mut before = Registers::default();
        before.x[19] = 7;
        let call = before.calling(100, number::MMAP, [1, 2, 3, 4, 5, 6]);
        assert_eq!((call.pc, call.x[8], call.x[0], call.x[5], call.x[19]), (100, 222, 1, 6, 7));
        assert_eq!(GATE, 0xd400_0001u32.to_le_bytes());
    }
}
