//! The register of what an authority has issued: issued.json.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use farpool_kernel::write_secret;
use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};

use super::{AuthorityError, DAY_S, Host};
use crate::certificate::{Serial, is_due};
use crate::identity::{Identity, RackName, Role};
use crate::revoked::Revoked;

/// Version of the file. Another one is refused.
const VERSION: u32 = 1;
/// How long a certificate stays in the register, and in the list of revoked ones, after its end: a
/// host whose clock is this far behind would otherwise accept it again.
const KEPT_S: u64 = 30 * DAY_S;

/// One certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its number.
    pub serial: Serial,
    /// Whose it is.
    pub identity: Identity,
    /// By which its owner can be reached.
    pub hosts: Vec<Host>,
    /// Its life as it was asked for, which the next renewal takes over.
    pub days: u64,
    /// Begin of its time, in seconds since 1970.
    pub not_before_s: u64,
    /// Last second of its time, since 1970.
    pub not_after_s: u64,
    /// When and why it was revoked.
    pub revoked: Option<Revoked>,
}

/// What a certificate is at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Accepted.
    Valid,
    /// Its time has not begun: this host's clock was set back.
    Early,
    /// Its time is over.
    Expired,
    /// It was revoked.
    Revoked,
}

impl Record {
    /// What it is at a time.
    #[must_use]
    pub const fn state(&self, now: UnixTime) -> State {
        match self.revoked {
            Some(_) => State::Revoked,
            None if now.as_secs() > self.not_after_s => State::Expired,
            None if now.as_secs() < self.not_before_s => State::Early,
            None => State::Valid,
        }
    }

    /// Whether less than a third of its time is left, so that it should be renewed.
    #[must_use]
    pub const fn is_due(&self, now: UnixTime) -> bool {
        is_due(self.not_before_s, self.not_after_s, now)
    }
}

/// What an authority has issued, oldest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Register {
    version: u32,
    /// Whose authority it is.
    pub rack: RackName,
    /// Last second of the authority's time, since 1970.
    pub not_after_s: u64,
    /// Number of the newest list of revoked certificates.
    pub(super) list_number: u64,
    /// The certificates.
    pub issued: Vec<Record>,
}

impl Register {
    pub(super) const fn new(rack: RackName, not_after_s: u64) -> Self {
        Self { version: VERSION, rack, not_after_s, list_number: 1, issued: Vec::new() }
    }

    /// The register's file in an authority's folder.
    #[must_use]
    pub fn path(folder: &Path) -> PathBuf {
        folder.join("issued.json")
    }

