//! `farpool blades`: shows and changes the blades of a run.

use std::io::Write;
use std::time::Duration;

use anyhow::bail;
use farpool_run::{BladeOffer, BladeUse, RunBlades, open_board};
use serde_json::json;

use super::{board_of, refuse_remote};
use crate::args::BladesArgs;

/// How often `--wait` checks.
const LOOK_STEP: Duration = Duration::from_millis(50);

/// Makes the requested changes, waits if asked to, and shows the blades.
pub fn main(args: &BladesArgs) -> anyhow::Result<u8> {
    let path = board_of(args.pid)?;
    let (board, folder) = (open_board(&path)?, path.parent().unwrap_or(&path));
    let is_allowed = args.allow_remote_tcp || board.header().settings().secures_tcp;
    refuse_remote(&args.add, Some(is_allowed))?;
    let blades = RunBlades::new(&board);
    for address in &args.add {
        blades.add(&BladeOffer::open(address.to_string()), folder)?;
    }
    let mut left = Vec::new();
    for address in &args.leave {
        left.push(blades.leave(&address.to_string())?);
    }
    if args.wait {
        wait_for(args.pid, &blades, &left)?;
    }
    print(&blades.list(), args.json)?;
    Ok(0)
}

/// Waits until the keeper has dropped all these blades.
fn wait_for(pid: u32, blades: &RunBlades<'_>, left: &[BladeUse]) -> anyhow::Result<()> {
    let is_left = |all: &[BladeUse], blade: &BladeUse| {
        !all.iter().any(|it| (it.entry, it.generation) == (blade.entry, blade.generation))
    };
    loop {
        let all = blades.list();
        if left.iter().all(|blade| is_left(&all, blade)) {
            return Ok(());
        }
        if board_of(pid).is_err() {
            bail!("the program ended before its memory had moved");
        }
        std::thread::sleep(LOOK_STEP);
    }
}

fn print(blades: &[BladeUse], as_json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let state = |blade: &BladeUse| match blade {
        blade if blade.is_stuck => "leaving, no room elsewhere",
        blade if blade.is_leaving => "leaving",
        _ => "active",
    };
    if as_json {
        let all: Vec<_> = blades
            .iter()
            .map(|it| json!({"address": it.address, "state": state(it), "processes": it.processes}))
            .collect();
        writeln!(out, "{:#}", json!(all))?;
        return Ok(());
    }
    writeln!(out, "{:<40} {:>9}  state", "blade", "processes")?;
    for blade in blades {
        writeln!(out, "{:<40} {:>9}  {}", blade.address, blade.processes, state(blade))?;
    }
    Ok(())
}
