//! The test programs that cargo builds.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Context;
use serde_json::Value;

/// A program made by `cargo test`.
#[derive(Clone, Debug)]
pub(crate) struct TestProgram {
    pub package: String,
    pub name: String,
    /// `lib`, `bin`, `test`, `example` or `bench`.
    pub kind: String,
    pub path: PathBuf,
    /// The folder of its package, in which cargo would start it.
    pub folder: PathBuf,
}

impl TestProgram {
    /// As people name it: `farpool-e2e spill`, `farpool-pager lib`.
    pub(crate) fn title(&self) -> String {
        let name = if self.kind == "test" { &self.name } else { &self.kind };
        format!("{} {name}", self.package)
    }
}

/// The cargo that started this program, or the one in the PATH.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Builds the test programs of `scope` (arguments of `cargo test`) and lists them.
///
/// # Errors
/// When cargo cannot be started, or the build fails.
pub(crate) fn build(scope: &[String]) -> anyhow::Result<Vec<TestProgram>> {
    let output = cargo()
        .args(["test", "--no-run", "--message-format=json-render-diagnostics"])
        .args(scope)
        .stderr(Stdio::inherit())
        .output()
        .context("cargo cannot be started")?;
    anyhow::ensure!(output.status.success(), "the tests do not build");
    let text = String::from_utf8(output.stdout).context("what cargo printed")?;
    let mut programs: Vec<TestProgram> = text.lines().filter_map(read).collect();
    programs.sort_by_key(TestProgram::title);
    Ok(programs)
}

/// A test program, if that is what a line of cargo's messages names.
fn read(line: &str) -> Option<TestProgram> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let manifest = PathBuf::from(message["manifest_path"].as_str()?);
    Some(TestProgram {
        package: package_of(message["package_id"].as_str()?).to_owned(),
        name: message["target"]["name"].as_str()?.to_owned(),
        kind: kind_of(&message["target"]["kind"]).to_owned(),
        path: message["executable"].as_str()?.into(),
        folder: manifest.parent()?.to_owned(),
    })
}

/// Returns cargo's kind if it is `bin`, `test`, `example` or `bench`. Every other kind is some form
/// of library.
fn kind_of(kinds: &Value) -> &str {
    match kinds[0].as_str() {
        Some(kind @ ("bin" | "test" | "example" | "bench")) => kind,
        _ => "lib",
    }
}

/// The name in `path+file:///…/crates/far/pager#farpool-pager@0.1.0` or `…/pager#0.1.0`.
fn package_of(id: &str) -> &str {
    let (path, version) = id.split_once('#').unwrap_or((id, ""));
    version.split_once('@').map_or_else(|| path.rsplit('/').next().unwrap_or(id), |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_read_from_both_forms_of_their_id() {
        assert_eq!(
            package_of("path+file:///w/crates/far/pager#farpool-pager@0.1.0"),
            "farpool-pager"
        );
        assert_eq!(package_of("path+file:///w/farpool#0.1.0"), "farpool");
    }

    #[test]
    fn only_test_programs_are_listed() {
        let artifact = |test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "profile": { "test": test },
                "manifest_path": "/w/crates/cli/Cargo.toml", "executable": "/t/kv-1",
                "package_id": "path+file:///w/crates/cli#farpool@0.1.0",
                "target": { "name": "kv", "kind": ["test"] },
            })
        };
        assert!(read(&artifact(false).to_string()).is_none());
        let program = read(&artifact(true).to_string()).expect("a test program");
        assert_eq!(program.title(), "farpool kv");
        assert_eq!(program.folder, PathBuf::from("/w/crates/cli"));
    }
}
