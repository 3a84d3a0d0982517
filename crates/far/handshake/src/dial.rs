//! The client's side: a connection and its handshake, in threads that may wait and that may hold
//! the certificate's key.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use farpool_fabric::{Address, Keys, OpenFailure, Opener, answer_secured};
use farpool_identity::{Credentials, Expect, Live, Peer, Refusal, Side, UnixTime, explain_tls};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, InvalidMessage};

use crate::keys::secrets_of;
use crate::record::{NoRecord, Record};
use crate::watch::Watch;

/// Longest time for a connection and its handshake; the pager that asked gives up before.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// How often a connection is replaced, so that its blade is verified again also if nobody watches
/// it any more. A handshake takes both ends a millisecond.
const RENEW_EVERY: Duration = Duration::from_secs(300);
/// Handshakes under way at a time; who asks for more is told to ask again. A program can have its
/// keeper asked as often as it likes.
const HANDSHAKES_LIMIT: usize = 256;
/// Most bytes of one read.
const BITE_BYTES: usize = 4096;

/// Connects to blades with a certificate.
#[derive(Clone)]
pub struct Dialer {
    credentials: Arc<Credentials>,
    config: Arc<ClientConfig>,
    watch: Arc<Watch>,
    under_way: Arc<AtomicUsize>,
}

/// One of the handshakes under way.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

impl Dialer {
    /// Shows the certificate of these credentials, as its files are at each connection. `tell` is
    /// told, in sentences for people, why connections are left and why files cannot be read anew.
    ///
    /// # Errors
    /// None that is known.
    pub fn new(credentials: Arc<Credentials>, tell: fn(&str)) -> Result<Arc<Self>, Refusal> {
        let mut config = credentials.client(Expect::Node)?;
        config.enable_secret_extraction = true;
        let watch = Watch::new(Arc::clone(&credentials), tell);
        let (config, under_way) = (Arc::new(config), Arc::default());
        Ok(Arc::new(Dialer { credentials, config, watch, under_way }))
    }

    /// Connections that were handed over and are not closed, as far as was seen by now.
    pub fn watched(&self) -> usize {
        self.watch.count()
    }

    /// Connects, in a thread of its own, and hands the connection to whoever asked. As long as that
    /// keeps the other end of `asker`, it is told there if the blade is not to be trusted any more.
    pub fn answer(&self, asker: OwnedFd, address: SocketAddr) {
        let place = Place(Arc::clone(&self.under_way));
        let is_over = place.0.fetch_add(1, Ordering::Relaxed) >= HANDSHAKES_LIMIT;
        if is_over || self.watch.is_full() {
            return answer_secured(&asker, Err(OpenFailure::System(Errno::AGAIN)));
        }
        let own = self.clone();
        let thread = std::thread::Builder::new().name("farpool-tls".into());
        let (asker, spare) = match asker.try_clone() {
            Ok(spare) => (asker, Some(spare)),
            Err(_) => (asker, None),
        };
        let spawned = thread.spawn(move || {
            let _until_its_end = place;
            own.hand_over(asker, address);
        });
        if let (Err(error), Some(asker)) = (spawned, spare) {
            answer_secured(&asker, Err(system(&error)));
        }
    }

    fn hand_over(&self, asker: OwnedFd, address: SocketAddr) {
        let opened = self.watch.start().map_err(|error| system(&error));
        let opened = opened.and_then(|()| self.open_watched(address));
        match opened {
            Ok((socket, keys, live)) => {
                answer_secured(&asker, Ok((socket, keys)));
                self.watch.hand_over(asker, live);
            }
            Err(failure) => answer_secured(&asker, Err(failure)),
        }
    }

    /// Connects and waits for the end of the handshake.
    ///
    /// # Errors
    /// The blade cannot be reached, or one end refuses the other.
    pub fn open(&self, address: SocketAddr) -> Result<(OwnedFd, Keys), OpenFailure> {
        self.open_watched(address).map(|(socket, keys, _)| (socket, keys))
    }

