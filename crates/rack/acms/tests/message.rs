//! The datagrams: round trips, any bytes, mutated valid ones, and one written out by hand.

#[allow(dead_code, reason = "each test file uses a part")]
mod exercise;

use std::net::SocketAddr;

use farpool_acms::message::{
    DATAGRAM_BYTES_MAX, EPOCHS_MAX, GOSSIP_BYTES_MAX, HEADER_BYTES, RUMOURS_MAX,
};
use farpool_acms::{
    Class, ClusterId, DecodeError, Epoch, GrantKey, Header, Incarnation, Message, Mood, NackReason,
    NodeId, RackKeys, RequestNo, Rumour, RumourKind, Zone,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn addr() -> impl Strategy<Value = SocketAddr> {
    prop_oneof![
        any::<([u8; 4], u16)>().prop_map(SocketAddr::from),
        any::<([u8; 16], u16)>().prop_map(SocketAddr::from),
    ]
}

fn epoch() -> impl Strategy<Value = Epoch> {
    any::<u64>().prop_map(Epoch)
}

fn rumour() -> impl Strategy<Value = Rumour> {
    let numbers = (1..=u64::MAX, any::<u32>(), any::<u32>(), any::<u64>());
    let times = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u8>());
    (any::<bool>(), numbers, times, addr()).prop_map(|(offer, numbers, times, addr)| Rumour {
        kind: if offer { RumourKind::Offer } else { RumourKind::Request },
        origin: NodeId(numbers.0),
        incarnation: Incarnation(numbers.1),
        seq: numbers.2,
        bytes: numbers.3,
        zone: Zone(times.0),
        age_ms: times.1,
        valid_ms: times.2,
        attempt: times.3,
        addr,
    })
}

fn message() -> impl Strategy<Value = Message> {
    let reason = prop_oneof![
        Just(NackReason::NoMemory),
        Just(NackReason::NoSuchGrant),
        Just(NackReason::Withdrawn),
        Just(NackReason::Declined),
    ];
    let class = prop_oneof![Just(Class::Server), Just(Class::Neutral), Just(Class::Client)];
    prop_oneof![
        Just(Message::Hello),
        Just(Message::Welcome),
        vec(any::<u8>(), 0..=GOSSIP_BYTES_MAX).prop_map(Message::Gossip),
        ((class, any::<u16>(), any::<u16>()), vec(rumour(), 0..=RUMOURS_MAX)).prop_map(
            |((class, clients, servers), rumours)| {
                Message::Rumours(Mood { class, clients, servers }, rumours)
            }
        ),
        any::<(u32, u64, u32)>().prop_map(|(request, bytes, zone)| Message::Request {
            request: RequestNo(request),
            bytes,
            zone: Zone(zone),
        }),
        (any::<(u32, u64, u64, u128, u32, u32, u32)>(), addr()).prop_map(|(numbers, blade)| {
            Message::Grant {
                request: RequestNo(numbers.0),
                epoch: Epoch(numbers.1),
                count: numbers.6,
                bytes: numbers.2,
                key: GrantKey(numbers.3),
                hold_ms: numbers.4,
                zone: Zone(numbers.5),
                blade,
            }
        }),
        (epoch(), any::<u64>(), any::<u64>()).prop_map(|(epoch, bytes, sent_ms)| Message::Ack {
            epoch,
            bytes,
            sent_ms
        }),
        (any::<u64>(), vec(epoch(), 0..=EPOCHS_MAX))
            .prop_map(|(sent_ms, epochs)| Message::Renew { sent_ms, epochs }),
        (any::<u64>(), any::<u32>(), vec(epoch(), 0..=EPOCHS_MAX))
            .prop_map(|(sent_ms, lease_ms, epochs)| Message::Lease { sent_ms, lease_ms, epochs }),
        (reason, any::<u32>(), epoch(), any::<u64>()).prop_map(
            |(reason, request, epoch, left_bytes)| Message::Nack {
                reason,
                request: RequestNo(request),
                epoch,
                left_bytes
            }
        ),
        (epoch(), any::<u32>()).prop_map(|(epoch, left_ms)| Message::Reclaim { epoch, left_ms }),
        epoch().prop_map(|epoch| Message::Released { epoch }),
        epoch().prop_map(|epoch| Message::Freed { epoch }),
    ]
}

