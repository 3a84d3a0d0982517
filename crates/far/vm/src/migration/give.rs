//! The host that gives a guest away.

use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use farpool_wire::Address;
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};

use super::desk::{self, Answer, DeskError, Order};
use super::link::{Link, LinkError, Message, PIECE_BYTES};
use super::{DEVICES_TIME, LOOK_STEP, QMP_TIME, memory_bytes, migration_state};
use crate::VmError;
use crate::ask::{AskError, Asked};
use crate::registry::Entry;
use crate::suspension::{self, Before};

/// What may be local and not yet written when the guest stops: the time that it stands still is
/// that in which this is written to a blade.
const UNWRITTEN_BYTES: u64 = 32 << 20;
/// The socket by which QEMU sends the state of its devices.
const STATE_SOCKET: &str = "state.sock";

/// Why a guest was not given away.
#[derive(Debug, thiserror::Error)]
pub enum GiveError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Desk(#[from] DeskError),
    #[error("QEMU does not do what it is told: {0}")]
    Ask(#[from] AskError),
    #[error("its memory cannot be made to leave: {0}")]
    Limit(String),
    #[error("QEMU cannot save its devices: {0}")]
    Devices(String),
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The guest runs, and its local memory leaves.
    Leaving { local_bytes: u64 },
    /// The guest stands still.
    Stopped,
}

/// What a migration took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// How long the guest stood still.
    pub downtime: Duration,
    /// How long it took to write what was local then, and to freeze all.
    pub given_in: Duration,
    /// From the command's begin to the guest's running at the other host.
    pub total: Duration,
    /// QEMU's local memory when the guest stopped.
    pub local_bytes: u64,
    /// What was sent to the other host.
    pub sent_bytes: u64,
}

/// Moves a VM's guest to the host that waits at this address.
pub(crate) fn migrate(
    entry: &Entry,
    to: &Address,
    may_be_remote: bool,
    mut watch: impl FnMut(Progress),
) -> Result<Migrated, VmError> {
    let began = Instant::now();
    let turn = suspension::turn(entry)?;
    let name = || entry.name.clone();
    if suspension::is_suspended(entry) {
        return Err(VmError::IsSuspended { name: name() });
    }
    let folder = entry.folder();
    let memory_bytes = memory_bytes(folder).ok_or_else(|| VmError::Fixed { name: name() })?;
    let stays = |error: GiveError| VmError::NotGiven { name: name(), error };
    let link = Link::connect(to, may_be_remote, memory_bytes);
    let mut link = link.map_err(|error| stays(error.into()))?;
    let before = suspension::note_before(entry)?;
    let mut given = Given { entry, link: &mut link, before, local_bytes: 0, stopped: began };
    let prepared = given.prepare(memory_bytes, &mut watch);
    let given_in = prepared.and_then(|()| given.hand_over());
    let (local_bytes, stopped, given_in) = match given_in {
        Ok(given_in) => (given.local_bytes, given.stopped, given_in),
        Err(error) => {
            // The other host knows that it gets nothing.
            let _ = link.send(&Message::Refused("the guest stays where it is".into()));
            drop(link);
            // Cut off from the blade, this host does not know that the other one has not taken it.
            return Err(match keep(entry, false)? {
                true => suspension::restore(entry, &turn).err().unwrap_or(stays(error)),
                false => VmError::RunsElsewhere { name: name() },
            });
        }
    };
    // From here on the guest is the other host's, unless the blade says otherwise.
    let let_go = desk::ask(folder, Order::LetGo, &[]).map_err(GiveError::from);
    let runs_there = let_go.and_then(|_| Ok(link.send(&Message::Go)?));
    let runs_there = runs_there.and_then(|()| Ok(link.expect(&Message::Running)?));
    let sent_bytes = link.sent_bytes;
    let downtime = stopped.elapsed();
    if let Err(error) = runs_there {
        let is_refused = matches!(error, GiveError::Link(LinkError::Refused(_)));
        drop(link);
        if keep(entry, is_refused)? {
            suspension::restore(entry, &turn)?;
            return Err(stays(error));
        }
    }
    // It has ended already if that fails.
    suspension::ask(entry, "quit").ok();
    Ok(Migrated { downtime, given_in, total: began.elapsed(), local_bytes, sent_bytes })
}

/// Has a guest back that was handed over. False: it is another host's. `is_sure`: no other host
/// runs it, by that host's own word or by the user's.
pub(crate) fn keep(entry: &Entry, is_sure: bool) -> Result<bool, VmError> {
    let order = if is_sure { Order::Force } else { Order::Keep };
    match desk::ask(entry.folder(), order, &[]) {
        Ok(Answer::Kept) => Ok(true),
        Ok(Answer::Taken) => Ok(false),
        Ok(_) => Err(VmError::Lost { name: entry.name.clone() }),
        Err(error) => Err(VmError::Unknown { name: entry.name.clone(), error }),
    }
}

