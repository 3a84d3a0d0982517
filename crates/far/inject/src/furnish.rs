//! Makes a program of the newborn sidecar while the host program runs again: it gets descriptors of
//! its own, the mapped image, a stack, loses its rights, and is started.
//!
//! All by calls in the sidecar's name. If one fails, what was mapped is unmapped and the sidecar is
//! killed; the program does not notice. It dies with the injecting thread until it is detached.

use std::io::Error;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use farpool_kernel::{fill_random, send_with_descriptors};
use rustix::net::SendFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::Setup;
use crate::arch::{self, number};
use crate::elf::Segment;
use crate::error::StepError;
use crate::image::{Image, page_bytes};
use crate::procfs::{self, Memory};
use crate::remote::{Remote, gone_or};
use crate::stack::{self, Contents};
use crate::sys;

/// Descriptor of the sidecar's control socket. 0, 1 and 2 are /dev/null.
pub const CONTROL_FD: u64 = 3;
/// Descriptor of the sidecar's pidfd of the program.
pub const HOST_FD: u64 = 4;
/// Variable with the program's process id, as the sidecar sees it.
pub const HOST_VARIABLE: &str = "FARPOOL_SIDECAR_HOST";
/// Variable with the addresses of image and stack, START-END in hexadecimal.
pub const SPAN_VARIABLE: &str = "FARPOOL_SIDECAR_SPAN";

/// Size of the first thread's stack. Only touched pages cost memory; other threads bring their own.
const STACK_BYTES: u64 = 512 << 10;
/// Inaccessible range below the stack: an overrun faults instead of writing into the image.
const GUARD_BYTES: u64 = 64 << 10;
/// Room for arguments, environment and auxiliary vector within the stack.
const MAX_CONTENTS_BYTES: usize = 64 << 10;

const PROT_NONE: u64 = 0;
const PROT_READ: u64 = 1;
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;
/// MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE.
const MAP_RESERVE: u64 = 0x2 | 0x20 | 0x4000;
/// MAP_PRIVATE | MAP_FIXED.
const MAP_PLACED: u64 = 0x2 | 0x10;
const NO_FD: u64 = u64::MAX;
/// A fork of the program must not get the sidecar's memory, nor pay for copying it. MADV_DONTDUMP
/// is not used: a core of the program is worth more with the pager's state in it.
const MADV_DONTFORK: u64 = 10;
const ALL_FDS: u64 = u32::MAX as u64;
const CLOSE_RANGE_UNSHARE: u64 = 2;
const AF_UNIX: u64 = 1;
/// SOCK_SEQPACKET | SOCK_CLOEXEC.
const SOCKET_KIND: u64 = 5 | 0o2_000_000;
const O_CLOEXEC: u64 = 0o2_000_000;
/// MSG_DONTWAIT | MSG_CMSG_CLOEXEC.
const RECEIVE: u64 = 0x40 | 0x4000_0000;
const RLIMIT_CORE: u64 = 4;
const PR_SET_NAME: u64 = 15;
const PR_SET_NO_NEW_PRIVS: u64 = 38;
const PR_CAP_AMBIENT: u64 = 47;
const PR_CAP_AMBIENT_CLEAR_ALL: u64 = 4;
/// _LINUX_CAPABILITY_VERSION_3.
const CAPABILITY_VERSION: u32 = 0x2008_0522;
/// Name in ps and top; the kernel keeps 15 bytes.
const NAME: &[u8] = b"farpool-sidecar\0";

/// Auxiliary vector keys that are copied from the program: HWCAP, CLKTCK, HWCAP2, RSEQ sizes,
/// HWCAP3, HWCAP4, MINSIGSTKSZ. They describe the machine, not the program.
const AT_COPIED: [u64; 8] = [16, 17, 26, 27, 28, 29, 30, 51];

/// What is known of the program when the sidecar is furnished.
#[derive(Debug)]
pub struct Host<'a> {
    pub pidfd: BorrowedFd<'a>,
    /// Process id in its own namespace.
    pub own_pid: i32,
    pub auxiliary: &'a [(u64, u64)],
}

