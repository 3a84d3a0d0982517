//! `farpool plan`: reads what is asked for, lets `farpool-plan` answer, prints the answer.

mod catalogs;
mod series;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anyhow::Context;
use farpool_plan::PlanError;
use farpool_report::{Page, Provenance};

use crate::args::{AnswerArgs, PlanAction};
use crate::config::UsageError;
use crate::terminal;

pub fn main(action: &PlanAction) -> anyhow::Result<u8> {
    match action {
        PlanAction::Pool(args) => series::pool(args),
        PlanAction::Pack(args) => series::pack(args),
        PlanAction::Cost(args) => catalogs::cost(args),
        PlanAction::Dense(args) => catalogs::dense(args),
    }
}

/// The provenance of what is being answered: this program, and the words it was asked with.
fn provenance() -> Provenance {
    let words = std::env::args_os().skip(1);
    Provenance::new(env!("CARGO_PKG_VERSION"), asked(words))
}

/// The words without those that only say how the answer is given: they must not change it.
fn asked(words: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut kept = Vec::new();
    let mut skip = false;
    for word in words.map(|word| word.to_string_lossy().into_owned()) {
        if std::mem::take(&mut skip) {
            continue;
        }
        match word.as_str() {
            "--json" => {}
            "--report" => skip = true,
            other if other.starts_with("--report=") => {}
            _ => kept.push(word),
        }
    }
    kept
}

/// Gives the answer in the ways that were asked for. The report is written first: what is printed may be cut short.
fn give(page: &Page, args: &AnswerArgs) -> anyhow::Result<u8> {
    if let Some(path) = &args.report {
        page.write(path).context("the report")?;
    }
    terminal::print(&if args.json { page.json() } else { page.text() })?;
    Ok(0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_an_answer_is_given_is_no_part_of_the_question() {
        let words = ["plan", "pool", "a b.csv", "--json", "--report", "x.html", "--group", "4"];
        let kept = asked(words.iter().map(OsString::from));
        assert_eq!(kept, ["plan", "pool", "a b.csv", "--group", "4"]);
        assert_eq!(asked(["plan", "--report=y"].iter().map(OsString::from)), ["plan"]);
    }
}
