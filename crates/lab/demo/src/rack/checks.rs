//! What must be true at the end, and whether it was; pure.

use std::fmt::Write;

use serde_json::{Value, json};

/// One condition that was checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Check {
    /// What must be true.
    pub name: String,
    pub passed: bool,
    /// The observation.
    pub seen: String,
}

/// All checks of one rack.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checks(Vec<Check>);

impl Checks {
    pub fn add(&mut self, name: impl Into<String>, passed: bool, seen: impl Into<String>) {
        self.0.push(Check { name: name.into(), passed, seen: seen.into() });
    }

    pub fn list(&self) -> &[Check] {
        &self.0
    }

    /// Whether there were any checks and all passed: a scenario that checked nothing shows nothing.
    pub fn all_passed(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|check| check.passed)
    }

    /// Lines of JSON.
    pub fn to_json(&self, rack: &str) -> Vec<Value> {
        let line = |check: &Check| {
            let (name, passed, seen) = (&check.name, check.passed, &check.seen);
            json!({ "kind": "check", "rack": rack, "name": name, "passed": passed, "seen": seen })
        };
        self.0.iter().map(line).collect()
    }
}

/// The table, a part for each rack.
pub fn table(racks: &[(String, Checks)], may_colour: bool) -> String {
    let all = || racks.iter().flat_map(|(_, checks)| checks.list());
    let width = all().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (title, checks) in racks {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{title}");
        for Check { name, passed, seen } in checks.list() {
            let result = match (passed, may_colour) {
                (true, false) => "pass",
                (false, false) => "FAIL",
                (true, true) => "\x1b[32mpass\x1b[0m",
                (false, true) => "\x1b[1;31mFAIL\x1b[0m",
            };
            let _ = writeln!(text, "  {result}  {name:<width$}  {seen}");
        }
    }
    text
}

/// Returns the last line of the output.
pub fn verdict(racks: &[(String, Checks)]) -> String {
    let all = || racks.iter().flat_map(|(_, checks)| checks.list());
    let failed = all().filter(|check| !check.passed).count();
    match (failed, all().count()) {
        (_, 0) => "nothing was looked at".to_owned(),
        (0, all) => format!("all {all} checks passed"),
        (failed, all) => format!("{failed} of {all} checks FAILED"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_is_enough_and_nothing_looked_at_is_no_success() {
        let mut checks = Checks::default();
        assert!(!checks.all_passed());
        checks.add("one", true, "yes");
        assert!(checks.all_passed());
        checks.add("longer name", false, "no");
        assert!(!checks.all_passed());
        let racks = [("the rack".to_owned(), checks)];
        assert_eq!(
            table(&racks, false),
            "\nthe rack\n  pass  one          yes\n  FAIL  longer name  no\n"
        );
        assert_eq!(verdict(&racks), "1 of 2 checks FAILED");
        assert_eq!(verdict(&[]), "nothing was looked at");
        assert_eq!(racks[0].1.to_json("x")[1]["passed"], false);
    }
}
