//! Who is who in a rack: certificates for mutual TLS, and the authority that issues them.
//!
//! A certificate names one [`Identity`] by a URI, `spiffe://RACK/node/a`, so that certificates of
//! cert-manager and SPIFFE work as well as those of [`authority`]. [`Credentials`] are what one
//! process has: its certificate and key, the authorities that it trusts, and a list of revoked
//! certificates. They are read again when a file changes, without a restart, and configurations
//! that were made from them before use what was read last. [`LiveConnections`] tells a server which
//! of its open connections a revocation has ended.
//!
//! Invariants: TLS 1.3 only; both sides show a certificate; no session is resumed, since a resumed
//! session would not be verified again; what cannot be verified is refused. A file that cannot be
//! used changes nothing: what was read before stays in force.

#![warn(missing_docs)]

pub mod authority;
mod certificate;
mod credentials;
mod explain;
mod files;
mod identity;
mod live;
pub mod pem;
mod refusal;
mod revoked;
mod stale;
mod trust;
mod verifier;

pub use certificate::{Certificate, Serial, SerialError};
pub use credentials::{Credentials, Reloaded};
pub use explain::{explain, explain_tls};
pub use files::{FileError, Files};
pub use identity::{Identity, IdentityError, Name, RackName, Role};
pub use live::{CHECK_EVERY, ConnectionId, Ended, Live, LiveConnections};
pub use refusal::Refusal;
pub use revoked::{Reason, RevocationList, Revoked};
pub use rustls::pki_types::UnixTime;
pub use stale::Stale;
pub use trust::{Peer, Side, Trust};
pub use verifier::Expect;
