//! The store of the bytes. A [`Store`] makes a [`SegmentMemory`] per segment; both know nothing of
//! clients and rights.
//!
//! Kinds `memfd` and `anonymous` give each segment memory of its own, so that the kernel's zeroing
//! is the scrub and a memfd can be handed to a same-host client: it is sealed at its final size, so
//! the client cannot grow it past its quota. Kinds `file` and `hugetlb` cut one file, device or run
//! of huge pages into superpages, reserved at the start or when they are lent ([`Reserve`]):
//! touching a page that cannot be had would kill the blade. Those superpages are zeroed by hand, or
//! punched out of the file, when their last reader is gone.
//!
//! A memfd that was handed out stays intact as long as a process holds it: that process may read it
//! long after its lease expired, and must find what it wrote, not zeros. Each descriptor handed out
//! is an open file of its own, marked by a lock that lives as long as that open file does (copies,
//! forks and mappings included), so the blade can ask the kernel whether any is still held.
//!
//! With flash below it ([`flash`]) a segment's memory is its hot pages, and with packing ([`pack`])
//! those that are cold take less; there a read or write may have to wait ([`Placed::Away`]).
//!
//! Files and mappings are made when first needed: an empty segment takes no descriptor, and a
//! segment whose client copies by itself takes no address space of the blade's.

mod bits;
mod flash;
mod given;
mod own;
mod pack;
mod pool;
mod room;

use crate::config::{BackingKind, FlashConfig, PackConfig};
use crate::journal::MemoryFile;
use crate::sys::Slice;
use crate::table::{Access, Run, ScrubPart, SegmentImage};
use farpool_kernel::{read_lock, write_lock};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES, exactly};
pub use flash::FlashStat;
use flash::{Fetcher, Tier, TieredSuperpage};
use own::{OwnKind, OwnMemory};
pub(crate) use pack::Domain;
pub use pack::PackStat;
use pack::{PackedSuperpage, Packing};
use pool::{Pool, PoolSuperpage};
pub(crate) use pool::{Reserve, identity_at};
pub(crate) use room::THREADS_LIMIT;
use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, RwLock};

/// Keeps memory alive while its bytes are being moved.
pub(crate) type Keep = Arc<dyn Any + Send + Sync>;

/// Makes the memory of segments.
#[derive(Debug)]
pub struct Store(StoreKind);

#[derive(Debug)]
enum StoreKind {
    Own(OwnKind),
    Pooled(Arc<Pool>),
    Tiered(Arc<Tier>),
    Packed(Arc<Packing>),
}

/// What runs on a thread of its own while the blade serves.
#[derive(Debug)]
pub(crate) enum Engine {
    /// Moves pages to flash.
    Flash(Box<flash::Engine>),
    /// Packs pages.
    Pack(Box<pack::Packer>),
}

/// A thread of the blade that asks for pages.
#[derive(Debug)]
pub(crate) struct Caller {
    /// Its number among them.
    thread: usize,
    /// What it reads from flash with, if there is any.
    fetcher: Option<Fetcher>,
}

/// What became of pages that were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Placed {
    /// They are in memory, and stay there while what keeps them lives.
    Here,
    /// They come from flash, or wait for memory: the thread is woken when it is to ask again.
    Away,
}

/// The memory of one segment: a row of superpages, counted from 0 (RMMA).
#[derive(Debug)]
pub struct SegmentMemory(SegmentKind);

#[derive(Debug)]
enum SegmentKind {
    Own(OwnMemory),
    Pooled(PooledMemory),
    Tiered(TieredMemory),
    Packed(PackedMemory),
}

#[derive(Debug)]
struct PooledMemory {
    pool: Arc<Pool>,
    slots: Slots<PoolSuperpage>,
}

/// A segment's superpages above flash.
#[derive(Debug)]
struct TieredMemory {
    tier: Arc<Tier>,
    slots: Slots<TieredSuperpage>,
}

/// A segment's superpages whose cold pages are packed.
#[derive(Debug)]
struct PackedMemory {
    packing: Arc<Packing>,
    domain: Domain,
    slots: Slots<PackedSuperpage>,
}

impl Engine {
    /// Runs until the store ends.
    pub(crate) fn run(self) {
        match self {
            Engine::Flash(engine) => engine.run(),
            Engine::Pack(packer) => packer.run(),
        }
    }

    /// What its thread is called.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Engine::Flash(_) => "fp-blade-flash",
            Engine::Pack(_) => "fp-blade-pack",
        }
    }
}

