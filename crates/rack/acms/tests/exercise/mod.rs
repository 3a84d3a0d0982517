//! Two nodes of which one lends to the other, and what the property tests and the fuzz target do to
//! them with arbitrary bytes.

use std::net::SocketAddr;
use std::time::Duration;

use farpool_acms::message::{HEADER_BYTES, MAC_BYTES};
use farpool_acms::{
    Action, ClusterId, Config, Incarnation, Member, MemoryUse, Message, NodeId, Output, RackKey,
    RackKeys,
};

/// Decoding never panics; what decodes encodes to the same bytes.
pub(crate) fn decode_any(bytes: &[u8]) {
    let keys = RackKeys::none();
    if let Ok((header, message)) = Message::decode(bytes, &keys) {
        assert_eq!(message.encode(&header, &keys), bytes);
    }
}

/// Gives arbitrary bytes to a node that lends and to one that borrows, with and without a correct
/// checksum.
pub(crate) fn feed_any(bytes: &[u8]) {
    let mut repaired = bytes.to_vec();
    repair(&mut repaired);
    let mut pair = Pair::start(|_| {});
    for datagram in [bytes, &repaired] {
        for (to, from) in [(&mut pair.lender, BORROWER), (&mut pair.borrower, LENDER)] {
            // As from the partner, so that what it has to do with the grant is reached.
            let mut told = datagram.to_vec();
            come_from(&mut told, from);
            for datagram in [datagram, &told] {
                let _ = to.on_datagram(address(from), datagram, pair.now);
                to.on_tick(pair.now + Duration::from_secs(1));
                while to.poll_output().is_some() {}
                assert!(to.held_bytes() <= to.offered_bytes());
                assert!(to.usable_bytes() <= LENT_BYTES_MAX);
            }
        }
    }
}

/// Gives arbitrary bytes, also as a datagram with a right checksum, to a node with a rack key: it
/// refuses them and is as it was.
pub(crate) fn refuse_any(bytes: &[u8]) {
    let config = Config { keys: keys(1), ..config(LENDER) };
    let Ok(mut member) = Member::new(config, Duration::ZERO) else { panic!("a node") };
    let mut told = bytes.to_vec();
    repair(&mut told);
    come_from(&mut told, BORROWER);
    let before = state(&member);
    for datagram in [bytes, &told] {
        assert!(member.on_datagram(address(BORROWER), datagram, Duration::ZERO).is_err());
        assert!(member.poll_output().is_none());
    }
    assert_eq!(state(&member), before);
}

/// All of a node but its counters.
pub(crate) fn state(member: &Member) -> String {
    let all = format!("{member:?}");
    let Some((node, _)) = all.split_once(", counters: ") else { panic!("no counters: {all}") };
    node.to_owned()
}

/// A rack key of its own for each number.
pub(crate) fn key(number: u8) -> RackKey {
    RackKey::new([number; farpool_acms::RACK_KEY_BYTES])
}

/// The rack key of this number alone.
pub(crate) fn keys(number: u8) -> RackKeys {
    RackKeys::of(key(number), None)
}

pub(crate) const LENDER: NodeId = NodeId(1);
pub(crate) const BORROWER: NodeId = NodeId(2);
/// Memory of each node.
const TOTAL_BYTES: u64 = 16 << 30;
/// More than one node of this size can have borrowed of the other.
const LENT_BYTES_MAX: u64 = TOTAL_BYTES;
/// What the borrower wants.
pub(crate) const WANTED_BYTES: u64 = 64 << 20;

pub(crate) fn address(node: NodeId) -> SocketAddr {
    ([127, 0, 0, farpool_units::exactly::<u8, _>(node.0)], 7070).into()
}

/// The settings of a node in its first life.
pub(crate) fn config(node: NodeId) -> Config {
    Config::new(ClusterId(1), node, Incarnation(1), address(node))
}

/// A node's use of its memory.
pub(crate) fn usage(used_bytes: u64) -> MemoryUse {
    MemoryUse { used_bytes, total_bytes: TOTAL_BYTES, pressure_permille: None }
}

