//! Connections to blades, opened for sidecars: a sidecar has the root directory, the namespaces and
//! the user of its program, but the blade is where this process sees it. And with a certificate
//! only this process has its key: handshakes of TLS are made here, for sidecars and for the
//! preloaded library.
//!
//! The program can write to its sidecar's memory, so it can ask for a connection, too. It gets one
//! only to a blade that was named by a user who may write to the run's folder: not by the board,
//! which the program may write to.

use std::io::{Error, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use farpool_handshake::Dialer;
use farpool_identity::Credentials;
use farpool_inject::Pid;
use farpool_wire::Address;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};

use crate::RunError;
use crate::say::say;
use crate::talk::receive;
use crate::uffd_guardian::is_of_the_run;

/// The blades of a run, in its folder: one address a line. Blades that have left stay listed.
const NAMES: &str = "blades";
/// Name of the socket in a run's folder on which the preloaded library asks for connections.
pub(crate) const DIAL_SOCKET: &str = "dial.sock";
/// A process that has connected asks at once: one that was stopped in between holds up all others.
const ASK_TIME: Duration = Duration::from_secs(10);

/// How the connections of a run are opened.
#[derive(Clone, Debug)]
pub(crate) struct Dialing {
    folder: PathBuf,
    /// Set with a certificate: TCP is then used in no other way.
    secure: Option<Arc<Dialer>>,
}

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

impl Dialing {
    /// For the run in this folder.
    pub(crate) fn new(
        folder: &Path,
        credentials: Option<&Arc<Credentials>>,
    ) -> Result<Dialing, RunError> {
        let secure = credentials.map(|credentials| Dialer::new(Arc::clone(credentials), tell));
        let secure = secure.transpose().map_err(RunError::Certificate)?;
        Ok(Dialing { folder: folder.to_owned(), secure })
    }

    /// Opens connections for a sidecar until it ends, in a thread of its own so that none holds up
    /// the keeper. Returns the socket for the sidecar's requests.
    pub(crate) fn serve(&self, sidecar: Pid) -> Result<OwnedFd, Error> {
        let flags = SocketFlags::CLOEXEC;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let own = self.clone();
        let thread = std::thread::Builder::new().name("farpool-dial".into());
        thread.spawn(move || own.answer_all(&here, sidecar))?;
        Ok(there)
    }

    fn answer_all(&self, requests: &OwnedFd, sidecar: Pid) {
        loop {
            match receive(requests, RecvFlags::empty()) {
                Ok((name, _)) if name.is_empty() => return,
                Ok((name, Some(asker))) => self.answer(asker, &name, user_of(sidecar)),
                // The sidecar does not wait for an answer.
                Ok((_, None)) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Opens connections over TCP for processes with the preloaded library, as long as this process
    /// lives. Without a certificate they open their own.
    pub(crate) fn listen(&self) -> Result<(), RunError> {
        if self.secure.is_none() {
            return Ok(());
        }
        let path = self.folder.join(DIAL_SOCKET);
        let own = self.clone();
        let accept = move |listener: UnixListener| {
            for stream in listener.incoming().flatten() {
                own.answer_one(&stream);
            }
        };
        let thread = std::thread::Builder::new().name("farpool-dial".into());
        let listening = UnixListener::bind(&path);
        let spawned = listening.and_then(|listener| thread.spawn(move || accept(listener)));
        spawned.map(drop).map_err(|error| RunError::Directory { path, error })
    }

    fn answer_one(&self, stream: &UnixStream) {
        if stream.set_read_timeout(Some(ASK_TIME)).is_err() || !is_of_the_run(stream) {
            return;
        }
        // One that sends nonsense waits in vain.
        if let Ok((name, Some(asker))) = receive(stream, RecvFlags::empty()) {
            self.answer(asker, &name, None);
        }
    }

    fn answer(&self, asker: OwnedFd, name: &str, user: Option<u32>) {
        match (meant(&self.folder, name), &self.secure) {
            (Some(Address::Tcp(address)), Some(secure)) => secure.answer(asker, address),
            (address, _) => farpool_fabric::answer(&asker, address.as_ref(), user),
        }
    }
}

/// Tells the user what happens to certificates and blades.
pub(crate) fn tell(news: &str) {
    say!("farpool: {news}");
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
