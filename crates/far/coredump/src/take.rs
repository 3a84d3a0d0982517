//! Takes the core: which threads are stopped, read and watch.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_inject::{Halted, InjectError, Pid, halt};

use crate::copy::{Copier, Pages, Sink};
use crate::elf::{self, Load};
use crate::error::CoreError;
use crate::file::Draft;
use crate::mappings::{Content, FILTER_ALL, Mapping};
use crate::notes::{self, Thread};
use crate::process::{self, Memory};

/// Pause between two checks of the reading thread.
const STEP: Duration = Duration::from_millis(20);
/// If nothing was read for this long, the program's threads are resumed: one of them may hold up
/// the pager, as during a fork. A blade that does not answer has a deadline of 10 s.
const STALL: Duration = Duration::from_secs(15);
/// How long an aborted dump waits for the reading thread, which may wait for a page.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
/// How often stopping a thread in an uninterruptible wait is tried.
const TRIES: u32 = 20;

/// Which core to take, and how.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    pub pid: u32,
    pub path: &'a Path,
    /// Also what is in files, whatever the process's coredump_filter.
    pub whole: bool,
    /// The program goes on while its memory is read.
    pub running: bool,
}

/// Progress of the dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub done_bytes: u64,
    /// 0 if not known yet.
    pub all_bytes: u64,
}

/// A core that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Core {
    /// Length of the file, holes included.
    pub bytes: u64,
    pub written_bytes: u64,
    pub threads: usize,
    pub mappings: usize,
    /// Pages that could not be read: zeros in the core.
    pub unreadable_pages: u64,
    /// How long the program stood still.
    pub stopped: Duration,
    /// It stood still until the end: the memory is that of one moment.
    pub is_of_one_moment: bool,
}

/// Writes a core. Calls `watch` now and then with the progress; false from it aborts.
pub fn take(wish: Wish<'_>, mut watch: impl FnMut(Progress) -> bool) -> Result<Core, CoreError> {
    let gone = CoreError::NoProcess { pid: wish.pid };
    let Some(pid) = i32::try_from(wish.pid).ok().and_then(Pid::from_raw) else { return Err(gone) };
    if !process::is_process(wish.pid) {
        return Err(gone);
    }
    if wish.pid == std::process::id() {
        return Err(CoreError::Oneself { pid: wish.pid });
    }
    let mut draft = Draft::create(wish.path)?;
    let since = Instant::now();
    let standing = Standing::begin(pid, wish.pid)?;
    let Some(task) = standing.threads.first().map(|thread| thread.tid) else { return Err(gone) };
    let read = |what| move |error| CoreError::NotRead { pid: wish.pid, what, error };
    let mappings = process::read_mappings(task).map_err(read("the list of mappings"))?;
    let described = process::describe(wish.pid, task).map_err(read("the description"))?;
    let memory = Memory::open(wish.pid, task).map_err(|error| match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => CoreError::NotPermitted { pid: wish.pid },
        _ => read("the memory")(error),
    })?;
    let filter = if wish.whole { FILTER_ALL } else { process::filter(wish.pid) };
    let notes = notes::notes(&described, &standing.threads, &mappings);
    let plan = Plan::new(&mappings, filter, &notes);
    let (file_bytes, threads) = (plan.layout.bytes, standing.threads.len());
    draft.write(0, &plan.layout.start)?;
    let reading =
        Arc::new(Reading { plan, done_bytes: AtomicU64::new(0), must_end: AtomicBool::new(false) });
    let watcher = Watcher {
        reading: Arc::clone(&reading),
        partial: draft.partial_name(),
        since,
        lets_run: wish.running,
    };
    let reader = std::thread::spawn(move || reading.read_all(memory, draft));
    let still = watcher.watch(&reader, standing, &mut watch)?;
    let (draft, unreadable_pages) = reader.join().unwrap_or(Err(CoreError::Cancelled))?;
    let written_bytes = draft.written_bytes;
    draft.complete(file_bytes)?;
    Ok(Core {
        bytes: file_bytes,
        written_bytes,
        threads,
        mappings: mappings.len(),
        unreadable_pages,
        stopped: still.unwrap_or_else(|| since.elapsed()),
        is_of_one_moment: still.is_none(),
    })
}

/// The program's threads, which stand still, and the facts about all threads.
struct Standing {
    halted: Option<Halted>,
    /// Those of a preloaded pager: they stood still only for their registers.
    pager: Option<Halted>,
    threads: Vec<Thread>,
}

impl Standing {
    fn begin(pid: Pid, number: u32) -> Result<Standing, CoreError> {
        let pagers = process::pagers_threads(number);
        let halted = try_to_halt(pid, &|thread| !pagers.contains(&thread))?;
        let mut threads = process::describe_threads(number, &halted);
        let mut pager = None;
        if !pagers.is_empty() {
            // The pager can do without its threads for this moment: only the program waits for
            // pages.
            let mut of_pager = try_to_halt(pid, &|thread| pagers.contains(&thread))?;
            threads.extend(process::describe_threads(number, &of_pager));
            of_pager.let_run();
            pager = Some(of_pager);
        }
        Ok(Standing { halted: Some(halted), pager, threads })
    }

