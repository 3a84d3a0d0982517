//! Datagrams that no honest node has sent: guessed, forged, recorded and sent again, and those of a
//! borrower that wants everything.

#[allow(dead_code, reason = "each test file uses a part")]
mod exercise;

use std::time::Duration;

use exercise::{BORROWER, LENDER, Pair, WANTED_BYTES, address, state, usage};
use farpool_acms::{
    Action, Class, ClusterId, DecodeError, Epoch, Header, Incarnation, Member, Message, Mood,
    NackReason, NodeId, Output, RackKeys, RequestNo, RevokeReason, Rng, Rumour, RumourKind, Zone,
};
use farpool_units::SUPERPAGE_BYTES;

fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// A header as an intruder makes it who has greeted both nodes and so knows their lives.
fn header(from: NodeId, to: NodeId, number: u64) -> Header {
    Header {
        cluster: ClusterId(1),
        from,
        from_incarnation: Incarnation(1),
        to,
        to_incarnation: Incarnation(1),
        number,
    }
}

/// What can end, bind or move a grant, or put a node out.
fn harmful(epoch: Epoch) -> Vec<Message> {
    let nack = |reason| Message::Nack { reason, request: RequestNo(1), epoch, left_bytes: 0 };
    let mood = Mood { class: Class::Client, clients: u16::MAX, servers: 0 };
    let rumour = Rumour {
        kind: RumourKind::Request,
        origin: BORROWER,
        incarnation: Incarnation(1),
        seq: u32::MAX,
        bytes: u64::MAX,
        zone: Zone(0),
        age_ms: 0,
        valid_ms: u32::MAX,
        attempt: 8,
        addr: address(NodeId(9)),
    };
    vec![
        Message::Released { epoch },
        Message::Freed { epoch },
        Message::Reclaim { epoch, left_ms: 1 },
        nack(NackReason::NoSuchGrant),
        nack(NackReason::Withdrawn),
        nack(NackReason::Declined),
        Message::Ack { epoch, bytes: 1, sent_ms: 0 },
        Message::Renew { sent_ms: 0, epochs: vec![epoch] },
        Message::Lease { sent_ms: u64::MAX, lease_ms: u32::MAX, epochs: vec![epoch] },
        Message::Request { request: RequestNo(u32::MAX), bytes: u64::MAX, zone: Zone(0) },
        Message::Rumours(mood, vec![rumour]),
        Message::Hello,
        Message::Welcome,
    ]
}

fn is_loss(action: &Action) -> bool {
    matches!(action, Action::Revoke { .. } | Action::GrantLost { .. } | Action::MoveOut { .. })
}

/// The grant that the borrower has.
fn epoch_of(pair: &Pair) -> Epoch {
    let grants: Vec<_> = pair.lender.bound().collect();
    let [(grant, BORROWER, WANTED_BYTES)] = grants[..] else { panic!("one grant: {grants:?}") };
    grant.epoch
}

/// Without a key: what is not listened to cannot be guessed.
#[test]
fn guessed_grants_are_neither_released_nor_reclaimed() {
    let mut pair = Pair::start(|_| {});
    let life = 1u64;
    let mut random = Rng::new(7);
    // Counted as grants once were, and at random.
    let counted = (0..=64).flat_map(|count| [count, life << 32 | count]);
    let drawn: Vec<u64> = (0..10_000).map(|_| random.bits()).collect();
    for guess in counted.chain(drawn) {
        for message in harmful(Epoch(guess)).into_iter().take(6) {
            for (to, from) in [(LENDER, BORROWER), (BORROWER, LENDER)] {
                let bytes = message.encode(&header(from, to, 1), &RackKeys::none());
                let member = if to == LENDER { &mut pair.lender } else { &mut pair.borrower };
                member.on_datagram(address(from), &bytes, pair.now).expect("it can be read");
            }
        }
        pair.pass();
    }
    pair.run(secs(30));
    assert_eq!(pair.actions.iter().find(|action| is_loss(action)), None);
    assert_eq!(
        (pair.lender.bound_bytes(), pair.borrower.usable_bytes()),
        (WANTED_BYTES, WANTED_BYTES)
    );
}

