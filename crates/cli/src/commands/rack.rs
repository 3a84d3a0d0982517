//! What people ask of a controller: nodes, segments, circuits, the rack, events.

use std::io::{Write, stdout};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use farpool_api::{
    Client, MoveRequest, Node, Policy, Segment, SegmentFilter, SegmentId, SegmentSpec, Task,
    TaskState,
};
use farpool_rack::{Allocator, topology};
use serde::Serialize;

use crate::config::UsageError;
use crate::rack_args::{
    Access, CircuitCommand, CreateArgs, DrainArgs, EventsArgs, MoveArgs, NamedArgs, RackCommand,
    RackShowArgs, SegmentCommand,
};
use crate::values::Size;

/// How often a task is looked at.
const LOOK_STEP: Duration = Duration::from_millis(100);

/// The token in a file, without the line's end.
pub fn read_token(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| UsageError(format!("the token file {}: {error}", path.display())))?;
    Ok(text.trim().to_owned())
}

fn client(access: &Access) -> anyhow::Result<Client> {
    let token = access.token_file.as_deref().map(read_token).transpose()?;
    Ok(Client::new(&access.control, token.as_deref())?)
}

/// Prints the value as JSON, or lines for people.
fn print(
    access: &Access,
    value: &impl Serialize,
    lines: impl FnOnce() -> Vec<String>,
) -> anyhow::Result<u8> {
    let mut out = stdout().lock();
    if access.json {
        writeln!(out, "{}", serde_json::to_string_pretty(value)?)?;
    } else {
        lines().iter().try_for_each(|line| writeln!(out, "{line}"))?;
    }
    Ok(0)
}

/// A state as the interface spells it.
fn word(state: &impl Serialize) -> String {
    serde_json::to_string(state).unwrap_or_default().trim_matches('"').to_owned()
}

fn node_line(node: &Node) -> String {
    let lendable = node.lendable_bytes.map_or_else(|| "-".into(), |it| Size(it).to_string());
    format!(
        "{:<20} {:<9} {:>9} {:>9} {:>9} {:>9}  {}",
        node.name,
        word(&node.state),
        Size(node.donate_bytes).to_string(),
        lendable,
        Size(node.granted_bytes).to_string(),
        node.segments,
        node.addresses.join(" ")
    )
}

fn node_head() -> String {
    format!(
        "{:<20} {:<9} {:>9} {:>9} {:>9} {:>9}  addresses",
        "node", "state", "donates", "lends", "granted", "segments"
    )
}

pub fn list_nodes(access: &Access) -> anyhow::Result<u8> {
    let list = client(access)?.nodes()?;
    let lines = || std::iter::once(node_head()).chain(list.nodes.iter().map(node_line)).collect();
    print(access, &list, lines)
}

pub fn show_node(args: &NamedArgs) -> anyhow::Result<u8> {
    let node = client(&args.access)?.node(&args.name)?;
    print(&args.access, &node, || vec![node_head(), node_line(&node)])
}

pub fn drain_node(args: &DrainArgs) -> anyhow::Result<u8> {
    let client = client(&args.access)?;
    if args.undo {
        let node = client.undrain_node(&args.name)?;
        return print(&args.access, &node, || vec![node_head(), node_line(&node)]);
    }
    let task = client.drain_node(&args.name)?;
    finish(&client, task, args.wait, &args.access)
}

/// Prints a task, when it has ended if that is asked for.
fn finish(client: &Client, task: Task, wait: bool, access: &Access) -> anyhow::Result<u8> {
    let mut task = task;
    while wait && task.state == TaskState::Running {
        std::thread::sleep(LOOK_STEP);
        task = client.task(task.id)?;
    }
    let line = format!("{} {} {}: {}", task.kind, task.subject, word(&task.state), task.detail);
    print(access, &task, || vec![line])?;
    Ok(u8::from(task.state == TaskState::Failed))
}

fn segment_head() -> String {
    format!(
        "{:<36} {:<9} {:>9} {:>6}  {:<16} {:<16} moves to",
        "segment", "state", "size", "epoch", "host", "node"
    )
}

fn segment_line(segment: &Segment) -> String {
    let target = segment.target.as_ref().map_or("", |target| target.place.node.as_str());
    format!(
        "{:<36} {:<9} {:>9} {:>6}  {:<16} {:<16} {}",
        segment.id.to_string(),
        word(&segment.state),
        Size(segment.place.bytes).to_string(),
        segment.epoch,
        segment.host,
        segment.place.node,
        target
    )
}

