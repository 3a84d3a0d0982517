//! `farpool node list`, `show` and `drain`.

use farpool_api::Node;

use super::{client, name_of, sheet, show, size, size_or_dash, tasks};
use crate::args::NodeAction;
use crate::terminal::table;

pub fn main(action: &NodeAction) -> anyhow::Result<u8> {
    match action {
        NodeAction::List(remote) => {
            let nodes = client(remote)?.nodes()?;
            show(remote, &nodes, |list| {
                table(&HEADER, &list.nodes.iter().map(row).collect::<Vec<_>>())
            })
        }
        NodeAction::Show { name, remote } => {
            show(remote, &client(remote)?.node(name)?, |node| sheet(&lines(node)))
        }
        NodeAction::Drain { name, undo: true, remote, .. } => {
            let node = client(remote)?.undrain_node(name)?;
            show(remote, &node, |_| format!("node {name} is used again\n"))
        }
        NodeAction::Drain { name, wait, remote, .. } => {
            let client = client(remote)?;
            let task = client.drain_node(name)?;
            tasks::finish(&client, remote, task, *wait)
        }
    }
}

const HEADER: [&str; 8] =
    ["node", "state", "donates", "lends", "granted", "used", "segments", "load"];

fn row(node: &Node) -> Vec<String> {
    vec![
        node.name.clone(),
        state(node),
        size(node.donate_bytes),
        size_or_dash(node.lendable_bytes),
        size(node.granted_bytes),
        size_or_dash(node.used_bytes),
        node.segments.to_string(),
        load(node),
    ]
}

/// Formats the state of a node, and whether it is being drained.
fn state(node: &Node) -> String {
    let state = name_of(&node.state);
    if node.draining && state != "draining" { format!("{state}, draining") } else { state }
}

fn load(node: &Node) -> String {
    node.load_permille.map_or("-".to_owned(), |load| format!("{}.{}%", load / 10, load % 10))
}

fn lines(node: &Node) -> Vec<(&'static str, String)> {
    let age = node.report_age_ms.map_or("never".to_owned(), |ms| format!("{ms}ms ago"));
    vec![
        ("node", node.name.clone()),
        ("state", state(node)),
        ("addresses", node.addresses.join(" ")),
        ("donates", size(node.donate_bytes)),
        ("lends", size_or_dash(node.lendable_bytes)),
        ("granted", size(node.granted_bytes)),
        ("used", size_or_dash(node.used_bytes)),
        ("segments", node.segments.to_string()),
        ("load", load(node)),
        ("read", size_or_dash(node.read_bytes_total)),
        ("written", size_or_dash(node.write_bytes_total)),
        ("blade", format!("{:016x}", node.blade_id)),
        ("reported", age),
    ]
}
