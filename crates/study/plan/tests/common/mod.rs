//! The paths of the data sets.

use std::path::{Path, PathBuf};

/// Ships with the sources.
pub(crate) fn google() -> PathBuf {
    let name = "data/utilisation/google-2011-1600-vms-24h-5min.parquet";
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns the folder with Bitbrains' machines, which have no licence to ship. Prints a notice if
/// it is not set.
pub(crate) fn bitbrains() -> Option<PathBuf> {
    let folder = std::env::var_os("FARPOOL_UTILISATION_DATA").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("SKIPPED: FARPOOL_UTILISATION_DATA names no folder with Bitbrains' machines");
    }
    folder
}
