//! Shared by the services of this binary: the ready line, systemd, tokens.

use std::io::{Write, stdout};
use std::path::Path;

use anyhow::Context;

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
