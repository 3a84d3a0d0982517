//! The kernel's structures and numbers, as in `include/uapi/linux/userfaultfd.h` and `linux/fs.h`.

/// Feature bits of `UFFDIO_API`.
pub mod features {
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    pub const EVENT_FORK: u64 = 1 << 1;
    pub const EVENT_REMAP: u64 = 1 << 2;
    pub const EVENT_REMOVE: u64 = 1 << 3;
    pub const MISSING_SHMEM: u64 = 1 << 5;
    pub const EVENT_UNMAP: u64 = 1 << 6;
    pub const SIGBUS: u64 = 1 << 7;
    pub const THREAD_ID: u64 = 1 << 8;
    pub const EXACT_ADDRESS: u64 = 1 << 11;
    pub const WP_UNPOPULATED: u64 = 1 << 13;
    pub const POISON: u64 = 1 << 14;
    pub const WP_ASYNC: u64 = 1 << 15;
    pub const MOVE: u64 = 1 << 16;

    /// The features that a pager in the program's address space needs.
    pub const PAGER: u64 = MOVE | POISON | THREAD_ID | PAGEFAULT_FLAG_WP;
    /// The further features that it needs to learn of the program's memory calls from the kernel.
    /// The handshake on `EVENT_FORK` needs a privilege (`CAP_SYS_PTRACE`).
    pub const EVENTS: u64 = EVENT_FORK | EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP;

