//! Connections to blades, opened for sidecars: a sidecar has the root directory, the namespaces and
//! the user of its program, but the blade is where this process sees it.
//!
//! The program can write to its sidecar's memory, so it can ask for a connection, too. It gets one
//! only to a blade that was named by a user who may write to the run's folder: not by the board,
//! which the program may write to.

use std::io::{Error, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use farpool_inject::Pid;
use farpool_wire::Address;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};

use crate::RunError;
use crate::talk::receive;

/// The blades of a run, in its folder: one address a line. Blades that have left stay listed.
const NAMES: &str = "blades";

/// Names a blade that programs of the run may be connected to.
pub(crate) fn name(folder: &Path, address: &str) -> Result<(), RunError> {
    let path = folder.join(NAMES);
    let mut options = std::fs::File::options();
    options.append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let written =
        options.open(&path).and_then(|mut file| file.write_all(format!("{address}\n").as_bytes()));
    written.map_err(|error| RunError::Directory { path, error })
}

/// The blade that a request names, if it is one of the run's.
fn meant(folder: &Path, name: &str) -> Option<Address> {
    let asked: Address = name.parse().ok()?;
    let names = std::fs::read_to_string(folder.join(NAMES)).ok()?;
    names.lines().filter_map(|name| name.parse().ok()).find(|address| *address == asked)
}

/// Opens connections for a sidecar until it ends, in a thread of its own so that none holds up the
/// keeper. Returns the socket for the sidecar's requests.
pub(crate) fn serve(sidecar: Pid, folder: &Path) -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC;
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let folder = folder.to_owned();
    let thread = std::thread::Builder::new().name("farpool-dial".into());
    thread.spawn(move || answer_all(&here, sidecar, &folder))?;
    Ok(there)
}

fn answer_all(requests: &OwnedFd, sidecar: Pid, folder: &Path) {
    loop {
        match receive(requests, RecvFlags::empty()) {
            Ok((name, _)) if name.is_empty() => return,
            Ok((name, Some(asker))) => {
                farpool_fabric::answer(&asker, meant(folder, &name).as_ref(), user_of(sidecar));
            }
            // The sidecar does not wait for an answer.
            Ok((_, None)) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// A user whose blades the program may use besides root's and this process's: its own.
fn user_of(sidecar: Pid) -> Option<u32> {
    let folder = PathBuf::from(format!("/proc/{}", sidecar.as_raw_nonzero()));
    std::fs::metadata(folder).ok().map(|folder| folder.uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blades_that_were_named_are_meant() {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path();
        assert_eq!(meant(path, "unix:///run/a"), None);
        name(path, "unix:///run/a").expect("a name");
        name(path, "tcp://127.0.0.1:7").expect("a name");
        assert_eq!(meant(path, "unix:///run/a"), Some(Address::Unix("/run/a".into())));
        assert!(meant(path, "tcp://127.0.0.1:7").is_some());
        for other in ["unix:///run/b", "tcp://127.0.0.1:8", "shm:///run/a", "", "no address"] {
            assert_eq!(meant(path, other), None, "{other}");
        }
    }
}
