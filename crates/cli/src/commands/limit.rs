//! `farpool limit`: changes the local memory of a run.

use farpool_run::set_limit;

use super::board_of;
use crate::args::LimitArgs;
use crate::values::Size;

/// Finds the run of a process and sets its limit.
pub fn main(args: &LimitArgs) -> anyhow::Result<u8> {
    let before = set_limit(&board_of(args.pid)?, args.local.into())?;
    println!("local memory was {}, is {}", Size(before), args.local);
    Ok(0)
}
