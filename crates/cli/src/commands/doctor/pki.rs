//! The checks of `--pki`: whether a process with these files would be accepted by its peers, for
//! how long, and who else may read or replace them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use farpool_identity::authority::Register;
use farpool_identity::{Credentials, FileError, Files, Refusal, UnixTime};
use farpool_units::utc_text;

use super::{Check, Status};

/// Rights of the owner's group and of all others.
const OF_OTHERS: u32 = 0o077;
/// The right to write, of the owner's group and of all others.
const WRITE_OF_OTHERS: u32 = 0o022;
const DAY_S: u64 = farpool_identity::authority::DAY_S;

/// Checks a folder. Returns also whether what is in it can be used now.
pub(super) fn examine(folder: &Path) -> (bool, Vec<Check>) {
    let now = UnixTime::now();
    let files = Files::in_folder(folder);
    let loaded = Credentials::load(files.clone(), now);
    let mut checks = vec![match &loaded {
        Ok(credentials) => {
            let found = credentials.identity().to_string();
            Check { name: "pki-certificate", status: Status::Ok, found, remedy: None }
        }
        Err(error) => wrong("pki-certificate", error.to_string(), remedy(error, folder)),
    }];
    if let Ok(credentials) = &loaded {
        checks.extend([time_left(credentials, now), list(credentials, now)]);
    }
    checks.push(secrecy(&files.key));
    checks.extend(replaceable(folder, &files));
    (loaded.is_ok(), checks)
}

fn wrong(name: &'static str, found: String, remedy: &'static str) -> Check {
    Check { name, status: Status::Wrong, found, remedy: Some(remedy) }
}

fn remedy(error: &FileError, folder: &Path) -> &'static str {
    if Register::path(folder).exists() {
        return "this is the authority's folder: give a folder of one certificate, such as node-a \
                in it";
    }
    match error {
        FileError::Refused { refusal: Refusal::Expired { .. }, .. } => {
            "renew it where the authority is, and copy its folder here: farpool pki renew NAME"
        }
        FileError::Refused { refusal: Refusal::NotYetValid { .. }, .. } => {
            "set this host's clock (timedatectl), or that of the authority's host, and renew it"
        }
        _ => "copy the certificate's whole folder here anew; farpool pki issue makes another",
    }
}

fn time_left(credentials: &Credentials, now: UnixTime) -> Check {
    const NAME: &str = "pki-expiry";
    let certificate = credentials.certificate();
    let left_s = certificate.not_after_s.saturating_sub(now.as_secs());
    let end = utc_text(certificate.not_after_s.saturating_mul(1000));
    let found = format!("{} days left, until {end}", left_s / DAY_S);
    if certificate.is_due(now) {
        let remedy = "renew it where the authority is, and copy its folder here: farpool pki renew \
                      NAME";
        return wrong(NAME, found, remedy);
    }
    Check { name: NAME, status: Status::Ok, found, remedy: None }
}

fn list(credentials: &Credentials, now: UnixTime) -> Check {
    const NAME: &str = "pki-revoked";
    let trust = credentials.trust();
    let lists = trust.lists();
    let is_late = lists.iter().any(|it| it.next_at_s().is_some_and(|next| now.as_secs() > next));
    let revoked: usize = lists.iter().map(|list| list.entries().count()).sum();
    let found = format!("revoked certificates: {revoked}");
    match (lists.is_empty(), is_late) {
        (true, _) => Check::info(NAME, "no revoked.crl: no certificate is known as revoked"),
        (false, true) => wrong(
            NAME,
            format!("{found}; its authority has a newer list by now"),
            "copy the newest revoked.crl here",
        ),
        (false, false) => Check { name: NAME, status: Status::Ok, found, remedy: None },
    }
}

/// Whether only its owner may read the key.
fn secrecy(key: &Path) -> Check {
    const NAME: &str = "pki-key-mode";
    match fs::metadata(key).map(|it| it.permissions().mode() & 0o777) {
        Ok(mode) if mode & OF_OTHERS == 0 => {
            Check { name: NAME, status: Status::Ok, found: format!("{mode:o}"), remedy: None }
        }
        Ok(mode) => wrong(
            NAME,
            format!("{mode:o}: others than its owner may use {}", key.display()),
            "chmod 600 the key; if others could read it, issue another and revoke this one",
        ),
        Err(error) => wrong(NAME, format!("{}: {error}", key.display()), "copy the key here"),
    }
}

/// Names what others may replace: who can replace ca.crt decides who is trusted.
fn replaceable(folder: &Path, files: &Files) -> Option<Check> {
    let all = [folder, &files.certificate, &files.key, &files.authorities, &files.revoked];
    let is_open = |path: &&&Path| {
        fs::metadata(path).is_ok_and(|it| it.permissions().mode() & WRITE_OF_OTHERS != 0)
    };
    let open: Vec<String> = all.iter().filter(is_open).map(|it| it.display().to_string()).collect();
    (!open.is_empty()).then(|| {
        let found = format!("others than its owner may write to {}", open.join(", "));
        wrong("pki-folder-mode", found, "take that right away: chmod go-w")
    })
}
