//! What a program on far memory needs, checked before it starts: a lack found later ends the
//! program in the middle of its work, when it first needs far memory.

use std::sync::Arc;
use std::time::Duration;

use farpool_board::Board;
use farpool_fabric::{Address, ClientId, Control, DescriptorSet, Session, Spare};
use farpool_handshake::Dialer;
use farpool_kernel::fill_random;
use farpool_uffd::{OpenError, Uffd, features};
use farpool_wire::{Purpose, Request};
use rustix::process::{Resource, Rlimit, getrlimit};

use crate::dialing::tell;
use crate::{RunError, RunOptions};

/// A blade that does not answer within this time is not accepted; a busy one answers in
/// milliseconds.
const BLADE_WAIT: Duration = Duration::from_secs(5);
/// Descriptors of the keeper's own: standard streams, board, sockets, signals, the blade's listener
/// and threads. 18 were seen, at two threads.
const KEEPER_DESCRIPTORS: u64 = 32;
/// Descriptors that one process of the tree takes up in the keeper besides its connections to a
/// private blade: its userfaultfd, and its far memory there.
const PROCESS_DESCRIPTORS: u64 = 4;
/// Descriptors of a program and of the pager in it, without those for the blades. 10 were enough
/// for Python.
const PROGRAM_DESCRIPTORS: u64 = 20;
/// Connections that a process has to each blade besides one for each of its fault threads:
/// eviction, steward, mover, control. At two threads and two blades 18 descriptors were enough and
/// 16 were not.
const OTHER_CONNECTIONS: u64 = 6;
/// Address space that the pager takes besides the program's own. 96 MiB of Python needed 785 MiB
/// with it and less than 150 MiB without, at limits from 32 MiB to 4 GiB and with two and eight
/// threads.
pub const PAGER_ADDRESS_BYTES: u64 = 656 << 20;

/// A run's board is a file of this size.
const BOARD_BYTES: u64 = Board::BYTES as u64;

/// Remedy for a user who may not open /dev/userfaultfd.
pub(crate) const DEVICE_REMEDY: &str = "let a group of yours open it: sudo chgrp GROUP \
     /dev/userfaultfd && sudo chmod 660 /dev/userfaultfd (for good: a udev rule, \
     KERNEL==\"userfaultfd\", GROUP=\"GROUP\", MODE=\"0660\"); in a container put the device into \
     its specification with read and write, and allow ioctl on it in the seccomp profile";

/// Why this process cannot have a userfaultfd as the pager needs it.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultfdLack {
    #[error("no permission for /dev/userfaultfd ({0})")]
    Permission(std::io::Error),
    #[error("there is no /dev/userfaultfd, and no permission for userfaultfd(2)")]
    NoDevice,
    #[error("this kernel has no userfaultfd")]
    NoKernel,
    #[error("the kernel's userfaultfd lacks {0}")]
    Lacks(String),
    #[error("userfaultfd does not work: {0}")]
    Broken(OpenError),
}

impl UserfaultfdLack {
    /// What the user can do about it, with the means that every system has.
    pub fn remedy(&self) -> &'static str {
        match self {
            UserfaultfdLack::Permission(_) => DEVICE_REMEDY,
            UserfaultfdLack::NoDevice => {
                "in a container put the device /dev/userfaultfd into its specification (--device \
                 /dev/userfaultfd) and allow userfaultfd in the seccomp profile; elsewhere run as \
                 root, or use a kernel from Linux 6.1 on"
            }
            UserfaultfdLack::NoKernel => {
                "use a kernel built with CONFIG_USERFAULTFD; in a container the seccomp profile \
                 may hide it"
            }
            UserfaultfdLack::Lacks(_) => "use Linux 6.8 or newer",
            UserfaultfdLack::Broken(_) => "farpool doctor says what this machine can do",
        }
    }

    fn of(error: OpenError) -> Self {
        match error {
            OpenError::Lacks { missing } => UserfaultfdLack::Lacks(missing),
            OpenError::Denied { device, call } => match device.kind() {
                std::io::ErrorKind::NotFound if call.raw_os_error() == Some(libc::ENOSYS) => {
                    UserfaultfdLack::NoKernel
                }
                std::io::ErrorKind::NotFound => UserfaultfdLack::NoDevice,
                _ => UserfaultfdLack::Permission(device),
            },
            broken @ OpenError::Handshake(_) => UserfaultfdLack::Broken(broken),
        }
    }
}

