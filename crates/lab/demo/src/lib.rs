//! `farpool demo`: real programs over this machine's real records, in every place memory can be.
//!
//! Two unmodified programs, redis and Python, work on the records of this machine (its package
//! index and the files under /usr). Each row of the table runs both in one place: all-local, on
//! far memory at 50 % and 25 % local (same-host and TCP blade), and at the same limits under the
//! kernel's own swap to disk and to zram. Every value read is compared with what was written, and
//! all rows must end with the same digests: a difference fails the demo.
//!
//! [`rack`] is another demo: five hosts that lend each other memory, and what happens when some of
//! it fails.
//!
//! Invariants: what is set up (swap, zram device, control group, blade, records) is owned by a
//! guard that takes it down on every way out, SIGINT and SIGTERM included; a row that cannot run
//! here is shown with its reason, never left out.

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

mod error;
mod jobs;
mod latency;
mod memory;
mod place;
pub mod rack;
mod records;
mod redis;
mod table;

use std::path::PathBuf;
use std::time::Instant;

pub use error::Error;
use farpool_bench::stage::{
    check_interrupted, progress, progress_done, remove_leftovers, watch_signals,
};
use jobs::{Footprint, Workspace};
use place::Place;
use table::{Outcome, Row};

/// What the user may choose.
#[derive(Clone, Debug)]
pub struct Options {
    /// The farpool binary: starts the far rows.
    pub farpool: PathBuf,
    /// How many bytes of records to load.
    pub records_bytes: u64,
    /// Requests of the query mix per row.
    pub requests: u64,
    /// Folder on a disk for the records and the swap file.
    pub folder: PathBuf,
    /// Only rows whose name contains this; the all-local row always runs.
    pub only: Option<String>,
    /// Print one JSON object per row as well.
    pub json: bool,
}

/// Runs the rows and prints the table.
///
/// # Errors
/// The all-local row could not run, or the user interrupted; rows that fail otherwise are in the
/// table, and make the result false.
pub fn run(options: &Options) -> Result<bool, Error> {
    watch_signals()?;
    remove_leftovers(&options.folder);
    let started = Instant::now();
    let work = Workspace::prepare(options)?;
    let places = Place::all(options.only.as_deref());
    let steps = places.len() + 1;
    let say = |at: usize, place: Place| {
        move |what: &str| progress(&format!("[{at}/{steps}] {place}: {what}"))
    };
    let (base, footprint) = work.run_all_local(&say(1, Place::Local))?;
    let mut rows = vec![Row::done(Place::Local, base)];
    progress_done(&format!("[1/{steps}] {}", rows[0].summary()));
    for (at, place) in places.iter().enumerate() {
        let row = run_place(&work, *place, &footprint, &say(at + 2, *place))?;
        progress_done(&format!("[{}/{steps}] {}", at + 2, row.summary()));
        rows.push(row);
    }
    println!("\n{}\n", table::headline(&work));
    print!("{}", table::render(&rows, &footprint));
    println!("\n{}", table::notes(&rows));
    println!("{} in {} s.", table::verdict(&rows), started.elapsed().as_secs());
    if options.json {
        rows.iter().for_each(|row| println!("{}", row.to_json()));
    }
    Ok(table::all_alike(&rows))
}

/// Runs one row. Only an interruption ends the demo; everything else is the row's own outcome.
fn run_place(
    work: &Workspace,
    place: Place,
    footprint: &Footprint,
    say: &dyn Fn(&str),
) -> Result<Row, Error> {
    match work.run(place, footprint, say) {
        Ok(results) => Ok(Row::done(place, results)),
        Err(Error::Interrupted) => Err(Error::Interrupted),
        Err(Error::Unavailable(reason)) => Ok(Row::without(place, Outcome::Skipped(reason))),
        Err(Error::Stopped(how)) => Ok(Row::without(place, Outcome::Stopped(how))),
        Err(error) if check_interrupted().is_err() => {
            progress_done(&error.to_string());
            Err(Error::Interrupted)
        }
        Err(error) => Ok(Row::without(place, Outcome::Failed(error.to_string()))),
    }
}
