//! Serves guests that Firecracker restores: their page faults are answered from an image.
//!
//! Invariants:
//! - a guest never reads zeros where the image has a page: if one is lost, or this server ends
//!   first, the guest's process is killed before its userfaultfd is closed;
//! - the guest's userfaultfd is read by one thread, so what it drops and what it is given have one
//!   order.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use farpool_uffd::{Change, Message, Outcome, Uffd};
use farpool_units::{PAGE_BYTES, PAGE_BYTES_U64};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::guest::{Fill, Guest, Need};
use crate::socket::{Listening, Peer, SocketError, Stop, Talk, wait};
use crate::store::{Image, Reader, StoreError};
use crate::sys::close_descriptor;
use crate::wire::firecracker::{Incoming, Layout, MessageError};

/// How long a monitor may take for its message after it has connected: Firecracker sends it at
/// once. A connection that is silent for longer is closed.
const MESSAGE_TIME: Duration = Duration::from_secs(10);
/// Most guests that are served at once, each by a thread; a further one is turned away.
pub const GUESTS_MAX: usize = 256;
/// Events that are read at once.
const EVENTS: usize = 64;
/// Pages that are fetched at once for nobody: few, so that a fault waits for little.
const BEFOREHAND_PAGES: usize = 16;
/// Longest sleep while pages are under way: their deadline is looked at this often.
const FETCH_STEP: Duration = Duration::from_millis(5);
/// Sleep before a page is put again where the guest was just changing its memory.
const AGAIN_STEP: Duration = Duration::from_micros(100);

/// Why a guest is served no more.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the process that connected cannot be held: {0}; Linux 6.5 or newer can")]
    NoPeer(Errno),
    #[error("its message came without a userfaultfd; is backend_type Uffd?")]
    NoDescriptor,
    #[error("the descriptor in its message is no userfaultfd")]
    OtherDescriptor,
    #[error("it waits for address {address:#x}, which is in no region of its message")]
    Stranger { address: usize },
    #[error("its memory has moved or was shared with a child, which is not known of Firecracker")]
    Strange,
    #[error("its userfaultfd cannot be read: {0}")]
    Events(std::io::Error),
    #[error("a page could not be put into its memory: {0}")]
    NotFilled(std::io::Error),
    #[error("farpool stops, and {pages} pages of its memory are still here only")]
    Stopped { pages: u32 },
    #[error("there are {GUESTS_MAX} guests already")]
    TooMany,
}

/// How guests are served.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Gives a guest all pages, also those that it does not ask for. It is independent then.
    pub beforehand: bool,
}

/// What became of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Its process has ended.
    Gone,
    /// It has all its memory and needs nobody.
    Whole,
}

/// Serves all guests that connect until it is time to stop. `tell` is called with what the user
/// should know of each.
///
/// # Errors
/// No connection can be accepted any more.
pub fn serve(
    listening: &Listening,
    image: &Arc<Image>,
    options: Options,
    stop: &Stop,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<(), SocketError> {
    let guests = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        while let Some(socket) = listening.accept(stop)? {
            if guests.fetch_add(1, Ordering::Relaxed) >= GUESTS_MAX {
                guests.fetch_sub(1, Ordering::Relaxed);
                tell(&format!("a guest is turned away: {}", GuestError::TooMany));
                continue;
            }
            let guests = &guests;
            scope.spawn(move || {
                serve_one(&socket, image, options, stop, tell);
                guests.fetch_sub(1, Ordering::Relaxed);
            });
        }
        Ok(())
    })
}

/// Serves a guest to its end, and says what became of it.
fn serve_one(
    socket: &OwnedFd,
    image: &Arc<Image>,
    options: Options,
    stop: &Stop,
    tell: &(dyn Fn(&str) + Sync),
) {
    let peer = match Peer::of(socket) {
        Ok(peer) => peer,
        Err(error) => {
            return tell(&format!("a guest is not served: {}", GuestError::NoPeer(error)));
        }
    };
    let mut descriptors = Vec::new();
    let received = receive(socket, &mut descriptors, image, stop);
    let uffd = descriptors.into_iter().find(is_userfaultfd).map(Uffd::adopt);
    let (uffd, guest) = match (uffd, received) {
        (Some(uffd), Ok(guest)) => (uffd, guest),
        (Some(uffd), Err(error)) => return end(&peer, uffd, &error, tell),
        // It has given nothing away, so all that it lacks it waits for.
        (None, Err(error)) => return tell(&format!("{peer} is not served: {error}")),
        (None, Ok(_)) => {
            return tell(&format!("{peer} is not served: {}", GuestError::OtherDescriptor));
        }
    };
    tell(&format!("{peer} is served: {} pages", guest.owed_pages()));
    let served = image.reader().map_err(GuestError::from).and_then(|reader| {
        // Reading it must not block.
        rustix::fs::fcntl_setfl(&uffd, OFlags::NONBLOCK).map_err(SocketError::Failed)?;
        Serving { uffd: &uffd, guest, reader, fills: VecDeque::new(), peer: &peer, stop }
            .run(options)
    });
    match served {
        Ok(End::Gone) => tell(&format!("{peer} has ended")),
        Ok(End::Whole) => tell(&format!("{peer} has all of its memory")),
        Err(error) => end(&peer, uffd, &error, tell),
    }
}

