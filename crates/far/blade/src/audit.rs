//! What a blade notes in the audit log: who came, who was refused, who was given another client's
//! memory, who wanted more than its quota, and what its node ordered.
//!
//! Whoever serves a connection never waits for a disk: entries wait here, and a thread writes them
//! once a second. So a blade that is killed may lose the last second's, and one that cannot write
//! its log notices afterwards: it then takes no further clients until it can. Those that it has go
//! on, for their programs would lose their memory.
//!
//! What the node orders is announced by a line before it is done: that is rare, and no client waits
//! for it.
//!
//! Everybody who reaches a port can be refused, so refusals are noted up to [`REFUSALS_PER_S`], and
//! beyond that counted.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use farpool_audit::{AuditLog, Entry, Stage};
use farpool_kernel::{lock, unix_ms};
use farpool_wire::ErrorCode;

/// Entries are on the disk after about this time.
const WRITE_EVERY: Duration = Duration::from_secs(1);
/// Refusals noted within [`WRITE_EVERY`]; more are counted. A line has some 300 bytes, so strangers
/// make the log grow by 3 KB a second at most, and a file of 64 MiB lasts six hours.
const REFUSALS_PER_S: usize = 10;
/// Entries that wait to be written; more are counted. Besides refusals, each is the end of an
/// exchange with a client or the node.
const WAITING_LIMIT: usize = 4096;

/// The outcome of what was done.
const DONE: u16 = 0;

/// What is to be noted, and where. Without a log nothing is.
#[derive(Debug)]
pub(crate) struct Audit {
    log: Option<Arc<AuditLog>>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
    /// The last attempt to write failed.
    is_failing: AtomicBool,
}

#[derive(Debug, Default)]
struct Waiting {
    entries: Vec<(Entry, Stage)>,
    refusals: usize,
    left_out: u64,
    is_over: bool,
}

/// Who asked for something.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    /// Its certificate's role and name, or what else is known.
    pub(crate) who: String,
    /// Where it is.
    pub(crate) from: Option<String>,
}

impl Asker {
    /// The node whose blade this is, in the same process.
    pub(crate) fn node() -> Asker {
        Asker { who: "its node".into(), from: None }
    }
}

impl Audit {
    pub(crate) fn new(log: Option<Arc<AuditLog>>) -> Audit {
        Audit {
            log,
            waiting: Mutex::default(),
            changed: Condvar::new(),
            is_failing: AtomicBool::new(false),
        }
    }

    /// True if there is a log to write.
    pub(crate) fn is_on(&self) -> bool {
        self.log.is_some()
    }

    /// Notes what was done, or what was refused with which code. `say` makes the line's text, if
    /// there will be a line.
    pub(crate) fn note(&self, refused: Option<ErrorCode>, say: impl FnOnce() -> (Asker, String)) {
        self.note_at(Stage::Done, refused, say);
    }

    /// Writes to the disk that something is going to be done. Returns the number of the line;
    /// `None` without a log, or if it cannot be written: what is ordered is done all the same,
    /// since memory that is to be taken back cannot wait for a disk.
    pub(crate) fn intend(&self, say: impl FnOnce() -> (Asker, String)) -> Option<u64> {
        let log = self.log.as_ref()?;
        let (Asker { who, from }, what) = say();
        let entry = Entry { unix_ms: unix_ms(), who, from, what, outcome: DONE };
        let intended = log.intend(entry);
        self.tell(intended.as_ref().map(drop));
        intended.ok()
    }

    /// Notes what became of an intent, or, without one, what was done.
    pub(crate) fn note_outcome(
        &self,
        intent: Option<u64>,
        refused: Option<ErrorCode>,
        say: impl FnOnce() -> (Asker, String),
    ) {
        self.note_at(intent.map_or(Stage::Done, Stage::OutcomeOf), refused, say);
    }

    fn note_at(
        &self,
        stage: Stage,
        refused: Option<ErrorCode>,
        say: impl FnOnce() -> (Asker, String),
    ) {
        if self.log.is_none() {
            return;
        }
        let mut waiting = lock(&self.waiting);
        // An intent has an outcome, whatever that is; only the node causes them.
        let is_strange = refused.is_some() && stage == Stage::Done;
        let is_one_too_many = is_strange && waiting.refusals >= REFUSALS_PER_S;
        if is_one_too_many || waiting.entries.len() >= WAITING_LIMIT {
            waiting.left_out += 1;
            return;
        }
        let (Asker { who, from }, what) = say();
        let outcome = refused.map_or(DONE, ErrorCode::number);
        waiting.entries.push((Entry { unix_ms: unix_ms(), who, from, what, outcome }, stage));
        waiting.refusals += usize::from(is_strange);
        self.changed.notify_all();
    }

