//! `farpool attach` gives a running process less local memory; `farpool detach` gives it back.
//!
//! The attaching process is the keeper: it holds the board with the limit, the private blade if no
//! other was named, and a duplicate of the userfaultfd. It stays until the process ends or is
//! detached. On SIGTERM or SIGINT it brings all pages back first; when it is killed, the sidecar
//! does.
//!
//! With a whole tree, the processes below come and go, and get sidecars as under `farpool run
//! --door sidecar`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::{Board, Counter};
use farpool_inject::Pid;
use farpool_kernel::raise_to_maximum;
use farpool_uffd::Uffd;
use rustix::process::{PidfdFlags, Resource, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use crate::dialing::Dialing;
use crate::directory::{BOARD, RunDirectory, is_in_another_run, keeper_of};
use crate::faults::{FaultRecorder, FaultTrace, Recording};
use crate::holder::{memory_folder, share_memory};
use crate::keeper::{self, Keeper};
use crate::nursery::Nursery;
use crate::priority::be_prompt;
use crate::proc::start_ticks;
use crate::rack::RackRun;
use crate::redundancy::{check_copies, with_redundancy};
use crate::renewal::Looks;
use crate::say::say;
use crate::sharing::check_sharing;
use crate::sidecars::{self, News, Ward};
use crate::stillness;
use crate::strain::Strain;
use crate::talk::printable;
use crate::uffd_guardian::end_orphans;
use crate::waits::is_over;
use crate::wards::{LEAVE, Wards};
use crate::{Door, RunError, RunOptions, dialing, needs, stats};

/// Name of a file in the directory of an attached run: its keeper may be told to leave. It holds
/// the number of the process, and when the keeper started.
const ATTACHED: &str = "attached";
/// How often the sidecar and the board are checked.
const STEP: Duration = Duration::from_millis(20);
/// Init, of the host or of a container: all other processes depend on it.
const FIRST_PROCESS: u32 = 1;
/// The name of a sidecar's process.
const SIDECAR_NAME: &str = "farpool-sidecar";
/// Longest that `detach` waits for the keeper to bring all pages back.
const DETACH_TIME: Duration = Duration::from_secs(600);

/// Longest pause between pages while all are brought back: a blade that answers late takes some
/// seconds.
const SILENCE_TIME: Duration = Duration::from_secs(60);

/// Progress of the pages that come back while processes are being left.
#[derive(Debug)]
struct Homecoming {
    least_far_pages: u64,
    since: Instant,
    is_said: bool,
}

impl Homecoming {
    fn new(now: Instant) -> Homecoming {
        Homecoming { least_far_pages: u64::MAX, since: now, is_said: false }
    }

    /// True once, when no page has come back for SILENCE_TIME: the user must be told. Pure.
    fn has_stopped(&mut self, far_pages: u64, now: Instant) -> bool {
        if far_pages < self.least_far_pages {
            (self.least_far_pages, self.since) = (far_pages, now);
        }
        let is_silent = now.saturating_duration_since(self.since) >= SILENCE_TIME;
        is_silent && !std::mem::replace(&mut self.is_said, true)
    }

    /// Says what can be done about a sidecar or a blade that hangs. Ending this process would lose
    /// the pages.
    fn watch(&mut self, board: &Board, pid: u32) {
        let far_pages = board.processes().map(|slot| slot.get(Counter::FarPages)).sum();
        if self.has_stopped(far_pages, Instant::now()) {
            say!(
                "farpool: process {pid} is being left, and no page has come back for {} s \
                 ({far_pages} pages are far): its blade or its sidecar does not answer. Bring the \
                 blade back, or end the process (kill -9 {pid})",
                SILENCE_TIME.as_secs()
            );
        }
    }
}

/// How an attachment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachEnd {
    /// The process ended, or runs another program.
    ProcessEnded,
    /// The process has all its memory back, and continues.
    Left,
}

/// Which processes are held to the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    Process,
    /// The process, all below it, and those born later.
    Tree,
}

/// What it took to enter the process, or those of its tree whose memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entered {
    /// Longest time that its threads were stopped for this.
    pub stopped: Duration,
    pub threads: usize,
    pub processes: usize,
}

