//! The pager in the program: what the keeper asks of it on the control socket.
//!
//! MAKE, with /dev/userfaultfd: a userfaultfd of this address space is made and a duplicate sent back; the keeper,
//! which has the right, shakes hands on it. START, with the board: paging begins, and goes on until LEAVE.
//!
//! What happens later is told without having been asked: SAY (a message for people), PROMPT and CALM (a
//! thread asks for real-time priority, or gives it up), CHILD (with a child's userfaultfd, to be kept until
//! SETTLED), READY (the program's memory is registered, or watched and far from the limit), LEFT, STUCK,
//! FAILED, or GONE when the program has ended or runs another image.
//!
//! When the keeper ends, nobody else holds the userfaultfd any more: if this process then died, too, the program would
//! read zeros. So the program is ended with it (START) or left, with all its memory (START STAYING).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use farpool_pager::attached::{Attached, Attachment, Children};
use farpool_pager::steward::Left;
use farpool_uffd::{Uffd, features};
use rustix::net::SendFlags;

use crate::{CONTROL_FD, control, own_ranges};

/// The userfaultfd between MAKE and START.
static MADE: Mutex<Option<(OwnedFd, Uffd)>> = Mutex::new(None);
static ATTACHED: OnceLock<&'static Attached> = OnceLock::new();
/// The program outlives its keeper.
static STAYS: AtomicBool = AtomicBool::new(false);
static HAS_LEFT: AtomicBool = AtomicBool::new(false);

/// The keeper holds on to what a child waits for.
const CHILDREN: Children = Children {
    born: |uffd| {
        control::reply(control_socket(), Ok(("CHILD".into(), uffd.try_clone().ok())));
    },
    settled: || tell("SETTLED"),
};

/// Whether a child of the program still has to get pages from here.
pub fn owes_children() -> bool {
    ATTACHED.get().is_some_and(|attached| attached.owes_children())
}

/// Makes a userfaultfd; the answer's descriptor is a duplicate.
pub fn make(device: Option<OwnedFd>) -> Result<OwnedFd, String> {
    let device = device.ok_or("MAKE wants a descriptor of /dev/userfaultfd")?;
    let refused = |error: std::io::Error| {
        format!("the kernel makes no userfaultfd from /dev/userfaultfd for this program: {error}")
    };
    let made = Uffd::make(device.as_fd(), true).map_err(refused)?;
    let drain = Uffd::make(device.as_fd(), true).map_err(refused)?;
    let drain = Uffd::shake_hands(drain, features::MOVE).map_err(|error| error.to_string())?;
    let duplicate = made.try_clone().map_err(|error| format!("a duplicate: {error}"))?;
    *MADE.lock().unwrap_or_else(PoisonError::into_inner) = Some((made, drain));
    Ok(duplicate)
}

/// Starts paging for the program `host`. STAYING: it outlives its keeper. NICE: the keeper gives threads the policy that
/// they ask for.
pub fn start(host: i32, board: Option<OwnedFd>, words: &str) -> Result<(), String> {
    let has = |wanted| words.split(' ').any(|word| word == wanted);
    STAYS.store(has("STAYING"), SeqCst);
    let board = board.ok_or("START wants a descriptor of the board")?;
    let made = MADE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (made, drain) = made.ok_or("MAKE comes before START")?;
    let program = u32::try_from(host).map_err(|_| "the program has no process id")?;
    let uffd = Uffd::adopt_with(made, features::PAGER | features::EVENTS);
    let own_ranges = || own_ranges().into_iter().map(|span| (span.start, span.end)).collect();
    let attachment = Attachment { board, uffd, drain, program, own_ranges, children: CHILDREN };
    let attached = Attached::prepare(attachment).map_err(|error| error.to_string())?;
    farpool_pager::sys::set_sayer(|message| tell(&format!("SAY {message}")));
    if has("NICE") {
        farpool_pager::sys::set_broker(|thread, prompt| {
            tell(&format!("{} {thread}", if prompt { "PROMPT" } else { "CALM" }));
        });
    }
    ATTACHED.set(attached).map_err(|_| "it was started already")?;
    let body = Box::new(move || tell(&end_of(attached)));
    let begun: Result<Arc<_>, _> = farpool_pager::sys::spawn(c"farpool-steward", false, body);
    begun.map(|_| ()).map_err(|error| format!("the steward's thread cannot be started: {error}"))
}

/// The keeper has ended, with its end of the control socket.
pub fn keeper_has_ended() {
    if ATTACHED.get().is_none() {
        HAS_LEFT.store(true, SeqCst);
    } else if !STAYS.load(SeqCst) || leave().is_err() {
        farpool_pager::sys::say("farpool has ended, and the program with it");
        farpool_pager::sys::kill_program();
    }
}

/// Whether the program was left as it was.
pub fn has_left() -> bool {
    HAS_LEFT.load(SeqCst)
}

/// Has everything brought in and the program left as it was.
pub fn leave() -> Result<(), String> {
    ATTACHED.get().map(|attached| attached.leave()).ok_or_else(|| "nothing was started".into())
}

/// All memory that is not the program's.
pub fn ranges() -> Vec<(usize, usize)> {
    match ATTACHED.get() {
        Some(attached) => attached.all_own_ranges(),
        None => own_ranges().into_iter().map(|span| (span.start, span.end)).collect(),
    }
}

fn end_of(attached: &'static Attached) -> String {
    match attached.serve(|| tell("READY")) {
        Ok(Left::Clean) => {
            HAS_LEFT.store(true, SeqCst);
            "LEFT".into()
        }
        Ok(Left::Stuck { pages }) => format!("STUCK {pages}"),
        Err(error) => format!("FAILED {error}"),
    }
}

/// Tells the keeper, if there is one.
pub fn tell(message: &str) {
    let _ = rustix::net::send(control_socket(), message.as_bytes(), SendFlags::NOSIGNAL);
}

fn control_socket() -> BorrowedFd<'static> {
    // SAFETY: the control socket stays open for the life of the sidecar.
    unsafe { BorrowedFd::borrow_raw(CONTROL_FD) }
}
