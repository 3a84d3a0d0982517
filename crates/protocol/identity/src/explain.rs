//! Errors of TLS in sentences that say what can be done.

use std::error::Error;

use rustls::AlertDescription as Alert;

use crate::refusal::Refusal;

/// Explains an error of a connection if it is one of TLS. In an [`std::io::Error`] it is inside.
#[must_use]
pub fn explain(error: &(dyn Error + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<rustls::Error>() {
        return Some(explain_tls(error));
    }
    let inner = error.downcast_ref::<std::io::Error>()?.get_ref()?;
    explain(inner)
}

/// Explains an error of TLS.
#[must_use]
pub fn explain_tls(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(why) => {
            format!("the peer is refused: {}", Refusal::from_tls(why))
        }
        rustls::Error::NoCertificatesPresented => {
            format!("the peer is refused: {}", Refusal::NoCertificate)
        }
        rustls::Error::PeerIncompatible(why) => format!(
            "the peer is refused: it does not speak TLS 1.3 as it is spoken here ({why:?}); update it"
        ),
        rustls::Error::InvalidMessage(_) => {
            "the peer is refused: it does not speak TLS; give it certificates, too".into()
        }
        rustls::Error::AlertReceived(alert) => refused_by_peer(*alert),
        other => other.to_string(),
    }
}

fn refused_by_peer(alert: Alert) -> String {
    let why = match alert {
        Alert::CertificateRequired => "it requires a certificate, and none was shown",
        Alert::CertificateRevoked => {
            "this certificate was revoked; issue another (farpool pki issue)"
        }
        Alert::CertificateExpired => {
            "this certificate's time is not now; renew it (farpool pki renew), or check both clocks"
        }
        Alert::UnknownCA => {
            "it does not trust the authority of this certificate; both sides need \
                             ca.crt of the same rack"
        }
        Alert::ProtocolVersion => "it speaks another version of TLS",
        Alert::CertificateUnknown | Alert::BadCertificate | Alert::UnsupportedCertificate => {
            "this certificate may not do that; its own log says why"
        }
        other => return format!("the peer ends the connection ({other:?})"),
    };
    format!("the peer refuses this side: {why}")
}
