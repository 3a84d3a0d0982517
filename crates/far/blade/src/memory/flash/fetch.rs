//! Pages on their way from flash. Each of the blade's threads reads for its own connections, so
//! that no other has to run before a page is sent.

use super::buffers::Buffers;
use super::file::DATA_AT_BYTES;
use super::residence::{Landing, OnWay};
use super::tier::{OnRing, Tier, TieredSuperpage, neighbours, page_of, version_of};
use crate::memory::given::Paged;
use crate::memory::room::Threads;
use farpool_disk::{Ended, Ring};
use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Reads of one thread under way at most, and their pages (8 MiB of memory); more wait their turn.
const READS: usize = 256;
const PAGES_READ: u64 = 2048;
/// With a read under way for longer than this, further ones are begun by a thread of the kernel's:
/// a file system may have its caller wait for a disk that hangs.
const SLOW: Duration = Duration::from_millis(50);

/// One thread's reads of flash.
pub(crate) struct Fetcher {
    tier: Arc<Tier>,
    /// Its number among the blade's threads.
    thread: usize,
    ring: Ring,
    next_token: u64,
    on_ring: HashMap<u64, (OnRing, Instant)>,
    pages_read: u64,
    buffers: Buffers,
    ended: Vec<Ended>,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetcher").field("thread", &self.thread).finish_non_exhaustive()
    }
}

impl Fetcher {
    /// # Errors
    /// The system's: too little memory, or too few descriptors.
    pub(super) fn new(tier: Arc<Tier>, thread: usize) -> io::Result<Fetcher> {
        Ok(Fetcher {
            ring: tier.flash.ring()?,
            tier,
            thread,
            next_token: 0,
            on_ring: HashMap::new(),
            pages_read: 0,
            buffers: Buffers::default(),
            ended: Vec::new(),
        })
    }

    pub(in crate::memory) fn thread(&self) -> usize {
        self.thread
    }

    /// The descriptor that becomes readable when pages have arrived.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.ring.bell()
    }

    /// Begins to read pages whose residence knows of it. False if it cannot be done now: it knows
    /// no more of it then, and the thread is woken when it is worth another try.
    pub(super) fn fetch(&mut self, superpage: &Arc<TieredSuperpage>, pages: &[OnWay]) -> bool {
        let is_busy = self.on_ring.len() >= READS || self.pages_read >= PAGES_READ;
        // Whoever is busy is woken by what is under way.
        if is_busy || !self.tier.take_room_to_read(pages.len() as u64, self.thread) {
            let mut residence = superpage.residence();
            residence.cancel_fetch(pages);
            let waiting = residence.take_waiting().without(self.thread);
            drop(residence);
            self.tier.room.wake(waiting);
            return false;
        }
        for run in neighbours(pages) {
            self.read(superpage, run);
        }
        true
    }

    /// Submits what [`Self::fetch`] has begun.
    pub(super) fn submit(&mut self) {
        self.ring.submit();
    }

    fn read(&mut self, superpage: &Arc<TieredSuperpage>, pages: &[OnWay]) {
        let Some(buffer) = self.buffers.take(pages.len()) else {
            // Nothing is under way that would wake this thread, either.
            let waiting = self.land(superpage, pages, None);
            self.tier.room.wake(waiting);
            return;
        };
        let now = Instant::now();
        let is_slow = self.on_ring.values().any(|(_, began)| now - *began > SLOW);
        let offset = DATA_AT_BYTES + superpage.offset_bytes(pages[0].page);
        self.next_token += 1;
        let read = if is_slow { Ring::read } else { Ring::read_at_once };
        read(&mut self.ring, buffer, offset, pages.len(), self.next_token);
        self.pages_read += pages.len() as u64;
        let on_ring = OnRing { superpage: Arc::clone(superpage), pages: pages.to_vec() };
        self.on_ring.insert(self.next_token, (on_ring, now));
    }

    /// Puts what has arrived where it is waited for.
    pub(crate) fn poll(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        self.ring.poll(&mut ended);
        for Ended { token, pages: mut buffer, is_ok } in ended.drain(..) {
            if let Some((OnRing { superpage, pages }, _)) = self.on_ring.remove(&token) {
                self.pages_read -= pages.len() as u64;
                let bytes = if is_ok { Some(buffer.bytes_mut()) } else { None };
                let waiting = self.land(&superpage, &pages, bytes);
                self.tier.room.wake(waiting.without(self.thread));
            }
            self.buffers.put(buffer);
        }
        self.ended = ended;
    }

    /// Puts pages that have arrived in their place; None if they could not be read. Returns who
    /// waits for them.
    fn land(&self, at: &TieredSuperpage, pages: &[OnWay], mut bytes: Option<&mut [u8]>) -> Threads {
        let (mut taken, mut failed) = (0, 0);
        for (index, it) in pages.iter().enumerate() {
            let page = bytes.as_deref_mut().and_then(|bytes| page_of(bytes, index));
            let opened = page.and_then(|page| {
                at.key().open(version_of(it), page, &it.tag).ok().map(|()| &*page)
            });
            let mut residence = at.residence();
            match residence.end_fetch(it, opened.is_some()) {
                Landing::Taken => {
                    // Under the lock: whoever finds it in memory finds its bytes.
                    if let Some(page) = opened {
                        at.slice(&(it.page..it.page + 1)).fill(page);
                    }
                    taken += 1;
                }
                Landing::Failed => failed += 1,
                Landing::Dropped => {}
            }
        }
        self.tier.room.give_back(pages.len() as u64 - taken);
        self.tier.counters.pages_fetched.fetch_add(taken, Ordering::Relaxed);
        if failed > 0 {
            self.tier.counters.pages_failed.fetch_add(failed, Ordering::Relaxed);
            self.tier.say_failed(failed, bytes.is_some());
        }
        at.residence().take_waiting()
    }
}
