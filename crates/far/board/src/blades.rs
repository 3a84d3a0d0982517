//! The table of blades: which the processes of a run use, and which they are to leave.
//!
//! The keeper writes it, or a command on its behalf; every process follows it. An entry's number is
//! the blade's slot in every process's pool, so that what one process froze another finds under the
//! same number.
//!
//! An entry changes by one store: its address is written while the entry is free. A writer that is
//! killed anywhere leaves a readable table, at worst with an entry that cannot be used any more.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, fence};
use std::time::Duration;

use farpool_kernel::monotonic_ns;
use farpool_policy::{Meters, RateLimit};
use rustix::thread::futex;

use crate::words::{BLADE_ENTRIES, halves, load_text, store_text};

/// Bytes of an address; the longest (a socket's path of 107 bytes) is well below.
const ADDRESS_BYTES: usize = 160;
/// Table version that a process publishes while it is about to connect for the first time.
pub const CONNECTING: u32 = 1;
/// The lowest version of a table that was written.
const FIRST_VERSION: u32 = 2;
/// As role: the address of a new blade is being written.
const WRITING: u32 = u32::MAX;

/// How a run uses a blade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum BladeRole {
    /// Memory is taken from it.
    Active = 1,
    /// Its pages are being moved to the others.
    Leaving = 2,
}

/// A blade to use, with its grant and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BladeOffer {
    /// In text form (numeric; no name is resolved inside a program).
    pub address: String,
    /// What it fails with besides its host.
    pub domain: BladeDomain,
    /// Key and epoch of the grant of memory there; None where the blade requires no grant.
    pub grant: Option<(u128, u64)>,
    /// Limits on the whole tree's rate of reads and writes. None if unlimited.
    pub limits: Option<[RateLimit; 2]>,
}

impl BladeOffer {
    /// A blade without grant and limits.
    pub fn open(address: impl Into<String>) -> Self {
        let domain = BladeDomain::Host;
        BladeOffer { address: address.into(), domain, grant: None, limits: None }
    }
}

/// What a blade fails with besides its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BladeDomain {
    /// Nothing that is known.
    Host,
    /// The failure domain of this number, which the rack names for it.
    Named(NonZeroU64),
    /// The run, and nothing less: the keeper serves it.
    Run,
}

impl BladeDomain {
    /// The word of [`BladeDomain::Run`]; 0 is that of [`BladeDomain::Host`].
    const RUN: u64 = u64::MAX;

    /// The domain that the rack gives this number. Of 2^64 the outermost two count as their
    /// neighbours.
    pub fn named(number: u64) -> Self {
        let number = NonZeroU64::new(number.min(Self::RUN - 1));
        BladeDomain::Named(number.unwrap_or(NonZeroU64::MIN))
    }

    fn word(self) -> u64 {
        match self {
            BladeDomain::Host => 0,
            BladeDomain::Named(number) => number.get(),
            BladeDomain::Run => Self::RUN,
        }
    }

    fn of_word(word: u64) -> Self {
        match NonZeroU64::new(word) {
            None => BladeDomain::Host,
            Some(_) if word == Self::RUN => BladeDomain::Run,
            Some(number) => BladeDomain::Named(number),
        }
    }
}

/// One blade in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BladeSettings {
    pub role: BladeRole,
    /// As in [`BladeOffer`].
    pub address: String,
    /// As in [`BladeOffer`].
    pub domain: BladeDomain,
    /// As in [`BladeOffer`].
    pub grant: Option<(u128, u64)>,
    /// True if there are limits; they are kept in [`BladeTable::meters`].
    pub is_limited: bool,
    /// Distinguishes successive blades of this entry; set by the table.
    pub generation: u32,
}

/// One entry in shared memory.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct BladeEntry {
    /// Generation and, in the lower half, role; role 0 for a free entry.
    state: AtomicU64,
    /// Key and epoch of the grant; all zeros without one.
    grant: [AtomicU64; 3],
    /// A [`BladeDomain`]'s word.
    domain: AtomicU64,
    /// Shared request rate of all processes of the tree; zeroed without limits.
    meters: Meters,
    address: [AtomicU8; ADDRESS_BYTES],
}

const _: () = assert!(size_of::<BladeEntry>() == 248);

/// The whole table in shared memory.
#[repr(C)]
#[derive(Debug)]
pub struct BladeTable {
    version: AtomicU32,
    padding: AtomicU32,
    entries: [BladeEntry; BLADE_ENTRIES],
}

/// The table at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blades {
    pub version: u32,
    pub entries: [Option<BladeSettings>; BLADE_ENTRIES],
}

