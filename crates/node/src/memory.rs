//! How much memory this server's own programs use.
//!
//! The machine's numbers are /proc/meminfo's; if the daemon runs in a memory control group with a limit, that group
//! is the server (version 1 or 2), as in a container. Pressure is the kernel's, where it has it.

use farpool_acms::MemoryUse;

/// Above this a group's limit is none: version 1 writes a number near the largest there is.
const NO_LIMIT_BYTES: u64 = 1 << 60;

/// What the system says of memory at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reading {
    /// /proc/meminfo.
    pub meminfo: String,
    /// The group's limit, and what it uses without what can be dropped at once.
    pub group: Option<(u64, u64)>,
    /// /proc/pressure/memory.
    pub pressure: Option<String>,
}

impl Reading {
    /// Reads it now.
    #[must_use]
    pub fn now() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        Reading {
            meminfo: read("/proc/meminfo").unwrap_or_default(),
            group: group(),
            pressure: read("/proc/pressure/memory"),
        }
    }

    /// What the server's own programs use; `lent_bytes`, what others have here, is not theirs. None if the system
    /// says nothing: then nothing should be lent.
    #[must_use]
    pub fn own_use(&self, lent_bytes: u64) -> Option<MemoryUse> {
        let total_bytes = field_bytes(&self.meminfo, "MemTotal:")?;
        let available_bytes = field_bytes(&self.meminfo, "MemAvailable:")?;
        let machine = (total_bytes, total_bytes.saturating_sub(available_bytes));
        // The tighter of the two is what runs out first.
        let left = |(limit, used): (u64, u64)| limit.saturating_sub(used);
        let group = self.group.filter(|group| left(*group) < left(machine));
        let (total_bytes, used_bytes) = group.unwrap_or(machine);
        Some(MemoryUse {
            used_bytes: used_bytes.saturating_sub(lent_bytes),
            total_bytes,
            pressure_permille: self.pressure.as_deref().and_then(some_permille),
        })
    }
}

/// The 10 s average of the time in which some program waited, in thousandths.
fn some_permille(text: &str) -> Option<u16> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent = some.split(' ').find_map(|word| word.strip_prefix("avg10="))?;
    let (whole, part) = percent.split_once('.')?;
    let tenth: u16 = part.get(..1)?.parse().ok()?;
    whole.parse::<u16>().ok()?.checked_mul(10)?.checked_add(tenth)
}

fn field_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Limit and use of the memory control group of this process, if it has a limit.
fn group() -> Option<(u64, u64)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let number = |path: String| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (limit, used, stat) = if controllers.split(',').any(|name| name == "memory") {
            let folder = format!("/sys/fs/cgroup/memory{path}");
            let limit = number(format!("{folder}/memory.limit_in_bytes"));
            (limit, number(format!("{folder}/memory.usage_in_bytes")), folder)
        } else if controllers.is_empty() {
            let folder = format!("/sys/fs/cgroup{path}");
            let limit = number(format!("{folder}/memory.max"));
            (limit, number(format!("{folder}/memory.current")), folder)
        } else {
            continue;
        };
        if let (Some(limit), Some(used)) = (limit.filter(|it| *it < NO_LIMIT_BYTES), used) {
            let stat = std::fs::read_to_string(format!("{stat}/memory.stat")).unwrap_or_default();
            return Some((limit, used.saturating_sub(inactive_file_bytes(&stat))));
        }
    }
    None
}

/// Pages of files that were not used lately: they are dropped when memory is needed.
fn inactive_file_bytes(stat: &str) -> u64 {
    let of = |name: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.trim().parse().ok())
    };
    of("total_inactive_file ").or_else(|| of("inactive_file ")).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:   12000000 kB\n";

    #[test]
    fn what_is_lent_is_not_used_by_the_servers_own_programs() {
        let reading = Reading { meminfo: MEMINFO.into(), ..Reading::default() };
        let own = reading.own_use(1_000_000 << 10).expect("numbers");
        assert_eq!(own.total_bytes, 16_000_000 << 10);
        assert_eq!(own.used_bytes, 3_000_000 << 10);
        assert_eq!(own.pressure_permille, None);
    }

    #[test]
    fn the_tighter_of_machine_and_group_counts() {
        let of = |group| Reading { meminfo: MEMINFO.into(), group: Some(group), pressure: None };
        let small = of((1 << 30, 1 << 29)).own_use(0).expect("numbers");
        assert_eq!((small.total_bytes, small.used_bytes), (1 << 30, 1 << 29));
        let large = of((1 << 40, 1 << 20)).own_use(0).expect("numbers");
        assert_eq!(large.total_bytes, 16_000_000 << 10);
    }

    #[test]
    fn pressure_is_read_and_nonsense_is_not() {
        let line = "some avg10=12.34 avg60=0.00 avg300=0.00 total=0\nfull avg10=1.00\n";
        assert_eq!(some_permille(line), Some(123));
        for bad in ["", "some", "some avg10=", "some avg10=x.y", "some avg10=99999.0"] {
            assert_eq!(some_permille(bad), None, "{bad}");
        }
        assert_eq!(Reading::default().own_use(0), None);
        assert_eq!(inactive_file_bytes("cache 5\ninactive_file 4096\n"), 4096);
        assert_eq!(inactive_file_bytes("inactive_file 4096\ntotal_inactive_file 8192\n"), 8192);
    }

    #[test]
    fn this_machine_says_something() {
        assert!(Reading::now().own_use(0).is_some_and(|own| own.total_bytes > 0));
    }
}
