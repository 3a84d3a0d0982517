//! Properties that must hold for any bytes given to the planner as utilisation or as a catalogue;
//! used by the property tests and by fuzz/.

use std::io::Write;
use std::path::Path;

use farpool_plan::pack::Server;
use farpool_plan::utilisation::{Columns, Options, Utilisation};
use farpool_plan::{cost, dense};

/// Reads `bytes` as series in text, and as promised amounts of what was read. Nothing panics, an
/// error names the file, and what is read are as many numbers as there are machines and steps, none
/// of them negative.
pub(crate) fn read_any_series(bytes: &[u8]) {
    // Only tests have such a folder.
    let folder = option_env!("CARGO_TARGET_TMPDIR").unwrap_or("/dev/shm");
    let mut builder = tempfile::Builder::new();
    let mut file = builder.suffix(".csv").tempfile_in(folder).expect("a file for the exercise");
    file.write_all(bytes).expect("the file of the exercise");
    let name = file.path().display().to_string();
    let mut read = match Utilisation::read(file.path(), &Options::default()) {
        Ok(read) => read,
        Err(refusal) => return assert!(refusal.to_string().contains(&name), "{refusal}"),
    };
    for vm in 0..read.vms.len() {
        let (cpu, memory) = (read.cpu(vm), read.memory(vm));
        assert_eq!((cpu.len(), memory.len()), (read.steps, read.steps));
        let all = cpu.iter().chain(memory);
        all.for_each(|value| assert!(value.is_finite() && *value >= 0.0, "{value}"));
    }
    if let Err(refusal) = read.read_provisioned(file.path(), &Columns::default()) {
        assert!(refusal.to_string().contains(&name), "{refusal}");
    }
}

/// Reads `bytes` as each of the planner's TOML files. Nothing panics, and an error names the file.
pub(crate) fn parse_any_catalog(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let path = Path::new("any.toml");
    let refusals = [
        Server::parse(path, text).err(),
        cost::Catalog::parse(path, text).err(),
        dense::Catalog::parse(path, text).err(),
    ];
    for refusal in refusals.into_iter().flatten() {
        assert!(refusal.to_string().contains("any.toml"), "{refusal}");
    }
}