    /// Whether what would have to be noted may be done.
    ///
    /// # Errors
    /// The log cannot be written at present.
    pub(crate) fn is_ready(&self) -> io::Result<()> {
        match self.is_failing.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the audit log cannot be written")),
            false => Ok(()),
        }
    }

    /// Writes what is noted, until [`Audit::stop`]; then the rest.
    pub(crate) fn run(&self) {
        let Some(log) = &self.log else { return };
        loop {
            let is_over = self.wait_until_due();
            self.write(log);
            if is_over {
                return;
            }
        }
    }

    /// Ends [`Audit::run`].
    pub(crate) fn stop(&self) {
        lock(&self.waiting).is_over = true;
        self.changed.notify_all();
    }

    /// Waits for the first entry, and then for those that follow it soon. True if it is over.
    fn wait_until_due(&self) -> bool {
        let mut until: Option<Instant> = None;
        let mut waiting = lock(&self.waiting);
        loop {
            let has_some = !waiting.entries.is_empty() || waiting.left_out > 0;
            if waiting.is_over {
                return true;
            }
            // What could not be written is tried again each time.
            if until.is_none() && (has_some || self.is_failing.load(Ordering::Relaxed)) {
                until = Some(Instant::now() + WRITE_EVERY);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            waiting = match left {
                Some(left) => {
                    let waited = self.changed.wait_timeout(waiting, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn write(&self, log: &AuditLog) {
        let Waiting { mut entries, left_out, .. } = {
            let mut waiting = lock(&self.waiting);
            let is_over = waiting.is_over;
            std::mem::replace(&mut *waiting, Waiting { is_over, ..Waiting::default() })
        };
        if left_out > 0 {
            let what = format!("{left_out} more are not listed, refusals above all");
            let who = "farpool".to_owned();
            let entry = Entry { unix_ms: unix_ms(), who, from: None, what, outcome: DONE };
            entries.push((entry, Stage::Done));
        }
        self.tell(log.record_all(entries).as_ref().copied());
    }

    /// Remembers, and says, whether the log can be written.
    fn tell(&self, written: Result<(), &io::Error>) {
        match written {
            Ok(()) => {
                if self.is_failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("the audit log is written again; clients are taken again");
                }
            }
            Err(error) => {
                if !self.is_failing.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        %error,
                        "the audit log cannot be written: no further client is taken until it can"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::path::Path;

    use super::*;

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let file = std::fs::File::open(path).expect("a log");
        farpool_audit::verify(BufReader::new(file), None).expect("as written");
        let text = std::fs::read_to_string(path).expect("a log");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    fn asker() -> Asker {
        Asker { who: "program web".into(), from: Some("host 10.0.0.7".into()) }
    }

    #[test]
    fn what_is_noted_is_written_by_the_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let audit = Audit::new(Some(Arc::new(AuditLog::open(&path).expect("a log"))));
        std::thread::scope(|scope| {
            scope.spawn(|| audit.run());
            audit.note(None, || (asker(), "hello \"redis\"".into()));
            audit.note(Some(ErrorCode::NotPermitted), || (asker(), "attach".into()));
            audit.stop();
        });
        let lines = lines(&path);
        let told: Vec<_> = lines[1..].iter().map(|it| (&it["who"], &it["outcome"])).collect();
        assert_eq!(
            told,
            [
                (&"program web".into(), &0.into()),
                (&"program web".into(), &ErrorCode::NotPermitted.number().into())
            ]
        );
        assert_eq!(lines[1]["what"], "hello \"redis\"");
        assert_eq!(lines[1]["from"], "host 10.0.0.7");
    }

    #[test]
    fn strangers_do_not_fill_the_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let audit = Audit::new(Some(Arc::new(AuditLog::open(&path).expect("a log"))));
        let hello = || (asker(), "hello".into());
        (0..5_000).for_each(|_| audit.note(Some(ErrorCode::NotPermitted), hello));
        audit.note(None, hello);
        audit.stop();
        audit.run();
        let lines = lines(&path);
        // Its opening, ten refusals, one that was let in, and how many are left out.
        assert_eq!(lines.len(), 1 + REFUSALS_PER_S + 1 + 1, "{lines:?}");
        let last = lines.last().expect("lines")["what"].as_str().expect("text").to_owned();
        assert!(last.starts_with("4990 more are not listed"), "{last}");
    }
}
