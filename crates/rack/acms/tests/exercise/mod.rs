//! What the property tests and the fuzz target do with arbitrary bytes.

use std::net::SocketAddr;
use std::time::Duration;

use farpool_acms::{ClusterId, Config, Incarnation, Member, MemoryUse, Message, NodeId, Output};

/// Decoding never panics; what decodes encodes to the same bytes.
pub(crate) fn decode_any(bytes: &[u8]) {
    if let Ok((header, message)) = Message::decode(bytes) {
        assert_eq!(message.encode(&header), bytes);
    }
}

/// Gives arbitrary bytes to a node that lends and to one that borrows, with and without a correct
/// checksum.
pub(crate) fn feed_any(bytes: &[u8]) {
    let mut repaired = bytes.to_vec();
    repair(&mut repaired);
    let Some((mut lender, mut borrower, now)) = partners() else { panic!("nothing was lent") };
    for datagram in [bytes, &repaired] {
        for (to, from) in [(&mut lender, BORROWER), (&mut borrower, LENDER)] {
            // As from the partner, so that what it has to do with the grant is reached.
            let mut told = datagram.to_vec();
            come_from(&mut told, from);
            for datagram in [datagram, &told] {
                let _ = to.on_datagram(address(from), datagram, now);
                to.on_tick(now + Duration::from_secs(1));
                while to.poll_output().is_some() {}
                assert!(to.held_bytes() <= to.offered_bytes());
                assert!(to.usable_bytes() <= LENT_BYTES_MAX);
            }
        }
    }
}

const LENDER: NodeId = NodeId(1);
const BORROWER: NodeId = NodeId(2);
/// Memory of each node.
const TOTAL_BYTES: u64 = 16 << 30;
/// More than one node of this size can have borrowed of the other.
const LENT_BYTES_MAX: u64 = TOTAL_BYTES;

fn address(node: NodeId) -> SocketAddr {
    ([127, 0, 0, farpool_units::exactly::<u8, _>(node.0)], 7070).into()
}

/// Returns a node that lends and one that borrows of it, at this time.
fn partners() -> Option<(Member, Member, Duration)> {
    let start = |node, used_bytes| {
        let config = Config::new(ClusterId(1), node, Incarnation(1), address(node));
        let mut member = Member::new(config, Duration::ZERO).ok()?;
        let usage = MemoryUse { used_bytes, total_bytes: TOTAL_BYTES, pressure_permille: None };
        member.on_usage(usage, Duration::ZERO);
        Some(member)
    };
    let (mut lender, mut borrower) = (start(LENDER, 1 << 30)?, start(BORROWER, 15 << 30)?);
    borrower.on_demand(Some(64 << 20), Duration::ZERO);
    borrower.join(vec![address(LENDER)]);
    for tick in 1..600 {
        let now = Duration::from_millis(100) * tick;
        let usage = |used_bytes| MemoryUse {
            used_bytes,
            total_bytes: TOTAL_BYTES,
            pressure_permille: None,
        };
        lender.on_usage(usage(1 << 30), now);
        borrower.on_usage(usage(15 << 30), now);
        lender.on_tick(now);
        borrower.on_tick(now);
        // Answers to answers, until there is none.
        for _ in 0..8 {
            pass(&mut lender, &mut borrower, now);
            pass(&mut borrower, &mut lender, now);
        }
        if borrower.usable_bytes() > 0 {
            return Some((lender, borrower, now));
        }
    }
    None
}

/// Delivers what one node sends to the other.
fn pass(from: &mut Member, to: &mut Member, now: Duration) {
    let sender = from.config().addr;
    while let Some(output) = from.poll_output() {
        if let Output::Send { bytes, .. } = output {
            let _ = to.on_datagram(sender, &bytes, now);
        }
    }
}

/// Makes a datagram, if it is long enough to be one, look like one of this node.
fn come_from(bytes: &mut [u8], node: NodeId) {
    if bytes.len() < farpool_acms::message::HEADER_BYTES {
        return;
    }
    bytes[16..24].copy_from_slice(&node.0.to_le_bytes());
    bytes[24..28].copy_from_slice(&1u32.to_le_bytes());
    seal(bytes);
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
    seal(bytes);
}

/// Gives a datagram the checksum that it needs.
fn seal(bytes: &mut [u8]) {
    bytes[40..44].fill(0);
    let crc = crc32fast::hash(bytes);
    bytes[40..44].copy_from_slice(&crc.to_le_bytes());
}
