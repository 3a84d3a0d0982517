//! From rustls's keys to those of the record layer.

use farpool_record::{Cipher, Secrets, TrafficKey};
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};

/// The keys of one end. None for a cipher that is not spoken.
pub(crate) fn secrets_of(extracted: ExtractedSecrets) -> Option<Secrets> {
    let ExtractedSecrets { tx, rx } = extracted;
    Some(Secrets { sending: key_of(&tx)?, receiving: key_of(&rx)? })
}

fn key_of((sequence, secrets): &(u64, ConnectionTrafficSecrets)) -> Option<TrafficKey> {
    let (cipher, key, iv) = match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (Cipher::Aes128Gcm, key, iv),
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (Cipher::Aes256Gcm, key, iv),
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            (Cipher::ChaCha20Poly1305, key, iv)
        }
        _ => return None,
    };
    TrafficKey::new(cipher, key.as_ref(), iv.as_ref().try_into().ok()?, *sequence)
}
