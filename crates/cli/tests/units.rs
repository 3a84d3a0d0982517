//! The systemd units that are installed: systemd takes them, and their programs take their flags.

mod common;

use std::path::Path;
use std::process::Command;

use common::{ended, farpool};

/// Returns the units by name, with their text.
fn units() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/systemd");
    let mut units: Vec<_> = std::fs::read_dir(folder)
        .expect("the folder of the units")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read_to_string(&path).expect("a unit is text"))
        })
        .collect();
    units.sort();
    units
}

#[test]
fn there_is_a_unit_for_each_service() {
    let names: Vec<String> = units().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["farpool-control.service", "farpool-kv.service", "farpool-node.service"]);
}

#[test]
fn systemd_takes_every_unit() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        farpool_testkit::skip("systemd-analyze is not installed (apt-get install systemd)");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in units() {
        let path = folder.path().join(&name);
        let program = env!("CARGO_BIN_EXE_farpool");
        std::fs::write(&path, text.replace("/usr/local/bin/farpool", program)).expect("written");
        let verified = Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(&path)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&verified.stderr).into_owned();
        let about = said.lines().filter(|line| line.contains(&name)).collect::<Vec<_>>();
        assert!(about.is_empty(), "{name}: {about:?}");
    }
}

#[test]
fn the_programs_of_the_units_take_their_flags() {
    let home = tempfile::tempdir().expect("a folder");
    for (name, text) in units() {
        let line = text.lines().find_map(|line| line.strip_prefix("ExecStart="));
        let words = line.expect("a unit starts something").split_whitespace().skip(1);
        let words = words.filter(|word| !word.starts_with('$')).chain(["--help"]);
        let (code, _, said) = ended(farpool(home.path()).args(words));
        assert_eq!(code, 0, "{name}: {said}");
    }
}
