//! Frames: what packed pages are made of, each once in its sharing domain (HPL-2011-31, section 3:
//! content-based page sharing; its inverse map is not needed here, since a page names its frame and
//! a frame its place, so that a frame can move without its pages).
//!
//! Invariants: a frame has as many references as pages name it, and is gone with the last. Pages of
//! different domains never share one: how long a write takes would tell what others hold. Equal
//! digests are no proof: bytes are compared before a frame is shared, and a page that is read is
//! checked against its digest.

use super::codec::{decompress, digest_of};
use super::slabs::{Place, Slabs, Thin};
use farpool_units::{PAGE_BYTES, exactly};
use hashbrown::HashTable;
use std::io;

/// Frames whose table is allocated at once: tables grow without being copied.
const CHUNK_FRAMES: u32 = 4096;
/// Parts of the index, each grown by itself: growing means to hash again, and readers wait.
const SHARDS: usize = 64;

/// Whose pages may share frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Domain(u64);

/// Marks a group's domain.
const GROUP: u64 = 1 << 63;

impl Domain {
    /// One client's: pages of a single program are seldom equal.
    pub(crate) fn of_client(number: u64) -> Domain {
        assert!(number < GROUP, "client {number} is out of range");
        Domain(number)
    }

    /// Several clients', which asked for it: guests of one kind have many equal pages. `number` is
    /// random; groups that have 63 bits in common are one.
    pub(crate) fn of_group(number: u64) -> Domain {
        Domain(GROUP | number)
    }

    pub(super) fn is_group(self) -> bool {
        self.0 & GROUP != 0
    }
}

/// A frame's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameId(u32);

#[cfg(test)]
impl FrameId {
    pub(super) fn of_number(number: u32) -> FrameId {
        FrameId(number)
    }

    pub(super) fn number(self) -> u32 {
        self.0
    }
}

/// Where a page's bytes are, and how they are found again.
#[derive(Clone, Copy, Debug)]
struct Frame {
    digest: u64,
    domain: Domain,
    references: u32,
    place: Place,
    /// Of the compressed page; [`PAGE_BYTES`] for one that is not compressed.
    bytes: u16,
}

const _: () = assert!(size_of::<Frame>() == 32);

/// The frames' numbers, and what is known of each.
#[derive(Debug, Default)]
struct FrameTable {
    chunks: Vec<Box<[Option<Frame>]>>,
    free: Vec<u32>,
}

/// All frames of a blade.
#[derive(Debug)]
pub(super) struct Frames {
    slabs: Slabs,
    table: FrameTable,
    /// Frames by digest and domain.
    index: Vec<HashTable<u32>>,
    index_bytes: usize,
    seed: u64,
    count: u64,
    scratch: Box<[u8; PAGE_BYTES]>,
}

impl FrameTable {
    fn get(&self, id: u32) -> &Frame {
        let chunk = &self.chunks[(id / CHUNK_FRAMES) as usize];
        chunk[(id % CHUNK_FRAMES) as usize].as_ref().expect("a page names a frame that exists")
    }

    fn entry(&mut self, id: u32) -> &mut Option<Frame> {
        &mut self.chunks[(id / CHUNK_FRAMES) as usize][(id % CHUNK_FRAMES) as usize]
    }

    fn get_mut(&mut self, id: u32) -> &mut Frame {
        self.entry(id).as_mut().expect("a page names a frame that exists")
    }

    /// A number that no frame has.
    fn take(&mut self) -> u32 {
        if self.free.is_empty() {
            let first = exactly::<u32, _>(self.chunks.len()) * CHUNK_FRAMES;
            self.chunks.push(vec![None; CHUNK_FRAMES as usize].into());
            self.free.extend((first..first + CHUNK_FRAMES).rev());
        }
        self.free.pop().expect("a chunk was added")
    }

    fn bytes(&self) -> usize {
        let chunk_bytes = CHUNK_FRAMES as usize * size_of::<Option<Frame>>();
        self.chunks.len() * chunk_bytes + self.free.capacity() * size_of::<u32>()
    }
}