/// Attaches to process `pid` with the limit and the blades of `options`, and stays until the end.
/// `entered` is called once paging has begun. From then on its faults are recorded in a trace at
/// `out`, if there is one: returns what is in it, and how the attachment ended.
pub fn attach(
    pid: u32,
    reach: Reach,
    options: &RunOptions,
    out: Option<&Path>,
    entered: impl FnOnce(Entered),
) -> Result<(AttachEnd, Option<FaultTrace>), RunError> {
    let gone = RunError::NoProcess { pid };
    let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Err(gone) };
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).map_err(|_| gone)?;
    refuse(pid, name.trim_end())?;
    keeper::check_limit(options.local)?;
    keeper::check_quota(options.quota_bytes)?;
    let options = &with_redundancy(options)?;
    check_copies(options)?;
    raise_to_maximum(Resource::Nofile);
    raise_to_maximum(Resource::Fsize);
    needs::check_file_size(keeper::private_bytes(options))?;
    if !options.no_check {
        needs::check_blades(options).map_err(|error| match error {
            // Here nothing is started in any case, so --no-check would not help.
            RunError::BladeCheck(error) => RunError::NoBlade(error),
            error => error,
        })?;
    }
    let statistics_file = options.stats_file.as_deref().map(stats::create_file).transpose()?;
    let recorder = out.map(|out| FaultRecorder::create(words_of(pid, &name), false, out));
    let mut recorder = recorder.transpose()?;
    let directory = RunDirectory::make()?;
    let (blades, private_blade) = keeper::blades(options, &directory)?;
    let board_path = directory.join(BOARD);
    blades.iter().try_for_each(|address| dialing::name(directory.path(), address))?;
    let dialing = Dialing::new(directory.path(), options.credentials.as_ref())?;
    let settings = keeper::settings(options, blades, Path::new(name.trim_end()));
    check_sharing(&settings)?;
    let board = Arc::new(Board::create(&board_path, &settings)?);
    keeper::open_to_others(&directory)?;
    if recorder.is_some() {
        board.switch_on_fault_log(&board_path)?;
    }
    let rack = options.rack.as_ref();
    let named = RunOptions { program: name.trim_end().into(), ..options.clone() };
    let rack = rack.map(|rack| RackRun::start(rack, &named, &board, directory.path()));
    let rack = rack.transpose()?;
    let must_leave = listen_for_the_end()?;
    let mut keeper =
        Keeper::new(Arc::clone(&board), None, Strain::new(Door::Sidecar, options.quiet));
    let mut recording = None;
    let told = |told: Entered| {
        let marker = directory.join(ATTACHED);
        let started = start_ticks(std::process::id()).unwrap_or_default();
        let written = std::fs::write(&marker, format!("{pid} {started}"));
        written.map_err(|error| RunError::Directory { path: marker, error })?;
        recording = recorder.take().map(|recorder| recorder.start(&board));
        entered(told);
        Ok(())
    };
    let end = match reach {
        Reach::Process => {
            let nursery = Nursery::open(&board_path, dialing, true)?;
            let ward = nursery.admit(target, &mut [], &mut Vec::new())?;
            let (stopped, threads) = ward.stopped();
            told(Entered { stopped, threads, processes: 1 })?;
            stay(&mut keeper, &board, &nursery, ward, &must_leave)
        }
        Reach::Tree => {
            let wards = Wards::attach(&board_path, dialing, pid)?;
            stay_with_tree(pid, &mut keeper, &board, wards, &must_leave, told)
        }
    };
    keeper.finish(statistics_file);
    let recorded = recording.map(Recording::finish);
    drop(rack);
    if let Some(blade) = private_blade {
        blade.shutdown();
    }
    Ok((end?, recorded.transpose()?))
}

/// The name and the arguments of a process; its short `name` if it has overwritten them.
fn words_of(pid: u32, name: &str) -> Vec<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = line.strip_suffix(b"\0").unwrap_or(&line);
    if line.is_empty() {
        return vec![name.trim_end().to_owned()];
    }
    line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Refuses processes that must not be entered, and those that have a pager already.
