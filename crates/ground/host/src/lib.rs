//! A host's memory as the kernel reports it (/proc/meminfo, the cgroups this process runs in, v1
//! and v2, the pressure), its [`processors`], and the speed of its links. Reads files and returns
//! numbers; nothing here decides.
//!
//! A cgroup's limit counts at each level up to the mount, because any of them may be the tightest.
//! A cgroup's caches that can be reclaimed at once (inactive file pages) are available to it.

mod link;
pub mod processors;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use link::link_bytes_per_s;

/// Deepest nesting of cgroups that is read; levels above count only through the machine.
const CGROUP_DEPTH_LIMIT: usize = 32;

/// One limit on the host's memory use: the machine, or a memory cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryLevel {
    /// All memory of the level.
    pub total_bytes: u64,
    /// Memory that programs can take at no loss to others.
    pub available_bytes: u64,
}

/// A sample of the host's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemorySight {
    /// The machine, and each cgroup with a limit.
    pub levels: Vec<MemoryLevel>,
    /// Share of time in which programs waited for memory, in thousandths (PSI "some", 10 s), if
    /// known.
    pub pressure_permille: Option<u16>,
}

impl MemorySight {
    /// Returns the level with the least available memory.
    #[must_use]
    pub fn tightest(&self) -> Option<&MemoryLevel> {
        self.levels.iter().min_by_key(|level| level.available_bytes)
    }

    /// Returns the size of the smallest level, to which steps and margins relate.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.levels.iter().map(|level| level.total_bytes).min().unwrap_or(0)
    }
}

/// The kernel's files on memory; in tests others.
#[derive(Clone, Debug)]
pub struct MemoryFiles {
    proc: PathBuf,
    cgroups: PathBuf,
}

impl Default for MemoryFiles {
    fn default() -> Self {
        Self { proc: PathBuf::from("/proc"), cgroups: PathBuf::from("/sys/fs/cgroup") }
    }
}

/// File names of one version of cgroups.
struct Names {
    limits: &'static [&'static str],
    usage: &'static str,
    reclaimable: &'static str,
}

/// `memory.high` counts as a limit, because programs are slowed down above it.
const V2: Names = Names {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: "inactive_file",
};
const V1: Names = Names {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

impl MemoryFiles {
    /// Reads files below folders other than `/proc` and `/sys/fs/cgroup`.
    #[must_use]
    pub fn at(proc: impl Into<PathBuf>, cgroups: impl Into<PathBuf>) -> Self {
        Self { proc: proc.into(), cgroups: cgroups.into() }
    }

    /// Samples all levels and the pressure.
    ///
    /// # Errors
    /// /proc/meminfo cannot be read or lacks a field. Cgroups and pressure may be missing.
    pub fn look(&self) -> io::Result<MemorySight> {
        let text = fs::read_to_string(self.proc.join("meminfo"))?;
        let lacks = || io::Error::new(io::ErrorKind::InvalidData, "meminfo lacks MemAvailable");
        let machine = parse_meminfo(&text).ok_or_else(lacks)?;
        let mut levels = vec![machine];
        let mut pressures = vec![self.proc.join("pressure/memory")];
        let own = fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        if let Some((mount, path, names)) = self.place_of(&own) {
            pressures.push(mount.join(&path).join("memory.pressure"));
            let folders = path.ancestors().take(CGROUP_DEPTH_LIMIT).map(|path| mount.join(path));
            let limited = folders.filter_map(|folder| level_of(&folder, names));
            levels.extend(limited.filter(|level| level.total_bytes < machine.total_bytes));
        }
        let pressure_of = |path: &PathBuf| parse_pressure(&fs::read_to_string(path).ok()?);
        let pressure_permille = pressures.iter().filter_map(pressure_of).max();
        Ok(MemorySight { levels, pressure_permille })
    }

    /// Finds this process's memory cgroup: the mount, the path below it, and its files' names.
    fn place_of(&self, own: &str) -> Option<(PathBuf, PathBuf, &'static Names)> {
        let (v1, v2) = parse_own_cgroup(own);
        let v1 = v1.map(|path| (self.cgroups.join("memory"), path, &V1));
        let v2 = v2.map(|path| (self.cgroups.clone(), path, &V2));
        // In a hybrid setup only one version has the memory controller: v1 if it has a line.
        v1.or(v2)
    }
}

/// Reads a cgroup's files; None if it has no limit.
fn level_of(folder: &Path, names: &Names) -> Option<MemoryLevel> {
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok()
    };
    let total_bytes = names.limits.iter().filter_map(|name| number(name)).min()?;
    let usage = number(names.usage)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = field(&stat, names.reclaimable).unwrap_or(0);
    let available = total_bytes.saturating_sub(usage).saturating_add(reclaimable.min(usage));
    Some(MemoryLevel { total_bytes, available_bytes: available.min(total_bytes) })
}

/// Returns the first number after a word at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut found = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    });
    found.next()
}

