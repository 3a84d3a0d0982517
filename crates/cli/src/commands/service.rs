//! Shared by the services of this binary and those who ask them: the ready line, systemd, tokens,
//! certificates.

use std::io::{Write, stdout};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use farpool_api::Access;
use farpool_audit::{AuditError, AuditLog};
use farpool_identity::{Credentials, Files, UnixTime};

use crate::config::UsageError;
use crate::notify::notify;

/// Longest token file; a longer one is the wrong file.
const TOKEN_LIMIT_BYTES: usize = 4096;

/// Prints the one line on standard output. Scripts wait for it and read the chosen ports from it.
pub fn say_ready(line: &str) -> anyhow::Result<()> {
    writeln!(stdout(), "{line}").context("standard output is closed")?;
    tell_systemd("READY=1");
    Ok(())
}

/// Notifies systemd if it asked for that.
pub fn tell_systemd(state: &str) {
    if let Err(error) = notify(state) {
        tracing::warn!(%error, state, "systemd does not take the message");
    }
}

/// Returns the token in a file, without the line's end.
pub fn read_token(path: Option<&Path>) -> Result<Option<String>, UsageError> {
    let Some(path) = path else { return Ok(None) };
    let wrong = |why: String| UsageError(format!("the token file {} {why}", path.display()));
    let text =
        std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let token = text.trim();
    let fits = text.len() <= TOKEN_LIMIT_BYTES && token.bytes().all(|byte| byte.is_ascii_graphic());
    if !fits || token.is_empty() {
        return Err(wrong("must hold one word of visible ASCII characters".into()));
    }
    Ok(Some(token.to_owned()))
}

/// Returns the credentials in a folder that `farpool pki issue` has filled.
pub fn read_pki(folder: Option<&Path>) -> Result<Option<Arc<Credentials>>, UsageError> {
    let Some(folder) = folder else { return Ok(None) };
    let wrong = |error: &dyn std::fmt::Display| {
        let folder = folder.display();
        UsageError(format!("--pki {folder}: {error}; farpool doctor --pki {folder} says more"))
    };
    // The files are read again, perhaps after a change of the working folder.
    let absolute = std::path::absolute(folder).map_err(|error| wrong(&error))?;
    let read = Credentials::load(Files::in_folder(&absolute), UnixTime::now());
    read.map(Some).map_err(|error| wrong(&error))
}

/// Opens the audit log, if there is to be one.
pub fn open_audit(file: Option<&Path>) -> Result<Option<Arc<AuditLog>>, AuditError> {
    Ok(file.map(AuditLog::open).transpose()?.map(Arc::new))
}

/// Returns what a client shows to controllers; with it all of them may be asked.
pub fn access(
    controllers: &str,
    pki: Option<&Path>,
    token_file: Option<&Path>,
    insecure: bool,
) -> Result<Access, UsageError> {
    let access = Access { token: read_token(token_file)?, credentials: read_pki(pki)?, insecure };
    access.addresses(controllers).map_err(|error| UsageError(error.to_string()))?;
    Ok(access)
}
