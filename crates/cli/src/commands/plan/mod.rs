//! `farpool plan`: reads what is asked for, lets `farpool-plan` answer, prints the answer.

mod catalogs;
mod series;

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anyhow::Context;
use farpool_plan::PlanError;

use super::answer::{give, provenance};
use super::sim;
use crate::args::PlanAction;
use crate::config::UsageError;

pub fn main(action: &PlanAction) -> anyhow::Result<u8> {
    match action {
        PlanAction::Pool(args) => series::pool(args),
        PlanAction::Pack(args) => series::pack(args),
        PlanAction::Local(args) => sim::local(args),
        PlanAction::Cost(args) => catalogs::cost(args),
        PlanAction::Dense(args) => catalogs::dense(args),
    }
}

/// A question without an answer is a mistake of usage; anything else is wrong with the data.
fn refused(error: PlanError) -> anyhow::Error {
    match error {
        PlanError::Question(why) => UsageError(why).into(),
        other => other.into(),
    }
}

fn text_of(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))
}

/// One line on a terminal that says how far it is; nothing anywhere else.
struct Progress {
    shown: bool,
}

impl Progress {
    fn new() -> Progress {
        Progress { shown: io::stderr().is_terminal() }
    }

    fn tell(&self, what: &str) {
        if self.shown {
            // A terminal that cannot be written to shows nothing; the answer does not depend on it.
            let _ = write!(io::stderr(), "\r\x1b[K{what}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.tell("");
    }
}
