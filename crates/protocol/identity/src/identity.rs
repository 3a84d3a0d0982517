//! An identity, and the URI by which a certificate names it.
//!
//! The form is that of SPIFFE: `spiffe://RACK/ROLE/NAME`, where RACK is the trust domain. A text
//! that is not exactly of this form is refused; nothing is normalized, so that two texts never name
//! one identity. Pure.

use std::fmt;
use std::str::FromStr;

use farpool_units::plain;
use serde::{Deserialize, Serialize};

/// What every identity begins with.
const SCHEME: &str = "spiffe://";
/// Longest name in bytes, as for nodes and tenants elsewhere; a longer one is refused.
const NAME_LIMIT_BYTES: usize = 64;
/// Longest name of a rack in bytes, as for a trust domain of SPIFFE; a longer one is refused.
const RACK_LIMIT_BYTES: usize = 255;
/// Longest URI in bytes, as in SPIFFE; a longer one is refused without being read.
const URI_LIMIT_BYTES: usize = 2048;

/// Why a certificate or a text names no identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// A name of a node, a tenant, a program or a person has other characters, or is too long.
    #[error(
        "\"{}\" is no name: give 1 to {NAME_LIMIT_BYTES} letters, digits, hyphens, underscores and \
         dots, but not \".\" or \"..\" alone", plain(.0)
    )]
    Name(String),
    /// A rack's name has other characters, or is too long.
    #[error(
        "\"{}\" is no name of a rack: give 1 to {RACK_LIMIT_BYTES} small letters, digits, hyphens, \
         underscores and dots, beginning with a letter or digit", plain(.0)
    )]
    Rack(String),
    /// A URI of another form.
    #[error(
        "\"{}\" names no identity of Farpool; that would be spiffe://RACK/ROLE/NAME with the role \
         viewer, operator, controller or node, or spiffe://RACK/program/TENANT", plain(.0)
    )]
    Uri(String),
    /// A URI that is longer than any identity.
    #[error("a URI of {0} bytes names no identity; at most {URI_LIMIT_BYTES} are read")]
    TooLong(usize),
    /// The certificate has no URI, or several: it would be unclear whose it is.
    #[error(
        "the certificate has {0} URIs among its names, and needs exactly one, such as \
         spiffe://RACK/node/NAME"
    )]
    Count(usize),
}

/// Name of a node, a tenant, a program or a person: 1 to 64 letters, digits, `-`, `_` and `.`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        // As segments of a path, these would lead elsewhere.
        let is_path = matches!(text, "." | "..");
        let fits = (1..=NAME_LIMIT_BYTES).contains(&text.len());
        if fits && !is_path && text.bytes().all(is_allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(IdentityError::Name(shortened(text)))
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Name of a rack: SPIFFE's trust domain.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RackName(String);

impl RackName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RackName {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_allowed = |byte: u8| is_plain(byte) || b"-_.".contains(&byte);
        let fits = text.len() <= RACK_LIMIT_BYTES && text.bytes().next().is_some_and(is_plain);
        if fits && text.bytes().all(is_allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(IdentityError::Rack(shortened(text)))
        }
    }
}

impl fmt::Display for RackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for RackName {
    type Error = IdentityError;

    fn try_from(text: String) -> Result<Self, IdentityError> {
        text.parse()
    }
}

impl From<RackName> for String {
    fn from(rack: RackName) -> Self {
        rack.0
    }
}

/// What an identity may be in its rack, and its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// A person or a program that may read the rack's state and change nothing.
    Viewer(Name),
    /// A person or a program that may change the rack.
    Operator(Name),
    /// The rack's controller, or one of them.
    Controller(Name),
    /// A node, which lends memory and speaks only for itself.
    Node(Name),
    /// A program that uses far memory, or the cache; it speaks only for its tenant.
    Program {
        /// Whose promise and quota it counts towards.
        tenant: Name,
        /// Tells programs of one tenant apart.
        name: Option<Name>,
    },
}

impl Role {
    /// Whether it may read the whole rack's state.
    #[must_use]
    pub const fn may_view(&self) -> bool {
        matches!(self, Self::Viewer(_) | Self::Operator(_) | Self::Controller(_))
    }

    /// Whether it may change the rack.
    #[must_use]
    pub const fn may_operate(&self) -> bool {
        matches!(self, Self::Operator(_))
    }

