//! Our identity to a blade, and why it could not be reached.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use farpool_kernel::Time;
use farpool_units::exactly;
use farpool_wire::{Address, ClientId, ErrorCode, Grant, HelloOk, Purpose, SharingGroup};

use crate::asked::Opener;
use crate::descriptor::DescriptorSet;
use crate::limits::ClientLimits;
use crate::opening::DialError;
use crate::spare::Spare;

/// One client's use of one blade: what all its connections have in common.
#[derive(Clone, Debug)]
pub struct Session {
    /// Where the blade is.
    pub address: Address,
    /// The client's id on the blade.
    pub client: ClientId,
    /// The client's name for display; cut to the protocol's limit.
    pub client_name: String,
    /// The grant of memory that the client shows, on a blade that requires one.
    pub grant: Option<Grant>,
    /// Limits on the client's request rate; requests over it wait until they may be sent, and their
    /// deadline begins then. To be no more than what the blade grants: a request that waits there
    /// counts as unanswered.
    pub limits: Option<Arc<ClientLimits>>,
    /// What the connections are for.
    pub purpose: Purpose,
    /// The most memory that the client would like, in bytes; counts when the blade first sees the
    /// client.
    pub quota_bytes: u64,
    /// Whose pages a blade that packs may share with the client's; counts as the quota does.
    pub sharing_group: Option<SharingGroup>,
    /// A request older than this means that the blade is lost. So does a connection that cannot be
    /// made again before the blade's lease has run out.
    pub deadline: Duration,
    /// Whether the blade may be given up before that.
    pub spare: Spare,
    /// Permits TCP to other hosts without certificates, where nothing but pages is encrypted.
    pub allow_remote_tcp: bool,
    /// TCP is used only with certificates: `asks` gives connections whose handshake is complete.
    pub secures_tcp: bool,
    /// Opens the connections in this process's stead, if set.
    pub asks: Option<Arc<dyn Opener>>,
    /// The time that deadlines and pauses are of.
    pub time: Time,
    /// The set that holds the connections' descriptors.
    pub descriptors: Arc<DescriptorSet>,
    /// What is known of the blade.
    pub met: Met,
}

/// What the connections of a session know together: whether one was greeted, for then a network
/// that refuses to reach the blade is no proof that there is none; and for how long the blade keeps
/// what this client has there while it hears nothing of it.
#[derive(Clone, Debug, Default)]
pub struct Met(Arc<Known>);

#[derive(Debug, Default)]
struct Known {
    is_met: AtomicBool,
    /// What it lends may outlive its process, so that it may come back.
    may_come_back: AtomicBool,
    /// 0 as long as it is not known.
    lease_ms: AtomicU64,
    /// When the blade was first heard, and how much later it was last heard.
    first_heard: OnceLock<Instant>,
    last_heard_ns: AtomicU64,
    /// The shortest time that a greeting took; 0 before the first.
    quickest_ns: AtomicU64,
    /// It is not used any more, whether it lives or not.
    is_given_up: AtomicBool,
}

impl Met {
    /// For a process whose parent uses the blade: the blade is there, or was, and it has not told
    /// this process that it does not come back.
    pub fn by_parent() -> Self {
        let met = Met::default();
        met.0.is_met.store(true, Ordering::Relaxed);
        met.0.may_come_back.store(true, Ordering::Relaxed);
        met
    }

    /// The blade is not used any more, for there are copies of what it has: requests are not waited
    /// for, and its lease is left to run out.
    pub fn give_up(&self) {
        self.0.is_given_up.store(true, Ordering::Release);
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.0.is_given_up.load(Ordering::Acquire)
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.is_met.load(Ordering::Relaxed)
    }

    /// True if the blade may come back when its process has ended.
    pub(crate) fn may_come_back(&self) -> bool {
        self.0.may_come_back.load(Ordering::Relaxed)
    }

