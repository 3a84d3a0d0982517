//! An experiment as a file (TOML), so that it can be kept, shared and run again.
//!
//! ```toml
//! trace = "sort.parquet"            # beside this file
//! designs = ["ps", "fgra", { base = "ps", name = "ps, slow link", far.link_latency_ps = 500_000 }]
//! local = ["75%", "50%", "64MiB"]
//! policies = ["clock", "lru"]
//! page_bytes = 4096                 # this and the rest may be omitted
//! overlap = 1
//! clients = 1
//! tick_ps = 455
//! seed = 1
//! ```
//!
//! A design is a preset's name, or a table: `base` names the preset to start from, the other keys
//! are those of [`Design`].

use std::path::{Path, PathBuf};

use farpool_policy::CacheKind;
use serde::Deserialize;

use crate::design::{Design, Preset};
use crate::experiment::{Experiment, LocalSize};

/// An experiment file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is not a valid experiment.
    #[error("{}: {reason}", path.display())]
    Wrong {
        /// Which file.
        path: PathBuf,
        /// What is wrong and where; for syntax errors the parser's message.
        reason: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    trace: PathBuf,
    designs: Vec<toml::Value>,
    local: Vec<LocalSize>,
    #[serde(default = "usual_policies")]
    policies: Vec<String>,
    #[serde(default = "usual_page_bytes")]
    page_bytes: u64,
    #[serde(default = "one")]
    overlap: u32,
    #[serde(default = "one")]
    clients: u32,
    tick_ps: Option<u64>,
    #[serde(default)]
    seed: u64,
}

fn usual_policies() -> Vec<String> {
    vec![CacheKind::Clock.name().to_owned()]
}

fn usual_page_bytes() -> u64 {
    farpool_units::PAGE_BYTES_U64
}

fn one() -> u32 {
    1
}

/// The content of an experiment file.
#[derive(Debug, Clone, PartialEq)]
pub struct ExperimentFile {
    /// The trace's path, resolved against the file's folder.
    pub trace: PathBuf,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// The experiment itself.
    pub experiment: Experiment,
}

/// Reads an experiment.
///
/// # Errors
/// The file is missing, is not TOML, has unknown keys or names, or a design that cannot be
/// simulated.
pub fn read(path: &Path) -> Result<ExperimentFile, FileError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| FileError::Io { path: path.to_owned(), source })?;
    let wrong = |reason: String| FileError::Wrong { path: path.to_owned(), reason };
    let document: Document = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let designs: Result<Vec<Design>, String> = document.designs.into_iter().map(design).collect();
    let policies: Result<Vec<CacheKind>, String> = document
        .policies
        .iter()
        .map(|name| name.parse().map_err(|error: farpool_policy::UnknownPolicy| error.to_string()))
        .collect();
    let experiment = Experiment {
        designs: designs.map_err(wrong)?,
        local: document.local,
        policies: policies.map_err(wrong)?,
        overlap: document.overlap,
        tick_ps: document.tick_ps,
        seed: document.seed,
        clients: document.clients,
    };
    for (name, is_empty) in [
        ("designs", experiment.designs.is_empty()),
        ("local", experiment.local.is_empty()),
        ("policies", experiment.policies.is_empty()),
    ] {
        if is_empty {
            return Err(wrong(format!("{name} is empty: there is nothing to simulate")));
        }
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    Ok(ExperimentFile {
        trace: folder.join(document.trace),
        page_bytes: document.page_bytes,
        experiment,
    })
}

/// Parses a preset's name, or a table that overrides one.
fn design(value: toml::Value) -> Result<Design, String> {
    let design = match value {
        toml::Value::String(name) => named(&name)?,
        toml::Value::Table(mut table) => {
            let base = match table.remove("base") {
                Some(toml::Value::String(name)) => named(&name)?,
                Some(_) => return Err("base is the name of a design".to_owned()),
                None => {
                    return Err(
                        "a design needs base, the name of the preset to start from".to_owned()
                    );
                }
            };
            let mut whole = toml::Table::try_from(base).map_err(|error| error.to_string())?;
            merge(&mut whole, table);
            whole.try_into().map_err(|error: toml::de::Error| error.to_string())?
        }
        _ => return Err("a design is a name or a table".to_owned()),
    };
    design.check().map_err(|error| error.to_string())?;
    Ok(design)
}

fn named(name: &str) -> Result<Design, String> {
    name.parse::<Preset>().map(Preset::design).map_err(|error| error.to_string())
}

fn merge(into: &mut toml::Table, from: toml::Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(toml::Value::Table(held)), toml::Value::Table(given)) => merge(held, given),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<ExperimentFile, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("e.toml");
        std::fs::write(&path, text).unwrap();
        read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn designs_are_names_or_tables_over_them() {
        let text = "trace = \"t.parquet\"\nlocal = [\"75%\", \"64MiB\"]\n\
                    designs = [\"fgra\", { base = \"ps\", name = \"mine\", far.link_latency_ps = 7 \
                    }]\n";
        let file = read_text(text).unwrap();
        let experiment = &file.experiment;
        assert_eq!(experiment.local, [LocalSize::Permille(750), LocalSize::Bytes(64 << 20)]);
        assert_eq!(experiment.policies, [CacheKind::Clock]);
        let mut mine = Preset::Ps.design();
        (mine.name, mine.far.link_latency_ps) = ("mine".to_owned(), 7);
        assert_eq!(experiment.designs, [Preset::Fgra.design(), mine]);
        assert!(file.trace.ends_with("t.parquet"));
    }

    #[test]
    fn what_is_all_local_stays_so_under_another_name() {
        let text = "trace = \"t.parquet\"\nlocal = [\"75%\"]\n\
                    designs = [\"ps\", { base = \"local\", name = \"fast\", local_latency_ps = 7 }]\n";
        let designs = read_text(text).unwrap().experiment.designs;
        let all_local: Vec<bool> = designs.iter().map(|design| design.is_all_local).collect();
        assert_eq!(all_local, [false, true]);
    }

    #[test]
    fn refusals_name_the_file_and_the_thing() {
        let base = "trace = \"t\"\nlocal = [\"75%\"]\n";
        for (rest, part) in [
            ("designs = [\"pss\"]", "no design named \"pss\"; choose one of: local, ps,"),
            ("designs = []", "designs is empty"),
            ("designs = [{ name = \"x\" }]", "a design needs base"),
            ("designs = [{ base = \"ps\", far.speed = 1 }]", "unknown field `speed`"),
            ("designs = [{ base = \"ps\", far.link_bytes_per_s = 0 }]", "a bandwidth of 0 bytes"),
            ("designs = [\"ps\"]\npolicies = [\"mru\"]", "no cache policy named \"mru\""),
            ("designs = [\"ps\"]\nlokal = 1", "unknown field `lokal`"),
            ("designs = [\"ps\"]\nlocal = [\"0%\"]", "duplicate key"),
        ] {
            let refusal = read_text(&format!("{base}{rest}\n")).unwrap_err();
            assert!(refusal.contains("e.toml: ") && refusal.contains(part), "{rest}: {refusal}");
        }
        let refusal =
            read_text("trace = \"t\"\ndesigns = [\"ps\"]\nlocal = [\"0%\"]\n").unwrap_err();
        assert!(refusal.contains("\"0%\" is not a size of local memory"), "{refusal}");
    }
}
