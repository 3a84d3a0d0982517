//! The host that gets a guest: a thread beside the keeper waits for it, brings it into the QEMU
//! that waits, and lets it go on. Where none comes to run here, QEMU is ended.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_wire::Address;
use serde_json::{Value, json};

use super::desk::{self, Answer, DeskError, Order};
use super::give::leave_memory_out;
use super::link::{Door, Link, LinkError, Message};
use super::{DEVICES_TIME, LOOK_STEP, QMP_TIME, migration_state};
use crate::ask::{AskError, Asked};
use crate::qmp;

/// How long the waiting QEMU may take until it answers and has mapped its memory.
const START_TIME: Duration = Duration::from_secs(60);
/// How long it is asked for a guest whose giver is not heard of any more. The blade ends the leases
/// of a host that has died after 10 s, unless it was started with longer ones (`--lease`).
const ORPHAN_TIME: Duration = Duration::from_secs(90);
/// How often it is asked for.
const TAKE_STEP: Duration = Duration::from_millis(1);
const ORPHAN_STEP: Duration = Duration::from_millis(200);
/// How long a giver that is there may take to let go.
const GO_TIME: Duration = Duration::from_secs(30);
/// The socket by which QEMU gets the state of its devices.
const STATE_SOCKET: &str = "incoming.sock";

/// Why no guest runs here.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Desk(#[from] DeskError),
    #[error("QEMU does not do what it is told: {0}")]
    Ask(#[from] AskError),
    #[error("QEMU cannot load the devices of the guest: {0}; is its command line the same there?")]
    Devices(String),
    #[error("it has {given_bytes} bytes of memory, and QEMU has {bytes} here: give the same -m")]
    OtherMemory { given_bytes: u64, bytes: u64 },
    #[error("QEMU did not start within {} s", START_TIME.as_secs())]
    NotStarted,
    #[error("its host has not let go of it")]
    NotGiven,
}

/// Waits for a guest.
#[derive(Clone, Debug)]
pub(crate) struct Receiver {
    folder: PathBuf,
    qmp: PathBuf,
    memory_bytes: u64,
    outcome: Arc<Mutex<Option<Result<(), ReceiveError>>>>,
}

impl Receiver {
    /// Begins to wait. `tell` is called with what the user should know.
    pub(crate) fn start(
        at: &Address,
        may_be_remote: bool,
        (folder, qmp): (&Path, &Path),
        memory_bytes: u64,
        tell: impl Fn(&str) + Send + 'static,
    ) -> Result<Receiver, LinkError> {
        let door = Door::open(at, may_be_remote)?;
        let (folder, qmp) = (folder.to_owned(), qmp.to_owned());
        let receiver = Receiver { folder, qmp, memory_bytes, outcome: Arc::default() };
        let here = receiver.clone();
        let address = door.address().map_or_else(|| at.to_string(), |address| address.to_string());
        let wait = move || {
            tell(&format!("a guest is waited for at {address}"));
            let outcome = here.receive(&door);
            drop(door);
            if outcome.is_ok() {
                tell("the guest has come");
            }
            let has_failed = outcome.is_err();
            *lock(&here.outcome) = Some(outcome);
            if has_failed {
                // Its keeper ends with it, and says why. It may have ended already.
                Asked::connect(&here.qmp).and_then(|asked| asked.command("quit")).ok();
            }
        };
        let builder = std::thread::Builder::new().name("farpool-guest".into());
        builder.spawn(wait).map_err(LinkError::Broken)?;
        Ok(receiver)
    }

    /// Why no guest has come, once QEMU has ended. None: one has, or QEMU ended before.
    pub(crate) fn failure(&self) -> Option<ReceiveError> {
        lock(&self.outcome).take().and_then(Result::err)
    }

    /// Brings in the first guest that is offered as it should be.
    fn receive(&self, door: &Door) -> Result<(), ReceiveError> {
        self.wait_for_qemu()?;
        loop {
            let mut link = door.accept(self.memory_bytes)?;
            match self.greet(&mut link) {
                Ok(runs) => {
                    let received = self.bring_in(&mut link, runs);
                    if let Err(error) = &received {
                        // Who gives it has it then.
                        let _ = link.send(&Message::Refused(error.to_string()));
                    }
                    return received;
                }
                Err(error) => drop(link.send(&Message::Refused(error.to_string()))),
            }
        }
    }

