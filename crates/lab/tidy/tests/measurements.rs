//! The page of measurements and the script that writes it have the same sections. Both are Python's
//! to compare: see scripts/measurements.py.

use std::process::Command;

use farpool_testkit::have;
use farpool_tidy::root;

/// Runs a Python program of the repository, which must succeed.
fn succeeds(script: &str, arguments: &[&str]) {
    if !have("python3") {
        return;
    }
    let output = Command::new("python3")
        .arg(root().join("scripts").join(script))
        .args(arguments)
        .output()
        .expect("Python starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script} {arguments:?}: {}\n{said}", output.status);
}

#[test]
fn the_page_of_measurements_has_the_sections_that_are_measured() {
    succeeds("measurements.py", &["--check"]);
}

#[test]
fn blocks_of_the_page_are_replaced_alone() {
    succeeds("measurements_test.py", &[]);
}
