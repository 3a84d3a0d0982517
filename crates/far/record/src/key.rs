//! Keys of one connection, and their form between two processes of one host.

use std::fmt;

use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use zeroize::{Zeroize, Zeroizing};

use crate::{HEADER_BYTES, RECORDS_LIMIT, RecordError, TAG_BYTES};

/// The longest key in bytes.
const KEY_BYTES: usize = 32;
/// The part of every nonce that belongs to the key, in bytes.
const IV_BYTES: usize = 12;
/// Cipher, key, initialization vector, next number.
const TRAFFIC_KEY_BYTES: usize = 1 + KEY_BYTES + IV_BYTES + 8;
/// The length of [`Secrets::encode`]'s result.
pub const SECRETS_BYTES: usize = 2 * TRAFFIC_KEY_BYTES;

/// The ciphers of TLS 1.3 that are spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-GCM with a key of 128 bits.
    Aes128Gcm,
    /// AES-GCM with a key of 256 bits.
    Aes256Gcm,
    /// For processors without instructions for AES.
    ChaCha20Poly1305,
}

impl Cipher {
    fn number(self) -> u8 {
        match self {
            Cipher::Aes128Gcm => 1,
            Cipher::Aes256Gcm => 2,
            Cipher::ChaCha20Poly1305 => 3,
        }
    }

    fn of_number(number: u8) -> Option<Self> {
        [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305]
            .into_iter()
            .find(|cipher| cipher.number() == number)
    }

    fn algorithm(self) -> &'static aead::Algorithm {
        match self {
            Cipher::Aes128Gcm => &aead::AES_128_GCM,
            Cipher::Aes256Gcm => &aead::AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        }
    }
}

/// The key of one direction, and the number of its next record. Overwritten when dropped.
pub struct TrafficKey {
    cipher: Cipher,
    /// The cipher's length of it counts; the rest is zero.
    key: [u8; KEY_BYTES],
    iv: [u8; IV_BYTES],
    sequence: u64,
}

impl fmt::Debug for TrafficKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrafficKey").field("cipher", &self.cipher).finish_non_exhaustive()
    }
}

impl Drop for TrafficKey {
    fn drop(&mut self) {
        self.key.zeroize();
        self.iv.zeroize();
    }
}

impl TrafficKey {
    /// A key as the handshake agreed on it. None if it has not the cipher's length, or the next
    /// number is beyond all that may be used.
    #[must_use]
    pub fn new(cipher: Cipher, key: &[u8], iv: [u8; IV_BYTES], sequence: u64) -> Option<Self> {
        if key.len() != cipher.algorithm().key_len() || sequence >= RECORDS_LIMIT {
            return None;
        }
        let mut whole = [0; KEY_BYTES];
        whole[..key.len()].copy_from_slice(key);
        Some(TrafficKey { cipher, key: whole, iv, sequence })
    }

    fn encode(&self, out: &mut [u8]) {
        let (cipher, rest) = out.split_at_mut(1);
        let (key, rest) = rest.split_at_mut(KEY_BYTES);
        let (iv, sequence) = rest.split_at_mut(IV_BYTES);
        cipher[0] = self.cipher.number();
        key.copy_from_slice(&self.key);
        iv.copy_from_slice(&self.iv);
        sequence.copy_from_slice(&self.sequence.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (cipher, rest) = bytes.split_first()?;
        let (key, rest) = rest.split_first_chunk::<KEY_BYTES>()?;
        let (iv, sequence) = rest.split_first_chunk::<IV_BYTES>()?;
        let cipher = Cipher::of_number(*cipher)?;
        let sequence = u64::from_le_bytes(sequence.try_into().ok()?);
        Self::new(cipher, &key[..cipher.algorithm().key_len()], *iv, sequence)
    }
}

/// The keys of a connection at one of its ends. Whoever takes it is the only one to use it: it
/// cannot be cloned.
#[derive(Debug)]
pub struct Secrets {
    /// For what this end sends.
    pub sending: TrafficKey,
    /// For what it receives.
    pub receiving: TrafficKey,
}

impl Secrets {
    /// The form for handing them, with the socket, to another process of this host.
    #[must_use]
    pub fn encode(self) -> Zeroizing<[u8; SECRETS_BYTES]> {
        let mut out = Zeroizing::new([0; SECRETS_BYTES]);
        let (sending, receiving) = out.split_at_mut(TRAFFIC_KEY_BYTES);
        self.sending.encode(sending);
        self.receiving.encode(receiving);
        out
    }

    /// What [`Self::encode`] has made. None for anything else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (sending, receiving) = bytes.split_at_checked(TRAFFIC_KEY_BYTES)?;
        if receiving.len() != TRAFFIC_KEY_BYTES {
            return None;
        }
        let sending = TrafficKey::decode(sending)?;
        Some(Secrets { sending, receiving: TrafficKey::decode(receiving)? })
    }
}

/// A key that is ready for use, in one direction.
pub(crate) struct Numbered {
    key: LessSafeKey,
    iv: [u8; IV_BYTES],
    sequence: u64,
}

impl fmt::Debug for Numbered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numbered").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Numbered {
    pub(crate) fn new(key: &TrafficKey) -> Self {
        let algorithm = key.cipher.algorithm();
        let unbound = UnboundKey::new(algorithm, &key.key[..algorithm.key_len()]);
        let unbound = unbound.unwrap_or_else(|_| unreachable!("the length was checked"));
        Numbered { key: LessSafeKey::new(unbound), iv: key.iv, sequence: key.sequence }
    }

    pub(crate) fn records(&self) -> u64 {
        self.sequence
    }

    /// The next nonce; each is given out once.
    fn nonce(&mut self) -> Result<Nonce, RecordError> {
        if self.sequence >= RECORDS_LIMIT {
            return Err(RecordError::Worn);
        }
        let mut nonce = self.iv;
        let number = self.sequence.to_be_bytes();
        nonce[IV_BYTES - 8..].iter_mut().zip(number).for_each(|(byte, number)| *byte ^= number);
        self.sequence += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// Encrypts in place and returns the tag.
    pub(crate) fn seal(
        &mut self,
        header: [u8; HEADER_BYTES],
        content: &mut [u8],
    ) -> Result<[u8; TAG_BYTES], RecordError> {
        let nonce = self.nonce()?;
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), content);
        let tag = sealed.map_err(|_| RecordError::Malformed)?;
        tag.as_ref().try_into().map_err(|_| RecordError::Malformed)
    }

    /// Verifies and decrypts in place; `body` ends with the tag. Returns the bytes before it.
    pub(crate) fn open<'a>(
        &mut self,
        header: [u8; HEADER_BYTES],
        body: &'a mut [u8],
    ) -> Result<&'a mut [u8], RecordError> {
        let nonce = self.nonce()?;
        self.key.open_in_place(nonce, Aad::from(header), body).map_err(|_| RecordError::Seal)
    }
}