    /// Reads the register of an authority. Needs no key.
    ///
    /// # Errors
    /// There is none, it cannot be read, or it is of another version.
    pub fn read(folder: &Path) -> Result<Self, AuthorityError> {
        let path = Self::path(folder);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(AuthorityError::Missing { folder: folder.to_owned() });
            }
            read => read.map_err(AuthorityError::io(&path))?,
        };
        let register: Self =
            serde_json::from_str(&text).map_err(|error| AuthorityError::damaged(&path, error))?;
        if register.version != VERSION {
            let reason = format!("version {}, and {VERSION} is read", register.version);
            return Err(AuthorityError::damaged(&path, reason));
        }
        Ok(register)
    }

    pub(super) fn write(&self, folder: &Path) -> Result<(), AuthorityError> {
        let path = Self::path(folder);
        let text =
            serde_json::to_vec(self).map_err(|error| AuthorityError::damaged(&path, error))?;
        write_secret(&path, &text).map_err(AuthorityError::io(&path))
    }

    /// The newest certificate of an identity.
    #[must_use]
    pub fn last(&self, role: &Role) -> Option<&Record> {
        self.issued.iter().rev().find(|record| record.identity.role == *role)
    }

    /// A certificate of an identity that is valid, the newest first.
    #[must_use]
    pub fn valid(&self, role: &Role, now: UnixTime) -> Option<&Record> {
        let is_valid =
            |record: &&Record| record.identity.role == *role && record.state(now) == State::Valid;
        self.issued.iter().rev().find(is_valid)
    }

    /// All identities, each once, in order.
    #[must_use]
    pub fn roles(&self) -> BTreeSet<Role> {
        self.issued.iter().map(|record| record.identity.role.clone()).collect()
    }

    /// The identities whose newest certificate is due to be renewed and not revoked.
    #[must_use]
    pub fn due(&self, now: UnixTime) -> Vec<Role> {
        let is_due =
            |role: &Role| self.last(role).is_some_and(|it| it.revoked.is_none() && it.is_due(now));
        self.roles().into_iter().filter(is_due).collect()
    }

    /// Returns the identity that a word names: its label (`node-a`), its URI, or its name alone if
    /// only one has it.
    ///
    /// # Errors
    /// None has it, or several.
    pub fn named(&self, word: &str) -> Result<Role, AuthorityError> {
        let roles = self.roles();
        let uri = word.parse::<Identity>().ok().filter(|it| it.rack == self.rack);
        let is_exact = |role: &&Role| {
            role.label() == word || uri.as_ref().is_some_and(|uri| uri.role == **role)
        };
        if let Some(role) = roles.iter().find(is_exact) {
            return Ok(role.clone());
        }
        let mut found = roles.iter().filter(|role| role.name().as_str() == word);
        match (found.next(), found.next()) {
            (None, _) => Err(AuthorityError::Unknown(word.to_owned())),
            (Some(role), None) => Ok(role.clone()),
            (Some(_), Some(_)) => {
                let named = roles.iter().filter(|role| role.name().as_str() == word);
                let labels = named.map(Role::label).collect();
                Err(AuthorityError::Ambiguous { name: word.to_owned(), labels })
            }
        }
    }

    /// Returns the certificates that a word names: one by its serial number, or all that are not
    /// revoked of the identity that [`Self::named`] finds.
    ///
    /// # Errors
    /// As [`Self::named`].
    pub fn serials(&self, word: &str) -> Result<Vec<Serial>, AuthorityError> {
        let serial = word.parse::<Serial>().ok();
        let by_number =
            serial.filter(|serial| self.issued.iter().any(|record| record.serial == *serial));
        if let Some(serial) = by_number {
            return Ok(vec![serial]);
        }
        let role = self.named(word)?;
        let of_role =
            self.issued.iter().filter(|it| it.identity.role == role && it.revoked.is_none());
        Ok(of_role.map(|record| record.serial.clone()).collect())
    }

    /// Marks certificates as revoked; returns those that were not before.
    pub(super) fn revoke(&mut self, serials: &[Serial], revoked: Revoked) -> Vec<Record> {
        let mut done = Vec::new();
        for record in &mut self.issued {
            if record.revoked.is_none() && serials.contains(&record.serial) {
                record.revoked = Some(revoked);
                done.push(record.clone());
            }
        }
        done
    }

    /// Forgets certificates that ended long ago, but for the newest of each identity.
    pub(super) fn forget_old(&mut self, now: UnixTime) {
        let newest: BTreeSet<Serial> = self
            .roles()
            .iter()
            .filter_map(|role| self.last(role).map(|record| record.serial.clone()))
            .collect();
        self.issued.retain(|it| !is_old(it, now) || newest.contains(&it.serial));
    }

    /// What the list of revoked certificates has to name.
    pub(super) fn revoked(&self, now: UnixTime) -> impl Iterator<Item = (&Serial, Revoked)> {
        let named = self.issued.iter().filter(move |it| !is_old(it, now));
        named.filter_map(|it| it.revoked.map(|revoked| (&it.serial, revoked)))
    }
}

const fn is_old(record: &Record, now: UnixTime) -> bool {
    now.as_secs() > record.not_after_s.saturating_add(KEPT_S)
}
