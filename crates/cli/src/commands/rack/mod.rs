//! Commands that ask the rack's controller: one request each, printed as a table or as the
//! controller's JSON. The exit code tells the kind of a controller's error.

mod backup;
mod events;
mod nodes;
mod segments;
mod show;
mod tasks;
mod tenants;

pub use backup::main as control;
pub use events::main as events;
pub use nodes::main as node;
pub use segments::main as segment;
pub use show::main as rack;
pub use tasks::main as task;
pub use tenants::main as tenant;

use farpool_api::Client;
use farpool_units::plain;
use serde::Serialize;

use crate::args::{CircuitAction, RemoteArgs};
use crate::commands::service::access;
use crate::terminal::{self, table};
use crate::values::Size;

/// Returns the controller named by the flags.
fn client(remote: &RemoteArgs) -> anyhow::Result<Client> {
    let (pki, token_file) = (remote.pki.as_deref(), remote.token_file.as_deref());
    let access = access(&remote.control, pki, token_file, remote.insecure)?;
    Ok(Client::with(&remote.control, &access)?)
}

/// Prints the controller's answer as JSON, or as formatted by `text`.
fn show<T: Serialize>(
    remote: &RemoteArgs,
    answer: &T,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<u8> {
    terminal::print(&match remote.json {
        true => format!("{}\n", serde_json::to_string(answer)?),
        false => text(answer),
    })?;
    Ok(0)
}

/// Returns a value's name in the REST interface, such as `first-fit`.
fn name_of(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => "?".to_owned(),
    }
}

fn size(bytes: u64) -> String {
    Size(bytes).to_string()
}

fn size_or_dash(bytes: Option<u64>) -> String {
    bytes.map_or("-".to_owned(), size)
}

fn per_s(bytes_per_s: u64) -> String {
    format!("{}/s", Size(bytes_per_s))
}

/// `name  value` lines for one thing; what a terminal would obey is escaped.
fn sheet(lines: &[(&str, String)]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line =
        |(name, value): &(&str, String)| format!("{:<width$}  {}\n", plain(name), plain(value));
    lines.iter().map(line).collect()
}

/// `farpool circuit list`.
pub fn circuit(action: &CircuitAction) -> anyhow::Result<u8> {
    let CircuitAction::List(remote) = action;
    let circuits = client(remote)?.circuits()?;
    show(remote, &circuits, |list| {
        let row = |circuit: &farpool_api::Circuit| {
            vec![
                circuit.switch.clone(),
                circuit.from_port.to_string(),
                circuit.to_port.to_string(),
                circuit.segments.to_string(),
                if circuit.standing { "yes" } else { "no" }.to_owned(),
            ]
        };
        let rows: Vec<_> = list.circuits.iter().map(row).collect();
        table(&["switch", "from", "to", "segments", "stands"], &rows)
    })
}