    /// Whether it is this node, and so may speak for it.
    #[must_use]
    pub fn is_node(&self, node: &str) -> bool {
        matches!(self, Self::Node(name) if name.as_str() == node)
    }

    /// Whether it is a program of this tenant, and so may speak for it.
    #[must_use]
    pub fn is_program_of(&self, tenant: &str) -> bool {
        matches!(self, Self::Program { tenant: own, .. } if own.as_str() == tenant)
    }

    /// The tenant for which it speaks; only programs have one.
    #[must_use]
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Self::Program { tenant, .. } => Some(tenant.as_str()),
            _ => None,
        }
    }

    /// Whether clients connect to it: a person or a program answers no connection.
    #[must_use]
    pub const fn may_serve(&self) -> bool {
        matches!(self, Self::Controller(_) | Self::Node(_))
    }

    /// One word for commands and folders, such as `node-a` or `program-web@payroll`. Two roles
    /// never have the same: no name has an `@`.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::Viewer(name) => format!("viewer-{name}"),
            Self::Operator(name) => format!("operator-{name}"),
            Self::Controller(name) => format!("controller-{name}"),
            Self::Node(name) => format!("node-{name}"),
            Self::Program { tenant, name: None } => format!("program-{tenant}"),
            Self::Program { tenant, name: Some(name) } => format!("program-{name}@{tenant}"),
        }
    }

    /// The name without the role: a tenant's, if its program has no name.
    #[must_use]
    pub const fn name(&self) -> &Name {
        match self {
            Self::Viewer(name)
            | Self::Operator(name)
            | Self::Controller(name)
            | Self::Node(name)
            | Self::Program { name: Some(name), .. }
            | Self::Program { tenant: name, name: None } => name,
        }
    }

    fn from_path(path: &[&str]) -> Result<Option<Self>, IdentityError> {
        Ok(Some(match path {
            ["viewer", name] => Self::Viewer(name.parse()?),
            ["operator", name] => Self::Operator(name.parse()?),
            ["controller", name] => Self::Controller(name.parse()?),
            ["node", name] => Self::Node(name.parse()?),
            ["program", tenant] => Self::Program { tenant: tenant.parse()?, name: None },
            ["program", tenant, name] => {
                Self::Program { tenant: tenant.parse()?, name: Some(name.parse()?) }
            }
            _ => return Ok(None),
        }))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Viewer(name) => write!(f, "viewer {name}"),
            Self::Operator(name) => write!(f, "operator {name}"),
            Self::Controller(name) => write!(f, "controller {name}"),
            Self::Node(name) => write!(f, "node {name}"),
            Self::Program { tenant, name: None } => write!(f, "program of tenant {tenant}"),
            Self::Program { tenant, name: Some(name) } => {
                write!(f, "program {name} of tenant {tenant}")
            }
        }
    }
}

/// Who a certificate belongs to. As text it is the URI.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Identity {
    /// The rack, outside of which the identity means nothing.
    pub rack: RackName,
    /// What it is there.
    pub role: Role,
}

impl Identity {
    /// Returns the identity among the URIs of a certificate.
    ///
    /// # Errors
    /// There is not exactly one, or it names no identity.
    pub fn among<'a>(uris: impl Iterator<Item = &'a str>) -> Result<Self, IdentityError> {
        let mut first = None;
        let mut count = 0;
        for uri in uris {
            first.get_or_insert(uri);
            count += 1;
        }
        match first {
            Some(uri) if count == 1 => uri.parse(),
            _ => Err(IdentityError::Count(count)),
        }
    }
}

impl FromStr for Identity {
    type Err = IdentityError;

    fn from_str(uri: &str) -> Result<Self, IdentityError> {
        if uri.len() > URI_LIMIT_BYTES {
            return Err(IdentityError::TooLong(uri.len()));
        }
        let other = || IdentityError::Uri(shortened(uri));
        let rest = uri.strip_prefix(SCHEME).ok_or_else(other)?;
        let mut parts = rest.split('/');
        let rack = parts.next().unwrap_or_default().parse()?;
        let path: Vec<&str> = parts.collect();
        let role = Role::from_path(&path)?.ok_or_else(other)?;
        Ok(Self { rack, role })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rack, role } = self;
        write!(f, "{SCHEME}{rack}/")?;
        match role {
            Role::Viewer(name) => write!(f, "viewer/{name}"),
            Role::Operator(name) => write!(f, "operator/{name}"),
            Role::Controller(name) => write!(f, "controller/{name}"),
            Role::Node(name) => write!(f, "node/{name}"),
            Role::Program { tenant, name: None } => write!(f, "program/{tenant}"),
            Role::Program { tenant, name: Some(name) } => write!(f, "program/{tenant}/{name}"),
        }
    }
}