impl Caller {
    /// The descriptor that becomes readable when pages have arrived; None without flash.
    pub(crate) fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.fetcher.as_ref().map(Fetcher::bell)
    }

    /// Whether it is worth asking for pages long before they are sent.
    pub(crate) fn may_look_ahead(&self) -> bool {
        self.fetcher.is_some()
    }

    /// Puts what has arrived where it is waited for.
    pub(crate) fn poll(&mut self) {
        if let Some(fetcher) = &mut self.fetcher {
            fetcher.poll();
        }
    }
}

impl Store {
    /// Opens the store. A file is made `capacity_bytes` long; a device must be.
    ///
    /// # Errors
    /// The file or device cannot be opened, locked, extended or mapped.
    pub(crate) fn open(
        kind: &BackingKind,
        capacity_bytes: u64,
        reserve: Reserve,
    ) -> io::Result<Store> {
        Ok(Store(match kind {
            BackingKind::Memfd | BackingKind::Automatic => StoreKind::Own(OwnKind::Memfd),
            BackingKind::Anonymous => StoreKind::Own(OwnKind::Anonymous),
            BackingKind::Hugetlb => StoreKind::Pooled(Arc::new(Pool::huge_pages(capacity_bytes)?)),
            BackingKind::File(path) => {
                StoreKind::Pooled(Arc::new(Pool::open(path, capacity_bytes, reserve)?))
            }
        }))
    }

    /// Opens a store of `superpages` on flash, of which `memory_bytes` may be in memory; and what
    /// is to run on a thread of its own.
    ///
    /// # Errors
    /// There is too little memory, or the flash is of no use.
    pub(crate) fn open_flash(
        config: &FlashConfig,
        superpages: u32,
        memory_bytes: u64,
    ) -> io::Result<(Store, Engine)> {
        let (tier, engine) = flash::open(config, superpages, memory_bytes)?;
        Ok((Store(StoreKind::Tiered(tier)), Engine::Flash(Box::new(engine))))
    }

    /// Opens a store of `superpages` that take at most `memory_bytes`, as they are packed; and what
    /// is to run on a thread of its own.
    ///
    /// # Errors
    /// There is too little memory, or the system's.
    pub(crate) fn open_packed(
        config: &PackConfig,
        superpages: u32,
        memory_bytes: u64,
    ) -> io::Result<(Store, Engine)> {
        let (packing, packer) = pack::open(config, superpages, memory_bytes)?;
        Ok((Store(StoreKind::Packed(packing)), Engine::Pack(Box::new(packer))))
    }

    /// Names the descriptors that wake the threads which ask for pages, by the threads' numbers.
    pub(crate) fn wakes(&self, threads: Vec<OwnedFd>) {
        match &self.0 {
            StoreKind::Own(_) | StoreKind::Pooled(_) => {}
            StoreKind::Tiered(tier) => tier.room.wakes(threads),
            StoreKind::Packed(packing) => packing.room.wakes(threads),
        }
    }

    /// What the thread of this number asks for pages with.
    ///
    /// # Errors
    /// The system's: too little memory, or too few descriptors.
    pub(crate) fn caller(&self, thread: usize) -> io::Result<Caller> {
        let fetcher = match &self.0 {
            StoreKind::Tiered(tier) => Some(flash::fetcher(tier, thread)?),
            StoreKind::Own(_) | StoreKind::Pooled(_) | StoreKind::Packed(_) => None,
        };
        Ok(Caller { thread, fetcher })
    }

    /// Ends what runs on a thread of its own.
    pub(crate) fn end(&self) {
        match &self.0 {
            StoreKind::Own(_) | StoreKind::Pooled(_) => {}
            StoreKind::Tiered(tier) => tier.end(),
            StoreKind::Packed(packing) => packing.end(),
        }
    }

    /// What flash did, if there is any.
    pub(crate) fn flash_stat(&self) -> Option<FlashStat> {
        match &self.0 {
            StoreKind::Tiered(tier) => Some(tier.stat()),
            StoreKind::Own(_) | StoreKind::Pooled(_) | StoreKind::Packed(_) => None,
        }
    }

    /// What is packed, if anything may be.
    pub(crate) fn pack_stat(&self) -> Option<PackStat> {
        match &self.0 {
            StoreKind::Packed(packing) => Some(packing.stat()),
            StoreKind::Own(_) | StoreKind::Pooled(_) | StoreKind::Tiered(_) => None,
        }
    }

