//! `farpool rack show` and `generate`.

use std::path::Path;

use anyhow::Context;
use farpool_placement::Allocator;
use farpool_placement::topology::{self, NetworkKind, RackSpec};

use super::{client, show};
use crate::args::{GenerateArgs, NetworkArg, RackAction};
use crate::config::UsageError;
use crate::terminal;

pub fn main(action: &RackAction) -> anyhow::Result<u8> {
    let text = match action {
        RackAction::Generate(args) => generate(args)?,
        RackAction::Show { topology: Some(path), toml, remote } => {
            if remote.json {
                let why = "only a controller prints a topology as JSON; leave out --topology";
                return Err(UsageError(why.into()).into());
            }
            of_file(path, *toml)?
        }
        RackAction::Show { toml: true, remote, .. } => client(remote)?.topology_toml()?,
        RackAction::Show { remote, .. } if remote.json => {
            return show(remote, &client(remote)?.topology()?, |_| String::new());
        }
        RackAction::Show { remote, .. } => client(remote)?.topology_drawing()?,
    };
    terminal::print(&text)?;
    Ok(0)
}

fn of_file(path: &Path, toml: bool) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("the topology {} cannot be read", path.display()))?;
    let read = topology::read(&text).with_context(|| format!("the topology {}", path.display()))?;
    for warning in &read.warnings {
        eprintln!("farpool: {}: {warning}", path.display());
    }
    Ok(match toml {
        true => topology::write(&read.graph),
        false => topology::draw(&Allocator::new(read.graph)),
    })
}

fn generate(args: &GenerateArgs) -> anyhow::Result<String> {
    let network = match args.network {
        NetworkArg::Packet => NetworkKind::Packet,
        NetworkArg::Circuit => NetworkKind::Circuit,
        NetworkArg::Mixed => NetworkKind::Mixed,
    };
    let spec = RackSpec {
        racks: args.racks,
        trays_per_rack: args.trays,
        compute_per_tray: args.compute,
        memory_per_tray: args.memory,
        ports_per_brick: args.ports,
        capacity_bytes: args.capacity.0,
        ..RackSpec::new(network)
    };
    let wrong = |error| UsageError(format!("cannot generate this rack: {error}"));
    Ok(topology::write(&topology::generate(&spec).map_err(wrong)?))
}
