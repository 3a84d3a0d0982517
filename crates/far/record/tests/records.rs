//! What one end seals, the other one opens, however the bytes are cut; anything else is refused.

mod exercise;

use farpool_record::{
    BODY_LIMIT_BYTES, CONTENT_LIMIT_BYTES, Cipher, HEADER_BYTES, Incoming, Outgoing, RECORDS_LIMIT,
    RECORDS_WORN, RecordError, SECRETS_BYTES, Secrets, TAG_BYTES, TrafficKey,
};
use proptest::prelude::*;

const CIPHERS: [Cipher; 3] = [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

fn key_from(cipher: Cipher, sequence: u64) -> TrafficKey {
    let bytes = if cipher == Cipher::Aes128Gcm { 16 } else { 32 };
    TrafficKey::new(cipher, &[7; 32][..bytes], [9; 12], sequence).expect("a key")
}

fn key(cipher: Cipher) -> TrafficKey {
    key_from(cipher, 0)
}

/// The records of these contents, one for each, as one end sends them.
fn records_of(cipher: Cipher, contents: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut outgoing = Outgoing::new(key(cipher));
    let one = |content: &&[u8]| {
        assert_eq!(outgoing.add(content), Ok(content.len()));
        outgoing.seal().expect("sealed");
        let record = outgoing.sealed().to_vec();
        outgoing.sent(record.len());
        record
    };
    contents.iter().map(one).collect()
}

/// What arrives when `bytes` come in pieces of at most `piece`.
fn arrives(incoming: &mut Incoming, bytes: &[u8], piece: usize) -> Result<Vec<u8>, RecordError> {
    let (mut arrived, mut left) = (Vec::new(), bytes);
    loop {
        let content = incoming.content()?;
        if !content.is_empty() {
            let count = content.len().min(piece);
            arrived.extend_from_slice(&content[..count]);
            incoming.take(count);
            continue;
        }
        if left.is_empty() {
            return Ok(arrived);
        }
        let room = incoming.room();
        let count = left.len().min(piece).min(room.len());
        assert!(count > 0, "there is room as long as no record is complete");
        room[..count].copy_from_slice(&left[..count]);
        incoming.received(count);
        left = &left[count..];
    }
}

#[test]
fn a_stream_may_be_cut_at_every_byte() {
    for cipher in CIPHERS {
        let records = records_of(cipher, &[b"hello", b"", b"a longer one"]).concat();
        for cut in 0..=records.len() {
            let mut incoming = Incoming::new(key(cipher));
            let mut all = arrives(&mut incoming, &records[..cut], usize::MAX).expect("the front");
            all.extend(arrives(&mut incoming, &records[cut..], usize::MAX).expect("the rest"));
            assert_eq!(all, b"helloa longer one", "{cipher:?} cut at {cut}");
        }
    }
}

#[test]
fn every_flipped_bit_is_refused_and_nothing_is_opened_after_it() {
    for cipher in CIPHERS {
        let records = records_of(cipher, &[b"first", b"second"]);
        for at in 0..records[0].len() {
            for bit in 0..8 {
                let mut bytes = records.concat();
                bytes[at] ^= 1 << bit;
                let mut incoming = Incoming::new(key(cipher));
                let (high, low) = (bytes[3], bytes[4]);
                match arrives(&mut incoming, &bytes, usize::MAX) {
                    Err(error) => {
                        let again = arrives(&mut incoming, &records[1], usize::MAX);
                        assert_eq!(again, Err(error), "{cipher:?} byte {at} bit {bit}");
                    }
                    // A longer record is waited for.
                    Ok(arrived) => {
                        let body = usize::from(u16::from_be_bytes([high, low]));
                        assert!(arrived.is_empty() && (3..5).contains(&at));
                        assert!(body > bytes.len() - HEADER_BYTES, "byte {at} bit {bit}");
                    }
                }
            }
        }
    }
}

#[test]
fn records_again_missing_or_in_another_order_are_refused() {
    let records = records_of(Cipher::Aes128Gcm, &[b"one", b"two", b"three"]);
    let [one, two, three] = &records[..] else { panic!("three") };
    for order in [[one, one], [two, one], [one, three], [three, two]] {
        let bytes: Vec<u8> = order.into_iter().flatten().copied().collect();
        let mut incoming = Incoming::new(key(Cipher::Aes128Gcm));
        assert_eq!(arrives(&mut incoming, &bytes, usize::MAX), Err(RecordError::Seal));
    }
}

#[test]
fn one_direction_is_not_taken_for_the_other() {
    let other = TrafficKey::new(Cipher::Aes128Gcm, &[8; 16], [9; 12], 0).expect("a key");
    let record = records_of(Cipher::Aes128Gcm, &[b"one"]).concat();
    let mut incoming = Incoming::new(other);
    assert_eq!(arrives(&mut incoming, &record, usize::MAX), Err(RecordError::Seal));
}

#[test]
fn what_is_no_record_of_data_ends_the_connection() {
    let refused = |header: [u8; HEADER_BYTES]| {
        let mut incoming = Incoming::new(key(Cipher::Aes128Gcm));
        let bytes = [&header[..], &[0; 64]].concat();
        arrives(&mut incoming, &bytes, usize::MAX).expect_err("no record")
    };
    let length = |bytes: usize| u16::try_from(bytes).expect("short").to_be_bytes();
    let [high, low] = length(BODY_LIMIT_BYTES + 1);
    let short = length(TAG_BYTES);
    for header in [
        [22, 3, 3, 0, 64],
        [20, 3, 3, 0, 64],
        [21, 3, 3, 0, 64],
        [23, 3, 1, 0, 64],
        [23, 3, 3, high, low],
        [23, 3, 3, short[0], short[1]],
        *b"FPPP1",
    ] {
        assert_eq!(refused(header), RecordError::Malformed, "{header:?}");
    }
}

#[test]
fn endless_records_without_content_are_refused() {
    let records = records_of(Cipher::Aes128Gcm, &[b"x"]);
    let mut incoming = Incoming::new(key(Cipher::Aes128Gcm));
    assert_eq!(arrives(&mut incoming, &records[0], usize::MAX), Ok(b"x".to_vec()));
    // This end seals no record without content.
    let mut outgoing = Outgoing::new(key(Cipher::Aes128Gcm));
    assert_eq!(outgoing.add(b""), Ok(0));
    outgoing.seal().expect("nothing to seal");
    assert!(outgoing.is_empty());
}

#[test]
fn a_key_ends_and_nothing_leaves_in_the_clear_then() {
    let last = || key_from(Cipher::Aes128Gcm, RECORDS_LIMIT - 1);
    let mut outgoing = Outgoing::new(last());
    assert!(outgoing.is_worn());
    outgoing.add(b"the last one").expect("room");
    outgoing.seal().expect("one is left");
    let sealed = outgoing.sealed().to_vec();
    outgoing.sent(sealed.len());
    let mut incoming = Incoming::new(last());
    assert_eq!(arrives(&mut incoming, &sealed, 7), Ok(b"the last one".to_vec()));
    outgoing.add(b"one more").expect("room");
    assert_eq!(outgoing.seal(), Err(RecordError::Worn));
    assert!(outgoing.sealed().is_empty() && outgoing.is_empty());
    assert_eq!(outgoing.add(b"one more"), Err(RecordError::Worn));
    assert_eq!(arrives(&mut incoming, &sealed, 7), Err(RecordError::Worn));
    assert!(TrafficKey::new(Cipher::Aes128Gcm, &[7; 16], [9; 12], RECORDS_LIMIT).is_none());
    assert!(!Outgoing::new(key_from(Cipher::Aes128Gcm, RECORDS_WORN - 1)).is_worn());
}

#[test]
fn secrets_are_read_as_they_were_written_and_shown_nowhere() {
    for cipher in CIPHERS {
        let secrets = Secrets { sending: key_from(cipher, 5), receiving: key(cipher) };
        assert!(!format!("{secrets:?}").contains('7'), "{secrets:?}");
        let bytes = secrets.encode();
        let there = Secrets::decode(&bytes[..]).expect("secrets");
        let mut outgoing = Outgoing::new(there.sending);
        outgoing.add(b"hello").expect("room");
        outgoing.seal().expect("sealed");
        let mut incoming = Incoming::new(key_from(cipher, 5));
        assert_eq!(arrives(&mut incoming, outgoing.sealed(), 3), Ok(b"hello".to_vec()));
        for count in 0..SECRETS_BYTES {
            assert!(Secrets::decode(&bytes[..count]).is_none(), "{count}");
        }
        let mut wrong = *bytes;
        wrong[0] = 4;
        assert!(Secrets::decode(&wrong).is_none());
    }
    assert!(TrafficKey::new(Cipher::Aes128Gcm, &[0; 32], [0; 12], 0).is_none());
}

fn contents() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let long = (0..3 * CONTENT_LIMIT_BYTES).prop_map(|bytes| vec![bytes.to_le_bytes()[0]; bytes]);
    let short = proptest::collection::vec(any::<u8>(), 0..100);
    proptest::collection::vec(prop_oneof![short, long], 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn all_that_is_sent_arrives_in_order(
        contents in contents(),
        send_piece in 1_usize..70_000,
        piece in 1_usize..70_000,
        cipher in 0_usize..3,
    ) {
        let mut outgoing = Outgoing::new(key(CIPHERS[cipher]));
        let mut incoming = Incoming::new(key(CIPHERS[cipher]));
        let mut arrived = Vec::new();
        for content in &contents {
            let mut left = &content[..];
            while !left.is_empty() {
                let taken = outgoing.add(left).expect("a fresh key");
                left = &left[taken..];
                outgoing.seal().expect("a fresh key");
                while !outgoing.is_empty() {
                    let sealed = outgoing.sealed();
                    let count = sealed.len().min(send_piece);
                    let got = arrives(&mut incoming, &sealed[..count], piece);
                    arrived.extend(got.expect("what was sent"));
                    outgoing.sent(count);
                }
            }
        }
        prop_assert_eq!(arrived, contents.concat());
    }

    #[test]
    fn any_bytes_are_refused_or_waited_for(
        bytes in proptest::collection::vec(any::<u8>(), 0..2000),
    ) {
        exercise::receive_any(&bytes);
    }
}
