//! Whether a sidecar may do more than its program.
//!
//! A sidecar is born with what its program may do at that moment, less all capabilities. Daemons
//! give up rights later: another user, a filter, another root directory. An attacker who takes such
//! a program over can steer its sidecar, for they share memory; so that sidecar is taken out, and
//! the process gets another one.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use farpool_inject::Pid;

/// Bits of capabilities(7).
const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;
const CAP_SYS_CHROOT: u64 = 1 << 18;

/// What a task without capabilities, and that gains none by exec, may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Authority {
    /// Real, effective, saved and file-system user.
    users: Vec<u32>,
    /// The same for groups, and the supplementary groups.
    groups: Vec<u32>,
    /// Number of seccomp filters; it only grows.
    filters: u32,
    /// Capabilities that it has or can make effective.
    permitted: u64,
    /// Device and inode; None where they may not be read.
    root: Option<(u64, u64)>,
    mount_namespace: Option<(u64, u64)>,
    user_namespace: Option<(u64, u64)>,
}

impl Authority {
    /// Authority of a task, by its folder in /proc. None if it has ended.
    fn of(task: &Path) -> Option<Authority> {
        let text = std::fs::read_to_string(task.join("status")).ok()?;
        let file = |name| std::fs::metadata(task.join(name)).ok();
        let place = |name| file(name).map(|file| (file.dev(), file.ino()));
        let found = Authority {
            root: place("root"),
            mount_namespace: place("ns/mnt"),
            user_namespace: place("ns/user"),
            ..Authority::parse(&text)?
        };
        Some(found)
    }

    /// From the text of /proc/PID/status.
    fn parse(status: &str) -> Option<Authority> {
        let field = |name: &str| {
            let mut lines = status.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim())
        };
        let numbers = |name| -> Option<Vec<u32>> {
            field(name)?.split_whitespace().map(|word| word.parse().ok()).collect()
        };
        let mut groups = numbers("Gid")?;
        groups.extend(numbers("Groups")?);
        Some(Authority {
            users: numbers("Uid")?,
            groups,
            // A kernel without filters does not list them.
            filters: field("Seccomp_filters").map_or(Ok(0), str::parse).ok()?,
            permitted: u64::from_str_radix(field("CapPrm")?, 16).ok()?,
            ..Authority::default()
        })
    }

    fn may(&self, capability: u64) -> bool {
        self.permitted & capability != 0
    }
}

/// What a sidecar has that its program lacks and cannot regain.
fn excess_over(program: &Authority, sidecar: &Authority) -> Option<&'static str> {
    let lacks = |own: &[u32], wanted: &[u32]| wanted.iter().any(|id| !own.contains(id));
    // What may not be read counts as equal.
    let differ =
        |one: Option<(u64, u64)>, other| one.zip(other).is_some_and(|(one, other)| one != other);
    if lacks(&program.users, &sidecar.users) && !program.may(CAP_SETUID) {
        Some("its user")
    } else if lacks(&program.groups, &sidecar.groups) && !program.may(CAP_SETGID) {
        Some("a group")
    } else if program.filters > sidecar.filters {
        Some("system calls (a seccomp filter)")
    } else if differ(program.user_namespace, sidecar.user_namespace) {
        Some("its user namespace")
    } else if differ(program.mount_namespace, sidecar.mount_namespace) {
        Some("its mount namespace")
    } else if differ(program.root, sidecar.root) && !program.may(CAP_SYS_CHROOT) {
        Some("its root directory")
    } else {
        None
    }
}

/// What a sidecar has that no thread of its program has. Threads are not protected from each other.
pub fn excess(program: Pid, sidecar: Pid) -> Option<&'static str> {
    let folder = |pid: Pid| PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    let (program, sidecar) = (folder(program), Authority::of(&folder(sidecar))?);
    let found = excess_over(&Authority::of(&program)?, &sidecar)?;
    let threads = std::fs::read_dir(program.join("task")).ok()?.flatten();
    let mut others = threads.filter_map(|thread| Authority::of(&thread.path()));
    others.all(|thread| excess_over(&thread, &sidecar).is_some()).then_some(found)
}

/// True if a process's files in /proc do not belong to its user: it is not dumpable.
pub fn has_hidden_files(process: Pid) -> bool {
    let folder = PathBuf::from(format!("/proc/{}", process.as_raw_nonzero()));
    let owner = std::fs::metadata(folder.join("pagemap")).map(|file| file.uid());
    let user = Authority::of(&folder).and_then(|own| own.users.get(1).copied());
    owner.ok().zip(user).is_some_and(|(owner, user)| owner != user)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "Name:\tdaemon\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0 4 \n\
        CapPrm:\t000001ffffffffff\nSeccomp:\t0\nSeccomp_filters:\t0\n";

    fn authority(uids: &str, groups: &str, permitted: &str, filters: u32) -> Authority {
        let text = format!(
            "Uid:\t{uids}\nGid:\t7 7 7 \
             7\nGroups:\t{groups}\nCapPrm:\t{permitted}\nSeccomp_filters:\t{filters}\n"
        );
        Authority { root: Some((1, 2)), ..Authority::parse(&text).expect("a status") }
    }

    #[test]
    fn a_status_is_read() {
        let root = Authority::parse(ROOT).expect("a status");
        assert_eq!((root.users, root.groups), (vec![0; 4], vec![0, 0, 0, 0, 0, 4]));
        assert!(root.permitted == 0x1ff_ffff_ffff && root.filters == 0);
        assert_eq!(Authority::parse("Uid:\t0\n"), None);
    }

    #[test]
    fn what_was_given_up_for_good_is_excess() {
        let sidecar = authority("0 0 0 0", "7 4", "0", 0);
        let of = |program: &Authority| excess_over(program, &sidecar);
        assert_eq!(of(&authority("0 0 0 0", "4 7 9", "0", 0)), None);
        assert_eq!(of(&authority("9 9 9 9", "4 7", "0", 0)), Some("its user"));
        assert_eq!(of(&authority("9 9 0 9", "4", "0", 0)), None, "it can be root again");
        assert_eq!(of(&authority("9 9 9 9", "", "c0", 0)), None, "it can be anybody");
        assert_eq!(of(&authority("0 0 0 0", "", "0", 0)), Some("a group"));
        assert_eq!(of(&authority("0 0 0 0", "4", "0", 1)), Some("system calls (a seccomp filter)"));
    }

    #[test]
    fn what_may_not_be_asked_is_taken_for_equal() {
        let sidecar = authority("0 0 0 0", "", "0", 0);
        let of = |program: &Authority| excess_over(program, &sidecar);
        assert_eq!(of(&Authority { root: None, ..sidecar.clone() }), None);
        assert_eq!(of(&Authority { user_namespace: Some((4, 5)), ..sidecar.clone() }), None);
        let elsewhere = Authority { root: Some((1, 3)), ..sidecar.clone() };
        assert_eq!(of(&elsewhere), Some("its root directory"));
        assert_eq!(of(&Authority { permitted: CAP_SYS_CHROOT, ..elsewhere }), None);
    }

    #[test]
    fn a_process_has_no_more_than_itself() {
        let own = rustix::process::getpid();
        assert_eq!(excess(own, own), None);
    }
}
