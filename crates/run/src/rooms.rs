//! Limits of a program (setrlimit) that its sidecar must not meet, nor use up.

use farpool_inject::Pid;

use crate::holder::memory_folder;
use crate::sidecars::SidecarError;

/// Addresses that a sidecar maps at most to begin with, in MiB; most of them are never touched.
pub(crate) const ADDRESS_ROOM_MIB: u64 = 1024;

/// The limits of the program that hold for the sidecar's own process must not end it: by CPU time, for instance.
/// Limits of the address space hold for what the sidecar maps, and the program must not meet them earlier for it.
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
        // A refusal (no CAP_SYS_RESOURCE) leaves the limit as the program has it.
        let _ = prlimit(Some(sidecar), resource, all);
    }
    let _ = prlimit(Some(sidecar), Resource::Nofile, getrlimit(Resource::Nofile));
}

/// Refuses a process that could miss the addresses which its sidecar takes.
pub(crate) fn check_address_space(pid: i32) -> Result<(), SidecarError> {
    let folder = memory_folder(pid.cast_unsigned());
    let text = |name| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let room = address_room(&text("limits"), &text("statm"));
    match room.map(|bytes| bytes >> 20) {
        Some(room) if room < ADDRESS_ROOM_MIB => Err(SidecarError::NoAddresses { pid, room }),
        _ => Ok(()),
    }
}

/// How many bytes a process may still map, by its limits and sizes in /proc; None: as many as it likes. Pure.
fn address_room(limits: &str, statm: &str) -> Option<u64> {
    const PAGE_BYTES: u64 = 4096;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    let pages: u64 = statm.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(pages * PAGE_BYTES))
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
}