/// A guest on its way, which is still this host's.
struct Given<'a> {
    entry: &'a Entry,
    link: &'a mut Link,
    /// What it was before; what ran is to run there.
    before: Before,
    local_bytes: u64,
    /// When it was stopped.
    stopped: Instant,
}

impl Given<'_> {
    /// Has most of its memory leave while it runs, and stops it.
    fn prepare(
        &mut self,
        memory_bytes: u64,
        watch: &mut impl FnMut(Progress),
    ) -> Result<(), GiveError> {
        self.link.send(&Message::Hello { memory_bytes, runs: self.before.ran })?;
        self.link.expect(&Message::Welcome)?;
        let shrunk = suspension::shrink(self.entry, UNWRITTEN_BYTES, |now| {
            watch(Progress::Leaving { local_bytes: now.local_bytes });
        });
        let not_shrunk = |error: VmError| GiveError::Limit(error.to_string());
        self.local_bytes = shrunk.map_err(not_shrunk)?.local_bytes;
        // With so little memory QEMU would take long for each of the next steps.
        suspension::give_back_limit(self.entry, self.before).map_err(not_shrunk)?;
        self.stopped = Instant::now();
        if self.before.ran {
            self.qmp()?.command("stop")?;
        }
        watch(Progress::Stopped);
        Ok(())
    }

    /// Brings its memory and its devices to the other host. Returns how long the memory took here.
    fn hand_over(&mut self) -> Result<Duration, GiveError> {
        let began = Instant::now();
        let Answer::Given(memory) = desk::ask(self.entry.folder(), Order::Give, &[])? else {
            return Err(LinkError::Nonsense("QEMU's pager gives nothing").into());
        };
        let given_in = began.elapsed();
        self.link.send(&Message::Memory(memory))?;
        self.link.expect(&Message::Bound)?;
        self.send_devices()?;
        self.link.send(&Message::StateEnd)?;
        self.link.expect(&Message::Loaded)?;
        Ok(given_in)
    }

    /// A connection to QEMU, which may be waiting for its own memory.
    fn qmp(&self) -> Result<Asked, AskError> {
        Ok(Asked::connect(&self.entry.socket)?.patient(QMP_TIME))
    }

    fn send_devices(&mut self) -> Result<(), GiveError> {
        let path = self.entry.folder().join(STATE_SOCKET);
        // Of an earlier attempt.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        leave_memory_out(self.qmp()?)?;
        let uri = json!({"uri": format!("unix:{}", path.display())});
        self.qmp()?.command_with("migrate", uri)?;
        let sent = self.forward(&listener);
        if sent.is_err() {
            self.qmp().and_then(|qmp| qmp.command("migrate_cancel")).ok();
        }
        let _ = std::fs::remove_file(&path);
        sent?;
        let until = Instant::now() + DEVICES_TIME;
        loop {
            let answer = self.qmp()?.command("query-migrate")?;
            if let Some(ended) = migration_state(&answer) {
                return ended.map_err(GiveError::Devices);
            }
            if Instant::now() > until {
                self.qmp().and_then(|qmp| qmp.command("migrate_cancel")).ok();
                return Err(GiveError::Devices("it takes too long".into()));
            }
            std::thread::sleep(LOOK_STEP);
        }
    }

    /// Passes on what QEMU sends, to its end.
    fn forward(&mut self, listener: &UnixListener) -> Result<(), GiveError> {
        let mut stream = accept(listener)?;
        stream.set_read_timeout(Some(DEVICES_TIME))?;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match stream.read(&mut piece) {
                Ok(0) => return Ok(()),
                Ok(length) => self.link.send(&Message::State(piece[..length].to_vec()))?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(GiveError::Io(error)),
            }
        }
    }
}

fn accept(listener: &UnixListener) -> Result<UnixStream, GiveError> {
    let mut ready = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
    let timeout = DEVICES_TIME.try_into().ok();
    if poll(&mut ready, timeout.as_ref()).map_err(std::io::Error::from)? == 0 {
        return Err(GiveError::Devices("QEMU sends nothing".into()));
    }
    Ok(listener.accept()?.0)
}

/// Has QEMU leave memory that it takes for shared out of its migration.
pub(super) fn leave_memory_out(qmp: Asked) -> Result<Value, AskError> {
    let capabilities = json!([{"capability": "x-ignore-shared", "state": true}]);
    let arguments = json!({"capabilities": capabilities});
    qmp.command_with("migrate-set-capabilities", arguments)
}
