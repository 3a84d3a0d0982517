//! Reads what a test program printed.

use std::time::Duration;

/// How many of its last lines are shown again if a program died without a result.
const LAST_LINES: usize = 40;
/// Longest part of a line that is shown again, in characters: some tests print whole models.
const LINE_LIMIT: usize = 300;

/// How one test program ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub title: String,
    pub took: Duration,
    /// Processor time of the program and its children, if the kernel reported it.
    pub cpu: Option<Duration>,
    pub passed: u64,
    pub failed: u64,
    pub ignored: u64,
    /// Reasons of tests that could not run here.
    pub skipped: Vec<String>,
    /// What it printed about failed tests.
    pub complaint: String,
}

impl Outcome {
    /// Reads what libtest printed. A program that did not end well has at least one failure: it may
    /// have died before it had a result.
    pub(crate) fn read(title: String, text: &str, ended_well: bool) -> Self {
        let mut outcome = Self { title, ..Self::default() };
        let (mut part, mut has_result) = (Part::Names, false);
        for line in text.lines() {
            match line {
                "successes:" => part = Part::Successes { is_skipped: false },
                "failures:" => part = Part::Failures,
                _ if line.starts_with("test result: ") => {
                    (part, has_result) = (Part::Names, true);
                    outcome.passed += count(line, "passed");
                    outcome.failed += count(line, "failed");
                    outcome.ignored += count(line, "ignored");
                }
                _ => outcome.hear(&mut part, line),
            }
        }
        if !ended_well && outcome.failed == 0 {
            outcome.failed = 1;
        }
        if !ended_well && !has_result {
            outcome.complain("it died; its last lines:");
            let lines: Vec<&str> = text.lines().collect();
            let last = lines.iter().skip(lines.len().saturating_sub(LAST_LINES));
            last.for_each(|it| outcome.complain(it));
        }
        // A skipped test returned, and libtest counted it as passed.
        let skipped = if has_result { outcome.skipped.len() as u64 } else { 0 };
        outcome.passed = outcome.passed.checked_sub(skipped).expect("who is skipped has passed");
        outcome
    }

    /// Reads a line of what tests printed.
    fn hear(&mut self, part: &mut Part, line: &str) {
        match part {
            Part::Names => {}
            Part::Failures => self.complain(line),
            Part::Successes { is_skipped } if line.starts_with("---- ") => *is_skipped = false,
            Part::Successes { is_skipped } => {
                // A test that says so twice is one test.
                if let Some(reason) = line.strip_prefix("SKIPPED: ")
                    && !std::mem::replace(is_skipped, true)
                {
                    self.skipped.push(reason.to_owned());
                }
            }
        }
    }

    fn complain(&mut self, line: &str) {
        self.complaint.extend(line.chars().take(LINE_LIMIT));
        self.complaint.push('\n');
    }
}

/// A part of what libtest prints.
enum Part {
    /// Tests and how they ended.
    Names,
    /// The output of tests that passed.
    Successes {
        /// Whether the test at hand has said that it could not run.
        is_skipped: bool,
    },
    Failures,
}

/// The number before a word in `test result: ok. 3 passed; 0 failed; …`.
fn count(line: &str, word: &str) -> u64 {
    let words: Vec<&str> = line.split([' ', ';']).filter(|it| !it.is_empty()).collect();
    let at = words.iter().position(|it| *it == word);
    at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSES: &str = "test a ... ok\n\nsuccesses:\n\n---- b stdout ----\nSKIPPED: no redis\n\
        SKIPPED: nor a client of it\n\n---- c stdout ----\nSKIPPED: no root\n\nsuccesses:\n    \
        a\n\n\
        test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured\n";

    #[test]
    fn skipped_tests_did_not_pass() {
        let outcome = Outcome::read("x".into(), PASSES, true);
        assert_eq!((outcome.passed, outcome.failed, outcome.ignored), (2, 0, 1));
        assert_eq!(outcome.skipped, ["no redis", "no root"]);
        assert_eq!(outcome.complaint, "");
    }

    #[test]
    fn what_failed_is_told_without_what_passed() {
        let text = "successes:\n    a\n\nfailures:\n\n---- b stdout ----\nSKIPPED: no root\n\
            wrong byte\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 \
            ignored\nafter";
        let outcome = Outcome::read("x".into(), text, false);
        assert_eq!((outcome.passed, outcome.failed), (1, 1));
        assert!(outcome.complaint.contains("wrong byte") && !outcome.complaint.contains("after"));
    }

    #[test]
    fn a_program_that_dies_fails() {
        let outcome = Outcome::read("x".into(), "test a ... ", false);
        assert_eq!(outcome.failed, 1);
        assert!(outcome.complaint.contains("test a ... "), "{}", outcome.complaint);
        // A program can also die after its results.
        assert_eq!(Outcome::read("x".into(), PASSES, false).failed, 1);
    }
}