    fn keep_pager_running(&self) {
        self.pager.iter().for_each(Halted::keep_running);
    }

    /// Lets the program go on. The pager's threads are kept running, since SIGSTOP may have stopped
    /// the process.
    fn end(&mut self) {
        self.halted = None;
    }
}

/// Retries for a thread that waits for a far page in the kernel: it stops when the page has
/// arrived.
fn try_to_halt(pid: Pid, wanted: &dyn Fn(i32) -> bool) -> Result<Halted, InjectError> {
    let mut tries = 1..TRIES;
    loop {
        match halt(pid, wanted) {
            Err(InjectError::Busy { .. }) if tries.next().is_some() => {}
            outcome => return outcome,
        }
    }
}

/// What is written where.
struct Plan {
    layout: elf::Layout,
    parts: Vec<Part>,
    all_bytes: u64,
}

struct Part {
    start: u64,
    end: u64,
    offset: u64,
    pages: Pages,
    is_readable: bool,
}

impl Plan {
    fn new(mappings: &[Mapping], filter: u64, notes: &[u8]) -> Plan {
        let contents: Vec<Content> =
            mappings.iter().map(|mapping| mapping.content(filter)).collect();
        let both = || mappings.iter().zip(&contents);
        let loads: Vec<Load> = both()
            .map(|(mapping, content)| Load {
                address: mapping.start,
                bytes: mapping.bytes(),
                file_bytes: mapping.file_bytes(*content),
                rights: mapping.rights,
            })
            .collect();
        let layout = elf::lay_out(notes, &loads);
        let part = |((mapping, content), offset): ((&Mapping, &Content), &u64)| Part {
            start: mapping.start,
            end: mapping.start + mapping.file_bytes(*content),
            offset: *offset,
            pages: if *content == Content::Present { Pages::Present } else { Pages::All },
            is_readable: mapping.is_readable(),
        };
        let parts: Vec<Part> =
            both().zip(&layout.offsets).map(part).filter(|part| part.end > part.start).collect();
        let all_bytes = parts.iter().map(|part| part.end - part.start).sum();
        Plan { layout, parts, all_bytes }
    }
}

/// State shared by the reading thread and its watcher.
struct Reading {
    plan: Plan,
    done_bytes: AtomicU64,
    /// The reader is to give up.
    must_end: AtomicBool,
}

impl Reading {
    /// Reads everything. Returns the number of unreadable pages.
    fn read_all(&self, mut memory: Memory, mut draft: Draft) -> Result<(Draft, u64), CoreError> {
        let mut unreadable_pages = 0;
        for part in &self.plan.parts {
            memory.is_readable = part.is_readable;
            let mut copier = Copier { source: &mut memory, sink: &mut draft, unreadable_pages: 0 };
            copier.copy(part.start..part.end, part.offset, part.pages, |bytes| {
                self.done_bytes.fetch_add(bytes, Relaxed);
                if self.must_end.load(Relaxed) { Err(CoreError::Cancelled) } else { Ok(()) }
            })?;
            unreadable_pages += copier.unreadable_pages;
        }
        Ok((draft, unreadable_pages))
    }
}

/// Watches the reading thread. It stays in its own thread, since ptrace is per thread.
struct Watcher {
    reading: Arc<Reading>,
    partial: PathBuf,
    since: Instant,
    lets_run: bool,
}

impl Watcher {
    /// Waits until all is read. Returns how long the program stood still if that was not until the
    /// end.
    fn watch(
        self,
        reader: &JoinHandle<Result<(Draft, u64), CoreError>>,
        mut standing: Standing,
        goes_on: &mut impl FnMut(Progress) -> bool,
    ) -> Result<Option<Duration>, CoreError> {
        let mut still = None;
        let (mut done_bytes, mut changed) = (0, Instant::now());
        while !reader.is_finished() {
            if still.is_none() && (self.lets_run || changed.elapsed() > STALL) {
                standing.end();
                still = Some(self.since.elapsed());
            }
            standing.keep_pager_running();
            std::thread::sleep(STEP);
            let progress = self.progress();
            if progress.done_bytes != done_bytes {
                (done_bytes, changed) = (progress.done_bytes, Instant::now());
            }
            if !goes_on(progress) {
                self.give_up(reader);
                return Err(CoreError::Cancelled);
            }
        }
        Ok(still)
    }

    fn progress(&self) -> Progress {
        let done_bytes = self.reading.done_bytes.load(Relaxed);
        Progress { done_bytes, all_bytes: self.reading.plan.all_bytes }
    }

    /// A page may be slow to arrive: in any case nothing is left behind.
    fn give_up(&self, reader: &JoinHandle<Result<(Draft, u64), CoreError>>) {
        self.reading.must_end.store(true, Relaxed);
        let _ = std::fs::remove_file(&self.partial);
        let until = Instant::now() + LAST_PATIENCE;
        while !reader.is_finished() && Instant::now() < until {
            std::thread::sleep(STEP);
        }
    }
}
