//! The socket by which a process is told to hand its guest's memory over, or to take one. Whoever
//! may open it may do so: it is in a folder of the user's own.
//!
//! One command at a time, each a line, with as many bytes after it as it says; so are answers. The
//! other side is a `farpool vm` of the same version.

use std::io::{BufRead, BufReader, Error, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use farpool_pool::{Baton, Revoked};

use crate::core::Core;
use crate::life::guest::Handed;
use crate::life::process::Pager;
use crate::life::requests::{Kind, Request};
use crate::space::units::SUPERPAGE_PAGES;
use crate::sys;

/// How long a process may take until its memory is registered: milliseconds, unless it has no
/// processor.
const ACTIVATION_TIME: Duration = Duration::from_secs(10);
/// How long the other side may take for the rest of a command, and to read its answer.
const REST_TIME: Duration = Duration::from_secs(10);
/// How long the other host may take to end the QEMU that was to have the guest.
const GIVING_UP_TIME: Duration = Duration::from_secs(2);
const GIVING_UP_STEP: Duration = Duration::from_millis(2);
/// The longest line of a command.
const LINE_BYTES_MAX: u64 = 64;
/// The most bytes that come with a command, for each page of the guest, beside those of the
/// tokens: its state, and its seal with what belongs to it.
const PAGE_BYTES_MAX: usize = 64;
const TOKENS_BYTES_MAX: usize = 1 << 20;

/// The answer that the guest's memory, and the right to run it, is this process's.
const KEPT: &str = "KEPT";

/// Why a command was not carried out.
type Refused = String;

/// Serves commands until the process ends.
pub fn serve(pager: &'static Pager, socket: &Path) {
    let listener = match UnixListener::bind(socket) {
        Ok(listener) => listener,
        Err(error) => {
            return sys::say(&format!(
                "this guest cannot move to another host: {}: {error}",
                socket.display()
            ));
        }
    };
    let mut desk = Desk { pager, baton: None, has_let_go: false };
    for stream in listener.incoming().flatten() {
        // A command that breaks off is over; the next connection brings another one.
        let _ = desk.attend(&stream);
    }
}

struct Desk {
    pager: &'static Pager,
    /// What it has offered or accepted.
    baton: Option<Baton>,
    /// It has offered that, and let go of it.
    has_let_go: bool,
}

impl Desk {
    fn attend(&mut self, stream: &UnixStream) -> Result<(), Error> {
        stream.set_read_timeout(Some(REST_TIME))?;
        stream.set_write_timeout(Some(REST_TIME))?;
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        (&mut reader).take(LINE_BYTES_MAX).read_line(&mut line)?;
        let (word, length) = line.trim_end().split_once(' ').unwrap_or((line.trim_end(), "0"));
        let answered = match length.parse::<usize>() {
            Ok(length) if length <= self.most_bytes() => {
                let mut bytes = vec![0; length];
                reader.read_exact(&mut bytes)?;
                self.carry_out(word, &bytes)
            }
            _ => Err("its length is none".to_owned()),
        };
        let (word, bytes) = match answered {
            Ok((word, bytes)) => (word, bytes),
            Err(reason) => ("REFUSED", reason.into_bytes()),
        };
        let mut stream = stream;
        stream.write_all(format!("{word} {}\n", bytes.len()).as_bytes())?;
        stream.write_all(&bytes)
    }

    /// The most bytes that a command for this guest has.
    fn most_bytes(&self) -> usize {
        let superpages = self.pager.space.count();
        TOKENS_BYTES_MAX + superpages * SUPERPAGE_PAGES * PAGE_BYTES_MAX
    }

    fn carry_out(&mut self, word: &str, bytes: &[u8]) -> Result<(&'static str, Vec<u8>), Refused> {
        match word {
            "GIVE" => self.give().map(|bytes| ("GIVEN", bytes)),
            "KEEP" => self.keep().map(|word| (word, Vec::new())),
            "FORCE" => Ok((self.force(), Vec::new())),
            "LET-GO" => self.let_go().map(|()| ("GONE", Vec::new())),
            "BIND" => self.bind(bytes).map(|()| ("BOUND", Vec::new())),
            "TAKE" => self.take().map(|word| (word, Vec::new())),
            _ => Err("there is no such command".to_owned()),
        }
    }

    /// Hands the memory over, and offers a baton with it.
    fn give(&mut self) -> Result<Vec<u8>, Refused> {
        if self.keep()? != KEPT {
            return Err("it was handed over already".to_owned());
        }
        let core = self.core()?;
        self.ask(Kind::GiveGuest)?;
        self.pager.guest.note_offered(true);
        let baton = core.pool.offer().map_err(|error| error.to_string())?;
        self.baton = Some(baton);
        let mut handed = self.pager.guest.take().ok_or("nothing was handed over")?;
        handed.baton = Some(baton.token());
        Ok(handed.to_bytes())
    }

    /// Keeps what was handed over, or has it back if nobody has taken it: the guest may go on here
    /// if the answer is [`KEPT`].
    fn keep(&mut self) -> Result<&'static str, Refused> {
        if let Some(baton) = &mut self.baton {
            let core = self.pager.core().ok_or("this process has no far memory")?;
            if self.has_let_go {
                match core.pool.revoke(baton).map_err(|error| error.to_string())? {
                    Revoked::Back => self.has_let_go = false,
                    Revoked::Taken => return Ok("TAKEN"),
                    Revoked::Gone => return Ok("LOST"),
                }
            }
            // Once the other side has given up its share it cannot take it, whatever becomes of
            // this host. Until then it could if the lease of this one ended; that the blade answers
            // shows that it has not.
            let until = Instant::now() + GIVING_UP_TIME;
            let is_alone = || core.pool.take(baton).map_err(|error| error.to_string());
            while !is_alone()? && Instant::now() < until {
                std::thread::sleep(GIVING_UP_STEP);
            }
        }
        Ok(self.put_away())
    }

    /// The same by the caller's word: no other host runs the guest, whatever the blade says.
    fn force(&mut self) -> &'static str {
        if let (Some(baton), Some(core)) = (&mut self.baton, self.pager.core())
            && self.has_let_go
        {
            self.has_let_go = !matches!(core.pool.revoke(baton), Ok(Revoked::Back));
        }
        self.put_away()
    }

    /// Ends the hand-over. A share in the baton that the other side still shares is never given up:
    /// it would be the other side's at once. It ends with this process.
    fn put_away(&mut self) -> &'static str {
        if self.pager.guest.note_offered(false) {
            self.pager.inheritance.has_arrived();
        }
        let had_let_go = std::mem::take(&mut self.has_let_go);
        if let (Some(baton), Some(core)) = (self.baton.take(), self.pager.core())
            && !had_let_go
            && matches!(core.pool.take(&baton), Ok(true))
        {
            // It ends with this process, too.
            let _ = core.pool.let_go(baton);
        }
        KEPT
    }

    /// Lets go of what was handed over. Whatever comes of it, the guest must not run here before
    /// [`Desk::keep`] says so.
    fn let_go(&mut self) -> Result<(), Refused> {
        let baton = self.baton.ok_or("nothing was handed over")?;
        if std::mem::replace(&mut self.has_let_go, true) {
            return Ok(());
        }
        self.core()?.pool.let_go(baton).map_err(|error| error.to_string())
    }

    fn bind(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        let unreadable = "what was handed over cannot be read; is the other farpool of another \
                          version?";
        let handed = Handed::from_bytes(bytes).ok_or(unreadable)?;
        let core = self.core()?;
        let token = handed.baton.ok_or(unreadable)?;
        self.pager.guest.put(handed);
        self.ask(Kind::BindGuest)?;
        self.baton = Some(core.pool.accept(token).map_err(|error| error.to_string())?);
        Ok(())
    }

    fn take(&mut self) -> Result<&'static str, Refused> {
        let baton = self.baton.ok_or("nothing was taken over")?;
        match self.core()?.pool.take(&baton) {
            Ok(true) => Ok("TAKEN"),
            Ok(false) => Ok("HELD"),
            Err(error) => Err(error.to_string()),
        }
    }

    fn ask(&self, kind: Kind) -> Result<(), Refused> {
        let request = Request { kind, start: 0, end: 0, extra: 0, more: 0 };
        self.pager.requests.call(request).map(drop).map_err(|_| self.pager.guest.refusal())
    }

    /// The pager's core, which a process has once it is active.
    fn core(&self) -> Result<&'static Core, Refused> {
        let is_active = self.pager.activate_within(ACTIVATION_TIME);
        let core = self.pager.core().filter(|_| is_active);
        let core = core.ok_or("this process has no far memory yet; try again")?;
        core.pool.wait();
        Ok(core)
    }
}