fn parse_meminfo(text: &str) -> Option<MemoryLevel> {
    let bytes = |name| field(text, name).and_then(|kib: u64| kib.checked_mul(1024));
    let total_bytes = bytes("MemTotal:")?;
    let available_bytes = bytes("MemAvailable:")?.min(total_bytes);
    Some(MemoryLevel { total_bytes, available_bytes })
}

/// Returns the thousandths of the last 10 s in which some program waited.
fn parse_pressure(text: &str) -> Option<u16> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let value = line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?;
    let (whole, fraction) = value.split_once('.')?;
    let tenths: u16 = fraction.get(..1)?.parse().ok()?;
    let permille = whole.parse::<u16>().ok()?.checked_mul(10)?.checked_add(tenths)?;
    Some(permille.min(1000))
}

/// Returns the paths of the memory cgroup (v1) and of the unified one (v2), without the leading
/// slash.
fn parse_own_cgroup(text: &str) -> (Option<PathBuf>, Option<PathBuf>) {
    let (mut v1, mut v2) = (None, None);
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) =
            (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        // The path of a cgroup outside this process's namespace begins with "/.."; it is not
        // visible here.
        let path = path.trim_start_matches('/');
        let path = if path.starts_with("..") { "" } else { path };
        if controllers.split(',').any(|name| name == "memory") {
            v1 = Some(PathBuf::from(path));
        } else if number == "0" && controllers.is_empty() {
            v2 = Some(PathBuf::from(path));
        }
    }
    (v1, v2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  4194304 kB\nMemFree: 1 kB\nMemAvailable:  2097152 kB\n";
    use farpool_units::GIB;

    fn write(folder: &Path, name: &str, text: &str) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn machine(own: &str) -> (tempfile::TempDir, MemoryFiles) {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "proc/meminfo", MEMINFO);
        write(folder.path(), "proc/self/cgroup", own);
        let files = MemoryFiles::at(folder.path().join("proc"), folder.path().join("cgroup"));
        (folder, files)
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let sight = MemoryFiles::default().look().unwrap();
        assert!(!sight.levels.is_empty());
        assert!(sight.levels.iter().all(|level| level.available_bytes <= level.total_bytes));
        assert!(sight.total_bytes() > 0);
    }

    #[test]
    fn v2_counts_each_limit_up_to_the_root() {
        let (folder, files) = machine("0::/a/b\n");
        let machine = MemoryLevel { total_bytes: 4 * GIB, available_bytes: 2 * GIB };
        write(folder.path(), "cgroup/a/b/memory.max", "max\n");
        write(folder.path(), "cgroup/a/b/memory.current", "7\n");
        assert_eq!(files.look().unwrap().levels, [machine]);
        write(folder.path(), "cgroup/a/memory.max", "1073741824\n");
        write(folder.path(), "cgroup/a/memory.high", "536870912\n");
        write(folder.path(), "cgroup/a/memory.current", "268435456\n");
        write(folder.path(), "cgroup/a/memory.stat", "anon 5\ninactive_file 4096\n");
        let a = MemoryLevel { total_bytes: GIB / 2, available_bytes: GIB / 4 + 4096 };
        assert_eq!(files.look().unwrap().levels, [machine, a]);
    }

    #[test]
    fn v1_is_found_by_its_controller_and_no_limit_is_none() {
        let (folder, files) = machine("5:cpu,memory:/x\n0::/y\n");
        write(folder.path(), "cgroup/memory/x/memory.limit_in_bytes", "2147483648\n");
        write(folder.path(), "cgroup/memory/x/memory.usage_in_bytes", "1073741824\n");
        write(folder.path(), "cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        write(folder.path(), "cgroup/memory/memory.usage_in_bytes", "1\n");
        let levels = files.look().unwrap().levels;
        let x = MemoryLevel { total_bytes: 2 * GIB, available_bytes: GIB };
        assert_eq!(levels[1..], [x]);
    }

    #[test]
    fn the_higher_pressure_counts_and_missing_files_do_not_matter() {
        let (folder, files) = machine("0::/a\n");
        assert_eq!(files.look().unwrap().pressure_permille, None);
        let some =
            |avg| format!("some avg10={avg} avg60=9.00 avg300=0 total=1\nfull avg10=99.00\n");
        write(folder.path(), "proc/pressure/memory", &some("1.27"));
        assert_eq!(files.look().unwrap().pressure_permille, Some(12));
        write(folder.path(), "cgroup/a/memory.pressure", &some("50.00"));
        assert_eq!(files.look().unwrap().pressure_permille, Some(500));
    }

    #[test]
    fn nonsense_is_an_error_or_nothing_at_all() {
        let (folder, files) = machine("garbage\n1:x\n0::/../../up\n");
        assert_eq!(files.look().unwrap().levels.len(), 1);
        write(folder.path(), "proc/meminfo", "MemTotal: many kB\n");
        assert!(files.look().is_err());
        assert_eq!(parse_pressure("some avg10=x.y"), None);
        assert_eq!(parse_pressure("some avg10=7000.0"), None);
    }
}
