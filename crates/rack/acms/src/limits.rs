//! Timers and limits of the protocol, each with its reason and what happens at it.
//!
//! They are constants because nodes must agree on them; operators set [`Config`](crate::Config).

use std::time::Duration;

/// The node acts at most this often on its own, so every timer below is true to one tick.
pub const TICK: Duration = Duration::from_millis(100);
/// Between two rounds of rumours.
pub const ROUND: Duration = Duration::from_millis(200);
/// Datagrams of rumours in a round when there is news: the budget that keeps a node's messages flat
/// whatever the cluster's size. Rumours that do not fit wait for the next round.
pub const ROUND_FANOUT: usize = 3;
/// Datagrams in a round with nothing new: they carry only the mood.
pub const ROUND_FANOUT_IDLE: usize = 1;
/// Times a node passes one rumour on. Push gossip misses a share of about e^-8 = 0.03 % of nodes.
pub const RUMOUR_SENDS_MAX: u8 = 8;
/// Rumours of one kind a node keeps; the one heard longest ago makes room. A client needs a few
/// good servers, not all.
pub const RUMOURS_KEPT_MAX: usize = 256;
/// Longest age a rumour may claim to be valid for; more is cut to this.
pub const RUMOUR_VALID_MAX: Duration = Duration::from_secs(60);
/// Between two broadcasts of an offer that changed notably: the broadcast period of section 4.3.
pub const BROADCAST_PERIOD: Duration = Duration::from_millis(1_000);
/// A stable offer's period doubles up to this.
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
/// A request without an answer is given up and another server asked.
pub const ASK_TIMEOUT: Duration = Duration::from_millis(400);
/// Grants are collected this long before choosing, where the policy compares them.
pub const CHOOSE_WINDOW: Duration = Duration::from_millis(200);
/// Servers that would answer a client's first broadcast if all heard it; doubled with each attempt.
/// In a rush of clients few have heard it in time, so this is more than one needs. More answers
/// cost messages and reservations.
pub const REPLIES_WANTED: u32 = 16;
/// Attempts after which the expected answers double no further.
pub const ATTEMPT_MAX: u8 = 8;
/// A grant without an ACK is reserved this long, then free again.
pub const HOLD: Duration = Duration::from_millis(2_000);
/// Between two ACKs, RECLAIMs or RELEASEDs while no answer has come.
pub const REPEAT: Duration = Duration::from_millis(300);
/// RELEASEDs without an answer before the client gives up: the server's lease ends it then.
pub const RELEASE_TRIES_MAX: u8 = 20;
/// Grants a server holds at once; a request beyond is refused with NACK.
pub const GRANTS_MAX: usize = 4_096;
/// Grants a client holds at once; it asks for no more.
pub const USED_GRANTS_MAX: usize = 256;
/// Requests a server keeps until its next choice; one beyond is refused with NACK.
pub const QUEUE_MAX: usize = 1_024;
/// Clients whose last request a server remembers, to know a replay; the smallest id makes room.
/// A forgotten one's replay costs a reservation for [`HOLD`], never more. Also the servers whose
/// newest grant a client remembers.
pub const REMEMBERED_MAX: usize = 4_096;
/// Nodes a node knows; more are not used for rumours.
pub const PEERS_MAX: usize = 65_536;
/// The side that broadcasts changes only when the other is larger by three halves: numbers that
/// wander about equality change nothing.
pub const SIDE_RATIO_NUM: u64 = 3;
/// See [`SIDE_RATIO_NUM`].
pub const SIDE_RATIO_DEN: u64 = 2;
/// Part of a client's deadline kept for the way of the message: the client counts from the
/// receipt, the server from the sending.
pub const DEADLINE_MARGIN_PART: u32 = 10;
/// A client's lease ends this much before the server's: timers are true to a tick, and the client
/// must have stopped before the server lends the memory again.
pub const LEASE_MARGIN: Duration = Duration::from_millis(300);
/// Room a client asks for above its need, thousandths of its memory: as much as half a guard band
/// of the default thresholds.
pub const WANT_ROOM_PERMILLE: u64 = 50;