/// A running sidecar.
#[derive(Debug)]
pub struct Furnished {
    pub pidfd: OwnedFd,
    pub control: OwnedFd,
    pub span: Range<u64>,
}

/// The layout in the program's address space.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Start of the whole reservation.
    start: u64,
    end: u64,
    /// Start of the image.
    image: u64,
    /// Start of the stack, which ends at `end`. Also used for the calls' arguments.
    stack: u64,
}

struct Work<'a> {
    task: &'a mut Remote,
    memory: Memory,
    place: Place,
}

/// Turns the newborn into a running sidecar, or removes it completely.
pub fn furnish(
    mut task: Remote,
    image: &Image,
    setup: &Setup,
    host: &Host,
) -> Result<Furnished, StepError> {
    task.take_time();
    let mut place = None;
    let furnished = try_furnish(&mut task, image, setup, host, &mut place);
    if furnished.is_err() {
        if let Some(Place { start, end, .. }) = place {
            // What cannot be unmapped stays as unused addresses: no task is left that could do it.
            let _ = task.call("munmap", number::MUNMAP, [start, end - start, 0, 0, 0, 0]);
        }
        task.kill();
    }
    furnished
}

fn try_furnish(
    task: &mut Remote,
    image: &Image,
    setup: &Setup,
    host: &Host,
    placed: &mut Option<Place>,
) -> Result<Furnished, StepError> {
    let unshare = [0, ALL_FDS, CLOSE_RANGE_UNSHARE, 0, 0, 0];
    task.call("close_range", number::CLOSE_RANGE, unshare)?;
    task.call("setsid", number::SETSID, [0; 6])?;
    let place = reserve(task, image, placed)?;
    let memory = Memory::open(task.tid).map_err(|e| StepError::Kernel("opening its memory", e))?;
    let mut work = Work { task, memory, place };
    work.make_stack()?;
    work.leave_directory()?;
    work.forbid_core()?;
    let (pidfd, control) = work.make_descriptors(image, host)?;
    work.map_image(image)?;
    work.forget_handlers()?;
    work.name_and_drop_rights()?;
    let stack = work.fill_stack(image, setup, host)?;
    work.start(image.layout().entry + place.image, stack)?;
    Ok(Furnished { pidfd, control, span: place.start..place.end })
}

/// Makes one reservation for everything: no access, no memory, and not in forks. It is far from all
/// other mappings: a program may unmap memory and map at the same place a moment later, and must
/// find nothing there.
fn reserve(
    task: &mut Remote,
    image: &Image,
    placed: &mut Option<Place>,
) -> Result<Place, StepError> {
    let layout = image.layout();
    let slack = layout.align_bytes - page_bytes();
    let bytes = layout.span_bytes + slack + GUARD_BYTES + STACK_BYTES;
    let mappings = procfs::mappings(task.tid);
    let mappings = mappings.map_err(|e| StepError::Kernel("reading its mappings", e))?;
    // A hint: if something is there by now the kernel chooses another place.
    let wish = procfs::middle_of_largest_gap(&mappings);
    let args = [wish, bytes, PROT_NONE, MAP_RESERVE, NO_FD, 0];
    let locks = procfs::locks_memory(task.tid);
    let locks = locks.map_err(|e| StepError::Kernel("reading its status", e))?;
    // Above its limit of locked memory the mapping fails.
    let start = task.call("mmap", number::MMAP, args).map_err(|error| match error {
        StepError::Refused(_, source) if locks && source.raw_os_error() == Some(libc::EAGAIN) => {
            StepError::Locked
        }
        error => error,
    })?;
    let image = start.next_multiple_of(layout.align_bytes);
    let end = start + bytes;
    let place = Place { start, end, image, stack: end - STACK_BYTES };
    *placed = Some(place);
    hide(task, place)?;
    let is_locked = || procfs::is_locked(task.tid, place.start);
    match locks.then(is_locked).transpose() {
        Ok(Some(true)) => Err(StepError::Locked),
        Ok(_) => Ok(place),
        Err(error) => Err(StepError::Kernel("reading its mappings", error)),
    }
}

