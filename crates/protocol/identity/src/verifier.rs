//! What rustls asks during handshakes, answered from the credentials as they were read last.

use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, SignatureScheme};

use crate::credentials::Credentials;
use crate::identity::Role;
use crate::refusal::Refusal;
use crate::trust::Side;

/// Whom a client means to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// A controller or node whose certificate names the address that the client dials.
    Address,
    /// A node whose certificate names the address that the client dials: its blade.
    Node,
    /// This one, at whatever address.
    Role(Role),
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    ring::default_provider().signature_verification_algorithms
}

/// The refusal of a version that no configuration offers.
fn too_old<T>() -> Result<T, Error> {
    Err(Error::PeerIncompatible(PeerIncompatible::ServerDoesNotSupportTls12Or13))
}

/// Verifies clients.
#[derive(Debug)]
pub(crate) struct OfClients(pub(crate) Arc<Credentials>);

impl ClientCertVerifier for OfClients {
    /// None: clients have one certificate, and show it.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.0.verify(leaf, between, Side::Client, now);
        verified.map_err(|refusal| refusal.into_tls(now))?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        too_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signature, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// Verifies servers.
#[derive(Debug)]
pub(crate) struct OfServers {
    pub(crate) credentials: Arc<Credentials>,
    pub(crate) expect: Expect,
}

impl OfServers {
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        address: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), Refusal> {
        let found = self.credentials.verify(leaf, between, Side::Server, now)?.identity.role;
        if !found.may_serve() {
            return Err(Refusal::NoServer(found));
        }
        match &self.expect {
            Expect::Role(expected) if *expected == found => Ok(()),
            Expect::Role(expected) => Err(Refusal::OtherRole { expected: expected.clone(), found }),
            Expect::Node if !matches!(found, Role::Node(_)) => Err(Refusal::NoBlade(found)),
            Expect::Address | Expect::Node => {
                let malformed = |error: Error| Refusal::Malformed(error.to_string());
                let parsed = ParsedCertificate::try_from(leaf).map_err(malformed)?;
                rustls::client::verify_server_name(&parsed, address)
                    .map_err(|_| Refusal::OtherAddress(address.to_str().into_owned()))
            }
        }
    }
}

impl ServerCertVerifier for OfServers {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        address: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.verify(leaf, between, address, now);
        verified.map_err(|refusal| refusal.into_tls(now))?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        too_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signature, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// Shows this process's certificate.
#[derive(Debug)]
pub(crate) struct Own(pub(crate) Arc<Credentials>);

impl ResolvesServerCert for Own {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.own())
    }
}

impl ResolvesClientCert for Own {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.own())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
