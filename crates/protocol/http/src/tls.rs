//! TLS below HTTP: who asks is proven by a certificate, and may be revoked while it is connected.
//!
//! Invariants:
//! - A connection is served only after its peer's certificate was verified, and only as long as it
//!   may be: the files are read anew every [`CHECK_EVERY`], and a connection whose peer may no
//!   longer be served is closed at the next check, also in the middle of an answer.
//! - Every request that gets through carries the [`Identity`] of its peer, as an extension.
//! - Whoever speaks HTTP without TLS is told so in plain HTTP, and gets nothing else.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farpool_api::{Problem, ProblemKind};
use farpool_identity::{
    CHECK_EVERY, Credentials, Identity, Live, LiveConnections, Peer, Refusal, Reloaded, Side,
    Stale, UnixTime, explain,
};
use farpool_kernel::lock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::PROBLEM_TYPE;

/// The first byte of a TLS connection: a record of a handshake (RFC 8446, 5.1). No HTTP request
/// begins with it.
const HANDSHAKE_RECORD: u8 = 0x16;
/// Longest that a refused peer is heard out. A connection that is closed while bytes of the peer
/// are unread is reset, and the reset can destroy the refusal before it was read.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The most that is read of a refused peer, in bytes; one that sends more may miss the reason.
const LAST_WORDS_BYTES: usize = 64 << 10;

/// Peers refused before they were known that are logged in each [`SAY_EVERY`]: anybody can cause
/// such lines. Further ones are not logged.
const SAY_LIMIT: u32 = 30;
/// See [`SAY_LIMIT`].
const SAY_EVERY: Duration = Duration::from_secs(60);

/// What a server needs to speak TLS. Its listeners share it.
pub struct Tls {
    credentials: Arc<Credentials>,
    live: Arc<LiveConnections>,
    acceptor: TlsAcceptor,
    /// Counts the checks that have ended a connection.
    ended: watch::Sender<u64>,
    stale: Mutex<Stale>,
    /// Since when refused peers are counted, and how many were logged.
    strangers: Mutex<(Instant, u32)>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

impl Tls {
    /// Speaks TLS with these credentials. [`Self::watch`] keeps them up to date.
    ///
    /// # Errors
    /// [`Refusal::NoServer`]: they are a person's or a program's.
    pub fn new(credentials: Arc<Credentials>) -> Result<Arc<Self>, Refusal> {
        let acceptor = TlsAcceptor::from(Arc::new(credentials.server()?));
        let live = LiveConnections::new(Arc::clone(&credentials));
        let (ended, stale) = (watch::channel(0).0, Mutex::default());
        let strangers = Mutex::new((Instant::now(), 0));
        Ok(Arc::new(Self { credentials, live, acceptor, ended, stale, strangers }))
    }

    /// Reads the files anew when they change, and closes the connections of peers that may no
    /// longer be served. Without end: to be run beside the server.
    pub async fn watch(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(CHECK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let own = Arc::clone(&self);
            // Files are read, which may take its time. A panic ends the process.
            let _ = tokio::task::spawn_blocking(move || own.check()).await;
        }
    }

    fn check(&self) {
        let now = UnixTime::now();
        let found = self.credentials.reload(now);
        if matches!(found, Ok(Reloaded::Changed)) {
            tracing::info!("certificates, or the list of revoked ones, were read anew");
        }
        if let Some(error) = lock(&self.stale).note(&found) {
            tracing::warn!(error, "certificates cannot be read anew; those in force stay");
        }
        if !self.live.check(now).is_empty() {
            self.ended.send_modify(|count| *count += 1);
        }
    }

    /// Makes the handshake of a new connection. None if its peer is refused, which it is told.
    pub(crate) async fn admit(&self, mut stream: TcpStream) -> Option<Admitted> {
        let mut first = [0];
        if !matches!(stream.peek(&mut first).await, Ok(1)) {
            return None;
        }
        let from = stream.peer_addr().ok();
        let from = from.map_or_else(|| "an address unknown".to_owned(), |at| at.to_string());
        if first[0] != HANDSHAKE_RECORD {
            self.say_refused(&from, "it does not speak TLS; give it https:// and --pki DIR");
            say_clear(&mut stream).await;
            return None;
        }
        let mut stream = match self.acceptor.accept(stream).into_fallible().await {
            Ok(stream) => stream,
            Err((error, mut stream)) => {
                let why = explain(&error).unwrap_or_else(|| error.to_string());
                self.say_refused(&from, &why);
                hear_out(&mut stream).await;
                return None;
            }
        };
        let peer = Peer::of(stream.get_ref().1, Side::Client);
        match peer.and_then(|peer| self.live.admit(peer, UnixTime::now())) {
            Ok(live) => Some(Admitted { stream, live }),
            Err(why) => {
                self.say_refused(&from, &why.to_string());
                // It learns no more than that: its certificate was good a moment ago.
                let _ = stream.shutdown().await;
                None
            }
        }
    }

    fn say_refused(&self, from: &str, why: &str) {
        let count = {
            let mut strangers = lock(&self.strangers);
            if strangers.0.elapsed() >= SAY_EVERY {
                *strangers = (Instant::now(), 0);
            }
            strangers.1 = strangers.1.saturating_add(1);
            strangers.1
        };
        if count < SAY_LIMIT {
            tracing::warn!(from, "a connection is refused: {why}");
        } else if count == SAY_LIMIT {
            let every_s = SAY_EVERY.as_secs();
            tracing::warn!(
                from,
                "a connection is refused: {why}; more within {every_s} s are not logged"
            );
        }
    }

    /// Returns once the peer of a connection may no longer be served.
    pub(crate) async fn ended(&self, live: &Live) {
        let mut checks = self.ended.subscribe();
        loop {
            checks.mark_unchanged();
            if let Some(why) = live.refusal() {
                let who = &live.peer().certificate.identity;
                tracing::warn!(%who, "its connection is closed: {why}");
                return;
            }
            if checks.changed().await.is_err() {
                return;
            }
        }
    }
}

/// A connection whose peer is known.
pub(crate) struct Admitted {
    pub stream: TlsStream<TcpStream>,
    pub live: Live,
}

impl Admitted {
    pub(crate) fn identity(&self) -> Identity {
        self.live.peer().certificate.identity.clone()
    }
}

/// Tells a peer in plain HTTP that it has to speak TLS.
async fn say_clear(stream: &mut TcpStream) {
    let detail = "this server speaks HTTP over TLS only: ask https:// and show a certificate of \
                  this rack (--pki DIR; farpool pki issue)";
    let body = serde_json::to_string(&Problem::new(ProblemKind::BadRequest, detail));
    let body = body.unwrap_or_default();
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: {PROBLEM_TYPE}\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n{body}"
    );
    // Whether it arrives is the peer's to know.
    let _ = stream.write_all(answer.as_bytes()).await;
    hear_out(stream).await;
}

/// Reads what a refused peer still sends, so that it can read why it is refused.
async fn hear_out(stream: &mut TcpStream) {
    let heard = async {
        stream.shutdown().await?;
        let mut bytes = [0; 4096];
        let mut left = LAST_WORDS_BYTES;
        while left > 0 {
            match stream.read(&mut bytes).await? {
                0 => break,
                count => left = left.saturating_sub(count),
            }
        }
        io::Result::Ok(())
    };
    // The connection ends in any case.
    let _ = tokio::time::timeout(LAST_WORDS, heard).await;
}
