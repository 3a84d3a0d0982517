//! The configuration of a blade, and every limit it keeps.

use farpool_audit::AuditLog;
use farpool_identity::Credentials;
use farpool_kernel::Time;
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::Address;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Where a blade's memory comes from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum BackingKind {
    /// Memfd where same-host clients could share it (a unix socket, and no grants), else anonymous.
    #[default]
    Automatic,
    /// A sealed memfd per segment: the only kind that same-host clients can share. In pages of 4
    /// KiB, unless the system is configured otherwise (`transparent_hugepage/shmem_enabled`).
    Memfd,
    /// Private anonymous memory per segment, in transparent huge pages where the system has them:
    /// memory that moves between hosts arrives twice as fast (`move_speed`), since it is not
    /// faulted in page by page.
    Anonymous,
    /// Huge pages of the system's default size, all reserved when the blade starts.
    Hugetlb,
    /// A file or a DAX device, cut into superpages for all segments.
    File(PathBuf),
}

/// The name of a backing store is unknown.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0:?} is no backing store; choose auto, memfd, anonymous, hugetlb or file:PATH")]
pub struct BackingKindError(String);

impl FromStr for BackingKind {
    type Err = BackingKindError;

    fn from_str(text: &str) -> Result<Self, BackingKindError> {
        match text {
            "auto" => Ok(BackingKind::Automatic),
            "memfd" => Ok(BackingKind::Memfd),
            "anonymous" => Ok(BackingKind::Anonymous),
            "hugetlb" => Ok(BackingKind::Hugetlb),
            _ => match text.strip_prefix("file:") {
                Some(path) if !path.is_empty() => Ok(BackingKind::File(PathBuf::from(path))),
                _ => Err(BackingKindError(text.to_owned())),
            },
        }
    }
}

impl BackingKind {
    /// The kind that automatic stands for, for a blade that listens on `addresses`.
    pub(crate) fn resolve(self, addresses: &[Address], require_grants: bool) -> BackingKind {
        let has_unix = addresses.iter().any(|address| address.socket_path().is_some());
        match self {
            BackingKind::Automatic if has_unix && !require_grants => BackingKind::Memfd,
            BackingKind::Automatic => BackingKind::Anonymous,
            chosen => chosen,
        }
    }
}

/// What the memory of a blade outlives, if it is a file or device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Persist {
    /// The blade's process, however that ends.
    Restart,
    /// An orderly reboot of the machine, too: when the blade is told to stop, it waits until all is
    /// written to the file. A crash of the machine loses everything.
    Reboot,
}

/// Flash below a blade's memory: what was not used for a while is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FlashConfig {
    /// A file, made if it does not exist, or a block device. What is in it is of no use to another
    /// process.
    pub path: PathBuf,
    /// How much of it is used, rounded down to superpages: that is what the blade lends.
    pub bytes: u64,
    /// Most bytes written to it in a second, to spare its life; none is no limit. What comes faster
    /// waits.
    pub write_bytes_per_s: Option<u64>,
}

/// What is cold is packed: kept once, compressed, or as nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackConfig {
    /// What the blade lends, rounded down to superpages.
    pub lent_bytes: u64,
    /// A page that was not used for so long is packed.
    pub cold: Duration,
}

impl PackConfig {
    /// Long enough that what a program is about to ask for again is not packed in between.
    const COLD_DEFAULT: Duration = Duration::from_secs(10);
    /// The part of its memory that a blade keeps for itself: as much as it has free before it
    /// begins to pack whatever it can.
    const KEPT_PART: u64 = 16;

    /// A blade that lends as much of its memory as it has room for if nothing packs.
    pub fn of_memory(memory_bytes: u64) -> PackConfig {
        let lent_bytes = memory_bytes - memory_bytes.div_ceil(Self::KEPT_PART);
        PackConfig { lent_bytes, cold: Self::COLD_DEFAULT }
    }
}