/// The features of userfaultfd that this process may use.
pub fn userfaultfd_features() -> Result<u64, UserfaultfdLack> {
    farpool_uffd::probe_features().map_err(UserfaultfdLack::of)
}

/// Refuses a limit that this process would exceed itself, which would end it (SIGXFSZ).
/// `blade_bytes`: the size of a private blade.
pub(crate) fn check_file_size(blade_bytes: Option<u64>) -> Result<(), RunError> {
    let has = getrlimit(Resource::Fsize).current;
    check_file_size_of(has, blade_bytes)
}

fn check_file_size_of(has: Option<u64>, blade_bytes: Option<u64>) -> Result<(), RunError> {
    let Some(has) = has else { return Ok(()) };
    if has < BOARD_BYTES {
        return Err(RunError::SmallFiles { has, needs: BOARD_BYTES });
    }
    match blade_bytes {
        Some(needs) if has < needs => Err(RunError::SmallBladeFiles { has, needs }),
        _ => Ok(()),
    }
}

/// Checks what can be checked before the blades are. `descriptors` is the limit for the program.
pub(crate) fn check_machine(options: &RunOptions, descriptors: &Rlimit) -> Result<(), RunError> {
    let wanted =
        features::MOVE | features::POISON | features::THREAD_ID | features::PAGEFAULT_FLAG_WP;
    Uffd::open(wanted, true).map_err(|error| RunError::Userfaultfd(UserfaultfdLack::of(error)))?;
    check_descriptors(options, descriptors.current, getrlimit(Resource::Nofile).current)?;
    check_address_space(getrlimit(Resource::As).current)
}

/// None is unlimited.
fn check_descriptors(
    options: &RunOptions,
    program: Option<u64>,
    keeper: Option<u64>,
) -> Result<(), RunError> {
    let connections = fault_threads(options) + OTHER_CONNECTIONS;
    let blades = options.blades.len() as u64;
    let served = if blades == 0 { connections } else { 0 };
    let keeper_needs = KEEPER_DESCRIPTORS + PROCESS_DESCRIPTORS + served;
    let program_needs = PROGRAM_DESCRIPTORS + blades.max(1) * connections;
    for (whose, has, needs) in
        [("the keeper", keeper, keeper_needs), ("the program", program, program_needs)]
    {
        if let Some(has) = has.filter(|has| *has < needs) {
            return Err(RunError::Descriptors { whose, has, needs });
        }
    }
    Ok(())
}

fn fault_threads(options: &RunOptions) -> u64 {
    match options.pager_threads {
        0 => std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64),
        threads => threads.into(),
    }
}

fn check_address_space(limit_bytes: Option<u64>) -> Result<(), RunError> {
    match limit_bytes {
        Some(has) if has <= PAGER_ADDRESS_BYTES => Err(RunError::AddressSpace { has }),
        _ => Ok(()),
    }
}

/// Asks each blade whether it accepts this client.
pub(crate) fn check_blades(options: &RunOptions) -> Result<(), RunError> {
    options.blades.iter().try_for_each(|address| check_blade(options, address))
}

