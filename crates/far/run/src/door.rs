//! Which door a run gets: a sidecar, since it serves every program, wherever this process can do
//! all that a sidecar needs; else the preloaded library. What is needed is tried, not guessed.

use std::fs::File;
use std::io::Error;
use std::os::fd::{AsFd, OwnedFd};

use farpool_inject::{Image, InjectError, TrialError};
use farpool_uffd::{OpenError, Uffd, features};
use rustix::process::{Resource, getrlimit};

use crate::needs::{ADDRESS_ROOM_MIB, DEVICE_REMEDY};
use crate::rights;

/// How the pager gets into the program's processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Door {
    /// The sidecar where it can work, else the preloaded library.
    #[default]
    Auto,
    /// A library that overrides the C library's memory calls.
    Preload,
    /// A process of its own in the program's address space, put into any process whose memory
    /// begins to count.
    Sidecar,
}

const DEVICE: &str = "/dev/userfaultfd";
const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// Why no sidecar can be put into a program from here.
#[derive(Debug, thiserror::Error)]
pub enum DoorLack {
    #[error("no permission for {DEVICE} ({0})")]
    Device(Error),
    #[error("there is no {DEVICE}")]
    NoDevice,
    #[error("{DEVICE} makes no userfaultfd ({0})")]
    Make(Error),
    #[error("no CAP_SYS_PTRACE, without which the kernel reports no forks")]
    NoForkEvents,
    #[error("{0}")]
    Handshake(OpenError),
    #[error("no process may be traced here{}", scope_in_words(.0.as_deref()))]
    Tracing(Option<String>),
    #[error("{0}")]
    Trial(TrialError),
    #[error("{0}")]
    Image(InjectError),
    #[error("its {ADDRESS_ROOM_MIB} MiB of addresses do not fit the limit of {} MiB", .0 >> 20)]
    Addresses(u64),
}

impl DoorLack {
    /// What the user can do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            DoorLack::Device(_) | DoorLack::Make(_) => DEVICE_REMEDY,
            DoorLack::NoDevice => {
                "in a container put the device /dev/userfaultfd into its specification \
                 (--device /dev/userfaultfd); elsewhere use Linux 6.1 or newer"
            }
            DoorLack::NoForkEvents => {
                "run as root (in a container with --cap-add SYS_PTRACE), or sudo setcap \
                 cap_sys_ptrace=p on the farpool binary (docs/operators/security.md says what \
                 that gives away)"
            }
            DoorLack::Handshake(_) => "use Linux 6.8 or newer",
            DoorLack::Tracing(_) => {
                "allow it to a process's ancestors (sudo sysctl kernel.yama.ptrace_scope=1; 3 can \
                 only be taken back by a boot); in a container allow ptrace in the seccomp profile"
            }
            DoorLack::Trial(TrialError::Trace(InjectError::AlreadyTraced { .. })) => {
                "have the debugger or strace follow the program, not farpool and all it starts"
            }
            DoorLack::Trial(_) => {
                "in a container allow ptrace, pidfd_getfd and kcmp in its seccomp profile \
                 (--cap-add SYS_PTRACE)"
            }
            DoorLack::Image(_) => "allow executable memory files: sudo sysctl vm.memfd_noexec=1",
            DoorLack::Addresses(_) => {
                "raise or lift the limit of the address space: ulimit -v unlimited"
            }
        }
    }
}

fn scope_in_words(scope: Option<&str>) -> String {
    scope.map_or_else(String::new, |scope| format!(" (kernel.yama.ptrace_scope is {scope})"))
}

/// What every sidecar of a run starts from.
#[derive(Debug)]
pub(crate) struct Means {
    pub image: Image,
    pub device: OwnedFd,
}

impl Means {
    /// Opens what is needed.
    pub fn open() -> Result<Means, DoorLack> {
        let image = Image::new(farpool_sidecar_image::SIDECAR_ELF).map_err(DoorLack::Image)?;
        let device = File::options().read(true).write(true).open(DEVICE);
        let device = device.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => DoorLack::NoDevice,
            _ => DoorLack::Device(error),
        })?;
        Ok(Means { image, device: device.into() })
    }

    /// Opens what is needed, and tries everything that this process will have to do for a sidecar.
    pub fn tried() -> Result<Means, DoorLack> {
        let means = Means::open()?;
        try_handshake(&means.device)?;
        try_addresses(getrlimit(Resource::As).current)?;
        farpool_inject::try_tracing().map_err(|error| match error {
            error if error.is_of_tracing() => {
                let scope = std::fs::read_to_string(YAMA).ok();
                DoorLack::Tracing(scope.map(|scope| scope.trim().to_owned()))
            }
            error => DoorLack::Trial(error),
        })?;
        Ok(means)
    }
}

/// The message when `--door auto` has to do without sidecars.
pub(crate) fn note(lack: &DoorLack) -> String {
    format!(
        "the preloaded library is used, which serves no static programs, because a sidecar cannot \
         work here: {lack}; {}. (--door preload suppresses this message)",
        lack.remedy()
    )
}

/// Why `farpool run` would not use sidecars here. Ok if it would.
pub fn sidecar_lack() -> Result<(), DoorLack> {
    Means::tried().map(drop)
}

fn try_handshake(device: &OwnedFd) -> Result<(), DoorLack> {
    let made = Uffd::make(device.as_fd(), true).map_err(DoorLack::Make)?;
    match rights::shake_hands(made, features::PAGER | features::EVENTS) {
        Ok(_) => Ok(()),
        Err(OpenError::Handshake(error)) if error.raw_os_error() == Some(libc::EPERM) => {
            Err(DoorLack::NoForkEvents)
        }
        Err(error) => Err(DoorLack::Handshake(error)),
    }
}

/// The program inherits this process's limit. One that raises or lowers its own is checked when it
/// is entered.
fn try_addresses(limit_bytes: Option<u64>) -> Result<(), DoorLack> {
    match limit_bytes {
        Some(has) if has >> 20 <= ADDRESS_ROOM_MIB => Err(DoorLack::Addresses(has)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_is_said_in_one_line_with_its_remedy() {
        let denied = || Error::from_raw_os_error(libc::EACCES);
        let lacks = [
            (DoorLack::Device(denied()), "chgrp"),
            (DoorLack::NoDevice, "--device"),
            (DoorLack::NoForkEvents, "setcap cap_sys_ptrace=p"),
            (DoorLack::Tracing(Some("3".into())), "ptrace_scope is 3"),
            (DoorLack::Addresses(1 << 30), "ulimit -v"),
        ];
        for (lack, word) in lacks {
            let note = note(&lack);
            assert!(note.contains(word) && !note.contains('\n'), "{note}");
        }
    }

    #[test]
    fn a_limit_that_a_sidecar_does_not_fit_is_a_lack() {
        assert!(try_addresses(Some(1 << 30)).is_err());
        assert!(try_addresses(Some(4 << 30)).is_ok());
        assert!(try_addresses(None).is_ok());
    }
}
