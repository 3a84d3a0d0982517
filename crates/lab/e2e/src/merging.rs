//! Kernel samepage merging (KSM), without a pause between its scans.

use std::fs;
use std::path::PathBuf;

use crate::skip;

/// Where KSM is switched on and set.
const KSM: &str = "/sys/kernel/mm/ksm";
/// KSM scans all it may, this many pages at a time, without a pause.
const SETTINGS: [(&str, &str); 4] =
    [("advisor_mode", "none"), ("pages_to_scan", "20000"), ("sleep_millisecs", "0"), ("run", "1")];

/// Merges equal pages of programs that permit it until it is dropped. Then all is set as before;
/// what was merged stays so.
#[derive(Debug)]
pub struct Merging {
    before: Vec<(PathBuf, String)>,
}

impl Merging {
    /// Begins to merge. None, and the test is skipped with the reason, if this kernel or this user
    /// cannot.
    pub fn start() -> Option<Merging> {
        let mut merging = Merging { before: Vec::new() };
        for (name, value) in SETTINGS {
            let path = PathBuf::from(KSM).join(name);
            // "scan-time [none]": the value in brackets, or the only one.
            let old = fs::read_to_string(&path).unwrap_or_default();
            let chosen = old.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            let old = chosen.map_or(old.trim(), |(chosen, _)| chosen).to_owned();
            match fs::write(&path, value) {
                Ok(()) => merging.before.push((path, old)),
                // Older kernels have no advisor, and scan what they are told.
                Err(_) if name == "advisor_mode" => {}
                Err(error) => {
                    skip(&format!("{} cannot be set: {error}", path.display()));
                    return None;
                }
            }
        }
        Some(merging)
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        self.before.iter().rev().for_each(|(path, old)| drop(fs::write(path, old)));
    }
}