fn hide(task: &mut Remote, place: Place) -> Result<(), StepError> {
    let args = [place.start, place.end - place.start, MADV_DONTFORK, 0, 0, 0];
    task.call("madvise", number::MADVISE, args).map(drop)
}

fn protection(segment: &Segment) -> u64 {
    let access = segment.access;
    let bit = |is_set, bit| if is_set { bit } else { PROT_NONE };
    bit(access.read, PROT_READ) | bit(access.write, PROT_WRITE) | bit(access.execute, PROT_EXEC)
}

impl Work<'_> {
    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), StepError> {
        self.memory.write(at, bytes).map_err(|e| StepError::Kernel("writing its memory", e))
    }

    fn get<const N: usize>(&self, at: u64) -> Result<[u8; N], StepError> {
        let mut bytes = [0; N];
        let read = self.memory.read(at, &mut bytes);
        read.map(|()| bytes).map_err(|e| StepError::Kernel("reading its memory", e))
    }

    fn protect(&mut self, range: Range<u64>, protection: u64) -> Result<(), StepError> {
        let args = [range.start, range.end - range.start, protection, 0, 0, 0];
        self.task.call("mprotect", number::MPROTECT, args).map(drop)
    }

    fn make_stack(&mut self) -> Result<(), StepError> {
        self.protect(self.place.stack..self.place.end, PROT_READ | PROT_WRITE)
    }

    /// Leaves the program's directory, whose file system may be unmounted later.
    fn leave_directory(&mut self) -> Result<(), StepError> {
        let room = self.place.stack;
        self.put(room, b"/\0")?;
        self.task.call("chdir", number::CHDIR, [room, 0, 0, 0, 0, 0]).map(drop)
    }

    /// A core of the sidecar would be the program's whole memory. 1 is the value that also applies
    /// to a core written to a pipe (core(5)).
    fn forbid_core(&mut self) -> Result<(), StepError> {
        let room = self.place.stack;
        let limits: Vec<u8> = [1u64, 1].iter().flat_map(|limit| limit.to_le_bytes()).collect();
        self.put(room, &limits)?;
        let args = [0, RLIMIT_CORE, room, 0, 0, 0];
        match self.task.call("prlimit64", number::PRLIMIT64, args) {
            // The program's own hard limit is 0, which applies to files and may not be raised.
            Err(StepError::Refused(_, error)) if error.raw_os_error() == Some(libc::EPERM) => {
                Ok(())
            }
            done => done.map(drop),
        }
    }

    /// Makes a socket pair and takes one end; the other descriptors are sent through the other.
    fn make_descriptors(
        &mut self,
        image: &Image,
        host: &Host,
    ) -> Result<(OwnedFd, OwnedFd), StepError> {
        let room = self.place.stack;
        let pair = [AF_UNIX, SOCKET_KIND, 0, room, 0, 0];
        self.task.call("socketpair", number::SOCKETPAIR, pair)?;
        let ends = self.get::<8>(room)?;
        let [near, far] =
            [&ends[..4], &ends[4..]].map(|end| end.try_into().map(i32::from_le_bytes));
        let (Ok(near), Ok(far)) = (near, far) else { return Err(StepError::Fault) };
        let (pidfd, control) = take_descriptor(self.task.tid.0, far)?;
        let near = u64::try_from(near).map_err(|_| StepError::Fault)?;
        self.task.call("dup3", number::DUP3, [near, CONTROL_FD, O_CLOEXEC, 0, 0, 0])?;
        let pair = [0, CONTROL_FD - 1, 0, 0, 0, 0];
        self.task.call("close_range", number::CLOSE_RANGE, pair)?;
        send_descriptors(&control, image, host)?;
        self.receive_descriptors()?;
        Ok((pidfd, control))
    }

    /// Does recvmsg in the sidecar's name: /dev/null as 0, 1 and 2, the pidfd as 4, the image as 5.
    /// The kernel gives the lowest free numbers in order, and 3 is the socket.
    fn receive_descriptors(&mut self) -> Result<(), StepError> {
        const HEADER: u64 = 56;
        const CONTROL_BYTES: u64 = 40;
        let room = self.place.stack;
        let (vector, byte, control) = (room + HEADER, room + HEADER + 16, room + HEADER + 24);
        let words = [0, 0, vector, 1, control, CONTROL_BYTES, 0, byte, 1];
        let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        self.put(room, &bytes)?;
        let call = [CONTROL_FD, room, RECEIVE, 0, 0, 0];
        self.task.call("recvmsg", number::RECVMSG, call)?;
        let got = self.get::<20>(control + 16)?;
        let expected: Vec<u8> = [0i32, 1, 2, 4, 5].iter().flat_map(|fd| fd.to_le_bytes()).collect();
        if got[..] == expected[..] { Ok(()) } else { Err(StepError::Fault) }
    }

    fn map_image(&mut self, image: &Image) -> Result<(), StepError> {
        for segment in &image.layout().segments {
            self.map_segment(segment)?;
        }
        hide(self.task, self.place)?;
        self.task.call("close", number::CLOSE, [IMAGE_FD, 0, 0, 0, 0, 0]).map(drop)
    }

    fn map_segment(&mut self, segment: &Segment) -> Result<(), StepError> {
        let page = page_bytes();
        let start = self.place.image + segment.address;
        let (first, file_end) = (start - start % page, start + segment.file_bytes);
        let (mapped_end, end) = (
            file_end.next_multiple_of(page),
            (start + segment.memory_bytes).next_multiple_of(page),
        );
        if segment.file_bytes > 0 {
            let (bytes, offset) = (mapped_end - first, segment.offset - segment.offset % page);
            let args = [first, bytes, protection(segment), MAP_PLACED, IMAGE_FD, offset];
            self.task.call("mmap", number::MMAP, args)?;
        }
        if segment.access.write && mapped_end > file_end {
            let tail = usize::try_from(mapped_end - file_end).map_err(|_| StepError::Fault)?;
            self.put(file_end, &vec![0; tail])?;
        }
        if end > mapped_end {
            self.protect(mapped_end..end, protection(segment))?;
        }
        Ok(())
    }

    /// Resets handlers: they were copied from the program, whose code they are. Ignored signals
    /// stay ignored, as over exec.
    fn forget_handlers(&mut self) -> Result<(), StepError> {
        let status = procfs::Status::read(self.task.tid);
        let status = status.map_err(|e| StepError::Kernel("reading its status", e))?;
        let caught = status.bits("SigCgt").unwrap_or(u64::MAX);
        let action = self.place.stack;
        self.put(action, &[0; 32])?;
        for signal in (1..=64).filter(|signal| caught >> (signal - 1) & 1 == 1) {
            self.task.call("rt_sigaction", number::RT_SIGACTION, [signal, action, 0, 8, 0, 0])?;
        }
        Ok(())
    }

    /// It shares memory that the program can write, so it must not be able to do more than the
    /// program.
    fn name_and_drop_rights(&mut self) -> Result<(), StepError> {
        let room = self.place.stack;
        self.put(room, NAME)?;
        self.task.call("prctl", number::PRCTL, [PR_SET_NAME, room, 0, 0, 0, 0])?;
        let ambient = [PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0];
        self.task.call("prctl", number::PRCTL, ambient)?;
        self.task.call("prctl", number::PRCTL, [PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0])?;
        let mut capabilities = [0; 32];
        capabilities[..4].copy_from_slice(&CAPABILITY_VERSION.to_le_bytes());
        self.put(room, &capabilities)?;
        self.task.call("capset", number::CAPSET, [room, room + 8, 0, 0, 0, 0]).map(drop)
    }

    fn fill_stack(&self, image: &Image, setup: &Setup, host: &Host) -> Result<u64, StepError> {
        let mut random = [0; 16];
        fill_random(&mut random).map_err(|e| StepError::Kernel("getrandom", e.into()))?;
        let mut environment = setup.environment.clone();
        environment.push(format!("{HOST_VARIABLE}={}", host.own_pid));
        environment.push(format!("{SPAN_VARIABLE}={:x}-{:x}", self.place.start, self.place.end));
        let pairs = pairs(image, self.place.image, host);
        let contents = Contents {
            arguments: &setup.arguments,
            environment: &environment,
            pairs: &pairs,
            platform: arch::PLATFORM,
            random,
        };
        let built = stack::build(&contents, self.place.end, MAX_CONTENTS_BYTES);
        let (pointer, bytes) = built.map_err(|_| {
            StepError::Kernel(
                "fitting arguments and environment",
                Error::from_raw_os_error(libc::E2BIG),
            )
        })?;
        self.put(pointer, &bytes)?;
        Ok(pointer)
    }

    /// Starts it as a program of its own.
    fn start(&mut self, entry: u64, stack: u64) -> Result<(), StepError> {
        let tid = self.task.tid;
        let float = arch::fresh_float_registers();
        sys::set_float_registers(tid, &float).map_err(gone_or("PTRACE_SETREGSET"))?;
        let registers = self.task.base().starting(entry, stack);
        sys::set_registers(tid, &registers).map_err(gone_or("PTRACE_SETREGSET"))?;
        sys::detach(tid).map_err(gone_or("PTRACE_DETACH"))
    }
}

