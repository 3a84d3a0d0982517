//! Which group of crates may import which. Cargo forbids circles between crates; this table forbids
//! them between products.

use std::process::Command;

use farpool_tidy::{require_none, root};

/// A group, and the groups that its crates may import besides their own.
const ARROWS: [(&str, &[&str]); 8] = [
    ("ground", &[]),
    ("protocol", &["ground"]),
    ("study", &["ground"]),
    ("far", &["ground", "protocol", "study"]),
    ("rack", &["ground", "protocol", "far"]),
    ("cache", &["ground", "protocol", "far"]),
    ("lab", &["ground", "protocol", "study", "far", "rack", "cache"]),
    ("cli", &["ground", "protocol", "study", "far", "rack", "cache", "lab"]),
];
/// The layers of the key-value server: a crate, and the other crates of it that it may import.
const KV_ARROWS: [(&str, &[&str]); 4] = [
    ("farpool-kv-store", &[]),
    ("farpool-kv-protocol", &["farpool-kv-store"]),
    ("farpool-kv-tier", &["farpool-kv-store"]),
    ("farpool-kv-server", &["farpool-kv-store", "farpool-kv-protocol", "farpool-kv-tier"]),
];
/// Imports allowed to tests in addition: the harness.
const OF_TESTS: &str = "lab";

struct Crate {
    name: String,
    /// Its folder below crates/, such as `far/pager`.
    folder: String,
    /// Names of what it imports, and whether only its tests do.
    imports: Vec<(String, bool)>,
}

impl Crate {
    fn group(&self) -> &str {
        self.folder.split('/').next().unwrap_or_default()
    }
}

fn crates() -> Vec<Crate> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("a list").iter();
    packages.map(read).collect()
}

fn read(package: &serde_json::Value) -> Crate {
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    let manifest = text(&package["manifest_path"]);
    let folder = manifest.split("/crates/").last().and_then(|it| it.strip_suffix("/Cargo.toml"));
    let dependencies = package["dependencies"].as_array().expect("a list").iter();
    Crate {
        name: text(&package["name"]),
        folder: folder.expect("a folder below crates/").to_owned(),
        imports: dependencies.map(|it| (text(&it["name"]), it["kind"] == "dev")).collect(),
    }
}

#[test]
fn arrows_between_groups_point_down() {
    let crates = crates();
    assert!(crates.len() > 30, "cargo names {} crates", crates.len());
    let mut broken = Vec::new();
    for importer in &crates {
        let row = ARROWS.iter().find(|(group, _)| *group == importer.group());
        let (group, allowed) = row.unwrap_or_else(|| panic!("{} has no group", importer.folder));
        for (name, is_of_tests) in &importer.imports {
            // A crate from outside the workspace has no group.
            let Some(imported) = crates.iter().find(|it| it.name == *name) else { continue };
            let target = imported.group();
            let may = target == *group
                || allowed.contains(&target)
                || (*is_of_tests && target == OF_TESTS);
            if !may {
                broken.push(format!("{} ({group}) imports {name} ({target})", importer.name));
            }
        }
    }
    require_none("crates import only groups below their own", &broken);
}

#[test]
fn the_key_value_server_has_floors() {
    let crates = crates();
    let mut broken = Vec::new();
    for (name, allowed) in KV_ARROWS {
        let importer = crates.iter().find(|it| it.name == name);
        let importer = importer.unwrap_or_else(|| panic!("there is no {name}"));
        for (imported, _) in &importer.imports {
            let is_of_kv = KV_ARROWS.iter().any(|(other, _)| other == imported);
            if is_of_kv && !allowed.contains(&imported.as_str()) {
                broken.push(format!("{name} imports {imported}"));
            }
        }
    }
    require_none("crates of the key-value server import only floors below", &broken);
}

#[test]
fn a_crate_is_named_like_its_folder() {
    let strays: Vec<String> = crates()
        .iter()
        .filter(|it| it.folder != "cli")
        .filter(|it| {
            it.folder.split('/').nth(1).is_none_or(|own| it.name != format!("farpool-{own}"))
        })
        .map(|it| format!("{} in crates/{}", it.name, it.folder))
        .collect();
    require_none("crates/<group>/<name> holds farpool-<name>", &strays);
}
