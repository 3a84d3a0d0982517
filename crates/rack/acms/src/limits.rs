//! Timers and limits of the protocol, each with its reason and what happens at it.
//!
//! They are constants because nodes must agree on them; operators set [`Config`](crate::Config).

use std::time::Duration;

/// The node acts at most this often on its own, so every timer below is true to one tick.
pub const TICK: Duration = Duration::from_millis(100);
/// Time between two rounds of rumours.
pub const ROUND: Duration = Duration::from_millis(200);
/// Datagrams of rumours in a round when there is news: the budget that keeps a node's messages flat
/// whatever the cluster's size. Rumours that do not fit wait for the next round.
pub const ROUND_FANOUT: usize = 3;
/// Datagrams in a round with nothing new to pass on: they carry only the mood.
pub const ROUND_FANOUT_IDLE: usize = 1;
/// Most times a node passes one rumour on. Push gossip misses a share of about e^-8 = 0.03 % of the
/// nodes.
pub const RUMOUR_SENDS_MAX: u8 = 8;
/// Most rumours of one kind that a node keeps; beyond that the one heard longest ago is dropped. A
/// client needs a few good servers, not all.
pub const RUMOURS_KEPT_MAX: usize = 256;
/// Longest age up to which a rumour may claim to be valid; a longer one is cut to this.
pub const RUMOUR_VALID_MAX: Duration = Duration::from_secs(60);
/// Time between two broadcasts of an offer that changed notably: the broadcast period of section
/// 4.3.
pub const BROADCAST_PERIOD: Duration = Duration::from_millis(1_000);
/// Longest period of a stable offer, whose period doubles up to this.
pub const BROADCAST_PERIOD_MAX: Duration = Duration::from_millis(16_000);
/// An offer changed notably if it moved by more than one part in this many.
pub const NOTABLE_PART: u64 = 8;
/// A rumour is forgotten after this many of its origin's periods without a newer one.
pub const VALID_PERIODS: u32 = 3;
/// Servers a client asks at once; it takes the best grant and declines the rest.
pub const ASK_FANOUT: usize = 2;
/// Servers drawn at random for each that is asked: the power of two choices keeps hundreds of
/// clients that hear the same offers from all choosing the largest.
pub const CHOICES: usize = 2;
/// Time after which a request without an answer is given up and another server is asked.
pub const ASK_TIMEOUT: Duration = Duration::from_millis(400);
/// Grants are collected this long before choosing, where the policy compares them.
pub const CHOOSE_WINDOW: Duration = Duration::from_millis(200);
/// Servers that would answer a client's first broadcast if all heard it; doubled with each attempt.
/// In a rush of clients few servers have heard it in time, so this is more than a client needs.
/// More answers cost messages and reservations.
pub const REPLIES_WANTED: u32 = 16;
/// Attempts after which the expected answers are not doubled any more.
pub const ATTEMPT_MAX: u8 = 8;
/// How long a grant without an ACK stays reserved.
pub const HOLD: Duration = Duration::from_millis(2_000);
/// Time between two ACKs, RECLAIMs or RELEASEDs while there is no answer.
pub const REPEAT: Duration = Duration::from_millis(300);
/// RELEASEDs without an answer before the client gives up: the lease then ends the grant at the
/// server.
pub const RELEASE_TRIES_MAX: u8 = 20;
/// Most grants of a server at once; beyond that a request is refused with NACK, a broadcast one
/// ignored.
pub const GRANTS_MAX: usize = 4_096;
/// How long a client whose unused memory is taken back gets none from that server, so that others
/// hear of it first: they do within some broadcast periods. A program that needs the memory after
/// all does not wait long.
pub const UNUSED_HOLD: Duration = Duration::from_secs(5);
/// Most grants of a client at once; it sends no requests beyond that.
pub const USED_GRANTS_MAX: usize = 256;
/// Most requests that a server keeps until its next choice; beyond that a request is refused with
/// NACK, a broadcast one ignored.
pub const QUEUE_MAX: usize = 1_024;
/// Most clients whose last request a server remembers, to recognize a replay; beyond that the
/// smallest id is forgotten. A replay of a forgotten request costs a reservation for [`HOLD`],
/// never more. Also the most servers whose newest grant a client remembers.
pub const REMEMBERED_MAX: usize = 4_096;
/// Most nodes that a node knows; further ones receive no rumours.
pub const PEERS_MAX: usize = 65_536;
/// How far ahead of this node's clock another node's life may begin. Clocks that show the time of
/// another zone are common; without this limit one that shows a year far ahead, once, would keep
/// its node out for as long. A later life is refused.
pub const LIFE_AHEAD: Duration = Duration::from_secs(24 * 60 * 60);
/// The same without a rack key, where anyone can claim a life for another node: it is kept out for
/// this long at most.
pub const LIFE_AHEAD_UNSIGNED: Duration = Duration::from_secs(10 * 60);
/// The side that broadcasts changes only when it is more than three halves of the other: numbers
/// that fluctuate around equality change nothing.
pub const SIDE_RATIO_NUM: u64 = 3;
/// See [`SIDE_RATIO_NUM`].
pub const SIDE_RATIO_DEN: u64 = 2;
/// Part of a client's deadline reserved for the message's transit: the client counts from
/// receiving it, the server from sending it.
pub const DEADLINE_MARGIN_PART: u32 = 10;
/// A client's lease ends this much before the server's: timers are true to a tick, and the client
/// must have stopped before the server lends the memory again.
pub const LEASE_MARGIN: Duration = Duration::from_millis(300);
/// Memory that a client requests above its need, thousandths of its memory: half a guard band of
/// the default thresholds.
pub const WANT_ROOM_PERMILLE: u64 = 50;
