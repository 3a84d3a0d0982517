//! The pager in the program: the keeper's requests to it on the control socket.
//!
//! DIALER, before all others: connections to blades are requested on its socket
//! ([`crate::dialing`]).
//!
//! MAKE, with /dev/userfaultfd: a userfaultfd of this address space is made and a duplicate
//! returned; the keeper, which has the right, does its handshake. START, with the board: paging
//! begins, and goes on until LEAVE.
//!
//! A program that was forked from one with a sidecar has a userfaultfd already. Between MAKE and
//! START: CLAIM, with the userfaultfd of some child, asks whether it is this program's (MINE or
//! OTHER). If so, the keeper has the parent's sidecar CEDE the child by its number, and passes the
//! answer on with INHERIT; or sends DISCLAIM if it was too late. Once the child's sidecar serves
//! it, it sends TAKEN, which the keeper passes on; or the keeper sends RETURN, if the sidecar
//! failed.
//!
//! STANDING, after STANDSTILL was sent: the program stands still. The answer is MOVED when it may
//! go on, or PASSED if the standstill is no longer wanted.
//!
//! PAGEMAP and MEMORY, before START: descriptors of /proc/PID/pagemap and mem, where this process
//! may not open its own (a program that has changed its user is not dumpable, and its files in
//! /proc are root's).
//!
//! WARD, once and before START: a process is made that takes over when this one is killed
//! ([`crate::warden`]); the answer's descriptor is a pidfd of it. DISMISS ends it: nothing is left
//! to keep.
//!
//! Later events are reported unasked: SAY (a message for people), PROMPT and CALM (a thread asks
//! for real-time priority, or gives it up), CHILD with a number (and a child's userfaultfd, to be
//! kept until SETTLED arrives with the same number), WARDEN (with a pidfd: there is a new one),
//! TAKEN, STANDSTILL (the program is to stand still for a moment), READY (the program's memory is
//! registered, or watched and far from the limit), LEFT, STUCK, FAILED, FINISHING (the program has
//! ended, and its children are getting their pages), or GONE when the program has ended or runs
//! another image.
//!
//! When the keeper ends, no other process holds the userfaultfd any more: if this process then
//! died, too, the program would read zeros. So the program is ended with it (START) or left, with
//! all its memory (START STAYING).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_pager::life::attached::{Attached, Attachment};
use farpool_pager::life::children::{Children, Keeper, child};
use farpool_pager::life::steward::Left;
use farpool_uffd::{Uffd, features};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

use crate::reply::reply;
use crate::{CONTROL_FD, own_ranges};

/// How often, and after what pause, a userfaultfd is asked again while its owner changes its
/// address space.
const MOST_CLAIMS: u32 = 100;
const CLAIM_STEP: Duration = Duration::from_millis(1);

/// How often the keeper is told that children get their pages, while it waits for that.
const PROGRESS_STEP: Duration = Duration::from_secs(1);

/// The userfaultfd between MAKE and START.
static MADE: Mutex<Option<OwnedFd>> = Mutex::new(None);
/// The program's userfaultfd since the fork, and where its pages are.
static CLAIMED: Mutex<Option<OwnedFd>> = Mutex::new(None);
static INHERITED: Mutex<Option<OwnedFd>> = Mutex::new(None);
/// Files of this process in /proc that the keeper has opened.
static PAGEMAP: Mutex<Option<OwnedFd>> = Mutex::new(None);
static MEMORY: Mutex<Option<OwnedFd>> = Mutex::new(None);
static ATTACHED: OnceLock<&'static Attached> = OnceLock::new();
/// The program outlives its keeper.
static STAYS: AtomicBool = AtomicBool::new(false);
static HAS_LEFT: AtomicBool = AtomicBool::new(false);

/// Has the keeper hold the userfaultfds of children that wait for pages.
const KEEPER: Keeper = Keeper {
    born: |number, uffd| {
        reply(control_socket(), Ok((format!("CHILD {number}"), uffd.try_clone().ok())));
    },
    settled: |number| tell(&format!("SETTLED {number}")),
    taken: || tell("TAKEN"),
    standstill: || tell("STANDSTILL"),
};

/// True if the program or a child of it would read zeros without a server. Allocates nothing.
pub fn may_owe_pages() -> bool {
    !HAS_LEFT.load(SeqCst) && ATTACHED.get().is_some_and(|attached| attached.may_owe_pages())
}