fn check_blade(options: &RunOptions, address: &str) -> Result<(), RunError> {
    let refused = |reason: String| RunError::Address { address: address.to_owned(), reason };
    let parsed: Address = address.parse().map_err(|error| {
        let error: farpool_fabric::AddressError = error;
        refused(error.to_string())
    })?;
    let dialer = options.credentials.clone().map(|it| Dialer::new(it, tell)).transpose();
    let dialer = dialer.map_err(RunError::Certificate)?;
    let session = Session {
        address: parsed,
        client: fresh_client()?,
        client_name: "farpool run".into(),
        grant: None,
        limits: None,
        purpose: Purpose::Client,
        quota_bytes: 0,
        sharing_group: None,
        deadline: BLADE_WAIT.min(options.deadline),
        spare: Spare::default(),
        allow_remote_tcp: options.allow_remote_tcp,
        secures_tcp: dialer.is_some(),
        asks: dialer.map(|dialer| dialer as _),
        time: farpool_fabric::Time::KERNEL,
        descriptors: Arc::new(DescriptorSet::default()),
        met: farpool_fabric::Met::default(),
    };
    let mut control = Control::connect(Arc::new(session), 0).map_err(RunError::BladeCheck)?;
    // The blade accepts us; if it misses our goodbye, the lease ends the client.
    let _ = control.call(&Request::Goodbye);
    Ok(())
}

fn fresh_client() -> Result<ClientId, RunError> {
    let mut bytes = [0_u8; 16];
    fill_random(&mut bytes).map_err(|error| RunError::Kernel {
        what: "the kernel gave no random numbers",
        error: error.into(),
    })?;
    Ok(ClientId(u128::from_le_bytes(bytes)))
}

/// Most addresses that a sidecar maps at its start, in MiB; most of them are never touched.
pub(crate) const ADDRESS_ROOM_MIB: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LocalLimit;

    fn options(blades: usize, threads: u32) -> RunOptions {
        let mut options = RunOptions::new("true", LocalLimit::Bytes(32 << 20));
        options.blades = (0..blades).map(|port| format!("tcp://127.0.0.1:{}", port + 1)).collect();
        options.pager_threads = threads;
        options
    }

    #[test]
    fn few_descriptors_are_refused_with_what_is_needed() {
        let few = check_descriptors(&options(0, 2), Some(16), Some(16)).expect_err("16");
        assert!(few.to_string().contains("the keeper"), "{few}");
        assert!(few.to_string().contains("ulimit -n 44"), "{few}");
        let program = check_descriptors(&options(2, 2), Some(35), None).expect_err("35");
        assert!(program.to_string().contains("the program"), "{program}");
        for (blades, threads) in [(0, 2), (8, 2), (1, 64)] {
            check_descriptors(&options(blades, threads), Some(1024), Some(1024)).expect("usual");
        }
        check_descriptors(&options(8, 256), None, None).expect("no limit");
    }

    #[test]
    fn small_files_are_refused_with_what_is_needed() {
        let said =
            |has, blade| check_file_size_of(Some(has), blade).expect_err("small").to_string();
        assert!(said(1024, Some(1 << 30)).contains("ulimit -f"));
        let blade = said(BOARD_BYTES, Some(1 << 30));
        assert!(blade.contains("--quota") && blade.contains("--blade"), "{blade}");
        check_file_size_of(Some(BOARD_BYTES), None).expect("no private blade");
        check_file_size_of(Some(1 << 30), Some(1 << 30)).expect("it fits");
        check_file_size_of(None, Some(u64::MAX)).expect("no limit");
    }

    #[test]
    fn little_address_space_is_refused_with_what_is_needed() {
        let error = check_address_space(Some(200 << 20)).expect_err("200 MiB").to_string();
        assert!(error.contains("656 MiB") && error.contains("ulimit -v"), "{error}");
        check_address_space(Some(2 << 30)).expect("2 GiB are enough");
        check_address_space(None).expect("no limit");
    }

    #[test]
    fn a_lack_of_userfaultfd_is_told_apart() {
        let of = |device, call| {
            let error = std::io::Error::from_raw_os_error;
            UserfaultfdLack::of(OpenError::Denied { device: error(device), call: error(call) })
        };
        let lack = of(libc::EACCES, libc::EPERM);
        assert!(matches!(lack, UserfaultfdLack::Permission(_)));
        assert!(lack.to_string().contains("no permission for /dev/userfaultfd"));
        assert!(lack.remedy().contains("chgrp"));
        assert!(matches!(of(libc::ENOENT, libc::EPERM), UserfaultfdLack::NoDevice));
        assert!(matches!(of(libc::ENOENT, libc::ENOSYS), UserfaultfdLack::NoKernel));
    }
}