/// Configuration of a blade. `BladeConfig { memory_bytes, ..Default::default() }` is the usual
/// form.
#[derive(Clone, Debug)]
pub struct BladeConfig {
    /// Memory to lend, rounded down to superpages; with flash, memory for what is hot, and packed,
    /// for all of it.
    pub memory_bytes: u64,
    /// Where what is cold goes. Not together with memory of a particular kind, nor with grants.
    pub flash: Option<FlashConfig>,
    /// What is cold is packed. Not together with flash, with memory of a particular kind, nor with
    /// grants.
    pub pack: Option<PackConfig>,
    /// Where the memory comes from.
    pub backing: BackingKind,
    /// What it lends goes on in the next process with the same file. Not with grants, which the
    /// rack gives to a process.
    pub persist: Option<Persist>,
    /// Quota of a client that asks for none; rounded up to superpages.
    pub quota_default_bytes: u64,
    /// Most a client may have, whatever it asks for; rounded up to superpages.
    pub quota_limit_bytes: u64,
    /// The same for a client of another host that shows no grant; by default an eighth of the
    /// memory, so that none takes all of it.
    pub quota_stranger_bytes: Option<u64>,
    /// How long a client's memory is kept after its last connection closed.
    pub lease: Duration,
    /// Threads that serve connections; 0 for one per processor.
    pub threads: usize,
    /// Allows TCP addresses beyond loopback without certificates. Nothing but pages is encrypted
    /// then, and peers are not authenticated.
    pub allow_remote_tcp: bool,
    /// Serves TCP, loopback too, over TLS only, to peers with a certificate of the same rack.
    pub credentials: Option<Arc<Credentials>>,
    /// Where to note who came, who was refused, and what the node ordered.
    pub audit: Option<Arc<AuditLog>>,
    /// Permissions of unix sockets, as in chmod.
    pub socket_mode: u32,
    /// Most pages of one read or write, 1 to 1024. A larger request occupies its connection longer.
    pub pages_per_request: u16,
    /// Requests a client may have in flight on one connection.
    pub credits: u16,
    /// Clients and keepers need a grant ([`crate::Blade::set_grant`]). Those without one are
    /// refused, and monitors see totals only.
    pub require_grants: bool,
    /// Most clients; further ones are refused.
    pub clients_limit: usize,
    /// Most segments of all clients (each takes a descriptor); further ones are refused.
    pub segments_limit: usize,
    /// Control requests, all but reads and writes, that the clients of one grant may make in a
    /// second together, and those without a grant of one host or user; `u64::MAX` for no limit. One
    /// client may make half of that. A large request counts as several: `server/toll.rs`. What
    /// comes faster waits.
    pub control_requests_per_s: u64,
    /// How long a connection may be there without a hello; it is closed then.
    pub hello_limit: Duration,
    /// Most connections, half of them of one host or user; further ones are closed at once.
    pub connections_limit: usize,
    /// The time that leases and rates are of.
    pub time: Time,
}

/// Clients of other hosts without a grant that share a blade's memory, unless it is configured.
const STRANGERS_DEFAULT: u64 = 8;
/// Long enough for a client to reconnect after a short network failure, short enough that a crashed
/// program's memory is not needed meanwhile.
const LEASE_DEFAULT: Duration = Duration::from_secs(10);
/// A client sends its hello at once; a host without memory or processors to spare takes seconds.
const HELLO_LIMIT_DEFAULT: Duration = Duration::from_secs(10);
/// 1 MiB: a swap-sized write in one request, and 0.2 ms of a connection's time.
const PAGES_PER_REQUEST_DEFAULT: u16 = 256;
/// Covers bandwidth x delay of 100 Gbit/s x 300 us with 32 KiB requests (115), twice.
const CREDITS_DEFAULT: u16 = 256;
/// At most a tenth of a processor for whoever floods a blade. It is a hundred times what a program
/// asks for that forks 50 times a second, or fills 10 GiB in one.
const CONTROL_REQUESTS_PER_S_DEFAULT: u64 = 20_000;

impl Default for BladeConfig {
    fn default() -> Self {
        BladeConfig {
            memory_bytes: 1 << 30,
            flash: None,
            pack: None,
            backing: BackingKind::Automatic,
            persist: None,
            quota_default_bytes: u64::MAX,
            quota_limit_bytes: u64::MAX,
            quota_stranger_bytes: None,
            lease: LEASE_DEFAULT,
            threads: 0,
            allow_remote_tcp: false,
            credentials: None,
            audit: None,
            socket_mode: 0o600,
            pages_per_request: PAGES_PER_REQUEST_DEFAULT,
            credits: CREDITS_DEFAULT,
            require_grants: false,
            clients_limit: 4096,
            segments_limit: 65536,
            control_requests_per_s: CONTROL_REQUESTS_PER_S_DEFAULT,
            hello_limit: HELLO_LIMIT_DEFAULT,
            connections_limit: 16384,
            time: Time::KERNEL,
        }
    }
}

impl BladeConfig {
    pub(crate) fn quota_stranger_bytes(&self) -> u64 {
        self.quota_stranger_bytes.unwrap_or(self.lent_bytes() / STRANGERS_DEFAULT)
    }

    /// Whether it has a way to lend more than its memory holds: with flash, or packed. Then
    /// requests may have to wait for memory.
    pub(crate) fn lends_beyond_memory(&self) -> bool {
        self.flash.is_some() || self.pack.is_some()
    }

    /// What the blade lends.
    pub fn lent_bytes(&self) -> u64 {
        let bytes = match (&self.flash, &self.pack) {
            (Some(flash), _) => flash.bytes,
            (None, Some(pack)) => pack.lent_bytes,
            (None, None) => self.memory_bytes,
        };
        bytes / SUPERPAGE_BYTES * SUPERPAGE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shareable_where_somebody_may_share_it() {
        let tcp: Address = "tcp://127.0.0.1:1".parse().expect("address");
        let unix: Address = "unix:///x".parse().expect("address");
        let resolve = |addresses: &[Address], require_grants| {
            BackingKind::Automatic.resolve(addresses, require_grants)
        };
        assert_eq!(resolve(std::slice::from_ref(&tcp), false), BackingKind::Anonymous);
        assert_eq!(resolve(&[tcp.clone(), unix.clone()], false), BackingKind::Memfd);
        assert_eq!(resolve(&[unix], true), BackingKind::Anonymous);
        assert_eq!(BackingKind::Memfd.resolve(&[tcp], true), BackingKind::Memfd);
    }
}
