//! The library that `farpool run` puts into a program (LD_PRELOAD): it makes the program's large
//! anonymous memory far.
//!
//! It replaces the C library's memory functions by functions that report the program's mappings to
//! the pager ([`farpool_pager`]), and its allocator by mimalloc, whose memory comes from those same
//! functions: glibc's malloc does not call mmap through the PLT and could not be seen.
//!
//! Rooms: `memory` the mmap family, `guest` the memory of a guest that can move to another host,
//! `heap` the malloc family, `process` fork, `threads` new threads, `rights` changes of user,
//! `pipes` calls that lend pages, `exec` and `variadic` the environment of new programs, `local`
//! the allocator of our own code, whose memory is never far.
//!
//! Invariants:
//! * nothing here runs differently for a process without a board in its environment;
//! * a function of the program never sees an error that the plain function could not have given;
//! * the program's errno is changed only by calls that fail.

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

mod errors;
mod exec;
mod guest;
mod heap;
mod local;
mod memory;
mod pipes;
mod process;
mod rights;
mod threads;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod variadic;

use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize};

use farpool_board::BOARD_VARIABLE;
use farpool_pager::Pager;

/// Nothing is decided yet: the C library does not have the environment yet.
const UNDECIDED: u8 = 0;
/// A thread is preparing the pager; its own calls pass through.
const PREPARING: u8 = 1;
/// This process has a pager.
const READY: u8 = 2;
/// This process was not started by `farpool run`.
const DISABLED: u8 = 3;

static STATE: AtomicU8 = AtomicU8::new(UNDECIDED);
static PAGER: AtomicPtr<Pager> = AtomicPtr::new(std::ptr::null_mut());

/// Mappings made before anything was decided, to be added once there is a pager: the dynamic linker
/// allocates before the environment can be read.
static EARLY: [(AtomicUsize, AtomicUsize); EARLY_MAPPINGS] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; EARLY_MAPPINGS];
static EARLY_COUNT: AtomicUsize = AtomicUsize::new(0);
/// More than the allocator makes at start; further ones would stay local.
const EARLY_MAPPINGS: usize = 32;

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = construct;

extern "C" fn construct() {
    let _ = pager();
}

unsafe extern "C" {
    static environ: *const *const libc::c_char;
}

/// The pager of this process, if it was started by `farpool run`.
#[inline]
fn pager() -> Option<&'static Pager> {
    if STATE.load(Acquire) == READY {
        // SAFETY: set before READY, and the pager lives for ever.
        return unsafe { PAGER.load(Acquire).as_ref() };
    }
    prepare()
}

#[cold]
fn prepare() -> Option<&'static Pager> {
    // SAFETY: reads a pointer variable of the C library.
    let environment_is_there = unsafe { !environ.is_null() };
    if !environment_is_there
        || STATE.compare_exchange(UNDECIDED, PREPARING, SeqCst, Relaxed).is_err()
    {
        return None;
    }
    let Some(board) = std::env::var_os(BOARD_VARIABLE).map(PathBuf::from) else {
        STATE.store(DISABLED, Release);
        return None;
    };
    match Pager::prepare(&board) {
        Ok(pager) => {
            exec::remember();
            guest::prepare(pager);
            heap::configure();
            process::register_fork_handlers();
            PAGER.store(std::ptr::from_ref(pager).cast_mut(), Release);
            STATE.store(READY, Release);
            add_early_mappings(pager);
            Some(pager)
        }
        Err(error) => farpool_pager::abort::fail_closed(&format!(
            "this process cannot be held to its limit: {error}"
        )),
    }
}

fn note_early_mapping(start: usize, end: usize) {
    if STATE.load(Acquire) == DISABLED {
        return;
    }
    let index = EARLY_COUNT.fetch_add(1, SeqCst);
    if let Some((early_start, early_end)) = EARLY.get(index) {
        early_start.store(start, Relaxed);
        early_end.store(end, Release);
    }
}

fn add_early_mappings(pager: &'static Pager) {
    let count = EARLY_COUNT.load(SeqCst).min(EARLY_MAPPINGS);
    for (start, end) in &EARLY[..count] {
        let (start, end) = (start.load(Relaxed), end.load(Acquire));
        if start < end {
            pager.add(start, end);
        }
    }
}

fn set_errno(errno: i32) {
    // SAFETY: the C library's errno location of the calling thread.
    unsafe { *libc::__errno_location() = errno }
}

/// A system call's result as the C library's functions return it (errno is already set).
#[expect(clippy::cast_possible_truncation, reason = "as the C library does")]
fn status(result: libc::c_long) -> libc::c_int {
    result as libc::c_int
}