impl Frames {
    /// Room for `bytes` of frames; none is taken yet. `seed` is a secret of the blade.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new(bytes: u64, seed: u64) -> io::Result<Frames> {
        Ok(Frames {
            slabs: Slabs::new(bytes)?,
            table: FrameTable::default(),
            index: (0..SHARDS).map(|_| HashTable::new()).collect(),
            index_bytes: 0,
            seed,
            count: 0,
            scratch: Box::new([0; PAGE_BYTES]),
        })
    }

    /// Frames that there are.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Memory that they take up, their tables included.
    pub(super) fn bytes(&self) -> u64 {
        (self.slabs.bytes() + self.table.bytes() + self.index_bytes) as u64
    }

    /// What a page is recognized by here.
    pub(super) fn digest_of(&self, page: &[u8; PAGE_BYTES]) -> u64 {
        digest_of(page, self.seed)
    }

    /// One more reference to the frame that holds the same bytes in the same domain; None if there
    /// is none.
    pub(super) fn share(
        &mut self,
        domain: Domain,
        digest: u64,
        page: &[u8; PAGE_BYTES],
    ) -> Option<FrameId> {
        let Frames { slabs, table, index, scratch, .. } = self;
        let is_equal = |id: &u32| {
            let frame = table.get(*id);
            frame.digest == digest
                && frame.domain == domain
                && frame.references < u32::MAX
                && read(slabs, frame, scratch)
                && **scratch == *page
        };
        let id = *index[shard_of(digest)].find(digest, is_equal)?;
        table.get_mut(id).references += 1;
        Some(FrameId(id))
    }

    /// A new frame with one reference, of a page that was packed to `bytes`. None if there is no
    /// room.
    pub(super) fn insert(&mut self, domain: Domain, digest: u64, bytes: &[u8]) -> Option<FrameId> {
        let id = self.table.take();
        let Some(place) = self.slabs.take(bytes.len(), id) else {
            self.table.free.push(id);
            return None;
        };
        self.slabs.slice(place, bytes.len()).fill(bytes);
        let bytes = exactly(bytes.len());
        *self.table.entry(id) = Some(Frame { digest, domain, references: 1, place, bytes });
        let table = &self.table;
        let hash = |id: &u32| table.get(*id).digest;
        let shard = &mut self.index[shard_of(digest)];
        // Only here it grows, and it never shrinks.
        self.index_bytes -= shard.allocation_size();
        shard.insert_unique(digest, id, hash);
        self.index_bytes += shard.allocation_size();
        self.count += 1;
        Some(FrameId(id))
    }

    /// Takes one reference away.
    pub(super) fn release(&mut self, FrameId(id): FrameId) {
        let frame = self.table.get_mut(id);
        frame.references -= 1;
        if frame.references > 0 {
            return;
        }
        let Frame { digest, place, .. } = *frame;
        let found = self.index[shard_of(digest)].find_entry(digest, |it| *it == id);
        found.expect("every frame is in the index").remove();
        self.slabs.give_back(place);
        *self.table.entry(id) = None;
        self.table.free.push(id);
        self.count -= 1;
    }

    /// Unpacks a page. False if it is not what was packed: this machine's memory is at fault, or
    /// this code.
    #[must_use]
    pub(super) fn read(&self, FrameId(id): FrameId, page: &mut [u8; PAGE_BYTES]) -> bool {
        let frame = self.table.get(id);
        read(&self.slabs, frame, page) && digest_of(page, self.seed) == frame.digest
    }

    /// Gives the memory of thin slabs back. True if there was one, and there may be more.
    pub(super) fn evacuate(&mut self, thin: Thin) -> bool {
        let Frames { slabs, table, .. } = self;
        let mut move_one =
            |class| slabs.evacuate(class, thin, |owner, place| table.get_mut(owner).place = place);
        (0..Slabs::classes()).filter(|class| move_one(*class)).count() > 0
    }
}

fn shard_of(digest: u64) -> usize {
    exactly(digest % SHARDS as u64)
}

fn read(slabs: &Slabs, frame: &Frame, page: &mut [u8; PAGE_BYTES]) -> bool {
    let bytes = usize::from(frame.bytes);
    let unpack = |packed: &[u8]| match <&[u8; PAGE_BYTES]>::try_from(packed) {
        Ok(whole) => {
            *page = *whole;
            true
        }
        Err(_) => decompress(packed, page),
    };
    slabs.slice(frame.place, bytes).read(unpack)
}

#[cfg(test)]
mod tests {
    use super::super::codec::Codec;
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const SEED: u64 = 42;

