//! `farpool demo rack`: five hosts that lend each other memory, with a controller and without one.
//!
//! The scenario is written once, for people ([`run`]) and for the end-to-end test ([`play`]). Pure
//! code is separate: [`timeline`], [`checks`], `figure`, `rows`, [`plan`]. `five_hosts` starts and
//! owns what runs, `sampler` samples it, and an [`organiser`] says how daemons and programs are
//! started and who lends what to whom.
//!
//! Invariants: all hosts, daemons and programs are owned, and end on every way out; every byte that
//! a program reads is compared with what it wrote; a check that was not reached is never counted as
//! passed.

pub mod checks;
mod collaboration;
mod controller;
mod end;
mod failures;
mod figure;
mod five_hosts;
mod log;
mod needs;
pub mod organiser;
pub mod plan;
mod programs;
mod rows;
mod sampler;
mod scenario;
mod screen;
pub mod timeline;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use farpool_bench::stage::{remove_leftovers, watch_signals};
use farpool_hosts::Hosts;
use farpool_kernel::lock;

use crate::Error;
use checks::Checks;
use collaboration::Collaboration;
use farpool_units::exactly;
use log::SharedScreen;
use organiser::Organiser;
use plan::{Plan, Program};
pub use screen::Screen;
use timeline::{Source, Timeline};

/// The hosts by their letters.
pub const A: usize = 0;
pub const B: usize = 1;
pub const C: usize = 2;
pub const D: usize = 3;
pub const E: usize = 4;

/// A further program beside those of the scenario, on the same far memory; it ends by itself.
#[derive(Clone, Debug)]
pub struct Companion {
    /// Starts with the far program of this host.
    pub host: usize,
    pub words: Vec<OsString>,
    pub limits: Program,
}

/// What the user may choose.
#[derive(Clone, Debug)]
pub struct Options {
    /// The farpool binary.
    pub farpool: PathBuf,
    /// Folder for what the daemons keep.
    pub folder: PathBuf,
    pub plan: Plan,
    pub variants: Vec<Variant>,
    /// Only the figure, no failures.
    pub only_figure: bool,
    /// Change a byte of a program behind its back: the demo must notice.
    pub spoil: bool,
    pub companions: Vec<Companion>,
    /// Print JSON lines on standard output, and the rest on standard error.
    pub json: bool,
}

/// How the rack is organised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variant {
    /// One daemon decides for all.
    Controller,
    /// The nodes agree among themselves.
    Collaboration,
}

/// The result of one rack.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub title: &'static str,
    pub timeline: Timeline,
    pub checks: Checks,
    /// Traffic over time, as text.
    pub figure: String,
}

impl Variant {
    pub const ALL: [Variant; 2] = [Variant::Controller, Variant::Collaboration];

    /// Returns why this build cannot play the variant, or None if it can.
    fn missing(self, farpool: &Path) -> Option<&'static str> {
        let is_missing = self == Variant::Collaboration && !Collaboration::is_there(farpool);
        is_missing.then_some("without a controller: this build has no `farpool node --collaborate`")
    }

    fn organiser(
        self,
        farpool: &Path,
        folder: &Path,
        hosts: &Hosts,
    ) -> Result<Arc<dyn Organiser>, Error> {
        Ok(match self {
            Variant::Controller => Arc::new(controller::Controller::new(farpool, folder, hosts)?),
            Variant::Collaboration => Arc::new(Collaboration::new(farpool, folder, hosts)?),
        })
    }
}

/// Plays all variants and prints the table of checks. Returns true if all passed.
///
/// # Errors
/// This machine lacks something, or somebody interrupted.
pub fn run(options: &Options) -> Result<bool, Error> {
    needs::check()?;
    watch_signals()?;
    remove_leftovers(&options.folder);
    let missing = |variant: &&Variant| variant.missing(&options.farpool).is_none();
    let variants: Vec<&Variant> = options.variants.iter().filter(missing).collect();
    let expected = options.plan.expected * exactly::<u32, _>(variants.len());
    let screen: SharedScreen = Arc::new(Mutex::new(Screen::new(options.json, expected)));
    let mut racks = Vec::new();
    for variant in variants {
        let outcome = play(options, *variant, &screen)?;
        racks.push((format!("The rack {}", outcome.title), outcome.checks));
    }
    let mut screen = lock(&screen);
    let may_colour = screen.may_colour();
    screen.text(&checks::table(&racks, may_colour));
    let skipped = options.variants.iter().filter_map(|it| it.missing(&options.farpool));
    skipped.for_each(|reason| screen.text(&format!("SKIPPED: {reason}")));
    screen.text(&format!("\n{}", checks::verdict(&racks)));
    Ok(!racks.is_empty() && racks.iter().all(|(_, checks)| checks.all_passed()))
}

/// Plays one variant. A scenario that stopped before its end is a failed check, not an error.
///
/// # Errors
/// This machine lacks something, or somebody interrupted.
pub fn play(options: &Options, variant: Variant, screen: &SharedScreen) -> Result<Outcome, Error> {
    if let Some(reason) = variant.missing(&options.farpool) {
        return Err(Error::Unavailable(reason.to_owned()));
    }
    let mut rack = five_hosts::Rack::start(options, variant, screen)?;
    let (title, name) = (rack.organiser().title(), rack.organiser().name());
    rack.log.text(&format!("\nFive hosts of {} MiB, {title}", options.plan.host_bytes >> 20));
    let mut figure = String::new();
    match whole_story(&mut rack, options, &mut figure) {
        Ok(()) => {}
        Err(Error::Interrupted) => return Err(Error::Interrupted),
        Err(error) => {
            rack.log.event(Source::Seen, &format!("the scenario stops: {error}"));
            rack.checks.add("the scenario goes to its end", false, error.to_string());
        }
    }
    let (timeline, checks) = (rack.log.timeline(), std::mem::take(&mut rack.checks));
    drop(rack);
    let mut screen = lock(screen);
    screen.end();
    checks.to_json(name).iter().for_each(|line| screen.json(line));
    let head = format!("\nFigure 6 of the ACMS paper, {title} (S lends, C borrows, B both)\n\n");
    screen.text(&format!("{head}{figure}"));
    Ok(Outcome { title, timeline, checks, figure })
}

fn whole_story(
    rack: &mut five_hosts::Rack,
    options: &Options,
    drawn: &mut String,
) -> Result<(), Error> {
    let figure = scenario::play(rack)?;
    *drawn = rack.log.look(|timeline| {
        figure::plot(timeline, rack.log.names(), &[A, B, C], figure.until, figure.moment)
    });
    if options.spoil {
        rack.done("a bit is changed behind its back in each program of A");
        // The second is never cut off, so it is sure to check all of its pages at the end.
        for name in [scenario::OF_A, scenario::OWN_OF_A] {
            rack.started(name)?.tell("spoil");
        }
    }
    if !options.only_figure {
        failures::play(rack)?;
    }
    end::all(rack)
}
