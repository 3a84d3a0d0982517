//! Who may talk to the key-value server, and how: protocols, TLS, and what is worth a warning.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use farpool_kv_server::tls::{ClientCertificates, Tls, TlsSettings};
use farpool_kv_server::{Dialect, Settings};

use crate::args::KvArgs;
use crate::config::UsageError;

/// Options of memcached's `-o` about TLS that have no counterpart: sizes of OpenSSL's buffers, and
/// who encrypts.
const WITHOUT_EFFECT: [&str; 2] = ["ssl_wbuf_size", "ssl_kernel_tls"];
/// memcached's number for keys in PEM form.
const PEM: &str = "1";

/// The protocols to serve, by `-B` and `-S`.
pub(crate) fn dialect(args: &KvArgs) -> Result<Dialect, UsageError> {
    let refused = |how: &str| Err(UsageError(how.into()));
    if args.sasl && args.credentials.is_none() {
        return refused("-S needs names and passwords: give -Y FILE, with lines of NAME:PASSWORD");
    }
    match args.protocol.as_deref() {
        None if args.sasl => Ok(Dialect::Binary),
        Some("ascii" | "auto") if args.sasl => {
            refused("-S serves the binary protocol only; with -Y alone both ask for a password")
        }
        None | Some("auto") => Ok(Dialect::Auto),
        Some("ascii") => Ok(Dialect::Text),
        Some("binary") => Ok(Dialect::Binary),
        Some(other) => Err(UsageError(format!(
            "the {other} protocol is not served; use -B ascii, -B binary or -B auto"
        ))),
    }
}

/// The `ssl_…` options of memcached's `-o`.
#[derive(Debug, Default)]
pub(crate) struct TlsOptions {
    chain: Option<PathBuf>,
    key: Option<PathBuf>,
    rest: TlsSettings,
    /// The first that was given.
    first: Option<String>,
}

impl TlsOptions {
    /// Takes an option if it is about TLS.
    pub(crate) fn take(&mut self, option: &str) -> Result<bool, UsageError> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if !name.starts_with("ssl_") {
            return Ok(false);
        }
        let wrong = |how: &str| Err(UsageError(format!("-o {option}: {how}")));
        let path = || match value {
            "" => Err(UsageError(format!("-o {name} needs a file: write {name}=FILE"))),
            path => Ok(Some(PathBuf::from(path))),
        };
        match name {
            "ssl_chain_cert" => self.chain = path()?,
            "ssl_key" => self.key = path()?,
            "ssl_ca_cert" => self.rest.client_roots = path()?,
            "ssl_verify_mode" => {
                self.rest.client_certificates = match value {
                    "0" => ClientCertificates::Unasked,
                    "1" => ClientCertificates::Asked,
                    "2" | "3" => ClientCertificates::Required,
                    _ => return wrong("0 asks for no certificate, 1 asks, 2 and 3 require one"),
                };
            }
            "ssl_min_version" => {
                self.rest.only_newest = match value {
                    "2" => false,
                    "3" => true,
                    "0" | "1" => return wrong("TLS 1.0 and 1.1 are broken; use 2 or 3"),
                    _ => return wrong("2 is TLS 1.2, 3 is TLS 1.3"),
                };
            }
            "ssl_session_cache" => self.rest.keeps_sessions = true,
            "ssl_keyformat" if value == PEM => {}
            "ssl_keyformat" => return wrong("keys are read in PEM form only, which is 1"),
            "ssl_ciphers" => {
                return wrong("only ciphers without known weaknesses are offered; leave it out");
            }
            _ if WITHOUT_EFFECT.contains(&name) => {}
            _ => return Err(UsageError(format!("-o {name} is not an option that Farpool knows"))),
        }
        self.first.get_or_insert_with(|| name.to_owned());
        Ok(true)
    }

    /// Loads certificates and key if TLS is to be spoken.
    pub(crate) fn load(self, is_wanted: bool) -> Result<Option<Arc<Tls>>, UsageError> {
        let refused = |how: String| Err(UsageError(how));
        if !is_wanted {
            let unused = |name| refused(format!("-o {name} is for TLS only; give -Z, too"));
            return self.first.map_or(Ok(None), unused);
        }
        let Some(chain) = self.chain else {
            return refused("-Z needs a certificate: -o ssl_chain_cert=FILE,ssl_key=FILE".into());
        };
        if self.rest.client_certificates != ClientCertificates::Unasked
            && self.rest.client_roots.is_none()
        {
            let how = "ssl_verify_mode needs the roots of clients' certificates: -o \
                ssl_ca_cert=FILE";
            return refused(how.into());
        }
        // The key may be in the same file.
        let key = self.key.unwrap_or_else(|| chain.clone());
        let tls = Tls::load(TlsSettings { chain, key, ..self.rest });
        tls.map(|tls| Some(Arc::new(tls))).map_err(|error| UsageError(error.to_string()))
    }
}

