//! Limits of a program (setrlimit) that its sidecar must neither exceed nor use up.

use farpool_inject::Pid;

use crate::holder::memory_folder;
use crate::needs::ADDRESS_ROOM_MIB;
use crate::sidecar_error::SidecarError;

/// A sidecar that may not write to files of this size has no room on a blade in memory files. Where
/// more is far than its limit allows the blade takes no more pages, and that is reported.
const FILE_ROOM_BYTES: u64 = 1 << 30;
/// Names in /proc/PID/limits.
const CPU_TIME: &str = "Max cpu time";
const FILE_SIZE: &str = "Max file size";

/// The limits of the program also apply to the sidecar's own process and must not end it: by CPU
/// time, for instance. Limits of the address space apply to what the sidecar maps, and the program
/// must not reach them earlier because of it.
pub(crate) fn lift_limits(sidecar: Pid) {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
    let all = Rlimit { current: None, maximum: None };
    let limits = [
        Resource::As,
        Resource::Cpu,
        Resource::Data,
        Resource::Fsize,
        Resource::Memlock,
        Resource::Nproc,
        Resource::Rttime,
        Resource::Sigpending,
    ];
    for resource in limits {
        // A refusal (no CAP_SYS_RESOURCE) leaves the limit as the program has it: see
        // `check_limits`.
        let _ = prlimit(Some(sidecar), resource, all);
    }
    let _ = prlimit(Some(sidecar), Resource::Nofile, getrlimit(Resource::Nofile));
}

/// Refuses a process that could lack what its sidecar takes, or whose sidecar would reach a limit
/// that cannot be lifted for it. `has_files`: all far memory goes to memory files (`shm`), which
/// the sidecar writes to itself.
pub(crate) fn check_limits(pid: i32, has_files: bool) -> Result<(), SidecarError> {
    let folder = memory_folder(pid.cast_unsigned());
    let text = |name| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let limits = text("limits");
    match address_room(&limits, &text("statm")).map(|bytes| bytes >> 20) {
        Some(room) if room < ADDRESS_ROOM_MIB => {
            return Err(SidecarError::NoAddresses { pid, room });
        }
        _ => {}
    }
    match data_room(&limits, &text("status")).map(|bytes| bytes >> 20) {
        Some(room) if room < ADDRESS_ROOM_MIB => return Err(SidecarError::NoData { pid, room }),
        _ => {}
    }
    if may_lift_limits() {
        return Ok(());
    }
    if let Some(seconds) = hard_limit(&limits, CPU_TIME) {
        return Err(SidecarError::LittleTime { pid, seconds });
    }
    match hard_limit(&limits, FILE_SIZE) {
        Some(bytes) if has_files && bytes < FILE_ROOM_BYTES => {
            Err(SidecarError::SmallFiles { pid, bytes })
        }
        _ => Ok(()),
    }
}

/// True if this process may raise others above their hard limits.
fn may_lift_limits() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_RESOURCE))
}

/// How many bytes a process may still map, by its limits and sizes in /proc. None if unlimited.
/// Pure.
fn address_room(limits: &str, statm: &str) -> Option<u64> {
    use farpool_units::PAGE_BYTES_U64;
    let limit = soft_limit(limits, "Max address space")?;
    let pages: u64 = statm.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(pages * PAGE_BYTES_U64))
}

/// The same for private writable memory. Pure.
fn data_room(limits: &str, status: &str) -> Option<u64> {
    let limit = soft_limit(limits, "Max data size")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(kib << 10))
}

/// The soft limit in a process's `limits`. None if unlimited. Pure.
fn soft_limit(limits: &str, name: &str) -> Option<u64> {
    limit_in(limits, name, 0)
}

/// The most that the process itself can raise it to. Pure.
fn hard_limit(limits: &str, name: &str) -> Option<u64> {
    limit_in(limits, name, 1)
}

fn limit_in(limits: &str, name: &str, field: usize) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().nth(field)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_below_a_limit_of_the_address_space_is_known() {
        let limits = |what| {
            format!(
                "Max cpu time  unlimited  unlimited\nMax address space  {what}  {what}  bytes\n"
            )
        };
        assert_eq!(address_room(&limits("1048576"), "16 5 2"), Some((1 << 20) - (16 << 12)));
        assert_eq!(address_room(&limits("4096"), "16 5 2"), Some(0));
        assert_eq!(address_room(&limits("unlimited"), "16 5 2"), None);
        assert_eq!(address_room("", ""), None);
    }

    #[test]
    fn soft_and_hard_limits_are_read() {
        let limits = "Limit Soft Hard Units\nMax cpu time  3  5  seconds\n\
            Max file size  unlimited  unlimited  bytes\nMax data size  8192  unlimited  bytes\n";
        assert_eq!(soft_limit(limits, CPU_TIME), Some(3));
        assert_eq!(hard_limit(limits, CPU_TIME), Some(5));
        assert_eq!(hard_limit(limits, FILE_SIZE), None);
        assert_eq!(data_room(limits, "VmPeak: 9 kB\nVmData:\t  4 kB\n"), Some(4096));
        assert_eq!(data_room("", "VmData: 4 kB"), None);
    }
}