/// With a key, an intruder who has seen everything but the key: the grant's number, too.
#[test]
fn a_forged_datagram_changes_nothing() {
    let mut pair = Pair::start(|config| config.keys = exercise::keys(1));
    let (epoch, now) = (epoch_of(&pair), pair.now);
    let lives = [1, 2, 600, u32::MAX];
    let mut count = 0;
    for (to, from) in [(LENDER, BORROWER), (BORROWER, LENDER)] {
        let member = if to == LENDER { &mut pair.lender } else { &mut pair.borrower };
        let (before, heard) = (state(member), member.counters());
        for life in lives {
            for message in harmful(epoch) {
                let from_incarnation = Incarnation(life);
                let header = Header { from_incarnation, ..header(from, to, u64::MAX) };
                for keys in [RackKeys::none(), exercise::keys(2)] {
                    let bytes = message.encode(&header, &keys);
                    let error = member.on_datagram(address(from), &bytes, now).expect_err("forged");
                    let is_named =
                        matches!(error, DecodeError::Unsigned | DecodeError::UnknownKey(_));
                    assert!(is_named, "{error}");
                    count += 1;
                }
                // The right key's number, and any MAC.
                let mut bytes = message.encode(&header, &exercise::keys(1));
                bytes[60] ^= 1;
                let error = member.on_datagram(address(from), &bytes, now).expect_err("forged");
                assert_eq!(error, DecodeError::Forged);
                count += 1;
            }
        }
        assert!(member.poll_output().is_none());
        assert_eq!(state(member), before);
        assert_eq!(member.counters().unauthentic - heard.unauthentic, count);
        count = 0;
    }
}

#[test]
fn a_recorded_datagram_does_nothing_the_second_time() {
    let mut pair = Pair::start(|config| config.keys = exercise::keys(1));
    pair.run(secs(20));
    let (sent, now) = (std::mem::take(&mut pair.sent), pair.now);
    assert!(sent.len() > 100, "{}", sent.len());
    let heard = [pair.lender.counters(), pair.borrower.counters()];
    let before = [state(&pair.lender), state(&pair.borrower)];
    for (to, bytes) in &sent {
        let member = if *to == LENDER { &mut pair.lender } else { &mut pair.borrower };
        let from = if *to == LENDER { BORROWER } else { LENDER };
        member.on_datagram(address(from), bytes, now).expect("it was signed");
        assert!(member.poll_output().is_none());
    }
    assert_eq!([state(&pair.lender), state(&pair.borrower)], before);
    let replayed = pair.lender.counters().replayed - heard[0].replayed
        + pair.borrower.counters().replayed
        - heard[1].replayed;
    assert_eq!(replayed, sent.len() as u64);
}

/// A node that restarts in the same life counts on, so that it is heard.
#[test]
fn a_node_that_restarts_within_a_second_is_heard() {
    let mut pair = Pair::start(|config| config.keys = exercise::keys(1));
    let mut config = exercise::config(BORROWER);
    (config.keys, config.first_number) = (exercise::keys(1), 1_000_000);
    pair.borrower = Member::new(config, pair.now).expect("a node");
    pair.borrower.on_demand(Some(2 * WANTED_BYTES), pair.now);
    pair.borrower.join(vec![address(LENDER)]);
    pair.run(secs(20));
    assert_eq!(pair.lender.counters().replayed, 0);
    assert_eq!(pair.borrower.usable_bytes(), 2 * WANTED_BYTES);
}

