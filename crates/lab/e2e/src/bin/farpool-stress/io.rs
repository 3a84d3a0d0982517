//! Copies between pages through pipes, files, O_DIRECT and io_uring, so that the kernel accesses
//! far buffers.
//!
//! If memory is lost, the kernel does not raise SIGBUS: the call fails with EFAULT, or stops before
//! the page. The program then reads the buffers itself, as any program does that continues to use
//! them.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use farpool_units::exactly;
use io_uring::{IoUring, opcode, types};

use crate::sys::{self, PAGE};

const URING_ENTRIES: u32 = 64;

/// The pipe, files and ring that one thread copies through.
#[derive(Debug)]
pub struct Files {
    pipe: (std::io::PipeReader, std::io::PipeWriter),
    plain: File,
    /// None if the file system does not support O_DIRECT.
    direct: Option<File>,
    ring: Option<Ring>,
}

struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Ring")
    }
}

impl Files {
    /// Opens everything. The files are unlinked at once.
    pub fn open(directory: &Path, seed: u64) -> Files {
        let Ok(pipe) = std::io::pipe() else { sys::unexpected("pipe") };
        let open = |kind: &str, flags: i32| {
            let path = directory.join(format!("stress-{}-{seed:x}-{kind}", std::process::id()));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(true).custom_flags(flags);
            let file = options.open(&path).ok();
            let _ = std::fs::remove_file(&path);
            file
        };
        let Some(plain) = open("plain", 0) else { sys::unexpected("creating a file") };
        let ring = IoUring::new(URING_ENTRIES).ok().map(Ring);
        Files { pipe, plain, direct: open("direct", libc::O_DIRECT), ring }
    }

    /// Copies by write(2) and read(2). The pages must fit into the pipe.
    pub fn through_pipe(&mut self, from: usize, to: usize, pages: usize) {
        // The length is checked before anything is read: a read of bytes that were not written
        // would never return.
        let written = self.pipe.1.write(sys::bytes(from, pages));
        if !written.is_ok_and(|bytes| bytes == pages * PAGE) {
            refused("writing to a pipe", from, pages);
        }
        if self.pipe.0.read_exact(sys::bytes(to, pages)).is_err() {
            refused("reading from a pipe", to, pages);
        }
    }

    /// Copies by pwrite(2) and pread(2).
    pub fn through_file(&mut self, from: usize, to: usize, pages: usize) {
        copy_through(&self.plain, from, to, pages);
    }

    /// Copies by pwrite(2) and pread(2) without the page cache: the kernel pins the pages during
    /// the transfer.
    pub fn through_direct(&mut self, from: usize, to: usize, pages: usize) {
        copy_through(self.direct.as_ref().unwrap_or(&self.plain), from, to, pages);
    }

    /// Copies with one io_uring request for each page, all at once, without the page cache.
    pub fn through_uring(&mut self, from: usize, to: usize, pages: usize) {
        let file = self.direct.as_ref().unwrap_or(&self.plain).as_raw_fd();
        let Some(Ring(ring)) = &mut self.ring else {
            return copy_through(&self.plain, from, to, pages);
        };
        let length = exactly(PAGE);
        let write = |page: usize| {
            let buffer = (from + page * PAGE) as *const u8;
            opcode::Write::new(types::Fd(file), buffer, length).offset((page * PAGE) as u64).build()
        };
        submit_all(ring, (0..pages).map(write).collect());
        let read = |page: usize| {
            let buffer = (to + page * PAGE) as *mut u8;
            opcode::Read::new(types::Fd(file), buffer, length).offset((page * PAGE) as u64).build()
        };
        submit_all(ring, (0..pages).map(read).collect());
    }
}

fn copy_through(file: &File, from: usize, to: usize, pages: usize) {
    if file.write_all_at(sys::bytes(from, pages), 0).is_err() {
        refused("writing to a file", from, pages);
    }
    if file.read_exact_at(sys::bytes(to, pages), 0).is_err() {
        refused("reading from a file", to, pages);
    }
}

/// Ends the process: by SIGBUS if the buffer is lost, otherwise with a message, as the call must
/// not fail.
#[cold]
fn refused(what: &str, buffer: usize, pages: usize) -> ! {
    sys::bytes(buffer, pages).chunks(PAGE).for_each(|page| {
        std::hint::black_box(page[0]);
    });
    sys::unexpected(what)
}

fn submit_all(ring: &mut IoUring, entries: Vec<io_uring::squeue::Entry>) {
    let count = entries.len();
    for entry in &entries {
        // SAFETY: the buffers belong to this thread, which waits for all completions below.
        if unsafe { ring.submission().push(entry) }.is_err() {
            sys::unexpected("io_uring submission");
        }
    }
    let mut done = 0;
    while done < count {
        if ring.submit_and_wait(1).is_err() {
            sys::unexpected("io_uring_enter");
        }
        for completion in ring.completion() {
            done += 1;
            if usize::try_from(completion.result()).ok() != Some(PAGE) {
                sys::say(&format!("io_uring completed with {}\n", completion.result()));
                sys::unexpected("io_uring transfer");
            }
        }
    }
}