/// Ends a guest that cannot be served any more. Only then is its userfaultfd closed: without one,
/// what it lacks reads as zeros.
fn end(peer: &Peer, uffd: Uffd, error: &GuestError, tell: &(dyn Fn(&str) + Sync)) {
    match peer.kill() {
        Ok(()) => {
            tell(&format!("{peer} is killed, for it must not read zeros: {error}"));
            wait(&[peer.as_fd()], None);
        }
        Err(errno) => {
            tell(&format!(
                "{peer} cannot be killed ({errno}): {error}; kill it before this process ends, for \
                 it must not read zeros"
            ));
            // It stays open as long as this process lives.
            std::mem::forget(uffd);
        }
    }
}

/// Receives a guest's message, and a descriptor with it. The bytes may come before that.
fn receive(
    socket: &OwnedFd,
    descriptors: &mut Vec<OwnedFd>,
    image: &Arc<Image>,
    stop: &Stop,
) -> Result<Guest, GuestError> {
    let talk = Talk { stop, patience: Some(MESSAGE_TIME) };
    let mut incoming = Incoming::default();
    let (mut piece, mut is_complete) = ([0; 4096], false);
    while !is_complete || descriptors.is_empty() {
        match talk.read_some(socket, &mut piece, descriptors)? {
            Some(count) => is_complete = incoming.take(&piece[..count])?,
            None if is_complete => return Err(GuestError::NoDescriptor),
            None => return Err(SocketError::Closed.into()),
        }
    }
    let image_bytes = u64::from(image.pages()) * PAGE_BYTES_U64;
    let layout = Layout::check(&incoming.regions()?, image_bytes)?;
    Ok(Guest::new(layout, image.present()))
}

fn is_userfaultfd(descriptor: &OwnedFd) -> bool {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    std::fs::read_link(path).is_ok_and(|it| it.as_os_str() == "anon_inode:[userfaultfd]")
}

/// A page that is to be put into a guest's memory.
#[derive(Clone, Copy, Debug)]
struct ToFill {
    page: u32,
    /// The reader's page that has its bytes; none if it is to be zeros.
    number: Option<usize>,
}

/// A guest that is being served.
#[derive(Debug)]
struct Serving<'a> {
    uffd: &'a Uffd,
    guest: Guest,
    reader: Reader,
    fills: VecDeque<ToFill>,
    peer: &'a Peer,
    stop: &'a Stop,
}