/// True if a child of the program still has to get pages from here.
pub fn owes_children() -> bool {
    ATTACHED.get().is_some_and(|attached| attached.owes_children())
}

/// Makes a userfaultfd. Returns a duplicate.
pub fn make(device: Option<OwnedFd>) -> Result<OwnedFd, String> {
    let device = device.ok_or("MAKE wants a descriptor of /dev/userfaultfd")?;
    let refused = |error: std::io::Error| {
        format!("the kernel makes no userfaultfd from /dev/userfaultfd for this program: {error}")
    };
    let made = Uffd::make(device.as_fd(), true).map_err(refused)?;
    let duplicate = made.try_clone().map_err(|error| format!("a duplicate: {error}"))?;
    *lock(&MADE) = Some(made);
    Ok(duplicate)
}

/// Keeps the page map, opened by the keeper.
pub fn keep_pagemap(file: Option<OwnedFd>) -> Result<(), String> {
    put(&PAGEMAP, file.ok_or("PAGEMAP wants a descriptor")?);
    Ok(())
}

/// Keeps the memory file, opened by the keeper.
pub fn keep_memory(file: Option<OwnedFd>) -> Result<(), String> {
    put(&MEMORY, file.ok_or("MEMORY wants a descriptor")?);
    Ok(())
}

/// True if a userfaultfd, which some process got by fork, is this program's: then it is kept.
pub fn claim(uffd: Option<OwnedFd>) -> Result<bool, String> {
    let uffd = Uffd::adopt(uffd.ok_or("CLAIM wants a userfaultfd")?);
    for _ in 0..MOST_CLAIMS {
        match uffd.is_of_caller() {
            Some(false) => return Ok(false),
            Some(true) => {
                put(&CLAIMED, uffd.into_descriptor());
                return Ok(true);
            }
            None => std::thread::sleep(CLAIM_STEP),
        }
    }
    // No process reads its events: so it is not this program's, which would be served.
    Ok(false)
}

/// Drops the claimed userfaultfd, which cannot be had after all.
pub fn disclaim() {
    drop(take(&CLAIMED));
}

/// Keeps the place of the pages of the program whose userfaultfd was claimed.
pub fn inherit(memory: Option<OwnedFd>) -> Result<(), String> {
    put(&INHERITED, memory.ok_or("INHERIT wants memory with a handover")?);
    Ok(())
}

/// Prepares a child of the program for a sidecar of its own. Returns what that sidecar needs.
pub fn cede(number: &str) -> Result<OwnedFd, String> {
    children()?.cede(number_of(number)?)
}

/// Records that a child's own sidecar serves it.
pub fn taken(number: &str) -> Result<(), String> {
    children()?.has_been_taken(number_of(number)?);
    Ok(())
}

/// Takes a child back whose own sidecar has failed.
pub fn take_back(number: &str) -> Result<(), String> {
    children()?.take_back(number_of(number)?);
    Ok(())
}

/// Tells the keeper now and then that children get their pages: else it would take the sidecar for
/// dead.
#[derive(Debug)]
pub struct Progress {
    told: Instant,
    fills: u64,
}

impl Progress {
    pub fn new() -> Progress {
        Progress { told: Instant::now(), fills: 0 }
    }

    pub fn tell(&mut self) {
        let fills = child::fills();
        if fills != self.fills && self.told.elapsed() >= PROGRESS_STEP {
            (self.told, self.fills) = (Instant::now(), fills);
            tell("FINISHING");
        }
    }
}

/// Gives all children of the program all pages that they lack.
pub fn finish_children() {
    if let Some(attached) = ATTACHED.get() {
        attached.finish_children();
    }
}

fn children() -> Result<&'static Children, String> {
    ATTACHED.get().map(|attached| attached.children()).ok_or_else(|| "nothing was started".into())
}

fn number_of(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text} is no child's number"))
}

fn put(place: &Mutex<Option<OwnedFd>>, descriptor: OwnedFd) {
    *lock(place) = Some(descriptor);
}

fn take(place: &Mutex<Option<OwnedFd>>) -> Option<OwnedFd> {
    lock(place).take()
}