    /// A page that compresses, unless it is one of every fifth.
    fn page(number: u16) -> Box<[u8; PAGE_BYTES]> {
        let mut page = Box::new([number.to_le_bytes()[0]; PAGE_BYTES]);
        page[0] = number.to_le_bytes()[1];
        if number.is_multiple_of(5) {
            let mut word = u64::from(number) + 1;
            for byte in page.iter_mut() {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte = word.to_le_bytes()[7];
            }
        }
        page
    }

    fn add(frames: &mut Frames, codec: &mut Codec, domain: Domain, number: u16) -> FrameId {
        let page = page(number);
        let digest = frames.digest_of(&page);
        frames.share(domain, digest, &page).unwrap_or_else(|| {
            let bytes = codec.compress(&page).unwrap_or(page.as_slice());
            frames.insert(domain, digest, bytes).unwrap()
        })
    }

    #[derive(Clone, Debug)]
    enum Step {
        Add(u64, u16),
        Release(prop::sample::Index),
        Evacuate,
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..3u64, 0..300u16).prop_map(|(domain, number)| Step::Add(domain, number)),
            5 => any::<prop::sample::Index>().prop_map(Step::Release),
            1 => Just(Step::Evacuate),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// A page that was packed is found again, there is one frame for each content and domain,
        /// and none when nobody refers to it.
        #[test]
        fn frames_are_what_was_packed(steps in prop::collection::vec(any_step(), 1..1500)) {
            let (mut frames, mut codec) = (Frames::new(16 << 20, SEED).unwrap(), Codec::new());
            let mut model: BTreeMap<usize, (u64, u16, FrameId)> = BTreeMap::new();
            for (name, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Add(domain, number) => {
                        let id = add(&mut frames, &mut codec, Domain::of_client(domain), number);
                        model.insert(name, (domain, number, id));
                    }
                    Step::Release(index) if !model.is_empty() => {
                        let name = *model.keys().nth(index.index(model.len())).unwrap();
                        frames.release(model.remove(&name).unwrap().2);
                    }
                    Step::Release(_) => {}
                    Step::Evacuate => while frames.evacuate(Thin::Any) {},
                }
                let contents: BTreeSet<_> = model.values().map(|it| (it.0, it.1)).collect();
                prop_assert_eq!(frames.count(), contents.len() as u64);
            }
            let mut back = Box::new([0; PAGE_BYTES]);
            for (_, number, id) in model.values() {
                prop_assert!(frames.read(*id, &mut back), "page {} does not fit", number);
                prop_assert!(back == page(*number), "page {} is another", number);
            }
            model.into_values().for_each(|(_, _, id)| frames.release(id));
            prop_assert_eq!(frames.count(), 0);
            prop_assert_eq!(frames.slabs.bytes(), 0);
        }
    }

    #[test]
    fn an_equal_digest_is_no_proof() {
        let (mut frames, mut codec) = (Frames::new(1 << 20, SEED).unwrap(), Codec::new());
        let domain = Domain::of_group(1);
        let one = add(&mut frames, &mut codec, domain, 1);
        let (first, second) = (page(1), page(2));
        let digest = frames.digest_of(&first);
        assert_eq!(frames.share(domain, digest, &second), None);
        assert_eq!(frames.share(domain, digest, &first), Some(one));
        assert_eq!(frames.share(Domain::of_client(1), digest, &first), None);
    }

    #[test]
    fn a_frame_that_was_changed_is_noticed() {
        let (mut frames, mut codec) = (Frames::new(1 << 20, SEED).unwrap(), Codec::new());
        for number in [5, 6] {
            let id = add(&mut frames, &mut codec, Domain::of_client(1), number);
            let frame = *frames.table.get(id.0);
            let place = frames.slabs.slice(frame.place, usize::from(frame.bytes));
            let mut bytes = place.read(<[u8]>::to_vec);
            let mut back = Box::new([0; PAGE_BYTES]);
            assert!(frames.read(id, &mut back));
            *bytes.last_mut().unwrap() ^= 1;
            place.fill(&bytes);
            assert!(!frames.read(id, &mut back), "page {number}");
        }
    }

    #[test]
    fn full_is_told() {
        let mut frames = Frames::new(1 << 16, SEED).unwrap();
        let domain = Domain::of_group(0);
        for number in 0..16 {
            assert!(frames.insert(domain, number, page(0).as_slice()).is_some());
        }
        assert_eq!(frames.insert(domain, 16, page(0).as_slice()), None);
        assert_eq!(frames.count(), 16);
    }
}
