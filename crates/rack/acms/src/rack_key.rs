//! The rack key: only who has it can speak to the nodes. It makes the MAC of every datagram.
//!
//! Without a key the MAC's place holds a checksum, which guards against accidents only.
//!
//! Invariants: keys are never shown, not by `Debug` either; a MAC is compared in constant time; a
//! datagram is signed with the first key and accepted under each.

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::datagram::{DecodeError, HEADER_BYTES, KEY_AT, MAC_AT, MAC_BYTES};

/// Bytes of a rack key, from a source of secure randomness.
pub const RACK_KEY_BYTES: usize = 32;
/// Most keys of a node: the present one, and its predecessor or successor while it is replaced.
pub const RACK_KEYS_MAX: usize = 2;
/// Bytes of a block of SHA-256.
const BLOCK_BYTES: usize = 64;
/// What a key's number is the MAC of. No datagram begins like this, so the number says nothing
/// about the MAC of any.
const NUMBER_LABEL: &[u8] = b"farpool: number of a rack key";
/// Number in datagrams that are not signed.
const UNSIGNED: u32 = 0;

/// A secret that all nodes of a cluster share.
#[derive(Clone)]
pub struct RackKey {
    secret: [u8; RACK_KEY_BYTES],
    /// Tells a datagram under another key from one that is forged or damaged.
    number: u32,
    mac: Hmac<Sha256>,
}

impl RackKey {
    /// Prepares a key for use.
    #[must_use]
    pub fn new(secret: [u8; RACK_KEY_BYTES]) -> Self {
        // HMAC fills a key that is shorter than a block with zeros.
        let mut block = [0; BLOCK_BYTES];
        block[..RACK_KEY_BYTES].copy_from_slice(&secret);
        let mac = Hmac::<Sha256>::new(&block.into());
        let tag = mac.clone().chain_update(NUMBER_LABEL).finalize().into_bytes();
        let number = u32::from_le_bytes([tag[0], tag[1], tag[2], tag[3]]).max(UNSIGNED + 1);
        Self { secret, number, mac }
    }

    /// A number by which people and nodes tell keys apart; it does not reveal the key.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    fn mac_of(&self, datagram: &[u8]) -> Hmac<Sha256> {
        let mac = self.mac.clone().chain_update(&datagram[..MAC_AT]);
        mac.chain_update(&datagram[HEADER_BYTES..])
    }
}

impl PartialEq for RackKey {
    fn eq(&self, other: &Self) -> bool {
        self.secret == other.secret
    }
}

impl Eq for RackKey {}

impl fmt::Debug for RackKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RackKey({:08x})", self.number)
    }
}

/// A node's keys: the first signs, each is accepted. Without any, datagrams are not signed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RackKeys(Vec<RackKey>);

impl RackKeys {
    /// No key: anyone can speak to the node.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// The key that signs, and perhaps a second one that is accepted, too.
    #[must_use]
    pub fn of(signs: RackKey, second: Option<RackKey>) -> Self {
        Self(std::iter::once(signs).chain(second).collect())
    }

    /// True without a key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Numbers of the keys, the one that signs first.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(RackKey::number)
    }

    /// Fills in the key's number and the MAC of a complete datagram.
    pub(crate) fn seal(&self, datagram: &mut [u8]) {
        let number = self.0.first().map_or(UNSIGNED, RackKey::number);
        datagram[KEY_AT..MAC_AT].copy_from_slice(&number.to_le_bytes());
        let tag = match self.0.first() {
            Some(key) => {
                let whole = key.mac_of(datagram).finalize().into_bytes();
                let mut tag = [0; MAC_BYTES];
                tag.copy_from_slice(&whole[..MAC_BYTES]);
                tag
            }
            None => checksum(datagram),
        };
        datagram[MAC_AT..HEADER_BYTES].copy_from_slice(&tag);
    }

    /// Checks the MAC of a datagram that has a whole header.
    pub(crate) fn check(&self, datagram: &[u8]) -> Result<(), DecodeError> {
        let mut number = [0; MAC_AT - KEY_AT];
        number.copy_from_slice(&datagram[KEY_AT..MAC_AT]);
        let number = u32::from_le_bytes(number);
        let tag = &datagram[MAC_AT..HEADER_BYTES];
        if number == UNSIGNED {
            // First, so that damage is not taken for a node without a key.
            let is_whole = checksum(datagram) == *tag;
            return match (is_whole, self.is_empty()) {
                (false, _) => Err(DecodeError::Checksum),
                (true, true) => Ok(()),
                (true, false) => Err(DecodeError::Unsigned),
            };
        }
        if self.is_empty() {
            return Err(DecodeError::Signed);
        }
        let mut candidates = self.0.iter().filter(|key| key.number == number).peekable();
        if candidates.peek().is_none() {
            return Err(DecodeError::UnknownKey(number));
        }
        let is_right = |key: &RackKey| key.mac_of(datagram).verify_truncated_left(tag).is_ok();
        if candidates.any(is_right) { Ok(()) } else { Err(DecodeError::Forged) }
    }
}

/// CRC-32 of a datagram without the MAC's place, in that place's first bytes; the others are 0.
fn checksum(datagram: &[u8]) -> [u8; MAC_BYTES] {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&datagram[..MAC_AT]);
    hasher.update(&datagram[HEADER_BYTES..]);
    let mut tag = [0; MAC_BYTES];
    tag[..4].copy_from_slice(&hasher.finalize().to_le_bytes());
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_shown() {
        let key = RackKey::new([0xA5; RACK_KEY_BYTES]);
        let shown = format!("{key:?} {:?}", RackKeys::of(key.clone(), None));
        assert!(!shown.contains("165") && !shown.to_lowercase().contains("a5a5"), "{shown}");
    }

    #[test]
    fn different_keys_have_different_numbers() {
        let number = |byte| RackKey::new([byte; RACK_KEY_BYTES]).number();
        let all: std::collections::BTreeSet<u32> = (0..=255).map(number).collect();
        assert_eq!(all.len(), 256);
        assert!(!all.contains(&UNSIGNED));
    }
}