/// Logs what strangers on other hosts could do.
pub(crate) fn warn_of_open_doors(settings: &Settings) {
    let is_open = |address: &&SocketAddr| !address.ip().is_loopback();
    let first = |addresses: &[SocketAddr]| addresses.iter().find(is_open).copied();
    let has_passwords = settings.credentials.is_some();
    let demands = |tls: &Arc<Tls>| tls.settings.client_certificates == ClientCertificates::Required;
    let sealed = settings.tls.as_ref().and(first(&settings.addresses));
    let plain = first(&settings.plain_addresses)
        .or_else(|| first(&settings.addresses).filter(|_| settings.tls.is_none()));
    match plain {
        Some(address) if has_passwords => tracing::warn!(
            %address,
            "whoever is on the way to this address reads passwords and items: it does not encrypt \
             (-Z)"
        ),
        Some(address) => tracing::warn!(
            %address,
            "whoever reaches this address may read and change every item: it asks for no password \
             (-Y) and does not encrypt (-Z)"
        ),
        None => {}
    }
    if let Some(address) = sealed
        && !has_passwords
        && !settings.tls.as_ref().is_some_and(demands)
    {
        tracing::warn!(
            %address,
            "whoever reaches this address may read and change every item: it encrypts, but asks \
             for neither a password (-Y) nor a certificate (-o ssl_verify_mode=2)"
        );
    }
    if let Some(address) = first(&settings.keyvault_addresses) {
        tracing::warn!(
            %address,
            "whoever reaches this address may read and change every item: KeyVault has neither \
             passwords nor encryption"
        );
    }
    if let Some(address) = settings.metrics_address.filter(|address| is_open(&address)) {
        tracing::warn!(
            %address,
            "whoever reaches this address sees the metrics and, at /keys, names of hot keys"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_tls_are_taken_or_refused_with_a_reason() {
        let mut options = TlsOptions::default();
        for option in ["ssl_verify_mode=2", "ssl_min_version=3", "ssl_wbuf_size=16"] {
            assert!(matches!(options.take(option), Ok(true)), "{option}");
        }
        assert_eq!(options.rest.client_certificates, ClientCertificates::Required);
        assert!(options.rest.only_newest);
        assert!(matches!(options.take("idle_timeout=3"), Ok(false)));
        for (option, told) in [
            ("ssl_key", "ssl_key=FILE"),
            ("ssl_ciphers=RC4", "leave it out"),
            ("ssl_keyformat=2", "PEM"),
            ("ssl_min_version=0", "use 2 or 3"),
            ("ssl_verify_mode=x", "0 asks for no certificate"),
            ("ssl_engine=x", "not an option that Farpool knows"),
        ] {
            let error = options.take(option).expect_err(option);
            assert!(error.to_string().contains(told), "{error}");
        }
        let error = options.load(false).expect_err("options without -Z");
        assert!(error.to_string().contains("-Z"), "{error}");
    }
}