/// The image's descriptor in the sidecar until it is mapped.
const IMAGE_FD: u64 = 5;

/// The auxiliary vector, without AT_SYSINFO_EHDR: the program can unmap or move its vDSO at any
/// time (valgrind, CRIU and gVisor do), so the sidecar makes system calls instead of using the
/// vDSO.
fn pairs(image: &Image, base: u64, host: &Host) -> Vec<(u64, u64)> {
    const AT_PHDR: u64 = 3;
    const AT_PHENT: u64 = 4;
    const AT_PHNUM: u64 = 5;
    const AT_PAGESZ: u64 = 6;
    const AT_BASE: u64 = 7;
    const AT_FLAGS: u64 = 8;
    const AT_ENTRY: u64 = 9;
    const AT_SECURE: u64 = 23;
    let layout = image.layout();
    let mut pairs = vec![
        (AT_PHDR, base + layout.headers),
        (AT_PHENT, 56),
        (AT_PHNUM, u64::from(layout.header_count)),
        (AT_PAGESZ, page_bytes()),
        (AT_BASE, 0),
        (AT_FLAGS, 0),
        (AT_ENTRY, base + layout.entry),
        (AT_SECURE, 0),
    ];
    pairs.extend(host.auxiliary.iter().filter(|(key, _)| AT_COPIED.contains(key)));
    pairs
}

/// Returns a pidfd of the sidecar, and a copy of one of its descriptors.
fn take_descriptor(pid: i32, fd: RawFd) -> Result<(OwnedFd, OwnedFd), StepError> {
    let pid = Pid::from_raw(pid).ok_or(StepError::Fault)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty());
    let pidfd = pidfd.map_err(|e| StepError::Kernel("pidfd_open", e.into()))?;
    let taken = pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty());
    let taken = taken.map_err(|e| StepError::Kernel("pidfd_getfd", e.into()))?;
    Ok((pidfd, taken))
}

fn send_descriptors(control: &OwnedFd, image: &Image, host: &Host) -> Result<(), StepError> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null");
    let null = null.map_err(|e| StepError::Kernel("opening /dev/null", e))?;
    let null = null.as_fd();
    let fds = [null, null, null, host.pidfd, image.file()];
    let sent = send_with_descriptors(control, b"+", &fds, SendFlags::empty());
    sent.map(drop).map_err(|e| StepError::Kernel("handing over descriptors", e.into()))
}