/// A node that lends, and one that borrows of it.
pub(crate) struct Pair {
    pub(crate) lender: Member,
    pub(crate) borrower: Member,
    pub(crate) now: Duration,
    /// All datagrams sent: to whom, and their bytes.
    pub(crate) sent: Vec<(NodeId, Vec<u8>)>,
    /// All actions of both.
    pub(crate) actions: Vec<Action>,
}

impl Pair {
    /// Runs both nodes until the borrower has memory.
    pub(crate) fn start(change: impl Fn(&mut Config)) -> Self {
        let node = |node| {
            let mut config = config(node);
            change(&mut config);
            let Ok(member) = Member::new(config, Duration::ZERO) else { panic!("a node") };
            member
        };
        let (lender, borrower) = (node(LENDER), node(BORROWER));
        let (sent, actions) = (Vec::new(), Vec::new());
        let mut pair = Self { lender, borrower, now: Duration::ZERO, sent, actions };
        pair.borrower.on_demand(Some(WANTED_BYTES), Duration::ZERO);
        pair.borrower.join(vec![address(LENDER)]);
        for _ in 0..600 {
            pair.step();
            if pair.borrower.usable_bytes() > 0 {
                return pair;
            }
        }
        panic!("nothing was lent");
    }

    /// Runs both nodes for a tenth of a second.
    pub(crate) fn step(&mut self) {
        self.now += Duration::from_millis(100);
        let now = self.now;
        self.lender.on_usage(usage(1 << 30), now);
        self.borrower.on_usage(usage(15 << 30), now);
        self.lender.on_tick(now);
        self.borrower.on_tick(now);
        // Answers to answers, until there is none.
        for _ in 0..8 {
            self.pass();
        }
    }

    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.step();
        }
    }

    /// Delivers what each node sends to the other.
    pub(crate) fn pass(&mut self) {
        let Self { lender, borrower, now, sent, actions } = self;
        for is_lender in [true, false] {
            let (from, to) = match is_lender {
                true => (&mut *lender, &mut *borrower),
                false => (&mut *borrower, &mut *lender),
            };
            let (sender, receiver) = (from.config().addr, to.config().node);
            while let Some(output) = from.poll_output() {
                match output {
                    Output::Send { to: at, bytes } if at == address(receiver) => {
                        let _ = to.on_datagram(sender, &bytes, *now);
                        sent.push((receiver, bytes));
                    }
                    Output::Send { .. } => {}
                    Output::Act(action) => actions.push(action),
                }
            }
        }
    }
}

/// Makes a datagram, if it is long enough to be one, look like one of this node.
pub(crate) fn come_from(bytes: &mut [u8], node: NodeId) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    bytes[16..24].copy_from_slice(&node.0.to_le_bytes());
    bytes[24..28].copy_from_slice(&1u32.to_le_bytes());
    seal(bytes);
}

/// Makes bytes pass the outer checks, so that the inner ones are reached.
pub(crate) fn repair(bytes: &mut [u8]) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    bytes[..4].copy_from_slice(&farpool_acms::message::MAGIC.to_le_bytes());
    bytes[4] = farpool_acms::message::VERSION;
    bytes[5] = bytes[5] % 13 + 1;
    let body = farpool_units::exactly::<u16, _>(bytes.len() - HEADER_BYTES);
    bytes[6..8].copy_from_slice(&body.to_le_bytes());
    bytes[8..16].copy_from_slice(&1u64.to_le_bytes());
    bytes[28..40].fill(0);
    seal(bytes);
}

/// Gives a datagram that is not signed the checksum that it needs.
fn seal(bytes: &mut [u8]) {
    const MAC_AT: usize = HEADER_BYTES - MAC_BYTES;
    bytes[MAC_AT - 4..HEADER_BYTES].fill(0);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..MAC_AT]);
    hasher.update(&bytes[HEADER_BYTES..]);
    bytes[MAC_AT..MAC_AT + 4].copy_from_slice(&hasher.finalize().to_le_bytes());
}