fn state(generation: u32, role: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(role)
}

fn parts(state: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = state.to_le_bytes();
    (u32::from_le_bytes([e, f, g, h]), u32::from_le_bytes([a, b, c, d]))
}

impl BladeEntry {
    fn load(&self) -> Option<BladeSettings> {
        loop {
            let before = self.state.load(Acquire);
            let (generation, role) = parts(before);
            let role = match role {
                1 => BladeRole::Active,
                2 => BladeRole::Leaving,
                _ => return None,
            };
            let address = load_text(&self.address);
            let [low, high, epoch] = [0, 1, 2].map(|at| self.grant[at].load(Relaxed));
            let key = u128::from(high) << 64 | u128::from(low);
            let grant = (key != 0).then_some((key, epoch));
            let domain = BladeDomain::of_word(self.domain.load(Relaxed));
            let is_limited = self.meters.read.limit().is_some();
            fence(Acquire);
            if self.state.load(Relaxed) == before {
                return Some(BladeSettings {
                    role,
                    address,
                    domain,
                    grant,
                    is_limited,
                    generation,
                });
            }
        }
    }
}

impl BladeTable {
    /// The present table.
    pub fn load(&self) -> Blades {
        let version = self.version.load(Acquire);
        Blades { version, entries: std::array::from_fn(|at| self.entries[at].load()) }
    }

    /// The present version.
    pub fn version(&self) -> u32 {
        self.version.load(Acquire)
    }

    /// Enters a blade. Returns its entry and generation, or None if all are taken.
    pub fn add(&self, offer: &BladeOffer) -> Option<(usize, u32)> {
        let claim = |entry: &BladeEntry| {
            let before = entry.state.load(Acquire);
            let (generation, role) = parts(before);
            let claimed = state(generation.wrapping_add(1), WRITING);
            let is_ours =
                role == 0 && entry.state.compare_exchange(before, claimed, AcqRel, Relaxed).is_ok();
            is_ours.then_some(generation.wrapping_add(1))
        };
        let mut all = self.entries.iter().enumerate();
        let (at, generation) = all.find_map(|(at, entry)| Some((at, claim(entry)?)))?;
        let entry = &self.entries[at];
        store_text(&entry.address, offer.address.as_bytes());
        let (key, epoch) = offer.grant.unwrap_or_default();
        let [low, high] = halves(key);
        for (word, value) in entry.grant.iter().zip([low, high, epoch]) {
            word.store(value, Relaxed);
        }
        entry.domain.store(offer.domain.word(), Relaxed);
        let [read, write] = offer.limits.unwrap_or([RateLimit::UNLIMITED; 2]);
        let now_ns = monotonic_ns();
        entry.meters.read.set_limit(now_ns, read);
        entry.meters.write.set_limit(now_ns, write);
        entry.state.store(state(generation, BladeRole::Active as u32), Release);
        self.announce();
        Some((at, generation))
    }

    /// All blades with grants and limits.
    pub fn offers(&self) -> Vec<BladeOffer> {
        let all = self.load().entries.into_iter().zip(&self.entries);
        let offer = |(blade, entry): (Option<BladeSettings>, &BladeEntry)| {
            let BladeSettings { address, domain, grant, .. } = blade?;
            let limits = entry.meters.read.limit().zip(entry.meters.write.limit());
            let limits = limits.map(|(read, write)| [read, write]);
            Some(BladeOffer { address, domain, grant, limits })
        };
        all.filter_map(offer).collect()
    }

    /// The rates that the processes of the tree share for the blade in an entry.
    pub fn meters(&self, at: usize) -> Option<&Meters> {
        self.entries.get(at).map(|entry| &entry.meters)
    }

    /// Changes a blade's role. False if the entry is another blade's by now.
    pub fn set_role(&self, at: usize, generation: u32, role: BladeRole) -> bool {
        self.replace(at, generation, role as u32)
    }

    /// Frees the entry. False if it is another blade's by now.
    pub fn remove(&self, at: usize, generation: u32) -> bool {
        self.replace(at, generation, 0)
    }

    fn replace(&self, at: usize, generation: u32, role: u32) -> bool {
        let Some(entry) = self.entries.get(at) else {
            return false;
        };
        let replaced = entry.state.fetch_update(AcqRel, Acquire, |before| {
            let (now, before) = parts(before);
            let is_it = now == generation && before != 0 && before != WRITING;
            is_it.then(|| state(generation, role))
        });
        self.announce();
        replaced.is_ok()
    }