    /// Every bit with the name the kernel gives it, for reports.
    pub const NAMES: [(u64, &str); 17] = [
        (PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
        (EVENT_FORK, "EVENT_FORK"),
        (EVENT_REMAP, "EVENT_REMAP"),
        (EVENT_REMOVE, "EVENT_REMOVE"),
        (1 << 4, "MISSING_HUGETLBFS"),
        (MISSING_SHMEM, "MISSING_SHMEM"),
        (EVENT_UNMAP, "EVENT_UNMAP"),
        (SIGBUS, "SIGBUS"),
        (THREAD_ID, "THREAD_ID"),
        (1 << 9, "MINOR_HUGETLBFS"),
        (1 << 10, "MINOR_SHMEM"),
        (EXACT_ADDRESS, "EXACT_ADDRESS"),
        (1 << 12, "WP_HUGETLBFS_SHMEM"),
        (WP_UNPOPULATED, "WP_UNPOPULATED"),
        (POISON, "POISON"),
        (WP_ASYNC, "WP_ASYNC"),
        (MOVE, "MOVE"),
    ];
}

/// Modes of `UFFDIO_REGISTER`.
pub mod register_mode {
    pub const MISSING: u64 = 1 << 0;
    pub const WP: u64 = 1 << 1;
}

pub(crate) const UFFD_API: u64 = 0xAA;
pub(crate) const EVENT_PAGEFAULT: u8 = 0x12;
pub(crate) const EVENT_FORK: u8 = 0x13;
pub(crate) const EVENT_REMAP: u8 = 0x14;
pub(crate) const EVENT_REMOVE: u8 = 0x15;
pub(crate) const EVENT_UNMAP: u8 = 0x16;
pub(crate) const PAGEFAULT_FLAG_WRITE: u64 = 1 << 0;
pub(crate) const PAGEFAULT_FLAG_WP: u64 = 1 << 1;

pub(crate) const MODE_DONTWAKE: u64 = 1 << 0;
pub(crate) const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
pub(crate) const MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;

/// `_IOC(dir, type, nr, size)` of asm-generic/ioctl.h.
const fn ioc(direction: u64, kind: u64, number: u64, size: usize) -> u64 {
    (direction << 30) | ((size as u64) << 16) | (kind << 8) | number
}
const READ: u64 = 2;
const WRITE_READ: u64 = 3;
const UFFDIO: u64 = 0xAA;

pub(crate) const USERFAULTFD_IOC_NEW: u64 = ioc(0, UFFDIO, 0x00, 0);
pub(crate) const UFFDIO_API: u64 = ioc(WRITE_READ, UFFDIO, 0x3F, size_of::<Api>());
pub(crate) const UFFDIO_REGISTER: u64 = ioc(WRITE_READ, UFFDIO, 0x00, size_of::<Register>());
pub(crate) const UFFDIO_UNREGISTER: u64 = ioc(READ, UFFDIO, 0x01, size_of::<Range>());
pub(crate) const UFFDIO_WAKE: u64 = ioc(READ, UFFDIO, 0x02, size_of::<Range>());
pub(crate) const UFFDIO_COPY: u64 = ioc(WRITE_READ, UFFDIO, 0x03, size_of::<Transfer>());
pub(crate) const UFFDIO_ZEROPAGE: u64 = ioc(WRITE_READ, UFFDIO, 0x04, size_of::<Fill>());
pub(crate) const UFFDIO_MOVE: u64 = ioc(WRITE_READ, UFFDIO, 0x05, size_of::<Transfer>());
pub(crate) const UFFDIO_WRITEPROTECT: u64 =
    ioc(WRITE_READ, UFFDIO, 0x06, size_of::<WriteProtect>());
pub(crate) const UFFDIO_POISON: u64 = ioc(WRITE_READ, UFFDIO, 0x08, size_of::<Fill>());
pub(crate) const PAGEMAP_SCAN: u64 = ioc(WRITE_READ, b'f' as u64, 16, size_of::<ScanArg>());

/// `struct uffdio_api`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Api {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
pub(crate) struct Range {
    pub start: u64,
    pub len: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
pub(crate) struct WriteProtect {
    pub range: Range,
    pub mode: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
pub(crate) struct Register {
    pub range: Range,
    pub mode: u64,
    pub ioctls: u64,
}

/// `struct uffdio_copy` and `struct uffdio_move`, which have the same shape.
#[repr(C)]
pub(crate) struct Transfer {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    /// Written by the kernel: bytes done, or a negative errno.
    pub done: i64,
}

/// `struct uffdio_zeropage` and `struct uffdio_poison`, which have the same shape.
#[repr(C)]
pub(crate) struct Fill {
    pub range: Range,
    pub mode: u64,
    /// Written by the kernel: bytes done, or a negative errno.
    pub done: i64,
}

/// `struct uffd_msg`. The fields are named for a page fault; the other events use the same three
/// words for: a descriptor (fork), from, to and length (remap), start and end (remove, unmap).
#[repr(C, packed)]
#[derive(Clone, Copy, Default)]
pub struct Message {
    pub(crate) event: u8,
    pub(crate) reserved1: u8,
    pub(crate) reserved2: u16,
    pub(crate) reserved3: u32,
    pub(crate) flags: u64,
    pub(crate) address: u64,
    pub(crate) thread: u64,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (event, address) = (self.event, self.address);
        write!(f, "Message {{ event: {event:#x}, address: {address:#x} }}")
    }
}

/// `struct pm_scan_arg`.
#[repr(C)]
pub(crate) struct ScanArg {
    pub size: u64,
    pub flags: u64,
    pub start: u64,
    pub end: u64,
    pub walk_end: u64,
    pub vec: u64,
    pub vec_len: u64,
    pub max_pages: u64,
    pub category_inverted: u64,
    pub category_mask: u64,
    pub category_anyof_mask: u64,
    pub return_mask: u64,
}

const _: () = assert!(size_of::<Api>() == 24);
const _: () = assert!(size_of::<Range>() == 16);
const _: () = assert!(size_of::<Register>() == 32);
const _: () = assert!(size_of::<Transfer>() == 40);
const _: () = assert!(size_of::<Fill>() == 32);
const _: () = assert!(size_of::<WriteProtect>() == 24);
const _: () = assert!(size_of::<Message>() == 32);
const _: () = assert!(size_of::<ScanArg>() == 96);
