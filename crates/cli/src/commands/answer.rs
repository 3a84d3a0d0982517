//! Answers of `sim` and `plan`: their provenance and their output formats.

use std::ffi::OsString;

use anyhow::Context;
use farpool_report::{Page, Provenance};

use crate::args::AnswerArgs;
use crate::terminal;

/// Returns the provenance of the answer: this program and its arguments.
pub fn provenance() -> Provenance {
    let words = std::env::args_os().skip(1);
    Provenance::new(env!("CARGO_PKG_VERSION"), asked(words))
}

/// Returns the arguments without those that only choose the output format, which must not change
/// the answer.
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

/// Prints and writes the answer in the requested formats. The report is written first, because the
/// reader of the output may close early.
pub fn give(page: &Page, args: &AnswerArgs) -> anyhow::Result<u8> {
    if let Some(path) = &args.report {
        page.write(path).context("the report")?;
    }
    terminal::print(&if args.json { page.json() } else { page.text() })?;
    Ok(0)
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
