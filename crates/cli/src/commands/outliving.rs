//! Blades whose memory outlives their process: what is there of an earlier one, and ending one that
//! still serves to go on in its stead.

use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Past, Predecessor};
use serde_json::Value;
use signal_hook::iterator::Signals;

use crate::values::Size;

/// How often it is said that the process before has not ended yet: with `--persist=reboot` it
/// writes its memory to the file first. It is waited for without limit: nobody else serves then.
const TAKEOVER_STEP: Duration = Duration::from_secs(5);

/// Ends the process that serves the memory now, if there is one.
pub(super) fn take_over(config: &BladeConfig, signals: &mut Signals) -> anyhow::Result<()> {
    let Some(before) = Predecessor::find(config)? else {
        tracing::info!("nobody serves this memory; there is nothing to take over");
        return Ok(());
    };
    let (pid, begun) = (before.pid(), Instant::now());
    before.ask_to_end()?;
    tracing::info!(pid, "the process that serves this memory is told to end");
    while !before.has_ended(TAKEOVER_STEP)? {
        if signals.pending().next().is_some() {
            anyhow::bail!("stopped while process {pid} ends; nobody serves its memory then");
        }
        let waited_s = begun.elapsed().as_secs();
        tracing::warn!(pid, waited_s, "the process before has not ended yet; waiting");
    }
    tracing::info!(pid, ended_after = ?begun.elapsed(), "goes on in its stead");
    Ok(())
}

/// Says what is there of an earlier process, or why nothing is.
pub(super) fn tell_past(past: &Past) {
    let Past { starts, clients, segments, bytes, loss } = past;
    if let Some(loss) = loss {
        tracing::error!("what this blade lent before is lost: {loss}");
    }
    if *starts > 1 {
        let memory = Size(*bytes).to_string();
        tracing::info!(starts, clients, segments, %memory, "goes on with what it lent before");
    }
}

/// Adds the same to the ready line of a blade that keeps its table.
pub(super) fn add_past(line: &mut Value, past: &Past) {
    if past.starts > 0 {
        line["starts"] = past.starts.into();
        line["lent_bytes"] = past.bytes.into();
        line["loss"] = past.loss.clone().into();
    }
}
