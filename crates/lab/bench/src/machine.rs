//! The machine on which something was measured.

use std::fs;

use farpool_units::about_bytes;

/// The facts that numbers depend on: two reports of different machines are not comparable.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Machine {
    /// Release of the running kernel.
    pub kernel: String,
    /// The processor's own name.
    pub processor: String,
    /// Number of cores that this process may use.
    pub cores: usize,
    /// Main memory, in bytes.
    pub memory_bytes: u64,
}

impl Machine {
    pub(crate) fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            processor: field(&cpuinfo, "model name").unwrap_or("unknown processor").to_owned(),
            cores: crate::sys::cores(),
            memory_bytes: meminfo_bytes("MemTotal").unwrap_or(0),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kernel, processor, cores, memory_bytes } = self;
        let memory = about_bytes(*memory_bytes as f64);
        write!(f, "Linux {kernel}, {cores} cores of {processor}, {memory}")
    }
}

/// Returns a value of `/proc/meminfo`, in bytes.
pub(crate) fn meminfo_bytes(name: &str) -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = field(&meminfo, name)?.trim_end_matches("kB").trim();
    kib.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns the value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}