fn refuse(pid: u32, name: &str) -> Result<(), RunError> {
    if pid == std::process::id() {
        return Err(RunError::Oneself { pid });
    }
    if pid == FIRST_PROCESS {
        return Err(RunError::FirstProcess);
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    if is_of_kernel(&stat) {
        return Err(RunError::KernelThread { pid, name: printable(name) });
    }
    if has_sidecar(pid) || is_in_another_run(pid, Path::new("")) {
        return Err(RunError::AlreadyPaged { pid });
    }
    Ok(())
}

/// True for a kernel thread, by its `stat`. Pure.
fn is_of_kernel(stat: &str) -> bool {
    const KERNEL_THREAD: u64 = 0x20_0000;
    // The name may hold anything; the flags, field 9, are the seventh after it.
    let fields = stat.rsplit_once(')').map(|(_, after)| after.split_ascii_whitespace());
    let flags = fields.and_then(|mut fields| fields.nth(6)?.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

fn has_sidecar(pid: u32) -> bool {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let sidecars = entries.filter_map(|entry| {
        let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        let sidecar: u32 = entry.file_name().to_str()?.parse().ok()?;
        (name.trim_end() == SIDECAR_NAME).then_some(sidecar)
    });
    sidecars.into_iter().any(|sidecar| sidecar == pid || share_memory(sidecar, pid))
}

fn listen_for_the_end() -> Result<Arc<AtomicBool>, RunError> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&flag))
            .map_err(|error| RunError::Kernel { what: "signals cannot be caught", error })?;
    }
    Ok(flag)
}

/// Waits for the end of the process or the order to leave, and handles either.
fn stay(
    keeper: &mut Keeper,
    board: &Board,
    nursery: &Nursery,
    mut ward: Ward,
    must_leave: &AtomicBool,
) -> Result<AttachEnd, RunError> {
    let mut leaving = None;
    let mut looks_at_rights = Looks::new();
    loop {
        keeper.count_native(0);
        match ward.news() {
            None => {}
            Some(News::Gone) => {
                let last = ward.last_reference();
                drop(ward);
                end_children(last.into_iter().collect());
                return Ok(AttachEnd::ProcessEnded);
            }
            Some(News::Left) => {
                withdraw(&ward);
                if !ward.is_renewed() || leaving.is_some() {
                    return Ok(AttachEnd::Left);
                }
                ward = nursery.admit(ward.pid, &mut [], &mut Vec::new())?;
            }
            Some(News::Failed(reason)) => {
                ward.withdraw()?;
                return Err(RunError::NotPaged { pid: pid_of(&ward), reason });
            }
            Some(News::Stuck(pages)) => {
                ward.end_program();
                return Err(RunError::Stuck { pid: pid_of(&ward), pages });
            }
            Some(News::Died(words)) => {
                ward.end_program();
                let (pid, orphans) = (pid_of(&ward), ward.orphans());
                // The warden waits for this end of the connection to close.
                drop(ward);
                end_children(orphans.map(|(_, uffd)| uffd).collect());
                return Err(RunError::SidecarDied { pid, words });
            }
        }
        if must_leave.load(Relaxed) && leaving.is_none() {
            leaving = Some(Homecoming::new(Instant::now()));
            keeper.begin_to_leave();
            ward.leave()?;
        }
        if let Some(leaving) = &mut leaving {
            leaving.watch(board, pid_of(&ward));
        } else {
            looks_at_rights.look(std::slice::from_mut(&mut ward));
            stillness::grant_all(std::slice::from_mut(&mut ward));
        }
        sidecars::wait(std::slice::from_ref(&ward), None, STEP);
    }
}

/// As [`stay`], with all processes of a tree.
fn stay_with_tree(
    pid: u32,
    keeper: &mut Keeper,
    board: &Board,
    mut wards: Wards,
    must_leave: &AtomicBool,
    told: impl FnOnce(Entered) -> Result<(), RunError>,
) -> Result<AttachEnd, RunError> {
    be_prompt();
    wards.look(board);
    let (processes, threads, stopped) = wards.entered();
    if processes == 0 && wards.has_refusals() {
        return Err(RunError::NobodyEntered { pid });
    }
    told(Entered { stopped, threads, processes })?;
    let mut leaving: Option<Homecoming> = None;
    loop {
        keeper.count_native(wards.common_bytes());
        let pause = wards.look(board);
        if wards.are_over() {
            return Ok(AttachEnd::ProcessEnded);
        }
        if leaving.is_some() && wards.entered().0 == 0 {
            return Ok(AttachEnd::Left);
        }
        if must_leave.load(Relaxed) && leaving.is_none() {
            leaving = Some(Homecoming::new(Instant::now()));
            keeper.begin_to_leave();
            wards.leave_all();
        }
        if let Some(leaving) = &mut leaving {
            leaving.watch(board, pid);
        }
        wards.wait(pause, None);
    }
}