    /// The blade greeted a connection, which took so long.
    pub(crate) fn greeted(&self, now: Instant, ok: &HelloOk, took: Duration) {
        let took_ns = exactly::<u64, _>(took.as_nanos()).max(1);
        let shorter = |known: u64| (known == 0 || took_ns < known).then_some(took_ns);
        // It is no shorter: what is known stays.
        let _ = self.0.quickest_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, shorter);
        self.0.is_met.store(true, Ordering::Relaxed);
        self.0.may_come_back.store(ok.outlives_process, Ordering::Relaxed);
        self.0.lease_ms.store(ok.lease_ms.into(), Ordering::Relaxed);
        self.heard(now);
    }

    /// The shortest time that a greeting took: what the way to the blade costs, without what a busy
    /// moment at either end added.
    pub(crate) fn quickest_greeting(&self) -> Duration {
        Duration::from_nanos(self.0.quickest_ns.load(Ordering::Relaxed))
    }

    /// Bytes came on a connection.
    pub(crate) fn heard(&self, now: Instant) {
        let first = *self.0.first_heard.get_or_init(|| now);
        let later_ns = exactly(now.saturating_duration_since(first).as_nanos());
        self.0.last_heard_ns.fetch_max(later_ns, Ordering::Relaxed);
    }

    /// When the lease runs out, for a connection that broke `since` and could not be made again:
    /// others may still hold it. None as long as the lease is not known.
    pub(crate) fn lease_end(&self, since: Instant) -> Option<Instant> {
        let lease_ms = self.0.lease_ms.load(Ordering::Relaxed);
        let first = *self.0.first_heard.get().filter(|_| lease_ms > 0)?;
        let heard = first + Duration::from_nanos(self.0.last_heard_ns.load(Ordering::Relaxed));
        Some(since.max(heard) + Duration::from_millis(lease_ms))
    }

    /// The reason why the blade is lost, if the lease has run out by now; see [`Met::lease_end`].
    /// `failure`: why the last attempt to connect failed, if it did.
    pub(crate) fn lapse(
        &self,
        since: Instant,
        now: Instant,
        failure: Option<&DialError>,
    ) -> Option<String> {
        self.lease_end(since).filter(|end| now >= *end)?;
        let lease_ms = self.0.lease_ms.load(Ordering::Relaxed);
        let failure = failure.map_or("it does not answer".to_owned(), |it| it.to_string());
        Some(format!(
            "this client's lease there of {lease_ms} ms ran out while it could not be reached: \
             {failure}"
        ))
    }
}

/// Why there is no connection to a blade. Each message names the blade and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// It cannot be reached, or no longer.
    #[error("blade {address} is lost: {reason}; check that it runs and can be reached")]
    Lost {
        /// The blade's address.
        address: String,
        /// The reason.
        reason: String,
    },
    /// It may be there, but the user that opens the connection may not use it.
    #[error(
        "user {user} may not connect to blade {address} ({reason}): open its socket and the \
         folders above it to that user (chmod, or a group), or run farpool as one who may"
    )]
    Forbidden {
        /// The blade's address.
        address: String,
        /// The user that connects.
        user: u32,
        /// The kernel's error.
        reason: String,
    },
    /// The process that opens connections does not know this blade.
    #[error(
        "blade {address} is none of those that farpool was given, and it connects this program to \
         no others; name it with --blade, or add it with `farpool blades --add`"
    )]
    NotMeant {
        /// The blade's address.
        address: String,
    },
    /// It can be reached but refuses this client.
    #[error("blade {address} refuses this client: {code}")]
    Refused {
        /// The blade's address.
        address: String,
        /// The reason.
        code: ErrorCode,
    },
    /// One end does not accept the other's certificate.
    #[error("blade {address} and this client do not trust each other: {reason}")]
    Untrusted {
        /// The blade's address.
        address: String,
        /// The reason, with the remedy.
        reason: String,
    },
    /// A TCP address beyond loopback without permission.
    #[error(
        "blade {address} is on another host and there is no certificate for it; give one (--pki), \
         or allow remote TCP explicitly if the network is trusted"
    )]
    RemoteTcp {
        /// The blade's address.
        address: String,
    },
    /// The blade behind a unix socket is run by a user that this user did not choose.
    #[error(
        "blade {address} is run by user {owner}, neither root nor this user ({user}), and could \
         read the memory: have it listen in a folder that is user {owner}'s and that nobody else \
         may write to, if that blade is meant"
    )]
    Stranger {
        /// The blade's address.
        address: String,
        /// The user that runs it.
        owner: u32,
        /// The user that connects.
        user: u32,
    },
    /// This process may hold no more descriptors.
    #[error("no descriptor is left for a connection to blade {address}; raise `ulimit -n`")]
    Descriptors {
        /// The blade's address.
        address: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quickest_greeting_counts_and_not_the_last() {
        let (met, now) = (Met::default(), Instant::now());
        let ok = HelloOk {
            blade_id: 1,
            capacity_bytes: 1 << 30,
            quota_bytes: 1 << 30,
            lease_ms: 1000,
            pages_per_request_limit: 64,
            outlives_process: false,
        };
        for (took_ms, quickest_ms) in [(40, 40), (300, 40), (5, 5), (90, 5)] {
            met.greeted(now, &ok, Duration::from_millis(took_ms));
            assert_eq!(met.quickest_greeting(), Duration::from_millis(quickest_ms));
        }
    }
}
