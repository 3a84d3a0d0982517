//! Forged pages are refused, whatever they are made of.

use farpool_seal::{Broken, Cipher, PageVersion, SealKey, Tag};
use farpool_units::PAGE_BYTES;
use proptest::prelude::*;

const CIPHERS: [Cipher; 2] = [Cipher::Aegis128X2, Cipher::ChaCha20Poly1305];
/// Forgeries of each kind and cipher.
const FORGERIES: u64 = if cfg!(debug_assertions) { 20_000 } else { 1_000_000 };

type Bytes = [u8; PAGE_BYTES];

/// A page of pseudo-random bytes.
fn content(seed: u64) -> Bytes {
    let mut word = seed;
    std::array::from_fn(|_| {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word.to_le_bytes()[7]
    })
}

/// What one page was stored as.
#[derive(Clone)]
struct Stored {
    at: PageVersion,
    sealed: Bytes,
    tag: Tag,
}

fn store(key: &SealKey, at: PageVersion, seed: u64) -> Stored {
    let mut sealed = content(seed);
    let tag = key.seal(at, &mut sealed);
    Stored { at, sealed, tag }
}

fn open(key: &SealKey, stored: &Stored, from_blade: &Bytes) -> Result<Bytes, Broken> {
    let mut page = *from_blade;
    key.open(stored.at, &mut page, &stored.tag).map(|()| page)
}

/// Each kind of forgery that a blade can make of all that it was ever given.
fn forge(kind: u32, number: u64, keys: &[SealKey; 2], own: &Stored) -> Bytes {
    let at = |page, version| PageVersion { page, version };
    let mut forged = own.sealed;
    match kind {
        0 => {
            let bit = usize::try_from(number).expect("small") % (PAGE_BYTES * 8);
            forged[bit / 8] ^= 1 << (bit % 8);
        }
        1 => forged = store(&keys[0], at(own.at.page + 1, own.at.version), number).sealed,
        2 => forged = store(&keys[0], at(own.at.page, own.at.version - 1), number).sealed,
        3 => forged = [0; PAGE_BYTES],
        4 => forged = store(&keys[1], own.at, number).sealed,
        _ => forged = content(number),
    }
    forged
}

#[test]
fn no_forgery_passes() {
    for cipher in CIPHERS {
        let keys = [(); 2].map(|()| SealKey::fresh_for(cipher).expect("a key"));
        let own = store(&keys[0], PageVersion { page: 7, version: 9 }, 3);
        assert_eq!(open(&keys[0], &own, &own.sealed), Ok(content(3)));
        for kind in 0..6 {
            for number in 0..FORGERIES {
                let forged = forge(kind, number, &keys, &own);
                assert_eq!(open(&keys[0], &own, &forged), Err(Broken), "{cipher:?} {kind}");
            }
        }
    }
}

proptest! {
    #[test]
    fn what_was_sealed_opens_and_is_not_readable(seed: u64, page: u32, version: u64) {
        for cipher in CIPHERS {
            let key = SealKey::fresh_for(cipher).expect("a key");
            let stored = store(&key, PageVersion { page, version }, seed);
            let same = stored.sealed.iter().zip(content(seed)).filter(|(a, b)| **a == *b).count();
            prop_assert!(same < PAGE_BYTES / 32, "{same} bytes are as they were");
            prop_assert_eq!(open(&key, &stored, &stored.sealed), Ok(content(seed)));
            let copy = SealKey::from_bytes(&key.to_bytes()).expect("a key");
            prop_assert_eq!(open(&copy, &stored, &stored.sealed), Ok(content(seed)));
        }
    }
}

#[test]
fn a_key_is_not_shown() {
    let key = SealKey::fresh_for(Cipher::Aegis128X2).expect("a key");
    assert_eq!(format!("{key:?}"), "SealKey { cipher: Aegis128X2, .. }");
}
