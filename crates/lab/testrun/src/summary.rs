//! The output: a line for each test program, and the end.

use std::fmt::Write;
use std::time::Duration;

use crate::outcome::Outcome;

/// How many of the slowest test programs are named.
const SLOWEST: usize = 10;

/// `ok      163.0 s (12.3 s of a CPU)  farpool-e2e spill: 11 passed`.
pub(crate) fn line(outcome: &Outcome) -> String {
    let word = if outcome.failed == 0 { "ok" } else { "FAILED" };
    let cpu = outcome.cpu.map_or("?".to_owned(), |cpu| format!("{:.1}", cpu.as_secs_f64()));
    let mut line = format!(
        "{word:<6} {:7.1} s ({cpu:>6} s of a CPU)  {}: {} passed",
        outcome.took.as_secs_f64(),
        outcome.title,
        outcome.passed
    );
    let skipped = outcome.skipped.len() as u64 + outcome.ignored;
    for (count, what) in [(outcome.failed, "failed"), (skipped, "skipped")] {
        if count > 0 {
            // Writing to a String cannot fail.
            let _ = write!(line, ", {count} {what}");
        }
    }
    line
}

/// How long each part of a run took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Phases {
    /// Building the test programs.
    pub build: Duration,
    /// The programs that run one at a time, with quick ones in the background.
    pub steady: Duration,
    /// The rest, in two lanes.
    pub waiting: Duration,
}

/// What failed, what was skipped and why, the slowest, where the time went, and the one line that
/// counts all.
pub(crate) fn end(outcomes: &[Outcome], phases: &Phases) -> String {
    let mut text = String::new();
    for outcome in outcomes.iter().filter(|it| it.failed > 0) {
        let _ = write!(text, "\nfailed in {}:\n{}", outcome.title, outcome.complaint);
    }
    let reasons: Vec<&String> = outcomes.iter().flat_map(|it| &it.skipped).collect();
    if !reasons.is_empty() {
        text.push_str("\nskipped:\n");
        reasons.iter().for_each(|it| text.extend(["  ", it, "\n"]));
    }
    let mut slowest: Vec<&Outcome> = outcomes.iter().collect();
    slowest.sort_by_key(|it| std::cmp::Reverse(it.took));
    text.push_str("\nslowest:\n");
    slowest.iter().take(SLOWEST).for_each(|it| text.extend(["  ", &line(it), "\n"]));
    let _ = writeln!(
        text,
        "\ntook {:.0} s to build, {:.0} s for steady programs, {:.0} s for the others",
        phases.build.as_secs_f64(),
        phases.steady.as_secs_f64(),
        phases.waiting.as_secs_f64()
    );
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>();
    let skipped = sum(|it| it.skipped.len() as u64 + it.ignored);
    let (passed, failed) = (sum(|it| it.passed), sum(|it| it.failed));
    let _ = writeln!(text, "\n{passed} passed, {failed} failed, {skipped} skipped");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_counts_all() {
        let good = Outcome { title: "a".into(), passed: 3, ..Outcome::default() };
        let bad = Outcome {
            title: "b".into(),
            passed: 1,
            failed: 2,
            ignored: 1,
            skipped: vec!["no redis".into()],
            complaint: "wrong byte\n".into(),
            ..Outcome::default()
        };
        let text = end(&[good, bad], &Phases::default());
        assert!(text.ends_with("\n4 passed, 2 failed, 2 skipped\n"), "{text}");
        assert!(text.contains("failed in b:\nwrong byte\n"), "{text}");
        assert!(text.contains("skipped:\n  no redis\n"), "{text}");
    }
}