pub fn segment(command: &SegmentCommand) -> anyhow::Result<u8> {
    match command {
        SegmentCommand::List(access) => list_segments(access),
        SegmentCommand::Show(args) => {
            let segment = client(&args.access)?.segment(id_of(&args.name)?)?;
            print(&args.access, &segment, || vec![segment_head(), segment_line(&segment)])
        }
        SegmentCommand::Create(args) => create_segment(args),
        SegmentCommand::Delete(args) => {
            client(&args.access)?.delete_segment(id_of(&args.name)?, None)?;
            Ok(0)
        }
        SegmentCommand::Move(args) => move_segment(args),
    }
}

fn id_of(text: &str) -> Result<SegmentId, UsageError> {
    text.parse().map_err(|error| UsageError(format!("{error}")))
}

fn policy_of(text: &str) -> Result<Policy, UsageError> {
    serde_json::from_value(text.into()).map_err(|_| {
        let known = "first-fit, pack, spread, nearest or least-loaded";
        UsageError(format!("--policy {text}: give {known}"))
    })
}

fn list_segments(access: &Access) -> anyhow::Result<u8> {
    let client = client(access)?;
    let (mut all, mut filter) = (Vec::new(), SegmentFilter::default());
    loop {
        let page = client.segments(&filter)?;
        all.extend(page.segments);
        filter.page_token = page.next_page_token;
        if filter.page_token.is_none() {
            break;
        }
    }
    let lines = || std::iter::once(segment_head()).chain(all.iter().map(segment_line)).collect();
    print(access, &all, lines)
}

fn create_segment(args: &CreateArgs) -> anyhow::Result<u8> {
    let id = match &args.id {
        Some(text) => id_of(text)?,
        None => SegmentId::from_u128(random()?),
    };
    let mut spec = SegmentSpec::of_client(farpool_api::ClientId::from_u128(0), args.size.0);
    spec.client = None;
    spec.host = Some(args.host.clone());
    spec.policy = policy_of(&args.policy)?;
    let segment = client(&args.access)?.put_segment(id, &spec)?;
    print(&args.access, &segment, || vec![segment_head(), segment_line(&segment)])
}

fn move_segment(args: &MoveArgs) -> anyhow::Result<u8> {
    let client = client(&args.access)?;
    let wish = MoveRequest { policy: policy_of(&args.policy)?, avoid: args.avoid.clone() };
    let task = client.move_segment(id_of(&args.id)?, &wish)?;
    finish(&client, task, args.wait, &args.access)
}

pub fn circuit(command: &CircuitCommand) -> anyhow::Result<u8> {
    let CircuitCommand::List(access) = command;
    let list = client(access)?.circuits()?;
    let lines = || {
        let head = format!("{:<16} {:>5} {:>5} {:>9}  stands", "switch", "from", "to", "segments");
        let line = |it: &farpool_api::Circuit| {
            let (from, to, stands) = (it.from_port, it.to_port, it.standing);
            format!("{:<16} {from:>5} {to:>5} {:>9}  {stands}", it.switch, it.segments)
        };
        std::iter::once(head).chain(list.circuits.iter().map(line)).collect()
    };
    print(access, &list, lines)
}

pub fn rack(command: &RackCommand) -> anyhow::Result<u8> {
    let RackCommand::Show(args) = command;
    let text = match &args.topology {
        Some(path) => draw_file(path, args)?,
        None => {
            let client = client(&args.access)?;
            if args.access.json {
                return print(&args.access, &client.topology()?, Vec::new);
            }
            if args.toml { client.topology_toml()? } else { client.topology_drawing()? }
        }
    };
    write!(stdout(), "{text}")?;
    Ok(0)
}

fn draw_file(path: &Path, args: &RackShowArgs) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("the topology {} cannot be read", path.display()))?;
    let read = topology::read(&text).with_context(|| path.display().to_string())?;
    read.warnings.iter().for_each(|warning| eprintln!("farpool: {}: {warning}", path.display()));
    Ok(if args.toml {
        topology::write(&read.graph)
    } else {
        topology::draw(&Allocator::new(read.graph))
    })
}

pub fn events(args: &EventsArgs) -> anyhow::Result<u8> {
    let client = client(&args.access)?;
    let mut out = stdout().lock();
    let most = args.count.unwrap_or(u64::MAX);
    for (event, _) in client.events(args.after)?.zip(0..most) {
        let event = event?;
        if args.access.json {
            writeln!(out, "{}", serde_json::to_string(&event)?)?;
        } else {
            let seconds = Duration::from_millis(event.uptime_ms).as_secs_f64();
            let (kind, subject) = (&event.kind, &event.subject);
            writeln!(
                out,
                "{:>8} {seconds:>10.3}s {kind:<20} {subject} {}",
                event.id, event.detail
            )?;
        }
    }
    Ok(0)
}

fn random() -> anyhow::Result<u128> {
    let mut bits = [0; 16];
    rustix::rand::getrandom(&mut bits, rustix::rand::GetRandomFlags::empty())
        .context("no random numbers for an id")?;
    Ok(u128::from_le_bytes(bits))
}
