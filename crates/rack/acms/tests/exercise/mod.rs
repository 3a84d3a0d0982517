//! What the property tests and the fuzz target do with arbitrary bytes.

use std::time::Duration;

use farpool_acms::{ClusterId, Config, Incarnation, Member, MemoryUse, Message, NodeId};

/// Decoding never panics; what decodes encodes to the same bytes.
pub(crate) fn decode_any(bytes: &[u8]) {
    if let Ok((header, message)) = Message::decode(bytes) {
        assert_eq!(message.encode(&header), bytes);
    }
}

/// Gives arbitrary bytes to a node that lends, with and without a correct checksum.
pub(crate) fn feed_any(bytes: &[u8]) {
    let addr = ([127, 0, 0, 1], 7070).into();
    let config = Config::new(ClusterId(1), NodeId(1), Incarnation(1), addr);
    let Ok(mut member) = Member::new(config, Duration::ZERO) else { return };
    let usage = MemoryUse { used_bytes: 1 << 30, total_bytes: 16 << 30, pressure_permille: None };
    member.on_usage(usage, Duration::ZERO);
    for second in 1..5 {
        member.on_tick(Duration::from_secs(second));
    }
    let mut repaired = bytes.to_vec();
    repair(&mut repaired);
    for datagram in [bytes, &repaired] {
        let _ = member.on_datagram(([127, 0, 0, 2], 7070).into(), datagram, Duration::from_secs(5));
        member.on_tick(Duration::from_secs(6));
        while member.poll_output().is_some() {}
        assert!(member.held_bytes() <= member.offered_bytes());
    }
}

/// Makes bytes pass the outer checks, so that the inner ones are reached.
pub(crate) fn repair(bytes: &mut [u8]) {
    const HEAD: usize = farpool_acms::message::HEADER_BYTES;
    if bytes.len() < HEAD {
        return;
    }
    bytes[..4].copy_from_slice(&farpool_acms::message::MAGIC.to_le_bytes());
    bytes[4] = farpool_acms::message::VERSION;
    bytes[5] = bytes[5] % 13 + 1;
    let body = farpool_units::exactly::<u16, _>(bytes.len() - HEAD);
    bytes[6..8].copy_from_slice(&body.to_le_bytes());
    bytes[8..16].copy_from_slice(&1u64.to_le_bytes());
    bytes[28..40].fill(0);
    bytes[40..44].fill(0);
    let crc = crc32fast::hash(bytes);
    bytes[40..44].copy_from_slice(&crc.to_le_bytes());
}