fn header() -> impl Strategy<Value = Header> {
    (any::<(u64, u32, u64, u32, u64)>(), 1..=u64::MAX).prop_map(|(numbers, from)| Header {
        cluster: ClusterId(numbers.0),
        from: NodeId(from),
        from_incarnation: Incarnation(numbers.1),
        to: NodeId(numbers.2),
        to_incarnation: Incarnation(numbers.3),
        number: numbers.4,
    })
}

/// No key, one, or two of which the second is the new one.
fn rack_keys() -> impl Strategy<Value = RackKeys> {
    let two = RackKeys::of(exercise::key(1), Some(exercise::key(2)));
    prop_oneof![Just(RackKeys::none()), Just(exercise::keys(1)), Just(two)]
}

proptest! {
    #[test]
    fn what_is_encoded_fits_a_datagram_and_decodes_to_itself(
        header in header(), message in message(), keys in rack_keys(),
    ) {
        let bytes = message.encode(&header, &keys);
        prop_assert!(bytes.len() <= DATAGRAM_BYTES_MAX, "{}", bytes.len());
        prop_assert_eq!(Message::decode(&bytes, &keys), Ok((header, message)));
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in vec(any::<u8>(), 0..1_500)) {
        exercise::decode_any(&bytes);
        exercise::feed_any(&bytes);
        exercise::refuse_any(&bytes);
    }

    #[test]
    fn a_changed_bit_is_noticed(
        header in header(), message in message(), keys in rack_keys(),
        at: prop::sample::Index, bit in 0..8u8,
    ) {
        let mut bytes = message.encode(&header, &keys);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(Message::decode(&bytes, &keys).is_err());
    }

    #[test]
    fn who_has_another_key_or_none_cannot_read_or_write(
        header in header(), message in message(), mine in rack_keys(), changes: [u8; 8],
    ) {
        let strange = [RackKeys::none(), exercise::keys(3)].into_iter().filter(|it| *it != mine);
        for strange in strange {
            let theirs = message.encode(&header, &strange);
            prop_assert!(Message::decode(&theirs, &mine).is_err());
            let ours = message.encode(&header, &mine);
            prop_assert!(Message::decode(&ours, &strange).is_err());
        }
        if !mine.is_empty() {
            // With the right number of the key, and a MAC that is guessed.
            let mut guessed = message.encode(&header, &mine);
            for (at, change) in changes.into_iter().enumerate() {
                guessed[HEADER_BYTES - 1 - at] ^= change;
            }
            let is_forged = Message::decode(&guessed, &mine) == Err(DecodeError::Forged);
            prop_assert_eq!(is_forged, changes != [0; 8]);
        }
    }

    #[test]
    fn a_mutated_message_with_a_right_checksum_harms_no_node(
        header in header(), message in message(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..8), cut: prop::sample::Index,
    ) {
        let mut bytes = message.encode(&header, &RackKeys::none());
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cut.index(4) == 0 {
            bytes.truncate(cut.index(bytes.len()));
        }
        exercise::feed_any(&bytes);
        exercise::refuse_any(&bytes);
        exercise::repair(&mut bytes);
        exercise::decode_any(&bytes);
    }
}

/// The number of the key of 32 bytes 1, and the MAC of the RECLAIM below under it.
const KEY_NUMBER: [u8; 4] = [0x7e, 0xc0, 0xd6, 0x4a];
const MAC: [u8; 16] = [
    0x96, 0x61, 0x05, 0xdd, 0x51, 0x9d, 0xf5, 0x78, 0x7c, 0x68, 0xe4, 0xd0, 0x35, 0x98, 0xdb, 0xd8,
];

