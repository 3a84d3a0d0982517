//! How a client proves who it is, and what it does not say in the clear.
//!
//! Invariant: beyond loopback nothing is asked over http:// unless its user insists: a token, and
//! the keys of grants in the answers, could be read on the way.

use std::net::IpAddr;
use std::sync::Arc;

use farpool_identity::Credentials;

use crate::ApiError;

/// What a client shows to a controller, and what it may do without.
#[derive(Clone, Default)]
pub struct Access {
    /// The token that the controller requires.
    pub token: Option<String>,
    /// The certificate that it shows, and whom it trusts; needed for https://.
    pub credentials: Option<Arc<Credentials>>,
    /// Speaks http:// beyond loopback, too.
    pub insecure: bool,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access")
            .field("has_token", &self.token.is_some())
            .field("credentials", &self.credentials)
            .field("insecure", &self.insecure)
            .finish()
    }
}

impl Access {
    /// Returns the addresses in `controllers`, which separates them by commas: all may be asked.
    ///
    /// # Errors
    /// One is no address; or of https:// without a certificate; or of http:// beyond loopback; or
    /// there is none.
    pub fn addresses(&self, controllers: &str) -> Result<Vec<String>, ApiError> {
        let urls = controllers.split(',').map(str::trim).filter(|url| !url.is_empty());
        let urls: Vec<String> = urls.map(|url| url.trim_end_matches('/').to_owned()).collect();
        urls.iter().try_for_each(|url| self.check(url))?;
        if urls.is_empty() {
            return Err(ApiError::BadUrl(controllers.to_owned()));
        }
        Ok(urls)
    }

    fn check(&self, url: &str) -> Result<(), ApiError> {
        let bad = || ApiError::BadUrl(url.to_owned());
        let uri: ureq::http::Uri = url.parse().map_err(|_| bad())?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(bad)?;
        match uri.scheme_str() {
            Some("https") if self.credentials.is_none() => {
                Err(ApiError::NoCertificate(url.to_owned()))
            }
            Some("https") => Ok(()),
            Some("http") if self.insecure || is_this_machine(host) => Ok(()),
            Some("http") => Err(ApiError::Clear(url.to_owned())),
            _ => Err(bad()),
        }
    }
}

/// Whether a host is surely this machine. A name may be anybody's, but for `localhost`.
fn is_this_machine(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_loopback_nothing_is_asked_in_the_clear_unless_the_user_insists() {
        let (careful, insists) =
            (Access::default(), Access { insecure: true, ..Access::default() });
        for near in
            ["http://127.0.0.1:7080", "http://[::1]:7080", "http://LocalHost", "http://127.9.9.9"]
        {
            careful.check(near).unwrap();
        }
        for far in [
            "http://192.0.2.1:7080",
            "http://rack:7080",
            "http://[2001:db8::1]",
            "http://127.0.0.1.example",
        ] {
            let error = careful.check(far).unwrap_err();
            assert!(matches!(error, ApiError::Clear(_)), "{far}: {error}");
            assert!(error.to_string().contains("--insecure"), "{error}");
            insists.check(far).unwrap();
        }
        let error = insists.check("https://rack:7080").unwrap_err();
        assert!(matches!(error, ApiError::NoCertificate(_)), "{error}");
        for bad in ["", "rack:7080", "ftp://rack", "http://"] {
            assert!(matches!(insists.check(bad), Err(ApiError::BadUrl(_))), "{bad}");
        }
    }
}