impl Serving<'_> {
    fn run(mut self, options: Options) -> Result<End, GuestError> {
        // Pages that are waited for and have found no room yet.
        let mut waiting = VecDeque::new();
        loop {
            if self.peer.is_gone() {
                return Ok(End::Gone);
            }
            self.read_events(&mut waiting)?;
            self.fetch(&mut waiting, options);
            let fetched = self.reader.poll(Instant::now())?;
            let filled =
                |it: &crate::store::Fetched| ToFill { page: it.page, number: Some(it.number) };
            self.fills.extend(fetched.iter().map(filled));
            if let Some(end) = self.fill()? {
                return Ok(end);
            }
            let is_whole = self.guest.is_whole() && self.fills.is_empty();
            if is_whole && self.let_go(&mut waiting)? {
                return Ok(End::Whole);
            }
            if self.stop.is_now() {
                return Err(GuestError::Stopped { pages: self.guest.owed_pages() });
            }
            self.sleep(options);
        }
    }

    /// Reads what the guest waits for, and what it drops.
    fn read_events(&mut self, waiting: &mut VecDeque<u32>) -> Result<(), GuestError> {
        let mut messages = [Message::default(); EVENTS];
        loop {
            let read = match self.uffd.read(&mut messages) {
                Ok(read) if !read.is_empty() => read,
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(GuestError::Events(error)),
            };
            for message in read {
                self.take(message, waiting)?;
            }
        }
    }

    fn take(&mut self, message: &Message, waiting: &mut VecDeque<u32>) -> Result<(), GuestError> {
        match message.change() {
            Some(Change::Removed { start, end } | Change::Unmapped { start, end }) => {
                self.guest.removed(start, end);
                return Ok(());
            }
            Some(Change::Forked { descriptor }) => {
                close_descriptor(descriptor);
                return Err(GuestError::Strange);
            }
            Some(Change::Moved { .. }) => return Err(GuestError::Strange),
            None => {}
        }
        let Some(address) = message.event().page_address else { return Ok(()) };
        match self.guest.fault(address).ok_or(GuestError::Stranger { address })? {
            Need::Fetch(page) => waiting.push_back(page),
            Need::Zero(page) => self.fills.push_back(ToFill { page, number: None }),
            Need::Nothing => {}
        }
        Ok(())
    }

    /// Begins to fetch what is waited for, and then what is not.
    fn fetch(&mut self, waiting: &mut VecDeque<u32>, options: Options) {
        let count = waiting.len().min(self.reader.room());
        let mut pages: Vec<u32> = waiting.drain(..count).collect();
        if options.beforehand && pages.is_empty() && !self.reader.is_busy() {
            let room = self.reader.room().min(BEFOREHAND_PAGES);
            pages.extend(std::iter::from_fn(|| self.guest.next_beforehand()).take(room));
        }
        if !pages.is_empty() {
            self.reader.fetch(&pages);
        }
    }

    /// Puts pages into the guest's memory. What the guest was just changing is left for later.
    fn fill(&mut self) -> Result<Option<End>, GuestError> {
        for _ in 0..self.fills.len() {
            let Some(it) = self.fills.pop_front() else { break };
            match self.put(it).errno {
                // EEXIST: it is there already. ENOENT: nothing is mapped there any more.
                None | Some(libc::EEXIST | libc::ENOENT) => {
                    self.guest.filled(it.page);
                    if let Some(number) = it.number {
                        self.reader.release(number);
                    }
                }
                // A change of the guest's memory is queued: it must be read before.
                Some(libc::EAGAIN) => self.fills.push_back(it),
                Some(libc::ESRCH) => return Ok(Some(End::Gone)),
                Some(errno) => {
                    let error = std::io::Error::from_raw_os_error(errno);
                    return Err(GuestError::NotFilled(error));
                }
            }
        }
        Ok(None)
    }

    fn put(&self, it: ToFill) -> Outcome {
        let outcome = match (self.guest.fill(it.page), it.number) {
            (Fill::Copy { address }, Some(number)) => {
                let from = self.reader.bytes(number).as_ptr() as usize;
                (address, self.uffd.copy(address, from, PAGE_BYTES, true))
            }
            (Fill::Zero { address }, _) => (address, self.uffd.zero(address, PAGE_BYTES, true)),
            // A page that is owed later on was owed before: it is never zeros.
            (Fill::Copy { .. }, None) => {
                return Outcome { done_bytes: 0, errno: Some(libc::EINVAL) };
            }
            (Fill::Nothing, _) => return Outcome { done_bytes: 0, errno: None },
        };
        if outcome.1.errno == Some(libc::EEXIST) {
            // Who waits for it looks again; if it fails, the process is gone.
            let _ = self.uffd.wake(outcome.0, PAGE_BYTES);
        }
        outcome.1
    }

    /// Leaves a guest to itself that has all its memory. False if it still needs this server, which
    /// then goes on.
    fn let_go(&mut self, waiting: &mut VecDeque<u32>) -> Result<bool, GuestError> {
        let regions = self.guest.layout().regions().to_vec();
        let leave = |it: &crate::wire::firecracker::Region| {
            self.uffd.unregister(it.start, it.bytes()).is_ok()
        };
        if !regions.iter().all(leave) {
            return Ok(false);
        }
        // Who has begun to drop memory waits until that is read.
        while self.uffd.is_changing() && !self.peer.is_gone() {
            self.read_events(waiting)?;
            wait(&[self.uffd.as_fd(), self.peer.as_fd()], Some(AGAIN_STEP));
        }
        self.read_events(waiting)?;
        Ok(true)
    }

    /// Sleeps until there is something to do.
    fn sleep(&self, options: Options) {
        let limit = match () {
            () if !self.fills.is_empty() => Some(AGAIN_STEP),
            () if self.reader.is_busy() => Some(FETCH_STEP),
            () if options.beforehand && self.guest.owed_pages() > 0 => Some(Duration::ZERO),
            () => None,
        };
        let mut all: Vec<BorrowedFd<'_>> =
            vec![self.uffd.as_fd(), self.peer.as_fd(), self.stop.as_fd()];
        all.extend(self.reader.descriptors());
        wait(&all, limit);
    }
}
