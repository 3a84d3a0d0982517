//! Restores: Cloud Hypervisor waits in `receive-migration` with `memory_mode=postcopy`, and we
//! connect and hand it the snapshot, with memory that is empty at first.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::Scope;
use std::time::Duration;

use farpool_kernel::{lock, memfd_of};
use rustix::io::Errno;

use super::faults::Faults;
use super::{GuestError, Options, Snapshot, pause};
use crate::socket::{Peer, SocketError, Stop, Talk, connect_to, wait};
use crate::wire::cloud_hypervisor::{Command, FAULT_ROLE, HEAD_BYTES, Memory, Request, Response};

/// How long the monitor may take for an answer: it makes the guest's devices meanwhile, and its
/// own page faults are answered. After that the restore has failed.
const ANSWER_TIME: Duration = Duration::from_secs(120);

/// A socket's file: one that is made anew at the same path is another one.
type SocketFile = (u64, u64, i64, i64);

/// Restores a guest whenever a monitor waits at `target`, until it is time to stop. Each socket
/// there is tried once: a monitor that refuses is not asked again.
pub(super) fn all(
    target: &Path,
    newest: &Mutex<Option<Arc<Snapshot>>>,
    options: Options,
    stop: &Stop,
    tell: &(dyn Fn(&str) + Sync),
) {
    let mut tried = None;
    std::thread::scope(|scope| {
        while !stop.is_now() {
            let snapshot = lock(newest).clone();
            let file = socket_file(target).filter(|file| tried != Some(*file));
            if let (Some(snapshot), Some(file)) = (snapshot, file)
                && let Ok(socket) = connect_to(target)
            {
                tried = Some(file);
                let guest = Restored { snapshot, target, options, stop, tell };
                if let Err(error) = guest.restore(&socket, scope) {
                    tell(&format!("no guest was restored: {error}"));
                }
            }
            pause(stop);
        }
    });
}

fn socket_file(path: &Path) -> Option<SocketFile> {
    let status = rustix::fs::stat(path).ok()?;
    let changed = (status.st_ctime, i64::try_from(status.st_ctime_nsec).ok()?);
    Some((status.st_dev, status.st_ino, changed.0, changed.1))
}

/// What a guest is restored from, and where.
struct Restored<'a> {
    snapshot: Arc<Snapshot>,
    target: &'a Path,
    options: Options,
    stop: &'a Stop,
    tell: &'a (dyn Fn(&str) + Sync),
}

impl<'a> Restored<'a> {
    /// Hands the snapshot over. The guest's faults are answered by a thread of its own, which goes
    /// on until the guest ends.
    fn restore<'scope>(
        self,
        socket: &OwnedFd,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(), GuestError>
    where
        'a: 'scope,
    {
        let talk = Talk { stop: self.stop, patience: Some(ANSWER_TIME) };
        let peer = Peer::of(socket).map_err(GuestError::NoPeer)?;
        let files = empty_files(&self.snapshot.parts.memory)?;
        ask(&talk, socket, Command::Start, &[])?;
        for (slot, file) in &files {
            send_memory(&talk, socket, *slot, file)?;
        }
        ask(&talk, socket, Command::Config, &self.snapshot.parts.config)?;
        let faults = Faults::new(Arc::clone(&self.snapshot), files)?;
        let fault_socket = connect_to(self.target).map_err(GuestError::FaultConnection)?;
        talk.send(&fault_socket, &FAULT_ROLE, None)?;
        let name = peer.to_string();
        let (snapshot, options, tell) = (Arc::clone(&self.snapshot), self.options, self.tell);
        let stop = self.stop;
        scope.spawn(move || answer_faults(faults, &fault_socket, &peer, options, stop, tell));
        ask(&talk, socket, Command::State, &snapshot.parts.state)?;
        let runs = snapshot.parts.runs || options.resume;
        let end = if runs { Command::Complete } else { Command::CompletePaused };
        ask(&talk, socket, end, &[])?;
        tell(&format!("{name} has a guest restored, {}", if runs { "running" } else { "paused" }));
        Ok(())
    }
}

/// Answers a guest's faults to its end, and says what became of it.
fn answer_faults(
    mut faults: Faults,
    socket: &OwnedFd,
    peer: &Peer,
    options: Options,
    stop: &Stop,
    tell: &(dyn Fn(&str) + Sync),
) {
    match faults.serve(socket, options, stop) {
        Ok(()) => tell(&format!("{peer} needs no more of its guest's memory")),
        Err(error) if peer.is_gone() => tell(&format!("{peer} has ended: {error}")),
        Err(error) => match peer.kill() {
            Ok(()) => {
                tell(&format!("{peer} is killed, for its guest must not read zeros: {error}"));
                wait(&[peer.as_fd()], None);
            }
            Err(errno) => tell(&format!(
                "{peer} cannot be killed ({errno}), and its guest waits for ever: {error}; kill it"
            )),
        },
    }
}

/// Empty memory for each slot, as large as its part of the slot's file reaches.
fn empty_files(memory: &Memory) -> Result<Vec<(u32, File)>, GuestError> {
    let empty = |slot: u32, bytes: u64| -> Result<(u32, File), Errno> {
        Ok((slot, File::from(memfd_of(&format!("farpool-vmm-{slot}"), bytes)?)))
    };
    let files = memory.mappings().map(|(it, _)| empty(it.slot, it.file_offset + it.size));
    files.collect::<Result<_, _>>().map_err(|error| GuestError::Memory(error.into()))
}

fn send_memory(
    talk: &Talk<'_>,
    socket: &OwnedFd,
    slot: u32,
    file: &File,
) -> Result<(), GuestError> {
    let (command, payload) = (Command::MemoryFd, slot.to_le_bytes());
    talk.send(socket, &Request { command, length: payload.len() as u64 }.encode(), None)?;
    talk.send(socket, &payload, Some(file.as_fd()))?;
    expect_done(talk, socket, command)
}

/// Sends a request with its payload, and waits until it is done.
fn ask(
    talk: &Talk<'_>,
    socket: &OwnedFd,
    command: Command,
    payload: &[u8],
) -> Result<(), GuestError> {
    talk.send(socket, &Request { command, length: payload.len() as u64 }.encode(), None)?;
    talk.send(socket, payload, None)?;
    expect_done(talk, socket, command)
}

fn expect_done(talk: &Talk<'_>, socket: &OwnedFd, command: Command) -> Result<(), GuestError> {
    let mut head = [0; HEAD_BYTES];
    if !talk.read_all(socket, &mut head, &mut Vec::new())? {
        return Err(SocketError::Closed.into());
    }
    Ok(Response::decode(&head)?.require_done(command)?)
}
