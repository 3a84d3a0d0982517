//! Values of the rack's commands.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use farpool_api::Policy;
use farpool_control::StoreChoice;

use super::Span;

/// How long something may take; 0: do not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience(pub Duration);

impl FromStr for Patience {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" | "0s" | "0ms" | "0m" => Ok(Patience(Duration::ZERO)),
            _ => text.parse().map(|Span(span)| Patience(span)),
        }
    }
}

impl fmt::Display for Patience {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.is_zero() {
            true => to.write_str("0"),
            false => Span(self.0).fmt(to),
        }
    }
}

/// Where a controller keeps its state: `redb:PATH`, or `etcd://HOST:PORT,HOST:PORT`, where each
/// member may begin with `etcd://`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAt(pub StoreChoice);

impl FromStr for StoreAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a store; give redb:PATH or etcd://HOST:PORT,HOST:PORT");
        if let Some(path) = text.strip_prefix("redb:").filter(|path| !path.is_empty()) {
            return Ok(StoreAt(StoreChoice::Redb(PathBuf::from(path))));
        }
        let members = text.strip_prefix("etcd://").ok_or_else(wrong)?.split(',');
        let members: Vec<&str> =
            members.map(|member| member.trim_start_matches("etcd://")).collect();
        match members.iter().all(|member| !member.is_empty()) {
            true => Ok(StoreAt(StoreChoice::Etcd(
                members.iter().map(|member| format!("http://{member}")).collect(),
            ))),
            false => Err(wrong()),
        }
    }
}

impl fmt::Display for StoreAt {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            StoreChoice::Redb(path) => write!(to, "redb:{}", path.display()),
            StoreChoice::Etcd(urls) => {
                let members = urls.iter().map(|url| url.trim_start_matches("http://"));
                write!(to, "etcd://{}", members.collect::<Vec<_>>().join(","))
            }
        }
    }
}

/// A circuit switch, by its name in the topology, and its control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchAt {
    pub name: String,
    pub socket: PathBuf,
}

impl FromStr for SwitchAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, socket)) if !name.is_empty() && !socket.is_empty() => {
                Ok(SwitchAt { name: name.to_owned(), socket: PathBuf::from(socket) })
            }
            _ => Err(format!("{text:?} is not a switch and its control socket; give NAME=SOCKET")),
        }
    }
}

impl fmt::Display for SwitchAt {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}={}", self.name, self.socket.display())
    }
}

/// How a brick is chosen, by its name in the REST interface.
pub fn policy(text: &str) -> Result<Policy, String> {
    serde_json::from_value(text.into()).map_err(|_| {
        format!("{text:?} is not a policy; choose first-fit, pack, spread, nearest or least-loaded")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_read_back_what_they_print() {
        for text in ["0", "500ms", "30s"] {
            assert_eq!(text.parse::<Patience>().expect(text).to_string(), text);
        }
        for none in ["0s", "0ms", "0m"] {
            assert_eq!(none.parse(), Ok(Patience(Duration::ZERO)), "{none}");
        }
        for text in ["redb:/var/lib/x.redb", "etcd://a:1", "etcd://a:1,b:2"] {
            assert_eq!(text.parse::<StoreAt>().expect(text).to_string(), text);
        }
        let text = "r0=/run/r0.sock";
        assert_eq!(text.parse::<SwitchAt>().expect(text).to_string(), text);
        let each = "etcd://a:1,etcd://b:2".parse::<StoreAt>();
        assert_eq!(each, "etcd://a:1,b:2".parse());
        assert_eq!(policy("pack"), Ok(Policy::Pack));
    }

    #[test]
    fn what_is_none_is_refused_with_an_example() {
        for text in ["redb:", "etcd://", "etcd://a,,b", "sqlite:x", ""] {
            assert!(text.parse::<StoreAt>().expect_err(text).contains("redb:PATH"));
        }
        for text in ["r0", "=/x", "r0=", ""] {
            assert!(text.parse::<SwitchAt>().expect_err(text).contains("NAME=SOCKET"));
        }
        assert!(policy("fastest").is_err());
    }
}
