//! The requirements of the rack on this machine, reported all at once.

use std::path::Path;

use crate::Error;

/// The most that all hosts together use, with some room: the scenario's programs and what is lent.
const MEMORY_BYTES: u64 = 4 << 30;

/// The state of this machine.
#[derive(Clone, Copy, Debug)]
struct Found {
    is_root: bool,
    has_ip: bool,
    has_userfaultfd: bool,
    available_bytes: Option<u64>,
}

/// Checks whether the rack can run here.
///
/// # Errors
/// Says everything that is missing, and the remedy.
pub fn check() -> Result<(), Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let found = Found {
        is_root: rustix::process::geteuid().is_root(),
        has_ip: std::env::split_paths(&path).any(|folder| folder.join("ip").is_file()),
        has_userfaultfd: Path::new("/dev/userfaultfd").exists(),
        available_bytes: available_bytes(&meminfo),
    };
    let missing = missing(found);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Unavailable(format!("the rack cannot run here: {}", missing.join("; "))))
}

fn missing(found: Found) -> Vec<String> {
    let mut missing = Vec::new();
    if !found.is_root {
        let why =
            "it makes network namespaces and memory control groups, so it must be run by root";
        missing.push(why.to_owned());
    }
    if !found.has_ip {
        missing.push("`ip` is not installed (package iproute2)".to_owned());
    }
    if !found.has_userfaultfd {
        missing.push("there is no /dev/userfaultfd (see `farpool doctor`)".to_owned());
    }
    if let Some(bytes) = found.available_bytes.filter(|bytes| *bytes < MEMORY_BYTES) {
        let (have, need) = (bytes >> 20, MEMORY_BYTES >> 20);
        missing.push(format!("{have} MiB of memory are available, it needs {need} MiB"));
    }
    missing
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_missing_is_said_at_once() {
        let all = Found {
            is_root: true,
            has_ip: true,
            has_userfaultfd: true,
            available_bytes: available_bytes("MemTotal: 1 kB\nMemAvailable:   8388608 kB\n"),
        };
        assert_eq!(missing(all), Vec::<String>::new());
        let none = Found {
            is_root: false,
            has_ip: false,
            has_userfaultfd: false,
            available_bytes: Some(1 << 30),
        };
        let text = missing(none).join("; ");
        for word in ["root", "iproute2", "userfaultfd", "1024 MiB", "4096 MiB"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert_eq!(available_bytes("nothing"), None);
    }
}