#[test]
fn a_reclaim_byte_by_byte() {
    let header = Header {
        cluster: ClusterId(0x0102_0304_0506_0708),
        from: NodeId(9),
        from_incarnation: Incarnation(3),
        to: NodeId(10),
        to_incarnation: Incarnation(4),
        number: 7,
    };
    let message = Message::Reclaim { epoch: Epoch(5 | 3 << 32), left_ms: 10_000 };
    let mut expected = Vec::new();
    expected.extend(b"FACM\x02\x0b\x0c\x00");
    expected.extend([8, 7, 6, 5, 4, 3, 2, 1]);
    expected.extend([9, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
    expected.extend([10, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([7, 0, 0, 0, 0, 0, 0, 0]);
    let key_at = expected.len();
    expected.extend([0; 4]);
    let body = [5, 0, 0, 0, 3, 0, 0, 0, 0x10, 0x27, 0, 0];

    let plain = message.encode(&header, &RackKeys::none());
    assert_eq!(plain[..52], expected[..]);
    assert_eq!(plain[68..], body);
    let crc = crc32fast::hash(&[&plain[..52], &plain[68..]].concat());
    assert_eq!(plain[52..56], crc.to_le_bytes());
    assert_eq!(plain[56..68], [0; 12]);

    // By Python's hmac: the key's number, and the MAC of the header before it and the body.
    let signed = message.encode(&header, &exercise::keys(1));
    assert_eq!(signed[..key_at], expected[..key_at]);
    assert_eq!(signed[68..], body);
    assert_eq!(signed[key_at..52], KEY_NUMBER);
    assert_eq!(signed[52..68], MAC);
}

#[test]
fn each_refusal_says_why() {
    let header = Header {
        cluster: ClusterId(1),
        from: NodeId(2),
        from_incarnation: Incarnation(1),
        to: NodeId(3),
        to_incarnation: Incarnation(1),
        number: 1,
    };
    let (none, own) = (RackKeys::none(), exercise::keys(1));
    let decode = |bytes: &[u8]| Message::decode(bytes, &RackKeys::none());
    let good = Message::Hello.encode(&header, &none);
    let with = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        decode(&bytes)
    };
    assert_eq!(decode(&[0; DATAGRAM_BYTES_MAX + 1]), Err(DecodeError::Long(1_401)));
    assert_eq!(decode(&good[..HEADER_BYTES - 1]), Err(DecodeError::Short));
    assert_eq!(with(0, 0), Err(DecodeError::Magic));
    assert_eq!(with(4, 1), Err(DecodeError::Version(1)));
    assert_eq!(decode(&good_of_version_1()), Err(DecodeError::Version(1)));
    assert_eq!(with(6, 1), Err(DecodeError::Short));
    assert_eq!(with(8, 7), Err(DecodeError::Checksum));
    let mut long = good.clone();
    long.push(0);
    assert_eq!(decode(&long), Err(DecodeError::Trailing));
    let nobody = Header { from: NodeId(0), ..header };
    assert_eq!(decode(&Message::Hello.encode(&nobody, &none)), Err(DecodeError::Field("sender")));
    assert_eq!(Message::decode(&good, &own), Err(DecodeError::Unsigned));
    let signed = Message::Hello.encode(&header, &own);
    assert_eq!(decode(&signed), Err(DecodeError::Signed));
    let number = exercise::key(1).number();
    let others = Message::decode(&signed, &exercise::keys(2));
    assert_eq!(others, Err(DecodeError::UnknownKey(number)));
}

/// HELLO as version 1 had it: a header of 44 bytes.
fn good_of_version_1() -> Vec<u8> {
    let mut bytes = b"FACM\x01\x01\x00\x00".to_vec();
    bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    bytes.resize(40, 0);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes);
    hasher.update(&[0; 4]);
    bytes.extend(hasher.finalize().to_le_bytes());
    bytes
}
