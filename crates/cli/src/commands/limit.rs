//! `farpool limit`: changes the local memory of a run that is under way.

use anyhow::bail;
use farpool_run::{read_statistics, runs, set_limit};

use crate::args::LimitArgs;
use crate::values::Size;

/// Finds the run that a process belongs to and sets its limit.
pub fn main(args: &LimitArgs) -> anyhow::Result<u8> {
    let belongs = |board: &std::path::PathBuf| {
        read_statistics(board).is_ok_and(|run| {
            run.keeper_pid == args.pid
                || run.processes.iter().any(|process| process.pid == args.pid)
        })
    };
    let Some(board) = runs().into_iter().find(belongs) else {
        bail!("no run of yours has a process {}; farpool stat shows what runs", args.pid);
    };
    let before = set_limit(&board, args.local.into())?;
    println!("local memory was {}, is {}", Size(before), args.local);
    Ok(0)
}
