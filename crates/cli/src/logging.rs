//! Logs go to standard error: plain lines for people, one JSON object per line under systemd.
//!
//! `FARPOOL_LOG` chooses what is logged, as in `debug` or `farpool_blade=trace`; the default is
//! `info`. ERROR means a person must look, WARN that something will go wrong if it goes on.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

use crate::config::UsageError;
use crate::terminal;

/// Starts logging; call once, before anything logs.
pub fn start() -> Result<(), UsageError> {
    let filter = std::env::var("FARPOOL_LOG").unwrap_or_else(|_| "info".into());
    let filter = EnvFilter::try_new(&filter)
        .map_err(|error| UsageError(format!("FARPOOL_LOG={filter}: {error}")))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    if under_systemd() && !stderr().is_terminal() {
        builder.json().init();
    } else {
        builder.with_ansi(terminal::may_colour(&stderr())).with_target(false).init();
    }
    Ok(())
}

/// systemd sets this for a service whose output it takes into the journal.
fn under_systemd() -> bool {
    std::env::var_os("JOURNAL_STREAM").is_some()
}
