//! TLS below the client, over connections that the HTTP library keeps for later requests.
//!
//! Invariants:
//! - A connection is used only while its server may be trusted: what was read from the files last
//!   holds for open connections, too, also while an answer is awaited.
//! - A connection was made with the certificate that is in force. After a renewal others are made,
//!   so that the end of the old certificate's time ends none of them.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex};

use farpool_identity::{
    CHECK_EVERY, Credentials, Expect, Live, LiveConnections, Peer, Refusal, Serial, Side, UnixTime,
    explain, explain_tls,
};
use farpool_kernel::lock;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use ureq::Error;
use ureq::unversioned::transport::time::Duration;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport,
    TransportAdapter,
};

/// The credentials of a client, kept up to date while they are used.
#[derive(Debug)]
pub(crate) struct Kept {
    credentials: Arc<Credentials>,
    live: Arc<LiveConnections>,
    config: Arc<ClientConfig>,
    /// Why the files could not be read anew at the last attempt.
    stale: Mutex<Option<String>>,
}

impl Kept {
    pub(crate) fn new(credentials: Arc<Credentials>) -> Result<Arc<Self>, Refusal> {
        let config = Arc::new(credentials.client(Expect::Address)?);
        let live = LiveConnections::new(Arc::clone(&credentials));
        Ok(Arc::new(Self { credentials, live, config, stale: Mutex::default() }))
    }

    /// Reads the files anew if they have changed, and looks at all connections. Costs a few system
    /// calls if nothing has changed.
    fn refresh(&self) {
        let now = UnixTime::now();
        let stale = self.credentials.reload(now).err().map(|error| error.to_string());
        *lock(&self.stale) = stale;
        // Each connection asks for its own result.
        self.live.check(now);
    }

    /// Explains why a request failed, as far as certificates are the reason.
    pub(crate) fn explained(&self, error: &Error) -> String {
        let why = explained(error);
        match lock(&self.stale).as_deref() {
            Some(stale) => format!("{why} (new certificates are not in use: {stale})"),
            None => why,
        }
    }
}

/// Explains an error in words about certificates, if it is about those.
pub(crate) fn explained(error: &Error) -> String {
    match error {
        Error::Io(error) => explained_io(error),
        other => other.to_string(),
    }
}

/// The same for an error while an answer is read.
pub(crate) fn explained_io(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match inner {
        Some(inner) => explained(inner),
        None => explain(error).unwrap_or_else(|| error.to_string()),
    }
}

/// Adds TLS to connections of https://.
#[derive(Debug)]
pub(crate) struct TlsConnector(pub(crate) Option<Arc<Kept>>);

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        let Some(transport) = chained else { return Ok(None) };
        if !details.needs_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let Some(kept) = &self.0 else { return Err(Error::TlsRequired) };
        kept.refresh();
        let host = details.uri.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host);
        let host =
            ServerName::try_from(host.to_owned()).map_err(|error| failed(error.to_string()))?;
        let own = kept.credentials.certificate().serial;
        let mut conn = ClientConnection::new(Arc::clone(&kept.config), host)
            .map_err(|error| failed(explain_tls(&error)))?;
        let mut sock = TransportAdapter::new(transport.boxed(), Arc::clone(&details.current_time));
        sock.set_timeout(details.timeout);
        conn.complete_io(&mut sock)?;
        let peer = Peer::of(&conn, Side::Server);
        let live = peer.and_then(|peer| kept.live.admit(peer, UnixTime::now()));
        let live = live.map_err(|why| failed(format!("the peer is refused: {why}")))?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        let stream = StreamOwned { conn, sock };
        Ok(Some(Either::B(TlsTransport { kept: Arc::clone(kept), own, live, buffers, stream })))
    }
}

fn failed(why: String) -> Error {
    Error::Io(io::Error::other(why))
}

/// A connection over TLS.
pub(crate) struct TlsTransport {
    kept: Arc<Kept>,
    /// The certificate that was shown.
    own: Serial,
    live: Live,
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter>,
}

impl std::fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsTransport").field("live", &self.live).finish_non_exhaustive()
    }
}

impl TlsTransport {
    fn check(&self) -> Result<(), Error> {
        self.kept.refresh();
        match self.live.refusal() {
            Some(why) => Err(failed(format!("the peer is refused: {why}"))),
            None => Ok(()),
        }
    }
}

/// Whether an error says that the time of a step is over.
fn is_timeout(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    matches!(inner, Some(Error::Timeout(_)))
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.stream.sock.set_timeout(timeout);
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output)?;
        Ok(())
    }

    /// Waits in steps: an answer may be long in coming, and the server be revoked meanwhile.
    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let mut left = timeout.after;
        loop {
            let step = match left {
                Duration::Exact(left) => Duration::Exact(left.min(CHECK_EVERY)),
                Duration::NotHappening => Duration::Exact(CHECK_EVERY),
            };
            self.stream.sock.set_timeout(NextTimeout { after: step, ..timeout });
            let read = self.stream.read(self.buffers.input_append_buf());
            match read {
                Ok(amount) => {
                    self.buffers.input_appended(amount);
                    return Ok(amount > 0);
                }
                Err(error) if is_timeout(&error) => {
                    self.check()?;
                    if let Duration::Exact(time) = &mut left {
                        *time = time.saturating_sub(CHECK_EVERY);
                        if time.is_zero() {
                            return Err(error.into());
                        }
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn is_open(&mut self) -> bool {
        self.check().is_ok()
            && self.own == self.kept.credentials.certificate().serial
            && self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}
