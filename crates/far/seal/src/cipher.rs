//! The two ciphers, and which one a processor gets.
//!
//! AEGIS-128X2 (draft-irtf-cfrg-aegis-aead) costs about two copies of a page with vector AES
//! instructions, where AEGIS-128L costs three and AES-GCM six; but only with AES instructions:
//! without them it would be slow and would leak the key by its timing. There ChaCha20-Poly1305
//! (RFC 8439) is used.

use aegis::aegis128x2::Aegis128X2;
use farpool_units::PAGE_BYTES;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use crate::{Broken, KEY_BYTES, PageVersion, TAG_BYTES, Tag};

/// How pages are sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Cipher {
    /// AEGIS-128L with tags of 128 bits; its key is the first half of the segment's.
    Aegis128X2 = 1,
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305 = 2,
}

impl Cipher {
    /// The one for this processor.
    pub fn for_this_processor() -> Cipher {
        if has_aes() { Cipher::Aegis128X2 } else { Cipher::ChaCha20Poly1305 }
    }

    /// The inverse of `self as u8`.
    pub fn from_number(number: u8) -> Option<Cipher> {
        [Cipher::Aegis128X2, Cipher::ChaCha20Poly1305].into_iter().find(|it| *it as u8 == number)
    }
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("avx")
}

#[cfg(target_arch = "aarch64")]
fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes() -> bool {
    false
}

/// Encrypts in place. Returns the tag.
pub(crate) fn seal(
    cipher: Cipher,
    key: &[u8; KEY_BYTES],
    at: PageVersion,
    bytes: &mut [u8; PAGE_BYTES],
) -> Tag {
    match cipher {
        Cipher::Aegis128X2 => Tag(aegis_of(key, at).encrypt_in_place(bytes, &[])),
        Cipher::ChaCha20Poly1305 => {
            let sealed =
                chacha_of(key).seal_in_place_separate_tag(chacha_nonce(at), Aad::empty(), bytes);
            // It fails only for more than 256 GiB at once.
            let tag = sealed.expect("a page can be sealed");
            Tag(tag.as_ref().try_into().expect("a tag has 16 bytes"))
        }
    }
}

/// Decrypts in place.
pub(crate) fn open(
    cipher: Cipher,
    key: &[u8; KEY_BYTES],
    at: PageVersion,
    bytes: &mut [u8; PAGE_BYTES],
    tag: &Tag,
) -> Result<(), Broken> {
    match cipher {
        Cipher::Aegis128X2 => {
            aegis_of(key, at).decrypt_in_place(bytes, &tag.0, &[]).map_err(|_| Broken)
        }
        Cipher::ChaCha20Poly1305 => {
            let (nonce, tag) = (chacha_nonce(at), ring::aead::Tag::from(tag.0));
            let opened = chacha_of(key).open_in_place_separate_tag(
                nonce,
                Aad::empty(),
                tag,
                bytes.as_mut_slice(),
                0..,
            );
            opened.map(drop).map_err(|_| Broken)
        }
    }
}

fn aegis_of(key: &[u8; KEY_BYTES], at: PageVersion) -> Aegis128X2<TAG_BYTES> {
    let mut nonce = [0; 16];
    nonce[..4].copy_from_slice(&at.page.to_le_bytes());
    nonce[8..].copy_from_slice(&at.version.to_le_bytes());
    let first_half = key.first_chunk().expect("a key is longer than AEGIS-128X2's");
    Aegis128X2::new(first_half, &nonce)
}

fn chacha_of(key: &[u8; KEY_BYTES]) -> LessSafeKey {
    let unbound = UnboundKey::new(&CHACHA20_POLY1305, key);
    LessSafeKey::new(unbound.expect("the key has the cipher's length"))
}

fn chacha_nonce(at: PageVersion) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..4].copy_from_slice(&at.page.to_le_bytes());
    nonce[4..].copy_from_slice(&at.version.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use farpool_units::exactly;

    use super::*;

    /// Test vector 2 of AEGIS-128X2 in the AEGIS draft: the library computes what others do.
    #[test]
    fn aegis_agrees_with_its_specification() {
        let key: [u8; 16] = std::array::from_fn(|at| exactly(at));
        let nonce: [u8; 16] = std::array::from_fn(|at| exactly(16 + at));
        let mut text = [4, 5, 6, 7].repeat(30);
        let cipher = Aegis128X2::<16>::new(&key, &nonce);
        let tag = cipher.encrypt_in_place(&mut text, &[1, 2, 3, 4, 1, 2, 3, 4]);
        let begin = u128::from_be_bytes(*text.first_chunk().expect("more than a block"));
        let end = u128::from_be_bytes(*text.last_chunk().expect("more than a block"));
        assert_eq!(begin, 0x5795_5443_0199_7f93_621b_2788_09d6_331b);
        assert_eq!(end, 0x62b2_9c22_cd4b_5761_b38f_43d5_a5ee_062f);
        assert_eq!(u128::from_be_bytes(tag), 0x1aeb_c200_804f_405c_ab63_7f2a_debb_6d77);
    }

    #[test]
    fn numbers_name_ciphers() {
        for cipher in [Cipher::Aegis128X2, Cipher::ChaCha20Poly1305] {
            assert_eq!(Cipher::from_number(cipher as u8), Some(cipher));
        }
        assert_eq!((Cipher::from_number(0), Cipher::from_number(3)), (None, None));
    }
}