    /// Memory for a segment of at most `superpages` superpages. Where pages are packed, those of a
    /// domain share what is equal.
    pub(crate) fn segment(&self, superpages: u32, domain: Domain) -> SegmentMemory {
        SegmentMemory(match &self.0 {
            StoreKind::Own(kind) => SegmentKind::Own(OwnMemory::new(*kind, superpages)),
            StoreKind::Pooled(pool) => SegmentKind::Pooled(PooledMemory {
                pool: Arc::clone(pool),
                slots: RwLock::default(),
            }),
            StoreKind::Tiered(tier) => SegmentKind::Tiered(TieredMemory {
                tier: Arc::clone(tier),
                slots: RwLock::default(),
            }),
            StoreKind::Packed(packing) => SegmentKind::Packed(PackedMemory {
                packing: Arc::clone(packing),
                domain,
                slots: RwLock::default(),
            }),
        })
    }

    /// The file or device, and whether this process made it. None if the memory is no longer than
    /// this process.
    pub(crate) fn identity(&self) -> Option<(MemoryFile, bool)> {
        match &self.0 {
            StoreKind::Own(_) | StoreKind::Tiered(_) | StoreKind::Packed(_) => None,
            StoreKind::Pooled(pool) => Some(pool.identity()),
        }
    }

    /// The memory of a segment as an earlier process left it.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`]: it has superpages that this store has not, or twice.
    pub(crate) fn restore_segment(&self, image: &SegmentImage) -> io::Result<SegmentMemory> {
        let StoreKind::Pooled(pool) = &self.0 else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let claim = |(rmma, number): (&u32, &u32)| {
            let superpage = Pool::claim(pool, *number).ok_or(io::ErrorKind::InvalidData)?;
            Ok((*rmma, Arc::new(superpage)))
        };
        let slots = image.places.iter().map(claim).collect::<io::Result<_>>()?;
        let slots = RwLock::new(slots);
        Ok(SegmentMemory(SegmentKind::Pooled(PooledMemory { pool: Arc::clone(pool), slots })))
    }

    /// Gives back what a file has memory for and no segment uses, as far as it is not reserved.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn trim(&self) -> io::Result<()> {
        match &self.0 {
            StoreKind::Own(_) | StoreKind::Tiered(_) | StoreKind::Packed(_) => Ok(()),
            StoreKind::Pooled(pool) => pool.trim(),
        }
    }

    /// Memory that can still be taken, as far as a file system limits that.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn room_bytes(&self) -> io::Result<u64> {
        match &self.0 {
            StoreKind::Own(_) | StoreKind::Tiered(_) | StoreKind::Packed(_) => Ok(u64::MAX),
            StoreKind::Pooled(pool) => pool.room_bytes(),
        }
    }

    /// From now on, what is dropped keeps its bytes for the next process.
    pub(crate) fn keep(&self) {
        if let StoreKind::Pooled(pool) = &self.0 {
            pool.keep();
        }
    }

    /// Returns once all bytes are in the file, whatever happens to the machine.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn sync(&self) -> io::Result<()> {
        match &self.0 {
            StoreKind::Own(_) | StoreKind::Tiered(_) | StoreKind::Packed(_) => Ok(()),
            StoreKind::Pooled(pool) => pool.sync(),
        }
    }
}

impl SegmentMemory {
    /// Makes superpage `rmma` usable and zero. Returns its place in the store's file, if there is
    /// one.
    ///
    /// # Errors
    /// Out of descriptors, or out of pool superpages (see [`is_full`]).
    pub(crate) fn commit(&self, rmma: u32) -> io::Result<Option<u32>> {
        match &self.0 {
            SegmentKind::Own(own) => own.commit().map(|()| None),
            SegmentKind::Pooled(pooled) => {
                let superpage = Pool::take(&pooled.pool)?;
                let place = superpage.number;
                let mut slots = write_lock(&pooled.slots);
                slots.insert(rmma, Arc::new(superpage));
                Ok(Some(place))
            }
            SegmentKind::Tiered(tiered) => {
                let superpage = tiered.tier.take()?;
                write_lock(&tiered.slots).insert(rmma, superpage);
                Ok(None)
            }
            SegmentKind::Packed(packed) => {
                let superpage = packed.packing.take(packed.domain)?;
                write_lock(&packed.slots).insert(rmma, superpage);
                Ok(None)
            }
        }
    }

    /// Where its superpages lie in the store's file: pairs of RMMA and place.
    pub(crate) fn places(&self) -> Vec<(u32, u32)> {
        match &self.0 {
            SegmentKind::Own(_) | SegmentKind::Tiered(_) | SegmentKind::Packed(_) => Vec::new(),
            SegmentKind::Pooled(pooled) => {
                let slots = read_lock(&pooled.slots);
                slots.iter().map(|(rmma, superpage)| (*rmma, superpage.number)).collect()
            }
        }
    }

