//! The reply to those keys of one `get` that several shards own: this shard's bytes, and where in
//! them the parts of other shards belong. Asking for such keys one by one would cost more than
//! looking them up. No I/O here.

use farpool_kv_store::key::HashedKey;
use smallvec::SmallVec;

/// The most keys asked for together, over all shards: as many as are planned together.
pub const KEYS_MAX: usize = crate::text::BATCH;

/// Bytes of a length in a part.
const LENGTH_BYTES: usize = 4;

/// The keys that one other shard is asked for, by the shard's place among those asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartNumber(u8);

/// The position of another shard's key in the reply.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// How many bytes of this shard's reply come before it.
    own_bytes: usize,
    part: PartNumber,
}

/// A reply to which other shards contribute.
#[derive(Debug, Default)]
pub struct Merge {
    own_bytes: usize,
    cuts: SmallVec<[Cut; KEYS_MAX]>,
    /// The shards that were asked, and what they sent if it has arrived but could not be used at
    /// once.
    parts: SmallVec<[(usize, Option<Vec<u8>>); 2]>,
    missing: usize,
}

impl Merge {
    /// Adds the next key, which shard `owner` owns; `own_bytes` of this shard's reply come before
    /// it.
    pub fn add(&mut self, owner: usize, own_bytes: usize) {
        let known = self.parts.iter().position(|&(shard, _)| shard == owner);
        let at = known.unwrap_or_else(|| {
            self.parts.push((owner, None));
            self.missing += 1;
            self.parts.len() - 1
        });
        self.cuts.push(Cut { own_bytes, part: number(at) });
    }

    /// Marks this shard's reply as complete.
    pub const fn close(&mut self, own_bytes: usize) {
        self.own_bytes = own_bytes;
    }

    #[must_use]
    pub const fn own_bytes(&self) -> usize {
        self.own_bytes
    }

    /// The number of keys of other shards.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.cuts.len()
    }

    /// The shards that are asked, each with its part.
    #[must_use]
    pub fn asked(&self) -> SmallVec<[(usize, PartNumber); 2]> {
        (0..).zip(&self.parts).map(|(at, &(owner, _))| (owner, number(at))).collect()
    }

    #[must_use]
    pub const fn is_whole(&self) -> bool {
        self.missing == 0
    }

    /// Whether it is complete with this part.
    #[must_use]
    pub fn lacks_only(&self, part: PartNumber) -> bool {
        self.missing == 1 && self.parts.get(usize::from(part.0)).is_some_and(|it| it.1.is_none())
    }

    /// Keeps a part that has arrived.
    pub fn keep(&mut self, part: PartNumber, bytes: &[u8]) {
        if let Some((_, kept @ None)) = self.parts.get_mut(usize::from(part.0)) {
            *kept = Some(bytes.to_vec());
            self.missing -= 1;
        }
    }

    /// The bytes of the parts that are kept.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.parts.iter().filter_map(|(_, kept)| kept.as_ref()).map(Vec::len).sum()
    }

    /// Appends the reply: `own` is this shard's, `last` a part that was not kept.
    pub fn write(&self, own: &[u8], last: Option<(PartNumber, &[u8])>, out: &mut Vec<u8>) {
        let mut parts: SmallVec<[PartReplies<'_>; 2]> = SmallVec::new();
        for (at, (_, kept)) in self.parts.iter().enumerate() {
            let keys = self.cuts.iter().filter(|cut| usize::from(cut.part.0) == at).count();
            let bytes = match last {
                Some((part, bytes)) if usize::from(part.0) == at => bytes,
                _ => kept.as_deref().unwrap_or_default(),
            };
            parts.push(PartReplies::of(bytes, keys));
        }
        let mut from = 0;
        for cut in &self.cuts {
            out.extend_from_slice(&own[from..cut.own_bytes]);
            out.extend_from_slice(parts[usize::from(cut.part.0)].next());
            from = cut.own_bytes;
        }
        out.extend_from_slice(&own[from..]);
    }
}

fn number(at: usize) -> PartNumber {
    PartNumber(u8::try_from(at).expect("no more parts than keys"))
}

