//! What a test program printed, read.

use std::time::Duration;

/// Lines of a program that died without a result which are shown again.
const LAST_LINES: usize = 40;
/// Longest part of a line that is shown again, in characters: some tests print whole models.
const LINE_LIMIT: usize = 300;

/// How one test program ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    pub title: String,
    pub took: Duration,
    /// Time of a processor that it and its children took.
    pub cpu: Duration,
    pub passed: u64,
    pub failed: u64,
    pub ignored: u64,
    /// Reasons of tests that could not run here.
    pub skipped: Vec<String>,
    /// What it said of what failed.
    pub complaint: String,
}

impl Outcome {
    /// Reads what libtest printed. A program that `ended_well` says it did not counts as one failure
    /// at the least: it may have died before it had a result.
    pub fn read(title: String, text: &str, ended_well: bool) -> Self {
        let mut outcome = Self { title, ..Self::default() };
        let mut has_result = false;
        let mut is_complaint = false;
        for line in text.lines() {
            if line.starts_with("test result: ") {
                has_result = true;
                is_complaint = false;
                outcome.passed += count(line, "passed");
                outcome.failed += count(line, "failed");
                outcome.ignored += count(line, "ignored");
            } else if let Some(reason) = line.strip_prefix("SKIPPED: ") {
                outcome.skipped.push(reason.to_owned());
            }
            match line {
                "failures:" => is_complaint = true,
                "successes:" => is_complaint = false,
                _ if is_complaint => outcome.complain(line),
                _ => {}
            }
        }
        if !ended_well && outcome.failed == 0 {
            outcome.failed = 1;
        }
        if !ended_well && !has_result {
            outcome.complain("it died; its last lines:");
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(LAST_LINES)..]
                .iter()
                .for_each(|it| outcome.complain(it));
        }
        // A skipped test returned, and libtest took that for a success.
        outcome.passed = outcome.passed.saturating_sub(outcome.skipped.len() as u64);
        outcome
    }

    fn complain(&mut self, line: &str) {
        self.complaint.extend(line.chars().take(LINE_LIMIT));
        self.complaint.push('\n');
    }
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

    const PASSES: &str = "test a ... ok\n\nsuccesses:\n\n---- b stdout ----\nSKIPPED: no redis\n\n\
        successes:\n    a\n\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured\n";

    #[test]
    fn skipped_tests_did_not_pass() {
        let outcome = Outcome::read("x".into(), PASSES, true);
        assert_eq!((outcome.passed, outcome.failed, outcome.ignored), (2, 0, 1));
        assert_eq!(outcome.skipped, ["no redis"]);
        assert_eq!(outcome.complaint, "");
    }

    #[test]
    fn what_failed_is_told_without_what_passed() {
        let text = "successes:\n    a\n\nfailures:\n\n---- b stdout ----\nwrong byte\n\nfailures:\n    b\n\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored\nafter";
        let outcome = Outcome::read("x".into(), text, false);
        assert_eq!((outcome.passed, outcome.failed), (1, 1));
        assert!(outcome.complaint.contains("wrong byte") && !outcome.complaint.contains("after"));
    }

    #[test]
    fn a_program_that_dies_fails() {
        let outcome = Outcome::read("x".into(), "test a ... ", false);
        assert_eq!(outcome.failed, 1);
        assert!(outcome.complaint.contains("test a ... "), "{}", outcome.complaint);
        // After its results, too.
        assert_eq!(Outcome::read("x".into(), PASSES, false).failed, 1);
    }
}
