//! Restores a store and kills itself at a step, for tests: `store_steps STORE BACKUP STEP`. Past
//! the last step it ends by itself.

use std::path::Path;

use farpool_control::store::backup::restore_redb;
use rustix::process::{Signal, getpid, kill_process};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [store, backup, step] = arguments.as_slice() else {
        return Err("store_steps STORE BACKUP STEP".into());
    };
    let (mut left, text): (usize, _) = (step.parse()?, std::fs::read_to_string(backup)?);
    let mut on_step = |_: &str| {
        if left == 0 {
            // SIGKILL: nothing of this process runs after it.
            let _ = kill_process(getpid(), Signal::KILL);
        }
        left = left.saturating_sub(1);
    };
    restore_redb(Path::new(store), &text, true, &mut on_step)?;
    Ok(())
}