/// Unmaps the sidecar's memory from a process that it has left. On a busy machine the threads may
/// not stop in time; at worst the process keeps some unused addresses.
fn withdraw(ward: &Ward) {
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(250);
    for _ in 1..TRIES {
        if ward.withdraw().is_ok() {
            return;
        }
        std::thread::sleep(PAUSE);
    }
    if let Err(error) = ward.withdraw() {
        let pid = pid_of(ward);
        say!(
            "farpool: process {pid} has all its memory, and unused addresses of its sidecar: \
             {error}"
        );
    }
}

/// Ends children that wait for pages lost with the sidecar, as soon as they touch one.
fn end_children(mut orphans: Vec<Uffd>) {
    while !orphans.is_empty() {
        let born: Vec<Uffd> = orphans.iter().flat_map(end_orphans).collect();
        orphans.extend(born);
        std::thread::sleep(STEP);
        orphans.retain(|uffd| !uffd.is_gone());
    }
}

fn pid_of(ward: &Ward) -> u32 {
    ward.pid.as_raw_nonzero().get().unsigned_abs()
}

/// True if a run, by its board (see [`crate::runs`]), is an attachment to this process.
pub fn is_attached_to(board: &Path, pid: u32) -> bool {
    let marker = board.parent().unwrap_or(board).join(ATTACHED);
    std::fs::read_to_string(marker).is_ok_and(|text| attached_process(&text) == Some(pid))
}

/// The process that an attachment was made to. Pure.
fn attached_process(marker: &str) -> Option<u32> {
    marker.split_whitespace().next()?.parse().ok()
}

/// True if a process that started at `ticks` may be the keeper of an attachment. Keepers of older
/// versions did not record their start. Pure.
fn may_be_keeper(marker: &str, ticks: u64) -> bool {
    marker.split_whitespace().nth(1).is_none_or(|started| started.parse() == Ok(ticks))
}

/// Detaches a process and waits until it has all its memory: all processes of an attachment, or
/// this one of a run. `board` is that of the attachment or the run.
pub fn detach(pid: u32, board: &Path) -> Result<(), RunError> {
    let directory: PathBuf = board.parent().unwrap_or(board).to_owned();
    let keeper_pid = keeper_of(&directory).ok_or(RunError::NotAttached { pid })?;
    if directory.join(ATTACHED).exists() {
        return end_attachment(pid, keeper_pid, &directory);
    }
    if pid == keeper_pid {
        return Err(RunError::NotAttached { pid });
    }
    let maps = std::fs::read(memory_folder(pid).join("maps")).unwrap_or_default();
    if keeper::is_preloaded(&maps) {
        return Err(RunError::Preloaded { pid });
    }
    if !has_sidecar(pid) {
        return Err(RunError::NotEntered { pid });
    }
    ask_to_leave(pid, &directory)?;
    let is_left = || !has_sidecar(pid);
    await_leave(pid, is_left)
}

/// Puts the request beside the board, where the keeper looks for it; one at a time.
fn ask_to_leave(pid: u32, directory: &Path) -> Result<(), RunError> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let (draft, request) = (directory.join(format!("{LEAVE}-{pid}")), directory.join(LEAVE));
    let failed = |error| RunError::Directory { path: request.clone(), error };
    std::fs::write(&draft, pid.to_string()).map_err(failed)?;
    let deadline = Instant::now() + DETACH_TIME;
    loop {
        match renameat_with(CWD, &draft, CWD, &request, RenameFlags::NOREPLACE) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::EXIST) if Instant::now() < deadline => std::thread::sleep(STEP),
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}

fn end_attachment(pid: u32, keeper_pid: u32, directory: &Path) -> Result<(), RunError> {
    let kernel = |error: rustix::io::Errno| RunError::Kernel {
        what: "the attaching farpool cannot be told to leave",
        error: error.into(),
    };
    let Some(keeper) = i32::try_from(keeper_pid).ok().and_then(Pid::from_raw) else {
        return Err(RunError::NotAttached { pid });
    };
    // What is read after this belongs to the process that gets the signal; else no process gets it.
    let handle = pidfd_open(keeper, PidfdFlags::empty()).map_err(kernel)?;
    let marker = std::fs::read_to_string(directory.join(ATTACHED)).unwrap_or_default();
    let started = start_ticks(keeper_pid);
    let is_keeper = started.is_some_and(|ticks| may_be_keeper(&marker, ticks));
    if !is_keeper || !is_farpool(keeper_pid) {
        return Err(RunError::NotAttached { pid });
    }
    pidfd_send_signal(&handle, Signal::TERM).map_err(kernel)?;
    let has_left = || is_over(&handle) || !directory.exists();
    if pid == keeper_pid { await_end(pid, has_left) } else { await_leave(pid, has_left) }
}