    /// How much of the machine's memory these superpages take up. Memory of a segment's own has
    /// pages only where something was written, above flash only what is hot, and packed only what
    /// is not; a pool is reserved, and all of it counts.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn backed_bytes(&self, rmmas: &[u32]) -> io::Result<u64> {
        let given_bytes = rmmas.len() as u64 * SUPERPAGE_BYTES;
        match &self.0 {
            SegmentKind::Own(own) => Ok(own.backed_bytes(rmmas)?.min(given_bytes)),
            SegmentKind::Pooled(_) => Ok(given_bytes),
            SegmentKind::Tiered(tiered) => {
                Ok(sum_of(&tiered.slots, rmmas, TieredSuperpage::backed_bytes))
            }
            SegmentKind::Packed(packed) => {
                Ok(sum_of(&packed.slots, rmmas, PackedSuperpage::backed_bytes))
            }
        }
    }

    /// True if a process still holds a descriptor of this memory.
    pub(crate) fn is_held(&self) -> io::Result<bool> {
        match self.shared_file() {
            Some(file) => crate::sys::is_held(file.as_fd(), 0, None),
            None => Ok(false),
        }
    }

    /// True if a descriptor that was handed to a client other than `holder` is still held.
    pub(crate) fn is_held_beside(&self, holder: u64) -> io::Result<bool> {
        let Some(file) = self.shared_file() else {
            return Ok(false);
        };
        Ok(crate::sys::is_held(file.as_fd(), 0, Some(holder))?
            || crate::sys::is_held(file.as_fd(), holder + 1, None)?)
    }

    /// The file, if descriptors of it may have been handed out.
    fn shared_file(&self) -> Option<&OwnedFd> {
        match &self.0 {
            SegmentKind::Own(own) => own.handed_out(),
            SegmentKind::Pooled(_) | SegmentKind::Tiered(_) | SegmentKind::Packed(_) => None,
        }
    }

    /// Zeroes and frees `part`; a whole segment only when it is not held ([`Self::is_held`]).
    /// Pooled memory that is still being sent follows afterwards.
    pub(crate) fn scrub(&self, part: &ScrubPart) -> io::Result<()> {
        match (&self.0, part) {
            (SegmentKind::Own(own), ScrubPart::Whole { .. }) => own.scrub_all(),
            (SegmentKind::Own(own), ScrubPart::Superpages { rmmas, .. }) => rmmas
                .iter()
                .try_for_each(|rmma| own.drop_content(offset_bytes(*rmma), SUPERPAGE_BYTES)),
            (SegmentKind::Pooled(pooled), part) => {
                drop_superpages(&pooled.slots, part);
                Ok(())
            }
            (SegmentKind::Tiered(tiered), part) => {
                drop_superpages(&tiered.slots, part);
                Ok(())
            }
            (SegmentKind::Packed(packed), part) => {
                drop_superpages(&packed.slots, part);
                Ok(())
            }
        }
    }

    /// Drops the content of a run. Pooled memory keeps it, which is allowed.
    pub(crate) fn discard(&self, run: Run) -> io::Result<()> {
        match &self.0 {
            SegmentKind::Own(own) => {
                let offset = offset_bytes(run.rmma) + u64::from(run.offset_bytes);
                own.drop_content(offset, u64::from(run.bytes))
            }
            SegmentKind::Pooled(_) => Ok(()),
            SegmentKind::Tiered(tiered) => {
                slot_of(&tiered.slots, run.rmma).map_or(Ok(()), |slot| slot.discard(pages_of(&run)))
            }
            SegmentKind::Packed(packed) => {
                if let Some(slot) = slot_of(&packed.slots, run.rmma) {
                    slot.discard(pages_of(&run));
                }
                Ok(())
            }
        }
    }

    /// Appends the slices of the runs, and what must be kept alive as long as they are used;
    /// neither if they are away.
    ///
    /// # Errors
    /// The memory cannot be mapped, a superpage was freed meanwhile, flash has failed, or there is
    /// no memory left (see [`is_full`]).
    pub(crate) fn place(
        self: &Arc<Self>,
        runs: &[Run],
        (access, caller): (Access, &mut Caller),
        slices: &mut Vec<Slice>,
        keeps: &mut Vec<Keep>,
    ) -> io::Result<Placed> {
        match &self.0 {
            SegmentKind::Own(own) => {
                let mapping = own.mapping()?;
                keeps.push(Arc::clone(self) as Keep);
                slices.extend(runs.iter().map(|run| {
                    let offset = offset_bytes(run.rmma) + u64::from(run.offset_bytes);
                    mapping.slice(to_usize(offset), to_usize(u64::from(run.bytes)))
                }));
                Ok(Placed::Here)
            }
            SegmentKind::Pooled(pooled) => pooled.place(runs, slices, keeps).map(|()| Placed::Here),
            SegmentKind::Tiered(tiered) => {
                let wanted = wanted(&tiered.slots, runs)?;
                let fetcher = caller.fetcher.as_mut().ok_or(io::ErrorKind::Unsupported)?;
                match access {
                    Access::Read => flash::read(&wanted, fetcher, slices, keeps),
                    Access::Write => flash::write(&wanted, caller.thread, slices, keeps),
                }
            }
            SegmentKind::Packed(packed) => {
                let wanted = wanted(&packed.slots, runs)?;
                match access {
                    Access::Read => pack::read(&wanted, slices, keeps).map(|()| Placed::Here),
                    Access::Write => pack::write(&wanted, caller.thread, slices, keeps),
                }
            }
        }
    }

    /// A descriptor of this memory for the same-host client `holder`, and its length in bytes.
    /// Unless `writable`, it is opened read-only, and can neither be written nor mapped for
    /// writing.
    ///
    /// # Errors
    /// `Unsupported` for every kind but memfd; else the memfd cannot be made, opened or marked.
    pub(crate) fn share(&self, holder: u64, writable: bool) -> io::Result<(OwnedFd, u64)> {
        let SegmentKind::Own(own) = &self.0 else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let (shared, bytes) = own.share(writable)?;
        crate::sys::mark_held(shared.as_fd(), holder)?;
        Ok((shared, bytes))
    }
}

