//! Numbers that no honest node sends.

use std::net::SocketAddr;
use std::time::Duration;

use farpool_acms::{
    ClusterId, Config, Header, Incarnation, Member, MemoryUse, Message, NodeId, Output, RackKeys,
    RequestNo, Zone,
};
use farpool_units::SUPERPAGE_BYTES;

const LENDER: NodeId = NodeId(1);
const BORROWER: NodeId = NodeId(2);

fn sent(message: &Message) -> Vec<u8> {
    let header = Header {
        cluster: ClusterId(1),
        from: BORROWER,
        from_incarnation: Incarnation(1),
        to: LENDER,
        to_incarnation: Incarnation(1),
        number: 1,
    };
    message.encode(&header, &RackKeys::none())
}

/// A request for the largest number of bytes gets what is free, and an ACK of as many takes what
/// was granted: neither overflows when it is rounded up.
#[test]
fn the_largest_number_of_bytes_is_bounded_by_what_is_free() {
    let borrower: SocketAddr = ([127, 0, 0, 2], 7070).into();
    let mut config =
        Config::new(ClusterId(1), LENDER, Incarnation(1), ([127, 0, 0, 1], 7070).into());
    config.borrower_percent = 100;
    let mut lender = Member::new(config, Duration::ZERO).expect("the configuration is right");
    let usage = MemoryUse { used_bytes: 1 << 30, total_bytes: 16 << 30, pressure_permille: None };
    let mut now = Duration::ZERO;
    while lender.offered_bytes() < 4 * SUPERPAGE_BYTES {
        now += Duration::from_secs(1);
        lender.on_usage(usage, now);
        lender.on_tick(now);
        assert!(now < Duration::from_secs(600), "it offers nothing");
    }
    while lender.poll_output().is_some() {}

    let request = Message::Request { request: RequestNo(1), bytes: u64::MAX, zone: Zone(0) };
    lender.on_datagram(borrower, &sent(&request), now).expect("it can be read");
    lender.on_tick(now);
    let outputs = std::iter::from_fn(|| lender.poll_output());
    let grants: Vec<_> = outputs
        .filter_map(|output| match output {
            Output::Send { bytes, .. } => Message::decode(&bytes, &RackKeys::none()).ok(),
            Output::Act(_) => None,
        })
        .filter_map(|(_, message)| match message {
            Message::Grant { epoch, bytes, .. } => Some((epoch, bytes)),
            _ => None,
        })
        .collect();
    let [(epoch, granted)] = grants[..] else { panic!("one grant: {grants:?}") };
    assert_eq!(granted, lender.offered_bytes() / SUPERPAGE_BYTES * SUPERPAGE_BYTES);
    assert_eq!(granted, lender.held_bytes());

    let taken = Message::Ack { epoch, bytes: u64::MAX, sent_ms: 0 };
    lender.on_datagram(borrower, &sent(&taken), now).expect("it can be read");
    assert_eq!(lender.bound_bytes(), granted);
}