    fn wait_for_qemu(&self) -> Result<(), ReceiveError> {
        let until = Instant::now() + START_TIME;
        loop {
            let state = self.ask("query-status").and_then(|answer| Ok(qmp::state(&answer)?));
            if state.is_ok() && desk::socket(&self.folder).exists() {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(ReceiveError::NotStarted);
            }
            std::thread::sleep(LOOK_STEP);
        }
    }

    /// Returns whether the guest runs.
    fn greet(&self, link: &mut Link) -> Result<bool, ReceiveError> {
        let Message::Hello { memory_bytes, runs } = link.receive()? else {
            return Err(LinkError::Nonsense("it does not greet").into());
        };
        if memory_bytes != self.memory_bytes {
            let (given_bytes, bytes) = (memory_bytes, self.memory_bytes);
            return Err(ReceiveError::OtherMemory { given_bytes, bytes });
        }
        link.send(&Message::Welcome)?;
        Ok(runs)
    }

    fn bring_in(&self, link: &mut Link, runs: bool) -> Result<(), ReceiveError> {
        let Message::Memory(memory) = link.receive()? else {
            return Err(LinkError::Nonsense("there is no memory").into());
        };
        desk::ask(&self.folder, Order::Bind, &memory)?;
        link.send(&Message::Bound)?;
        self.load_devices(link)?;
        link.send(&Message::Loaded)?;
        link.wait_at_most(GO_TIME)?;
        match link.receive() {
            Ok(Message::Go) => self.take(Instant::now() + GO_TIME, TAKE_STEP)?,
            Ok(_) => return Err(LinkError::Nonsense("another message is due").into()),
            // The giver has said that it stays there.
            Err(error @ LinkError::Refused(_)) => return Err(error.into()),
            // The giver, its host or the network has died: the blade knows who has the guest.
            Err(_) => self.take(Instant::now() + ORPHAN_TIME, ORPHAN_STEP)?,
        }
        match if runs { self.ask("cont").map(drop) } else { Ok(()) } {
            // One that gives no answer in time was told all the same, and does it later.
            Ok(()) | Err(AskError::Silent(_)) => {}
            // It does not run here, and nobody else can take it: the giver is told, and has it.
            Err(error) => return Err(error.into()),
        }
        // The giver may be gone.
        let _ = link.send(&Message::Running);
        Ok(())
    }

    fn load_devices(&self, link: &mut Link) -> Result<(), ReceiveError> {
        leave_memory_out(self.asked()?)?;
        let path = self.folder.join(STATE_SOCKET);
        let uri = json!({"uri": format!("unix:{}", path.display())});
        self.asked()?.command_with("migrate-incoming", uri)?;
        let failed = |error: std::io::Error| ReceiveError::Devices(error.to_string());
        let mut stream = UnixStream::connect(&path).map_err(failed)?;
        let _ = std::fs::remove_file(&path);
        stream.set_write_timeout(Some(DEVICES_TIME)).map_err(failed)?;
        // An error of QEMU's says more than that it reads no more.
        let mut has_ended = false;
        loop {
            match link.receive()? {
                Message::State(piece) => has_ended |= stream.write_all(&piece).is_err(),
                Message::StateEnd => break,
                _ => return Err(LinkError::Nonsense("another message is due").into()),
            }
        }
        has_ended |= stream.shutdown(Shutdown::Write).is_err();
        let until = Instant::now() + DEVICES_TIME;
        loop {
            let answer = self.ask("query-migrate")?;
            match migration_state(&answer) {
                Some(Ok(())) => return Ok(()),
                Some(Err(reason)) => return Err(ReceiveError::Devices(reason)),
                None if Instant::now() > until || has_ended => {
                    return Err(ReceiveError::Devices("it reads no more".into()));
                }
                None => std::thread::sleep(LOOK_STEP),
            }
        }
    }

    /// Takes the guest once its giver has let go.
    fn take(&self, until: Instant, step: Duration) -> Result<(), ReceiveError> {
        loop {
            if desk::ask(&self.folder, Order::Take, &[])? == Answer::Taken {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(ReceiveError::NotGiven);
            }
            std::thread::sleep(step);
        }
    }

    fn ask(&self, command: &'static str) -> Result<Value, AskError> {
        self.asked()?.command(command)
    }

    fn asked(&self) -> Result<Asked, AskError> {
        Ok(Asked::connect(&self.qmp)?.patient(QMP_TIME))
    }
}
