//! The sidecar: a program that the injector starts inside another program's address space.
//!
//! It is a static position-independent executable of its own: own C library, own thread-local
//! storage, own descriptors, own signals. What it shares is the address space, so:
//! - it never moves the break (see `libc_memory`), and maps nothing that it does not record;
//! - it leaves at once, touching nothing, when the program ends or runs another image.
//!
//! Built without `-C target-feature=+crt-static` (as part of the workspace, for tests and lints) it
//! is an ordinary program that says what it is for. `farpool-sidecar-image` makes the real one.
#![allow(unreachable_pub, reason = "a program: nothing leaves the crate")]
#![cfg_attr(not(test), no_main)]
#![cfg_attr(any(test, not(target_feature = "crt-static")), allow(dead_code))]

mod bereft;
mod control;
mod dialing;
mod heap;
mod libc_memory;
mod lock;
mod paging;
mod raw;
mod reply;
mod spans;
mod warden;
mod watch;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_kernel::fill_random;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::paging::Progress;
use crate::spans::Span;
use crate::watch::Host;

#[global_allocator]
static GLOBAL: heap::Heap = heap::Heap;

/// Descriptor at which the injector places the control socket.
const CONTROL_FD: RawFd = 3;
/// Descriptor at which the injector places a pidfd of the program.
const HOST_FD: RawFd = 4;
/// The injector's variable with the program's process id, as seen from the sidecar.
const HOST_VARIABLE: &str = "FARPOOL_SIDECAR_HOST";
/// The injector's variable with the addresses of image and first stack, START-END in hexadecimal.
const SPAN_VARIABLE: &str = "FARPOOL_SIDECAR_SPAN";
/// How often an exec is checked for; the old image's memory stays for at most this long.
const EXEC_LOOK_NS: i64 = 5_000_000;
/// How often the children of an ended program are checked for missing pages.
const CHILDREN_LOOK: std::time::Duration = std::time::Duration::from_millis(2);
/// Exit codes, seen by the process that reaps the sidecar.
const EXIT_DONE: i32 = 0;
const EXIT_NOT_INJECTED: i32 = 2;

/// The word by which an address space is recognized (see `watch`).
static SECRET: AtomicU64 = AtomicU64::new(0);

/// All present addresses of the sidecar: a pager must leave them alone.
fn own_ranges() -> Vec<Span> {
    // Allocated first: an allocation under the table's lock would deadlock.
    let mut copy = Vec::with_capacity(spans::CAPACITY);
    raw::OWN.with(|own| copy.extend_from_slice(own.spans()));
    copy
}

fn parse_span(text: &str) -> Option<Span> {
    let (start, end) = text.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    Some(Span { start: number(start)?, end: number(end)? })
}

/// The program, from the injector's variables. None for a sidecar started by hand.
fn host() -> Option<Host> {
    let pid = std::env::var(HOST_VARIABLE).ok()?.parse().ok()?;
    let span = parse_span(&std::env::var(SPAN_VARIABLE).ok()?)?;
    raw::OWN.with(|own| own.add(span)).ok()?;
    let mut bytes = [0; 8];
    fill_random(&mut bytes).ok()?;
    let secret = u64::from_ne_bytes(bytes);
    SECRET.store(secret, Ordering::SeqCst);
    Some(Host { pid, address: SECRET.as_ptr() as usize, secret })
}

/// Reports a panic on the control socket (there is no terminal); then the process aborts.
fn tell_panics() {
    std::panic::set_hook(Box::new(|panic| {
        // SAFETY: the control socket stays open for the life of the sidecar.
        let socket = unsafe { BorrowedFd::borrow_raw(CONTROL_FD) };
        let text = format!("PANIC {panic}");
        let _ = rustix::net::send(socket, text.as_bytes(), rustix::net::SendFlags::NOSIGNAL);
    }));
}

/// Serves until the program is gone, or has been left after its keeper's end.
fn run(host: Host, control: OwnedFd, ended: &OwnedFd) -> ! {
    let (mut control, mut progress) = (Some(control), Progress::new());
    loop {
        let mut ready = vec![PollFd::new(ended, PollFlags::IN)];
        if let Some(control) = &control {
            ready.push(PollFd::new(control, PollFlags::IN));
        }
        let patience = Timespec { tv_sec: 0, tv_nsec: EXEC_LOOK_NS };
        let _ = poll(&mut ready, Some(&patience));
        let has_ended = !ready[0].revents().is_empty();
        let is_asked = ready.get(1).is_some_and(|control| !control.revents().is_empty());
        let is_over = has_ended || !host.shares_memory();
        let serve = |socket: &OwnedFd| control::serve(socket.as_fd(), host);
        if is_asked && control.as_ref().is_some_and(|socket| !serve(socket)) {
            control = None;
            paging::keeper_has_ended();
        }
        if warden::is_missing() {
            control::replace_warden(paging::control_socket(), host);
        }
        if is_over && paging::owes_children() {
            // They would read zeros instead of their pages.
            paging::finish_children();
            progress.tell();
            std::thread::sleep(CHILDREN_LOOK);
            continue;
        }
        if is_over {
            // An orderly end: a keeper that is not told takes it for a failure, and ends the
            // program.
            paging::tell("GONE");
            warden::dismiss();
            raw::leave(EXIT_DONE);
        }
        if control.is_none() && paging::has_left() {
            warden::dismiss();
            raw::leave(EXIT_DONE);
        }
    }
}

fn start() -> i32 {
    let Some(host) = host() else {
        eprintln!("farpool-sidecar is started by farpool inside another program, not by hand");
        return EXIT_NOT_INJECTED;
    };
    tell_panics();
    let control = raw::placed_descriptor(CONTROL_FD);
    let ended = raw::placed_descriptor(HOST_FD);
    run(host, control, &ended)
}

/// C's main: Rust's own start-up would install signal handlers and check the standard streams.
#[cfg(not(test))]
#[unsafe(no_mangle)]
extern "C" fn main(_argc: i32, _argv: *const *const u8, _environment: *mut *mut u8) -> i32 {
    #[cfg(feature = "injected")]
    raw::read_vector(_environment);
    start()
}