    /// Raises the version and wakes all processes that follow.
    fn announce(&self) {
        let next = |version: u32| Some(version.wrapping_add(1).max(FIRST_VERSION));
        let _always_ok = self.version.fetch_update(AcqRel, Acquire, next);
        let _nobody_waits = futex::wake(&self.version, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Waits until the version has changed, or the time is over.
    pub fn wait(&self, version: u32, at_most: Option<Duration>) {
        let timeout = at_most.and_then(|time| futex::Timespec::try_from(time).ok());
        // An error is a wake-up like any other: the caller checks again.
        let _ = futex::wait(&self.version, futex::Flags::empty(), version, timeout.as_ref());
    }
}

/// Whether an address fits an entry.
pub fn address_fits(address: &str) -> bool {
    address.len() < ADDRESS_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> BladeTable {
        // SAFETY: a table of atomics; all bits zero is a table without blades, as in a new file.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn another_blade_in_an_entry_is_another_generation() {
        let table = table();
        let entry = |at: usize| table.load().entries[at].clone().map(|it| (it.role, it.generation));
        assert_eq!(table.add(&BladeOffer::open("tcp://10.0.0.1:1")), Some((0, 1)));
        let first = table.version();
        assert_eq!(table.add(&BladeOffer::open("tcp://10.0.0.2:1")), Some((1, 1)));
        assert!(table.set_role(0, 1, BladeRole::Leaving));
        assert_eq!(entry(0), Some((BladeRole::Leaving, 1)), "the same blade");
        assert!(table.remove(0, 1));
        assert_eq!(entry(0), None);
        assert!(!table.set_role(0, 1, BladeRole::Active), "it is gone");
        assert_eq!(table.add(&BladeOffer::open("tcp://10.0.0.1:1")), Some((0, 2)));
        assert_eq!(entry(0), Some((BladeRole::Active, 2)), "it left and came back");
        assert!(table.version() > first && first >= FIRST_VERSION);
        let offer = BladeOffer::open("tcp://10.0.0.9:1");
        (2..BLADE_ENTRIES).for_each(|at| assert_eq!(table.add(&offer), Some((at, 1))));
        assert_eq!(table.add(&offer), None, "all entries are taken");
    }

    #[test]
    fn terms_come_with_the_blade_and_go_with_it() {
        let table = table();
        let limits = Some([RateLimit::paced(1 << 20), RateLimit::paced(2 << 20)]);
        let grant = Some((u128::MAX - 5, 9));
        let domain = BladeDomain::named(u64::MAX - 7);
        let offer = BladeOffer { domain, grant, limits, ..BladeOffer::open("tcp://10.0.0.1:1") };
        table.add(&offer);
        let known = table.load().entries[0].clone().expect("entered");
        assert_eq!((known.domain, known.grant, known.is_limited), (domain, grant, true));
        assert_eq!(table.offers(), [offer]);
        let read = table.meters(0).and_then(|meters| meters.read.limit());
        assert_eq!(read, Some(RateLimit::paced(1 << 20)));
        table.remove(0, known.generation);
        table.add(&BladeOffer::open("tcp://10.0.0.2:1"));
        let known = table.load().entries[0].clone().expect("entered");
        assert_eq!((known.domain, known.grant, known.is_limited), (BladeDomain::Host, None, false));
    }

    #[test]
    fn a_domain_is_what_was_stored() {
        let number = |number| NonZeroU64::new(number).map(BladeDomain::Named).expect("not zero");
        for domain in [BladeDomain::Host, BladeDomain::Run, number(1), number(u64::MAX - 1)] {
            assert_eq!(BladeDomain::of_word(domain.word()), domain);
        }
        assert_eq!([0, u64::MAX].map(BladeDomain::named), [number(1), number(u64::MAX - 1)]);
    }

    #[test]
    fn readers_never_see_half_an_address() {
        let table = table();
        let name = |n: u32| format!("tcp://10.{}.0.{n}:{n}", n % 7);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                loop {
                    let Some(blade) = table.load().entries[0].clone() else { continue };
                    assert_eq!(blade.address, name(blade.generation));
                    if blade.generation == 255 {
                        return;
                    }
                }
            });
            for n in 1..=255 {
                assert_eq!(table.add(&BladeOffer::open(name(n))), Some((0, n)));
                assert!(n == 255 || table.remove(0, n));
            }
            reader.join().expect("consistent");
        });
    }

    #[test]
    fn whoever_follows_is_woken() {
        let table = table();
        let seen = table.version();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                while table.version() == seen {
                    table.wait(seen, None);
                }
            });
            table.add(&BladeOffer::open("tcp://10.0.0.9:9"));
            waiting.join().expect("woken");
        });
    }
}