/// Without a key: a life that no clock can show is refused, and the node stays.
#[test]
fn one_datagram_with_the_highest_life_keeps_no_node_out() {
    let mut pair = Pair::start(|_| {});
    let from_incarnation = Incarnation(u32::MAX);
    for (to, from) in [(LENDER, BORROWER), (BORROWER, LENDER)] {
        let member = if to == LENDER { &mut pair.lender } else { &mut pair.borrower };
        for message in harmful(Epoch(1)) {
            let header = Header { from_incarnation, ..header(from, to, 1) };
            let bytes = message.encode(&header, &RackKeys::none());
            let error = member.on_datagram(address(from), &bytes, pair.now).expect_err("ahead");
            assert!(matches!(error, DecodeError::Ahead(seconds) if seconds > 1 << 31), "{error}");
        }
        assert_eq!(member.counters().ahead, harmful(Epoch(1)).len() as u64);
    }
    // In a rumour of a node that is believed.
    let offer = Rumour {
        kind: RumourKind::Offer,
        origin: LENDER,
        incarnation: from_incarnation,
        seq: 1,
        bytes: 1 << 40,
        zone: Zone(0),
        age_ms: 0,
        valid_ms: 60_000,
        attempt: 0,
        addr: address(NodeId(9)),
    };
    let mood = Mood { class: Class::Neutral, clients: 0, servers: 0 };
    let bytes = Message::Rumours(mood, vec![offer])
        .encode(&header(NodeId(9), BORROWER, 1), &RackKeys::none());
    pair.borrower.on_datagram(address(NodeId(9)), &bytes, pair.now).expect("it can be read");
    assert!(pair.borrower.offers(pair.now).all(|(_, bytes)| bytes < 1 << 40));
    pair.run(secs(30));
    assert_eq!(pair.actions.iter().find(|action| is_loss(action)), None);
    assert_eq!(pair.borrower.peers().len() + pair.lender.peers().len(), 2);
    assert_eq!(pair.borrower.usable_bytes(), WANTED_BYTES);
}

/// A life whose clock is a little ahead is an honest one.
#[test]
fn a_clock_that_differs_keeps_no_node_out() {
    for (keys, ahead_s) in [(exercise::keys(1), 86_400), (RackKeys::none(), 600)] {
        let change = |config: &mut farpool_acms::Config| {
            config.keys = keys.clone();
            config.incarnation =
                Incarnation(if config.node == BORROWER { 1_000 + ahead_s } else { 1_000 });
        };
        let pair = Pair::start(change);
        assert_eq!(pair.lender.counters().ahead, 0);
    }
}

#[test]
fn keys_are_replaced_without_a_pause() {
    let mut pair = Pair::start(|config| config.keys = exercise::keys(1));
    let [old, new] = [1, 2].map(exercise::key);
    let both = |first: &farpool_acms::RackKey, second: &farpool_acms::RackKey| {
        RackKeys::of(first.clone(), Some(second.clone()))
    };
    let steps = [both(&old, &new), both(&new, &old), exercise::keys(2)];
    for keys in steps {
        pair.lender.set_keys(keys.clone());
        pair.run(secs(15));
        pair.borrower.set_keys(keys);
        pair.run(secs(15));
    }
    assert_eq!(pair.actions.iter().find(|action| is_loss(action)), None);
    assert_eq!(pair.lender.counters().unauthentic + pair.borrower.counters().unauthentic, 0);
    assert_eq!(pair.borrower.usable_bytes(), WANTED_BYTES);
    // A node that was forgotten is told apart.
    pair.borrower.set_keys(exercise::keys(1));
    pair.run(secs(1));
    assert!(pair.lender.counters().unauthentic > 0);
}

/// A borrower that asks for everything and keeps it by renewals without using it.
struct Hog {
    lender: Member,
    now: Duration,
    number: u64,
    held: Vec<(Epoch, u64)>,
    revoked: Vec<RevokeReason>,
}

impl Hog {
    /// A node that offers all it ever will.
    fn new() -> Self {
        let mut config = exercise::config(LENDER);
        config.keys = exercise::keys(1);
        let lender = Member::new(config, Duration::ZERO).expect("a node");
        let (held, revoked) = (Vec::new(), Vec::new());
        let mut hog = Self { lender, now: Duration::ZERO, number: 0, held, revoked };
        for _ in 0..30 {
            hog.second(&[]);
        }
        hog
    }