    fn open_watched(&self, address: SocketAddr) -> Result<(OwnedFd, Keys, Live), OpenFailure> {
        let now = UnixTime::now();
        // What cannot be read leaves what was read before in force; whoever watches says so.
        let _ = self.credentials.reload(now);
        let until = Instant::now() + HANDSHAKE_LIMIT;
        let stream =
            TcpStream::connect_timeout(&address, HANDSHAKE_LIMIT).map_err(|e| system(&e))?;
        stream.set_nodelay(true).map_err(|error| system(&error))?;
        let name = ServerName::from(address.ip());
        let connection = ClientConnection::new(Arc::clone(&self.config), name);
        let connection = connection.map_err(|error| distrust(&error))?;
        let mut handshake = Handshake { connection, stream, until };
        if let Err(failure) = handshake.run() {
            // The alert, so that the blade's log has the reason, too.
            let _ = handshake.connection.write_tls(&mut handshake.stream);
            return Err(failure);
        }
        let Handshake { connection, stream, .. } = handshake;
        stream.set_read_timeout(None).map_err(|error| system(&error))?;
        stream.set_write_timeout(None).map_err(|error| system(&error))?;
        stream.set_nonblocking(true).map_err(|error| system(&error))?;
        let peer = Peer::of(&connection, Side::Server).map_err(refused)?;
        let left_s = peer.certificate.not_after_s.saturating_sub(now.as_secs());
        let live = self.watch.admit(peer, now).map_err(refused)?;
        Ok((OwnedFd::from(stream), keys_of(connection, left_s)?, live))
    }
}

fn refused(refusal: Refusal) -> OpenFailure {
    OpenFailure::Untrusted(refusal.to_string())
}

fn keys_of(connection: ClientConnection, left_s: u64) -> Result<Keys, OpenFailure> {
    let extracted = connection.dangerous_extract_secrets().map_err(|error| distrust(&error))?;
    let secrets = secrets_of(extracted);
    let unspoken = || OpenFailure::Untrusted("it chose a cipher that is not spoken".into());
    Ok(Keys {
        secrets: secrets.ok_or_else(unspoken)?,
        renew_within: RENEW_EVERY,
        valid_for: Duration::from_secs(left_s),
    })
}

impl Opener for Dialer {
    /// A TCP connection is made by a thread of this process; others are opened by the asking one.
    fn ask(&self, address: &Address) -> Result<Option<OwnedFd>, Errno> {
        let Address::Tcp(address) = address else { return Ok(None) };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        self.answer(there, *address);
        Ok(Some(here))
    }
}

/// A handshake on a socket that waits.
struct Handshake {
    connection: ClientConnection,
    stream: TcpStream,
    until: Instant,
}

impl Handshake {
    fn run(&mut self) -> Result<(), OpenFailure> {
        let mut record = Record::default();
        loop {
            self.wait_no_longer()?;
            while self.connection.wants_write() {
                self.connection.write_tls(&mut self.stream).map_err(|error| system(&error))?;
            }
            self.stream.flush().map_err(|error| system(&error))?;
            if !self.connection.is_handshaking() {
                return Ok(());
            }
            let no_tls = |NoRecord| {
                distrust(&rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType))
            };
            match record.missing_bytes().map_err(no_tls)? {
                0 => self.take(&record.take())?,
                missing => {
                    let mut bytes = [0; BITE_BYTES];
                    let room = &mut bytes[..missing.min(BITE_BYTES)];
                    match self.stream.read(room).map_err(|error| system(&error))? {
                        0 => return Err(OpenFailure::System(Errno::CONNRESET)),
                        count => record.add(&bytes[..count]),
                    }
                }
            }
        }
    }

    fn take(&mut self, record: &[u8]) -> Result<(), OpenFailure> {
        let mut left = record;
        while !left.is_empty() {
            self.connection.read_tls(&mut left).map_err(|error| system(&error))?;
            self.connection.process_new_packets().map_err(|error| distrust(&error))?;
        }
        Ok(())
    }

    /// Makes the next call on the socket end with the time that is left.
    fn wait_no_longer(&self) -> Result<(), OpenFailure> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(OpenFailure::System(Errno::TIMEDOUT));
        }
        let set = self.stream.set_read_timeout(Some(left));
        set.and_then(|()| self.stream.set_write_timeout(Some(left))).map_err(|error| system(&error))
    }
}

fn distrust(error: &rustls::Error) -> OpenFailure {
    OpenFailure::Untrusted(explain_tls(error))
}

fn system(error: &io::Error) -> OpenFailure {
    let errno = Errno::from_io_error(error).unwrap_or(match error.kind() {
        io::ErrorKind::TimedOut => Errno::TIMEDOUT,
        _ => Errno::IO,
    });
    // A socket with a time limit that has passed says EAGAIN.
    OpenFailure::System(if errno == Errno::AGAIN { Errno::TIMEDOUT } else { errno })
}