/// Appends what one shard sends: the lengths of the replies to its keys, 4 bytes each, then the
/// replies.
pub fn write_part<K>(keys: &[K], out: &mut Vec<u8>, mut reply: impl FnMut(&K, &mut Vec<u8>)) {
    let lengths_at = out.len();
    out.resize(lengths_at + keys.len() * LENGTH_BYTES, 0);
    for (number, key) in keys.iter().enumerate() {
        let start = out.len();
        reply(key, out);
        let length = u32::try_from(out.len() - start).expect("a value has at most 30 bits");
        let at = lengths_at + number * LENGTH_BYTES;
        out[at..at + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    }
}

/// The replies in a part that are not used yet.
struct PartReplies<'a> {
    lengths: &'a [[u8; LENGTH_BYTES]],
    replies: &'a [u8],
}

impl<'a> PartReplies<'a> {
    fn of(bytes: &'a [u8], keys: usize) -> Self {
        let (lengths, replies) = bytes.split_at(keys * LENGTH_BYTES);
        Self { lengths: lengths.as_chunks().0, replies }
    }

    fn next(&mut self) -> &'a [u8] {
        let (length, lengths) = self.lengths.split_first().expect("a length for each key");
        let (reply, replies) = self.replies.split_at(u32::from_le_bytes(*length) as usize);
        (self.lengths, self.replies) = (lengths, replies);
        reply
    }
}

/// Appends a key to a shard's ask: its hash, its length, its bytes.
pub fn push_key(HashedKey { key, hash }: HashedKey<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(&hash.to_le_bytes());
    out.push(u8::try_from(key.len()).expect("the parser refuses longer keys"));
    out.extend_from_slice(key);
}

/// Reads the keys in a shard's ask, with their hashes.
pub fn read_keys(mut bytes: &[u8]) -> SmallVec<[HashedKey<'_>; KEYS_MAX]> {
    let mut keys = SmallVec::new();
    while let Some((hash, rest)) = bytes.split_first_chunk() {
        let Some((&length, rest)) = rest.split_first() else { break };
        let Some((key, rest)) = rest.split_at_checked(usize::from(length)) else { break };
        keys.push(HashedKey { key, hash: u64::from_le_bytes(*hash) });
        bytes = rest;
    }
    keys
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

        /// Whichever shard owns a key, whatever its reply, and in whatever order the parts arrive,
        /// the reply equals that of a single shard.
        #[test]
        fn the_reply_is_in_the_order_of_the_keys(
            keys in prop::collection::vec((0usize..5, prop::collection::vec(any::<u8>(), 0..40)), 1..KEYS_MAX),
            order in prop::collection::vec(any::<prop::sample::Index>(), 5),
            uses_last: bool,
        ) {
            let (mut merge, mut own) = (Merge::default(), Vec::new());
            let mut asked: Vec<Vec<&(usize, Vec<u8>)>> = vec![Vec::new(); 5];
            for key in &keys {
                if key.0 == 0 {
                    own.extend_from_slice(&key.1);
                } else {
                    merge.add(key.0, own.len());
                    asked[key.0].push(key);
                }
            }
            own.extend_from_slice(b"END");
            merge.close(own.len());
            let mut parts: Vec<(PartNumber, Vec<u8>)> = Vec::new();
            for (owner, part) in merge.asked() {
                let mut bytes = Vec::new();
                write_part(&asked[owner], &mut bytes, |key, out| out.extend_from_slice(&key.1));
                parts.push((part, bytes));
            }
            let mut order = order.iter();
            let mut last = None;
            while !parts.is_empty() {
                let (part, bytes) = parts.swap_remove(order.next().unwrap().index(parts.len()));
                prop_assert_eq!(merge.lacks_only(part), parts.is_empty());
                if uses_last && parts.is_empty() {
                    last = Some((part, bytes));
                } else {
                    merge.keep(part, &bytes);
                }
            }
            prop_assert_eq!(merge.is_whole(), last.is_none());
            let mut out = b"before".to_vec();
            merge.write(&own, last.as_ref().map(|(part, bytes)| (*part, &bytes[..])), &mut out);
            let expected = [&b"before"[..], &keys.iter().flat_map(|key| key.1.clone()).collect::<Vec<u8>>(), b"END"].concat();
            prop_assert_eq!(out, expected);
        }

        #[test]
        fn keys_come_as_they_were_asked(keys in prop::collection::vec((prop::collection::vec(any::<u8>(), 1..251), any::<u64>()), 0..KEYS_MAX)) {
            let mut bytes = Vec::new();
            for (key, hash) in &keys {
                push_key(HashedKey { key, hash: *hash }, &mut bytes);
            }
            let read = read_keys(&bytes).into_iter().map(|it| (it.key.to_vec(), it.hash));
            let read: Vec<(Vec<u8>, u64)> = read.collect();
            prop_assert_eq!(read, keys);
        }
    }
}