/// True if a process runs the same file as this one, perhaps another version of it, or has its name
/// where the file is not visible. The number of a killed keeper may be another process's by now.
fn is_farpool(pid: u32) -> bool {
    match std::fs::read_link(format!("/proc/{pid}/exe")) {
        Ok(image) => std::env::current_exe().is_ok_and(|own| file_name(&own) == file_name(&image)),
        Err(_) => std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.starts_with("farpool")),
    }
}

/// The file name of a program, even if the file was replaced since the start. Pure.
fn file_name(image: &Path) -> Option<&str> {
    let name = image.file_name()?.to_str()?;
    Some(name.strip_suffix(" (deleted)").unwrap_or(name))
}

/// Waits until a process has been left. An error if it had to be ended instead.
fn await_leave(pid: u32, is_left: impl Fn() -> bool) -> Result<(), RunError> {
    await_end(pid, is_left)?;
    let lives = Path::new(&format!("/proc/{pid}")).exists();
    if lives { Ok(()) } else { Err(RunError::NoProcess { pid }) }
}

fn await_end(pid: u32, is_over: impl Fn() -> bool) -> Result<(), RunError> {
    let deadline = Instant::now() + DETACH_TIME;
    while Instant::now() < deadline {
        if is_over() {
            return Ok(());
        }
        std::thread::sleep(STEP);
    }
    Err(RunError::StillThere { pid, seconds: DETACH_TIME.as_secs() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_farpool_is_known_by_its_file() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        let other = is_farpool(child.id());
        child.kill().expect("a signal");
        child.wait().expect("its end");
        assert!(is_farpool(std::process::id()) && !other);
        assert_eq!(file_name(Path::new("/usr/bin/farpool (deleted)")), Some("farpool"));
        assert_eq!(file_name(Path::new("/usr/bin/farpool")), Some("farpool"));
    }

    #[test]
    fn a_thread_of_the_kernel_is_known() {
        assert!(is_of_kernel("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 1"));
        assert!(!is_of_kernel("7 (a) b) S 1 7 7 0 -1 4194304 1 2 3 4 150 25"));
        let own = std::fs::read_to_string("/proc/self/stat").expect("stat");
        assert!(!is_of_kernel(&own) && !is_of_kernel(""));
    }

    #[test]
    fn a_keeper_is_known_by_its_start() {
        assert!(may_be_keeper("7 100", 100) && may_be_keeper("7", 100));
        assert!(!may_be_keeper("7 100", 101) && !may_be_keeper("7 a", 100));
        assert_eq!(attached_process("7 100"), Some(7));
    }

    #[test]
    fn only_the_keeper_that_attached_is_told_to_leave() {
        let mut other = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        let base = tempfile::tempdir().expect("tempdir");
        let directory = base.path().join(format!("run-{}-0a", other.id()));
        std::fs::create_dir(&directory).expect("mkdir");
        let started = start_ticks(other.id()).expect("it lives");
        for marker in [format!("7 {started}"), format!("7 {}", started + 1), "7".into()] {
            std::fs::write(directory.join(ATTACHED), marker).expect("a marker");
            assert!(is_attached_to(&directory.join(BOARD), 7));
            let told = detach(7, &directory.join(BOARD));
            assert!(matches!(told, Err(RunError::NotAttached { pid: 7 })), "{told:?}");
        }
        assert!(other.try_wait().expect("its state").is_none(), "it got a signal");
        other.kill().expect("a signal");
        other.wait().expect("its end");
    }

    #[test]
    fn that_nothing_comes_in_is_said_once() {
        let began = Instant::now();
        let mut leaving = Homecoming::new(began);
        assert!(!leaving.has_stopped(10, began));
        assert!(!leaving.has_stopped(9, began + SILENCE_TIME));
        assert!(!leaving.has_stopped(9, began + SILENCE_TIME * 3 / 2));
        assert!(leaving.has_stopped(9, began + SILENCE_TIME * 2));
        assert!(!leaving.has_stopped(9, began + SILENCE_TIME * 4));
    }
}