/// Starts paging for the program `host`. STAYING: it outlives its keeper. NICE: the keeper gives
/// threads the policy that they ask for. EXECUTES: seccomp filters allow executable memory.
/// PROGRAM=PID:TICKS: the program's process id for the keeper, and its start time.
pub fn start(host: i32, board: Option<OwnedFd>, words: &str) -> Result<(), String> {
    let has = |wanted| words.split(' ').any(|word| word == wanted);
    STAYS.store(has("STAYING"), SeqCst);
    let board = board.ok_or("START wants a descriptor of the board")?;
    let made = lock(&MADE).take();
    let made = made.ok_or("MAKE comes before START")?;
    let program = u32::try_from(host).map_err(|_| "the program has no process id")?;
    if let Some((pid, ticks)) = words.split(' ').find_map(program_to_keeper) {
        farpool_pager::sys::set_program_to_keeper(pid, ticks);
    }
    let (claimed, inherited) = (take(&CLAIMED), take(&INHERITED));
    // Both or neither: the place of pages is of no use without the userfaultfd of their memory.
    let (uffd, inherited) = match (claimed, inherited) {
        (Some(claimed), Some(memory)) => (claimed, Some(memory)),
        _ => (made, None),
    };
    let uffd = Uffd::adopt_with(uffd, features::PAGER | features::EVENTS);
    let own_ranges = || own_ranges().into_iter().map(|span| (span.start, span.end)).collect();
    let (pagemap, memory) = (take(&PAGEMAP), take(&MEMORY));
    let keeper = KEEPER;
    let may_execute = has("EXECUTES");
    let attachment = Attachment {
        board,
        uffd,
        program,
        own_ranges,
        keeper,
        inherited,
        pagemap,
        memory,
        may_execute,
    };
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

fn program_to_keeper(word: &str) -> Option<(u32, u64)> {
    let (pid, ticks) = word.strip_prefix("PROGRAM=")?.split_once(':')?;
    Some((pid.parse().ok()?, ticks.parse().ok()?))
}

/// Handles the end of the keeper, and of its end of the control socket.
pub fn keeper_has_ended() {
    if ATTACHED.get().is_none() {
        HAS_LEFT.store(true, SeqCst);
        return;
    }
    if !STAYS.load(SeqCst) || leave().is_err() {
        farpool_pager::sys::say("farpool has ended, and the program with it");
        farpool_pager::sys::kill_program();
    }
    if let Some(attached) = ATTACHED.get() {
        attached.children().reclaim();
    }
}

/// True if the program was left as it was.
pub fn has_left() -> bool {
    HAS_LEFT.load(SeqCst)
}

/// Called while the program stands still; returns when it may go on. True if the standstill was
/// wanted.
pub fn stand_still() -> Result<bool, String> {
    let attached = ATTACHED.get().ok_or("nothing was started")?;
    let stood = attached.stand_still();
    // Without the keeper the program may have run while its memory had changed protection.
    if stood && has_hung_up() {
        farpool_pager::sys::say(
            "farpool has ended while the program stood still; it is ended, too",
        );
        farpool_pager::sys::kill_program();
    }
    Ok(stood)
}

/// True if the keeper's end of the control socket is closed.
fn has_hung_up() -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let socket = control_socket();
    let mut looked = [PollFd::new(&socket, PollFlags::empty())];
    poll(&mut looked, Some(&now)).is_ok() && looked[0].revents().contains(PollFlags::HUP)
}

/// Has all pages brought back and the program left as it was.
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
        Err(error) => {
            // Nothing was moved out: a sidecar without a keeper may end.
            HAS_LEFT.store(true, SeqCst);
            format!("FAILED {error}")
        }
    }
}

/// Sends a message to the keeper, if there is one.
pub fn tell(message: &str) {
    let _ = rustix::net::send(control_socket(), message.as_bytes(), SendFlags::NOSIGNAL);
}

/// The connection to the keeper, even after that has ended.
pub fn control_socket() -> BorrowedFd<'static> {
    // SAFETY: the control socket stays open for the life of the sidecar.
    unsafe { BorrowedFd::borrow_raw(CONTROL_FD) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_its_keepers_number() {
        assert_eq!(program_to_keeper("PROGRAM=7:100"), Some((7, 100)));
        for word in ["START", "PROGRAM=7", "PROGRAM=:1", "PROGRAM=-7:1"] {
            assert_eq!(program_to_keeper(word), None, "{word}");
        }
    }
}
