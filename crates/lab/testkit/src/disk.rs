//! A real block device that fails on the test's orders: a loop device over a file that this process
//! serves through FUSE. And file systems that are mounted for one test.
//!
//! Requests to the device arrive here past all caches but the device's own. Nothing is left behind,
//! even by a killed test: the mount is detached once the loop device has the file open, and the
//! loop device is removed with its last user.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use farpool_kernel::lock;
use farpool_units::{PAGE_BYTES, exactly};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyWrite, Request, Session, WriteFlags,
};

/// Offset bits flipped to find the nearby block whose content is returned instead.
const ELSEWHERE_BYTES: u64 = 192 << 10;
/// One page in this many is garbled: some items and some zones' summaries, but neither all nor
/// none.
const SPOILED_PAGE: u64 = 61;
/// The most requests that the kernel may have under way here: more than a loop device sends at a
/// time.
const REQUESTS_MAX: u16 = 512;
const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);
/// How long the kernel may cache attributes: nothing changes that it could have cached.
const VALID: Duration = Duration::from_secs(3600);

/// The fault that the disk shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Every request takes this long.
    Slow(Duration),
    /// No request is answered until the fault is over.
    Hang,
    FailReads,
    FailWrites,
    /// No space for writes: thin provisioning that ran out.
    Full,
    /// Some pages are read with one bit flipped.
    FlipBits,
    /// Some pages are read as zeros.
    Zeros,
    /// Some pages are read from elsewhere.
    Elsewhere,
    /// Writes are answered but not done.
    LoseWrites,
    /// Only the first half of each write arrives.
    TearWrites,
}

/// The test's orders to the disk.
#[derive(Debug)]
pub struct Faults {
    /// The fault, and the first byte that it concerns.
    order: Mutex<(Fault, u64)>,
    held: Mutex<Vec<Job>>,
    done: AtomicU64,
    bytes: File,
    size: u64,
}

#[derive(Debug)]
enum Job {
    Read { offset: u64, size: usize, reply: ReplyData },
    Write { offset: u64, data: Vec<u8>, reply: ReplyWrite },
    Sync(ReplyEmpty),
}

impl Faults {
    /// Applies a fault to the whole disk from now on.
    pub fn set(&self, fault: Fault) {
        self.set_from(fault, 0);
    }

    /// Applies a fault to all offsets from `first` on from now on. Requests that were held back are
    /// answered.
    pub fn set_from(&self, fault: Fault, first: u64) {
        *lock(&self.order) = (fault, first);
        self.release();
    }

    /// Performs what was held back, unless the disk hangs.
    fn release(&self) {
        let (fault, first) = *lock(&self.order);
        if fault != Fault::Hang {
            let held = std::mem::take(&mut *lock(&self.held));
            held.into_iter().for_each(|job| self.perform(job, fault, first));
        }
    }

    /// The number of requests to which a fault was applied.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn take(self: &Arc<Self>, job: Job) {
        let (fault, first) = *lock(&self.order);
        let offset = match job {
            Job::Read { offset, .. } | Job::Write { offset, .. } => offset,
            Job::Sync(_) => u64::MAX,
        };
        match fault {
            Fault::Hang if offset >= first => {
                self.done.fetch_add(1, Ordering::Relaxed);
                lock(&self.held).push(job);
                // The fault may have been changed since it was read.
                self.release();
            }
            Fault::Slow(delay) if offset >= first => {
                self.done.fetch_add(1, Ordering::Relaxed);
                let disk = Arc::clone(self);
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    disk.perform(job, Fault::None, 0);
                });
            }
            _ => self.perform(job, fault, first),
        }
    }

    fn perform(&self, job: Job, fault: Fault, first: u64) {
        match job {
            Job::Read { offset, size, reply } => match self.read(offset, size, (fault, first)) {
                Ok(bytes) => reply.data(&bytes),
                Err(error) => reply.error(error),
            },
            Job::Write { offset, data, reply } => {
                let written = self.write(offset, &data, (fault, first));
                match written.map(|()| u32::try_from(data.len()).expect("requests are short")) {
                    Ok(bytes) => reply.written(bytes),
                    Err(error) => reply.error(error),
                }
            }
            Job::Sync(reply) => reply.ok(),
        }
    }

    fn read(&self, offset: u64, size: usize, order: (Fault, u64)) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; size.min(exactly(self.size - offset))];
        self.bytes.read_exact_at(&mut bytes, offset).map_err(|_| Errno::EIO)?;
        let (fault, first) = order;
        if offset < first {
            return Ok(bytes);
        }
        if fault == Fault::FailReads {
            self.done.fetch_add(1, Ordering::Relaxed);
            return Err(Errno::EIO);
        }
        for (at, page) in (offset..).step_by(PAGE_BYTES).zip(bytes.chunks_mut(PAGE_BYTES)) {
            let number = at / PAGE_BYTES as u64;
            if !number.is_multiple_of(SPOILED_PAGE) {
                continue;
            }
            match fault {
                Fault::FlipBits => {
                    let spot = exactly::<usize, _>(number * 131) % page.len();
                    page[spot] ^= 0x10;
                }
                Fault::Zeros => page.fill(0),
                Fault::Elsewhere => {
                    let other = at ^ ELSEWHERE_BYTES;
                    self.bytes.read_exact_at(page, other).map_err(|_| Errno::EIO)?;
                }
                _ => continue,
            }
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes)
    }

    fn write(&self, offset: u64, data: &[u8], (fault, first): (Fault, u64)) -> Result<(), Errno> {
        let fault = if offset < first { Fault::None } else { fault };
        let arrives = match fault {
            Fault::FailWrites | Fault::Full | Fault::LoseWrites => 0,
            Fault::TearWrites => data.len() / 2,
            _ => data.len(),
        };
        self.bytes.write_all_at(&data[..arrives], offset).map_err(|_| Errno::EIO)?;
        if arrives < data.len() {
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        match fault {
            Fault::FailWrites => Err(Errno::EIO),
            Fault::Full => Err(Errno::ENOSPC),
            _ => Ok(()),
        }
    }

    fn attributes(&self, number: INodeNo) -> FileAttr {
        let is_file = number == FILE;
        FileAttr {
            ino: number,
            size: if is_file { self.size } else { 0 },
            blocks: self.size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_file { FileType::RegularFile } else { FileType::Directory },
            perm: if is_file { 0o600 } else { 0o700 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        }
    }
}

/// A file system with one file, the disk.
struct OneFile(Arc<Faults>);

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // Requests must not wait for one another: the loop device sends many at a time.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_background(REQUESTS_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&VALID, &self.0.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&VALID, &self.0.attributes(number));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.0.take(Job::Read { offset, size: size as usize, reply });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.0.take(Job::Write { offset, data: data.to_vec(), reply });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.0.take(Job::Sync(reply));
    }
}