impl TryFrom<String> for Identity {
    type Error = IdentityError;

    fn try_from(text: String) -> Result<Self, IdentityError> {
        text.parse()
    }
}

impl From<Identity> for String {
    fn from(identity: Identity) -> Self {
        identity.to_string()
    }
}

/// The beginning of a text from elsewhere, for a message of one line.
fn shortened(text: &str) -> String {
    const SHOWN_CHARACTERS: usize = 100;
    let mut shown: String = text.chars().take(SHOWN_CHARACTERS).collect();
    if shown.len() < text.len() {
        shown.push_str("...");
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_has_one_uri_one_label_and_its_rights() {
        let roles = [
            ("viewer/ann", "viewer-ann", "viewer ann"),
            ("operator/bob", "operator-bob", "operator bob"),
            ("controller/c1", "controller-c1", "controller c1"),
            ("node/a", "node-a", "node a"),
            ("program/payroll", "program-payroll", "program of tenant payroll"),
            ("program/payroll/web.1", "program-web.1@payroll", "program web.1 of tenant payroll"),
        ];
        for (path, label, words) in roles {
            let uri = format!("spiffe://rack-1.example/{path}");
            let identity: Identity = uri.parse().expect("an identity");
            assert_eq!(identity.to_string(), uri);
            assert_eq!(identity.role.label(), label);
            assert_eq!(identity.role.to_string(), words);
            assert_eq!(identity.role.may_serve(), ["co", "no"].contains(&&path[..2]), "{path}");
            assert_eq!(identity.role.may_operate(), path.starts_with('o'), "{path}");
            assert_eq!(identity.role.is_node("a"), path == "node/a");
            assert_eq!(identity.role.is_program_of("payroll"), path.starts_with("program/payroll"));
        }
    }

    #[test]
    fn what_is_almost_an_identity_is_none() {
        let long = "n".repeat(NAME_LIMIT_BYTES + 1);
        for uri in [
            "",
            "spiffe://",
            "spiffe:///node/a",
            "spiffe://rack",
            "spiffe://rack/",
            "spiffe://rack/node",
            "spiffe://rack/node/",
            "spiffe://rack/node/a/",
            "spiffe://rack/node/a/b",
            "spiffe://rack//node/a",
            "spiffe://rack/node/..",
            "spiffe://rack/node/.",
            "spiffe://rack/node/a?b",
            "spiffe://rack/node/a#b",
            "spiffe://rack/node/%61",
            "spiffe://rack/node/a b",
            "spiffe://rack/node/\u{e4}",
            "spiffe://rack/Node/a",
            "spiffe://Rack/node/a",
            "spiffe://rack:80/node/a",
            "spiffe://u@rack/node/a",
            "spiffe://-rack/node/a",
            "SPIFFE://rack/node/a",
            "https://rack/node/a",
            "spiffe://rack/program",
            "spiffe://rack/program/t/p/x",
            "spiffe://rack/admin/a",
            &format!("spiffe://rack/node/{long}"),
        ] {
            let refused = uri.parse::<Identity>().expect_err(uri);
            assert!(refused.to_string().len() < 400, "{refused}");
        }
        let endless = format!("spiffe://rack/node/{}", "a".repeat(URI_LIMIT_BYTES));
        assert!(matches!(endless.parse::<Identity>(), Err(IdentityError::TooLong(_))));
    }

    #[test]
    fn a_certificate_has_one_identity() {
        let (a, b) = ("spiffe://rack/node/a", "spiffe://rack/node/b");
        assert_eq!(Identity::among([].into_iter()), Err(IdentityError::Count(0)));
        assert_eq!(Identity::among([a, b].into_iter()), Err(IdentityError::Count(2)));
        assert_eq!(Identity::among([a, a].into_iter()), Err(IdentityError::Count(2)));
        assert_eq!(Identity::among([a].into_iter()).expect("one").to_string(), a);
    }
}
