//! What is checked of any bytes, by the tests and by fuzzing.

use farpool_record::{Cipher, Incoming, Outgoing, TrafficKey};

const CIPHERS: [Cipher; 3] = [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

fn key(cipher: Cipher) -> TrafficKey {
    let bytes = if cipher == Cipher::Aes128Gcm { 16 } else { 32 };
    TrafficKey::new(cipher, &[7; 32][..bytes], [9; 12], 0).expect("a key")
}

/// The content that comes out until something is refused, if the bytes arrive in pieces.
fn opened(cipher: Cipher, bytes: &[u8], piece: usize) -> Vec<u8> {
    let mut incoming = Incoming::new(key(cipher));
    let (mut all, mut left) = (Vec::new(), bytes);
    loop {
        match incoming.content() {
            Err(error) => {
                assert_eq!(incoming.content(), Err(error), "what was refused stays refused");
                return all;
            }
            Ok([]) if left.is_empty() => return all,
            Ok([]) => {
                let room = incoming.room();
                let count = left.len().min(piece).min(room.len());
                room[..count].copy_from_slice(&left[..count]);
                incoming.received(count);
                left = &left[count..];
            }
            Ok(content) => {
                let count = content.len();
                all.extend_from_slice(content);
                incoming.take(count);
            }
        }
    }
}

/// The first bytes choose what is done: the rest arrives as it is, from which nothing may come out,
/// or is sealed and changed in one place, from which nothing but what was sealed may come out.
pub(crate) fn receive_any(bytes: &[u8]) {
    let Some((&[how, at, change, piece], rest)) = bytes.split_first_chunk() else { return };
    let cipher = CIPHERS[usize::from(how) % CIPHERS.len()];
    let piece = 1 + usize::from(piece);
    assert!(opened(cipher, rest, piece).is_empty(), "it was never sealed");
    let mut outgoing = Outgoing::new(key(cipher));
    let (mut sealed, mut taken) = (Vec::new(), 0);
    for part in rest.chunks(1 + usize::from(at)) {
        let count = outgoing.add(part).expect("a fresh key");
        taken += count;
        outgoing.seal().expect("a fresh key");
        if count < part.len() {
            break;
        }
    }
    sealed.extend_from_slice(outgoing.sealed());
    assert_eq!(opened(cipher, &sealed, piece), rest[..taken]);
    let length = sealed.len();
    if let Some(byte) = sealed.get_mut(usize::from(at) * 7 % length.max(1)) {
        *byte ^= change;
    }
    let found = opened(cipher, &sealed, piece);
    assert!(rest.starts_with(&found), "only what was sealed");
    assert!(change == 0 || taken == 0 || found.len() < taken, "a change is seen");
}
