//! A hand-off: Cloud Hypervisor is told `send-migration` with `local=on` to our socket.
//!
//! Invariant: the end is answered when all memory is stored, and not before: the sender's VM ends
//! with the answer, and nobody else has its memory.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use farpool_units::exactly;

use super::{GuestError, Snapshot};
use crate::socket::{SocketError, Stop, Talk};
use crate::store::{Image, Store};
use crate::wire::cloud_hypervisor::{Command, HEAD_BYTES, Memory, Request, Response};
use crate::wire::hand_off::{HandOff, Step};

/// How long the sender may be silent between two requests: it pauses its guest and saves its
/// devices meanwhile. After that the hand-off has failed, and the sender goes on with its guest.
const REQUEST_TIME: Duration = Duration::from_secs(60);
/// A payload is read in pieces of this size, so that its length alone takes no memory.
const PIECE_BYTES: usize = 64 << 10;

/// Takes one hand-off, and answers its sender.
pub(super) fn take(
    socket: &OwnedFd,
    store: &Arc<Store>,
    stop: &Stop,
    watch: &(dyn Fn(u64) + Sync),
) -> Result<Snapshot, GuestError> {
    let talk = Talk { stop, patience: Some(REQUEST_TIME) };
    let snapshot = receive(&talk, socket, store, watch);
    let answer = match &snapshot {
        Ok(_) | Err(GuestError::Abandoned) => Response::DONE,
        Err(_) => Response::Error,
    };
    // A sender that is gone has got no answer, and what is stored is whole.
    let _ = talk.send(socket, &answer.encode(), None);
    snapshot
}

fn receive(
    talk: &Talk<'_>,
    socket: &OwnedFd,
    store: &Arc<Store>,
    watch: &(dyn Fn(u64) + Sync),
) -> Result<Snapshot, GuestError> {
    let (mut hand_off, mut files) = (HandOff::default(), Vec::new());
    loop {
        let mut descriptors = Vec::new();
        let (command, payload) = read_request(talk, socket, &mut descriptors)?;
        let expected = usize::from(command == Command::MemoryFd);
        if descriptors.len() != expected {
            return Err(GuestError::Descriptors(descriptors.len(), expected));
        }
        match hand_off.take(command, payload)? {
            Step::Abandoned => return Err(GuestError::Abandoned),
            Step::Keep => break,
            Step::Answer => talk.send(socket, &Response::DONE.encode(), None)?,
        }
        files.extend(descriptors.into_iter().map(File::from));
    }
    let slots = hand_off.slots().to_vec();
    let parts = hand_off.parts().ok_or(GuestError::Abandoned)?;
    let files: Vec<_> = slots.into_iter().zip(files).collect();
    let image = store_memory(&parts.memory, &files, store, talk.stop, watch)?;
    Ok(Snapshot { parts, image })
}

/// Reads a request and its payload, and the descriptors that come with either.
pub(super) fn read_request(
    talk: &Talk<'_>,
    socket: &OwnedFd,
    descriptors: &mut Vec<OwnedFd>,
) -> Result<(Command, Vec<u8>), GuestError> {
    let mut head = [0; HEAD_BYTES];
    if !talk.read_all(socket, &mut head, descriptors)? {
        return Err(SocketError::Closed.into());
    }
    let Request { command, length } = Request::decode(&head)?;
    let mut payload = Vec::new();
    // Its memory does not come through the socket, and the hand-off refuses it.
    let length = if command == Command::Memory { 0 } else { exactly::<usize, _>(length) };
    while payload.len() < length {
        let done = payload.len();
        payload.resize(length.min(done + PIECE_BYTES), 0);
        if !talk.read_all(socket, &mut payload[done..], descriptors)? {
            return Err(SocketError::Closed.into());
        }
    }
    Ok((command, payload))
}

/// Stores the guest's memory, one mapping after the other.
fn store_memory(
    memory: &Memory,
    files: &[(u32, File)],
    store: &Arc<Store>,
    stop: &Stop,
    watch: &(dyn Fn(u64) + Sync),
) -> Result<Arc<Image>, GuestError> {
    let mut loader = store.begin(memory.pages())?;
    let mut before = 0;
    for (mapping, first_page) in memory.mappings() {
        // That each has a file was checked with the configuration.
        let Some((_, file)) = files.iter().find(|(slot, _)| *slot == mapping.slot) else {
            continue;
        };
        loader.put_file(file, mapping.file_offset, first_page, mapping.pages(), |done| {
            watch(before + done);
            !stop.is_now()
        })?;
        before += mapping.size;
        watch(before);
    }
    Ok(loader.finish()?)
}