/// A block device that exists while this value lives or something has it open.
#[derive(Debug)]
pub struct Loop {
    path: PathBuf,
    _open: File,
}

impl Loop {
    /// Creates a device over a file. Returns None, after printing the reason, if that cannot be
    /// done.
    pub fn over(file: &Path, is_direct: bool) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            crate::skip("loop devices need root");
            return None;
        }
        let direct = if is_direct { "--direct-io=on" } else { "--direct-io=off" };
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", direct]).arg(file).stdin(Stdio::null());
        let made = command.output().map_err(|error| error.to_string()).and_then(|output| {
            let told = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
            if output.status.success() {
                Ok(told(&output.stdout))
            } else {
                Err(told(&output.stderr))
            }
        });
        let path = match made {
            Ok(path) => PathBuf::from(path),
            Err(error) => {
                crate::skip(&format!("no loop device can be made: {error}"));
                return None;
            }
        };
        let open = File::open(&path).expect("the device is there");
        // While the device is in use, this only marks it: it is removed with its last user.
        let marked = Command::new("losetup").arg("--detach").arg(&path).status();
        assert!(marked.is_ok_and(|status| status.success()), "{} stays", path.display());
        Some(Self { path, _open: open })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A disk that fails on order.
#[derive(Debug)]
pub struct Disk {
    pub device: Loop,
    pub faults: Arc<Faults>,
    _session: BackgroundSession,
}

impl Disk {
    /// Creates a disk of zeros. Returns None, after printing the reason, if that cannot be done.
    pub fn start(size: u64) -> Option<Self> {
        let bytes = tempfile::tempfile().expect("a file for what the disk holds");
        bytes.set_len(size).expect("room for the disk");
        let faults = Arc::new(Faults {
            order: Mutex::new((Fault::None, 0)),
            held: Mutex::default(),
            done: AtomicU64::new(0),
            bytes,
            size,
        });
        let mount = tempfile::tempdir().expect("a folder");
        let session = Session::new(OneFile(Arc::clone(&faults)), mount.path(), &Config::default());
        let session = match session.and_then(Session::spawn) {
            Ok(session) => session,
            Err(error) => {
                crate::skip(&format!(
                    "no file system can be served here (/dev/fuse, root): {error}"
                ));
                return None;
            }
        };
        let device = Loop::over(&mount.path().join(NAME), true);
        let flags = rustix::mount::UnmountFlags::DETACH;
        rustix::mount::unmount(mount.path(), flags).expect("it is mounted");
        Some(Self { device: device?, faults, _session: session })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Processes that still wait for it can then end.
        self.faults.set(Fault::None);
    }
}

/// A file system that is mounted while this value lives.
#[derive(Debug)]
pub struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    /// Makes an ext4 and mounts it. None, after printing the reason, if that cannot be done.
    pub fn ext4(device: &Path, at: &'a Path) -> Option<Self> {
        std::fs::create_dir_all(at).expect("a folder");
        if !make_ext4(device) {
            return None;
        }
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount(device, at, "ext4", flags, None).expect("it is mounted");
        Some(Self(at))
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // It disappears from the folders at once, and entirely with its last user.
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

impl<'a> Mounted<'a> {
    /// Mounts a tmpfs of this size.
    pub fn tmpfs(at: &'a Path, size: &str) -> Self {
        std::fs::create_dir_all(at).expect("a folder");
        let options = std::ffi::CString::new(format!("size={size}")).expect("no zeros");
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", at, "tmpfs", flags, options.as_c_str())
            .expect("it is mounted");
        Self(at)
    }
}

fn make_ext4(device: &Path) -> bool {
    let mut command = Command::new("mkfs.ext4");
    let made = command.args(["-q", "-F"]).arg(device).stdin(Stdio::null()).status();
    if made.is_err() {
        crate::skip("mkfs.ext4 is not installed (apt-get install e2fsprogs)");
    }
    made.is_ok_and(|status| status.success())
}
