//! Why a process has no sidecar, and whether another try is worthwhile.

use std::io::Error;

use farpool_inject::InjectError;
use farpool_uffd::OpenError;

use crate::door::DoorLack;
use crate::needs::ADDRESS_ROOM_MIB;

/// Why a process has no sidecar.
#[derive(Debug, thiserror::Error)]
pub enum SidecarError {
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error("{0}; {remedy}", remedy = .0.remedy())]
    Means(DoorLack),
    #[error(transparent)]
    Userfaultfd(#[from] OpenError),
    #[error(
        "the kernel reports the forks of process {pid} only with CAP_SYS_PTRACE: {error}; run as \
         root, or setcap cap_sys_ptrace=p on the farpool binary"
    )]
    NoRight { pid: i32, error: OpenError },
    #[error("the sidecar of process {pid}: {reason}")]
    Refused { pid: i32, reason: String },
    #[error(
        "process {pid} is served by its parent's sidecar, which does not hand it over yet: {reason}"
    )]
    NotYet { pid: i32, reason: String },
    #[error("the sidecar of process {pid} does not answer: {error}")]
    Silent { pid: i32, error: Error },
    #[error(
        "process {pid} may map {room} MiB more (RLIMIT_AS), and its sidecar could take \
         {ADDRESS_ROOM_MIB} MiB of that; raise its limit (ulimit -v)"
    )]
    NoAddresses { pid: i32, room: u64 },
    #[error(
        "process {pid} may have {room} MiB more of private memory (RLIMIT_DATA), and its sidecar \
         could take \
         {ADDRESS_ROOM_MIB} MiB of that; raise its limit (ulimit -d)"
    )]
    NoData { pid: i32, room: u64 },
    #[error(
        "process {pid} may use {seconds} s of processor time (RLIMIT_CPU), its sidecar as much, \
         and with the sidecar it \
         would end early; lift its limit (ulimit -t unlimited), or give farpool CAP_SYS_RESOURCE"
    )]
    LittleTime { pid: i32, seconds: u64 },
    #[error(
        "process {pid} may write to files of {bytes} bytes (RLIMIT_FSIZE), and its sidecar, \
         which writes to the blade's \
         memory file, too; lift its limit (ulimit -f unlimited), give farpool CAP_SYS_RESOURCE, \
         or use a blade on a \
         socket (--blade unix://...)"
    )]
    SmallFiles { pid: i32, bytes: u64 },
    #[error("process {pid} has a pager of another farpool already, whose limit it is held to")]
    AlreadyPaged { pid: u32 },
    #[error("{what}: {error}")]
    Kernel { what: &'static str, error: Error },
}

impl SidecarError {
    /// True if the reason may pass at any moment, and a try costs the process hardly anything.
    pub(crate) fn may_pass(&self) -> bool {
        use InjectError::{AlreadyTraced, Busy, Died, NoProcess, Slow};
        matches!(
            self,
            SidecarError::NotYet { .. }
                | SidecarError::Inject(
                    AlreadyTraced { .. }
                        | Busy { .. }
                        | Died { .. }
                        | NoProcess { .. }
                        | Slow { .. }
                )
        )
    }

    /// True if another try would end the same way.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            SidecarError::Inject(error) => !matches!(
                error,
                InjectError::Busy { .. }
                    | InjectError::Slow { .. }
                    | InjectError::Died { .. }
                    | InjectError::NoProcess { .. }
            ),
            SidecarError::Silent { .. }
            | SidecarError::Refused { .. }
            | SidecarError::NotYet { .. } => false,
            _ => true,
        }
    }
}
