//! `farpool attach`: gives a running process less local memory, and `farpool detach`: gives it back.
//!
//! The attaching process is the keeper: it holds the board with the limit, the private blade if no other was named, and
//! a duplicate of the userfaultfd. It stays until the process ends or is left. When it is told to end (SIGTERM, SIGINT)
//! it brings everything in first; when it is killed, the sidecar does.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::Board;
use farpool_inject::Pid;
use farpool_uffd::{PAGE_BYTES, Uffd};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use crate::custody::end_orphans;
use crate::directory::{BOARD, RunDirectory, runs};
use crate::keeper::{self, Keeper};
use crate::sidecars::{News, Nursery, Ward};
use crate::strain::Strain;
use crate::wards::share_memory;
use crate::{Door, RunError, RunOptions, needs, stats};

/// Name of a file in the directory of a run that was attached: its keeper may be told to leave.
const ATTACHED: &str = "attached";
/// Between two looks at the sidecar and the board.
const STEP: Duration = Duration::from_millis(20);
/// It holds all others, or all of a container's.
const FIRST_PROCESS: u32 = 1;
/// What a sidecar calls itself.
const SIDECAR_NAME: &str = "farpool-sidecar";
/// `detach` waits at most this long for the keeper to bring everything in.
const DETACH_TIME: Duration = Duration::from_secs(600);

/// How an attachment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachEnd {
    /// The process ended, or runs another program.
    ProcessEnded,
    /// The process has all its memory again, and goes on.
    Left,
}

/// How the process was entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entered {
    /// How long its threads were stopped for it.
    pub stopped: Duration,
    pub threads: usize,
}

/// Attaches to process `pid` with the limit and the blades of `options`, and stays until the end. `entered` is called
/// once paging has begun.
pub fn attach(
    pid: u32,
    options: &RunOptions,
    entered: impl FnOnce(Entered),
) -> Result<AttachEnd, RunError> {
    let gone = RunError::NoProcess { pid };
    let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Err(gone) };
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).map_err(|_| gone)?;
    refuse(pid)?;
    keeper::check_limit(options.local)?;
    keeper::check_quota(options.quota_bytes)?;
    if !options.no_check {
        needs::check_blades(options)?;
    }
    let statistics_file = options.stats_file.as_deref().map(stats::create_file).transpose()?;
    let directory = RunDirectory::make()?;
    let (blades, private_blade) = keeper::blades(options, &directory)?;
    let board_path = directory.join(BOARD);
    let settings = keeper::settings(options, blades, Path::new(name.trim_end()));
    let board = Arc::new(Board::create(&board_path, &settings)?);
    keeper::open_to_others(&directory)?;
    let nursery = Nursery::open(&board_path, true)?;
    let must_leave = listen_for_the_end()?;
    let ward = nursery.admit(target, false)?;
    let marker = directory.join(ATTACHED);
    std::fs::write(&marker, b"").map_err(|error| RunError::Directory { path: marker, error })?;
    let (stopped, threads) = ward.stopped();
    entered(Entered { stopped, threads });
    let mut keeper = Keeper::new(board, None, Strain::new(Door::Sidecar, options.quiet));
    let end = stay(&mut keeper, ward, &must_leave);
    keeper.finish(statistics_file);
    if let Some(blade) = private_blade {
        blade.shutdown();
    }
    end
}

/// Refuses what must not be entered, or has a pager already.
fn refuse(pid: u32) -> Result<(), RunError> {
    if pid == std::process::id() {
        return Err(RunError::Oneself { pid });
    }
    if pid == FIRST_PROCESS {
        return Err(RunError::FirstProcess);
    }
    if has_sidecar(pid) || is_in_a_run(pid) {
        return Err(RunError::AlreadyPaged { pid });
    }
    Ok(())
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

fn is_in_a_run(pid: u32) -> bool {
    let boards = runs().into_iter().filter_map(|path| Board::open(&path, false).ok());
    boards.into_iter().any(|board| board.processes().any(|slot| slot.pid.load(Relaxed) == pid))
}

fn listen_for_the_end() -> Result<Arc<AtomicBool>, RunError> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&flag))
            .map_err(|error| RunError::Kernel { what: "signals cannot be caught", error })?;
    }
    Ok(flag)
}

/// Waits for the end of the process or the order to leave, and does what either asks for.
fn stay(
    keeper: &mut Keeper,
    mut ward: Ward,
    must_leave: &AtomicBool,
) -> Result<AttachEnd, RunError> {
    let mut is_leaving = false;
    loop {
        keeper.count_native();
        match ward.news() {
            None => {}
            Some(News::Gone) => return Ok(AttachEnd::ProcessEnded),
            Some(News::Left) => {
                withdraw(&ward);
                return Ok(AttachEnd::Left);
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
                end_children(&ward.orphans());
                return Err(RunError::SidecarDied { pid: pid_of(&ward), words });
            }
        }
        if must_leave.load(Relaxed) && !is_leaving {
            is_leaving = true;
            ward.leave()?;
        }
        Ward::wait(std::slice::from_ref(&ward), STEP);
    }
}

/// Takes the sidecar's memory out of a process that it has left. On a busy machine its threads may not stop in time;
/// in the end the process keeps some unused addresses, and nothing else.
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
        eprintln!(
            "farpool: process {pid} has all its memory, and unused addresses of its sidecar: {error}"
        );
    }
}

/// Ends children that wait for pages which were lost with the sidecar, as soon as they touch one.
fn end_children(orphans: &[Uffd]) {
    const NOWHERE: usize = 0x8000;
    let lives = |uffd: &&Uffd| uffd.zero(NOWHERE, PAGE_BYTES, false).errno != Some(libc::ESRCH);
    while orphans.iter().filter(lives).count() > 0 {
        orphans.iter().for_each(end_orphans);
        std::thread::sleep(STEP);
    }
}

fn pid_of(ward: &Ward) -> u32 {
    ward.pid.as_raw_nonzero().get().unsigned_abs()
}

/// Has the keeper of an attached process leave it, and waits until it has. `board` is the run's, see
/// [`crate::runs`].
pub fn detach(pid: u32, board: &Path) -> Result<(), RunError> {
    let keeper_pid = Board::open(board, false)?.header().keeper_pid.load(Relaxed);
    let directory: PathBuf = board.parent().unwrap_or(board).to_owned();
    if !directory.join(ATTACHED).exists() {
        return Err(RunError::NotAttached { pid });
    }
    let kernel = |error: rustix::io::Errno| RunError::Kernel {
        what: "the attaching farpool cannot be told to leave",
        error: error.into(),
    };
    let Some(keeper) = i32::try_from(keeper_pid).ok().and_then(Pid::from_raw) else {
        return Err(RunError::NotAttached { pid });
    };
    let handle = pidfd_open(keeper, PidfdFlags::empty()).map_err(kernel)?;
    pidfd_send_signal(&handle, Signal::TERM).map_err(kernel)?;
    let deadline = Instant::now() + DETACH_TIME;
    while Instant::now() < deadline {
        if rustix::process::test_kill_process(keeper).is_err() || !directory.exists() {
            // If it could not be left as it was, it was ended.
            let lives = Path::new(&format!("/proc/{pid}")).exists();
            return if lives { Ok(()) } else { Err(RunError::NoProcess { pid }) };
        }
        std::thread::sleep(STEP);
    }
    Err(RunError::StillThere { pid, seconds: DETACH_TIME.as_secs() })
}