    fn say(&mut self, message: &Message) {
        self.number += 1;
        let bytes = message.encode(&header(BORROWER, LENDER, self.number), &exercise::keys(1));
        self.lender.on_datagram(address(BORROWER), &bytes, self.now).expect("signed");
        while let Some(output) = self.lender.poll_output() {
            match output {
                Output::Send { bytes, .. } => self.hear(&bytes),
                Output::Act(Action::Revoke { grant, reason }) => {
                    self.held.retain(|(epoch, _)| *epoch != grant.epoch);
                    self.revoked.push(reason);
                }
                Output::Act(_) => {}
            }
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        let Ok((_, message)) = Message::decode(bytes, &exercise::keys(1)) else { return };
        if let Message::Grant { epoch, bytes, .. } = message {
            self.held.push((epoch, bytes));
            self.say(&Message::Ack { epoch, bytes, sent_ms: 0 });
        }
    }

    /// A second in which it says this, and renews what it holds.
    fn second(&mut self, messages: &[Message]) {
        self.now += secs(1);
        self.lender.on_usage(usage(1 << 30), self.now);
        self.lender.on_tick(self.now);
        for message in messages {
            self.say(message);
        }
        let epochs: Vec<Epoch> = self.held.iter().map(|(epoch, _)| *epoch).take(128).collect();
        self.say(&Message::Renew { sent_ms: 0, epochs });
    }

    fn ask(&self) -> Message {
        let request = RequestNo(farpool_units::exactly(self.now.as_secs()));
        Message::Request { request, bytes: 1 << 40, zone: Zone(0) }
    }
}

#[test]
fn a_borrower_that_asks_for_everything_leaves_some_to_others() {
    let mut hog = Hog::new();
    for _ in 0..60 {
        let ask = hog.ask();
        hog.second(&[ask]);
    }
    let offered = hog.lender.offered_bytes();
    let share = offered / 100 * u64::from(farpool_acms::BORROWER_PERCENT);
    let share = share / SUPERPAGE_BYTES * SUPERPAGE_BYTES;
    assert!(share > 0 && share < offered);
    assert_eq!(hog.lender.bound_bytes(), share);
    assert_eq!(hog.lender.share_left_bytes(BORROWER), 0);
    assert_eq!(hog.lender.share_left_bytes(NodeId(3)), share);
}

#[test]
fn memory_that_is_lent_and_never_used_comes_back() {
    let mut hog = Hog::new();
    let ask = hog.ask();
    hog.second(&[ask]);
    assert!(hog.lender.bound_bytes() > 0);
    let unused = secs(u64::from(farpool_acms::UNUSED_MS / 1_000));
    let deadline = secs(u64::from(farpool_acms::RECLAIM_DEADLINE_MS / 1_000));
    let until = hog.now + unused + deadline + secs(2);
    while hog.now < until {
        let used: Vec<(Epoch, u64)> = hog.held.iter().map(|(epoch, _)| (*epoch, 0)).collect();
        hog.lender.on_lent_use(&used, hog.now);
        // It asks again all the time, also at the moment at which the memory comes back.
        let ask = hog.ask();
        hog.second(&[ask]);
    }
    assert_eq!((hog.lender.bound_bytes(), hog.lender.unused_count()), (0, 1));
    assert_eq!(hog.revoked, [RevokeReason::Deadline]);
    assert!(hog.lender.share_left_bytes(NodeId(3)) > 0, "others get some meanwhile");
    for _ in 0..60 {
        let ask = hog.ask();
        hog.second(&[ask]);
    }
    assert!(hog.lender.bound_bytes() > 0, "it is not shut out for ever");
}

#[test]
fn memory_that_is_used_stays() {
    let mut hog = Hog::new();
    let ask = hog.ask();
    hog.second(&[ask]);
    let held = hog.lender.bound_bytes();
    for second in 0..900u64 {
        // It holds data for a second of each five minutes.
        let used_bytes = if second % 250 == 0 { SUPERPAGE_BYTES } else { 0 };
        let used: Vec<_> = hog.held.iter().map(|(epoch, _)| (*epoch, used_bytes)).collect();
        hog.lender.on_lent_use(&used, hog.now);
        hog.second(&[]);
    }
    assert_eq!((hog.lender.bound_bytes(), hog.lender.unused_count()), (held, 0));
}