/// True if the error means that no memory is left, rather than that something is broken.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory)
}

fn offset_bytes(rmma: u32) -> u64 {
    u64::from(rmma) * SUPERPAGE_BYTES
}

/// Lossless: the blade runs on 64-bit machines only.
fn to_usize(bytes: u64) -> usize {
    const _: () = assert!(size_of::<usize>() == size_of::<u64>());
    exactly(bytes)
}

/// Drops superpages of a segment, which zeroes those that are not being sent any more.
fn drop_superpages<T>(slots: &Slots<T>, part: &ScrubPart) {
    let mut slots = write_lock(slots);
    let dropped: Vec<_> = match part {
        ScrubPart::Whole { .. } => std::mem::take(&mut *slots).into_values().collect(),
        ScrubPart::Superpages { rmmas, .. } => {
            rmmas.iter().filter_map(|rmma| slots.remove(rmma)).collect()
        }
    };
    drop(slots);
    drop(dropped); // without the lock
}

impl PooledMemory {
    fn place(
        &self,
        runs: &[Run],
        slices: &mut Vec<Slice>,
        keeps: &mut Vec<Keep>,
    ) -> io::Result<()> {
        let slots = read_lock(&self.slots);
        for run in runs {
            let slot = slots.get(&run.rmma).ok_or(io::ErrorKind::NotFound)?;
            let offset = offset_bytes(slot.number) + u64::from(run.offset_bytes);
            let bytes = to_usize(u64::from(run.bytes));
            slices.push(self.pool.mapping.slice(to_usize(offset), bytes));
            keeps.push(Arc::clone(slot) as Keep);
        }
        Ok(())
    }
}

/// A segment's superpages, by their RMMA.
type Slots<T> = RwLock<BTreeMap<u32, Arc<T>>>;

fn slot_of<T>(slots: &Slots<T>, rmma: u32) -> Option<Arc<T>> {
    read_lock(slots).get(&rmma).map(Arc::clone)
}

/// The pages of runs, in their superpages.
fn wanted<T>(slots: &Slots<T>, runs: &[Run]) -> io::Result<Vec<given::Wanted<T>>> {
    let slots = read_lock(slots);
    let wanted = |run: &Run| {
        let slot = slots.get(&run.rmma).ok_or(io::ErrorKind::NotFound)?;
        Ok((Arc::clone(slot), pages_of(run)))
    };
    runs.iter().map(wanted).collect()
}

/// The sum over the superpages that are there.
fn sum_of<T>(slots: &Slots<T>, rmmas: &[u32], of: impl Fn(&T) -> u64) -> u64 {
    let slots = read_lock(slots);
    rmmas.iter().filter_map(|rmma| slots.get(rmma)).map(|slot| of(slot)).sum()
}

/// The pages of a run, counted in its superpage.
fn pages_of(run: &Run) -> Range<u32> {
    let page_bytes: u32 = exactly(PAGE_BYTES);
    run.offset_bytes / page_bytes..(run.offset_bytes + run.bytes) / page_bytes
}
