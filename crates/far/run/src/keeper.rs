//! The keeper: starts the program, watches its tree, passes on signals and the exit code.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use farpool_blade::{BladeConfig, Server, Serving};
use farpool_board::{
    BOARD_VARIABLE, BladeOffer, Board, Counter, ProcessState, Redundancy, Sealing, Settings, Slot,
};
use farpool_kernel::raise_to_maximum;
use farpool_seal::SealPolicy;
use farpool_units::{SUPERPAGE_BYTES, at_most, exactly};
use farpool_wire::Address;
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, WaitId, WaitIdOptions, WaitOptions, WaitStatus, pidfd_open,
    wait, waitid,
};
use signal_hook::consts::signal;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

use crate::blades::RunBlades;
use crate::dialing::{self, DIAL_SOCKET, Dialing};
use crate::directory::{self, BLADE_SOCKET, BOARD, RunDirectory};
use crate::door::{self, Door, Means};
use crate::faults::{FaultRecorder, FaultTrace, Recording};
use crate::holder::Holder;
use crate::needs;
use crate::outside::{self, EXIT_OUTSIDE, Outsiders, Strangers, WhenOutside};
use crate::priority::{at_usual_priority, be_prompt};
use crate::proc::{is_zombie, start_ticks};
use crate::program;
use crate::rack::RackRun;
use crate::redundancy::{check_copies, redundancy, with_redundancy};
use crate::rights;
use crate::say::say;
use crate::sharing::{check_sharing, group_named};
use crate::sidecars;
use crate::stats::{self, Peak, ProcessStatistics};
use crate::strain::Strain;
use crate::uffd_guardian::{UFFD_GUARDIAN_SOCKET, UffdGuardian};
use crate::wards::Wards;
use crate::{LIMIT_MIN_BYTES, LocalLimit, PERCENT_FLOOR_BYTES, RunError, RunOptions};

/// Signals passed on to the program; those of the terminal reach it anyway.
const FORWARDED: [i32; 8] = [
    signal::SIGTERM,
    signal::SIGINT,
    signal::SIGQUIT,
    signal::SIGHUP,
    signal::SIGUSR1,
    signal::SIGUSR2,
    signal::SIGWINCH,
    signal::SIGCONT,
];
/// How often processes without a pager are counted.
const WATCH_STEP: Duration = Duration::from_millis(20);
const PRELOAD_NAME: &str = "libfarpool_preload.so";

/// Runs the program and its descendants to their end. Returns the program's exit code (128 + the
/// signal's number if a signal ended it).
pub fn run(options: &RunOptions) -> Result<i32, RunError> {
    run_recorded(options, None).map(|(code, _)| code)
}

/// As [`run`], and writes the faults of the run to a trace at `out`. Returns what is in it.
pub fn capture_faults(options: &RunOptions, out: &Path) -> Result<(i32, FaultTrace), RunError> {
    let program = std::iter::once(&options.program).chain(&options.arguments);
    let program = program.map(|word| word.to_string_lossy().into_owned()).collect();
    let recorder = FaultRecorder::create(program, true, out)?;
    let (code, trace) = run_recorded(options, Some(recorder))?;
    Ok((code, trace.unwrap_or_default()))
}

fn run_recorded(
    options: &RunOptions,
    recorder: Option<FaultRecorder>,
) -> Result<(i32, Option<FaultTrace>), RunError> {
    let path = program::find(&options.program)?;
    check_limit(options.local)?;
    check_quota(options.quota_bytes)?;
    let options = &with_redundancy(options)?;
    check_copies(options)?;
    let [descriptors, file_size] = [Resource::Nofile, Resource::Fsize].map(raise_to_maximum);
    needs::check_file_size(private_bytes(options))?;
    if !options.no_check {
        needs::check_machine(options, &descriptors)?;
        needs::check_blades(options)?;
    }
    let way = choose(options, &path)?;
    let statistics_file = options.stats_file.as_deref().map(stats::create_file).transpose()?;
    let directory = RunDirectory::make()?;
    let (blades, private_blade) = blades(options, &directory)?;
    let board_path = directory.join(BOARD);
    blades.iter().try_for_each(|address| dialing::name(directory.path(), address))?;
    let dialing = Dialing::new(directory.path(), options.credentials.as_ref())?;
    dialing.listen()?;
    let settings = settings(options, blades, &path);
    check_sharing(&settings)?;
    let board = Arc::new(Board::create(&board_path, &settings)?);
    let guardian_path = directory.join(UFFD_GUARDIAN_SOCKET);
    let uffd_guardian = UffdGuardian::start(&guardian_path)
        .map_err(|error| RunError::Directory { path: guardian_path, error })?;
    open_to_others(&directory)?;
    let kernel = |what| move |error| RunError::Kernel { what, error };
    become_subreaper().map_err(kernel("the keeper cannot adopt the program's children"))?;
    let rack = options.rack.as_ref();
    let rack = rack.map(|rack| RackRun::start(rack, options, &board, directory.path()));
    let rack = rack.transpose()?;
    let child = Arc::new(AtomicI32::new(0));
    forward_signals(&child).map_err(kernel("signals cannot be passed on"))?;
    if recorder.is_some() {
        board.switch_on_fault_log(&board_path)?;
    }
    let (door, preload, wards) = match way {
        Way::Library(library) => (Door::Preload, Some(library), None),
        Way::Sidecars(means) => {
            let wards = Wards::open(means, &board_path, dialing, options.when_outside)?;
            (Door::Sidecar, None, Some(wards))
        }
    };
    let program = start(options, &path, preload.as_deref(), &board_path, [descriptors, file_size])
        .map_err(|error| program::ProgramError::NotStarted { path: path.clone(), error })?;
    child.store(program, Relaxed);
    let recording = recorder.map(|recorder| recorder.start(&board));
    let mut keeper = Keeper::new(board, Some(uffd_guardian), Strain::new(door, options.quiet));
    if wards.is_some() {
        be_prompt();
    }
    keeper.wards = wards;
    keeper.strangers =
        preload.as_deref().map(|library| Strangers::new(options.when_outside, library));
    let status = keeper.watch(program);
    keeper.finish(statistics_file);
    let recorded = recording.map(Recording::finish);
    drop(rack);
    if let Some(blade) = private_blade {
        blade.shutdown();
    }
    let code = if keeper.must_end() { EXIT_OUTSIDE } else { exit_code(status) };
    Ok((code, recorded.transpose()?))
}

/// The door of a run, with what it needs.
enum Way {
    Library(PathBuf),
    Sidecars(Means),
}

/// Refuses a door that cannot work, and a program that the only possible door cannot serve.
fn choose(options: &RunOptions, program: &Path) -> Result<Way, RunError> {
    if options.door != Door::Preload {
        match Means::tried() {
            Ok(means) => return Ok(Way::Sidecars(means)),
            Err(lack) if options.door == Door::Sidecar => return Err(RunError::Door(lack)),
            Err(_) if options.quiet => {}
            Err(lack) => say!("farpool: {}", door::note(&lack)),
        }
    }
    if options.when_outside != WhenOutside::Allow {
        program::check(program)?;
    }
    Ok(Way::Library(preload_path(options)?))
}

/// The state of a run: its board, and what its processes have counted.
pub(crate) struct Keeper {
    board: Arc<Board>,
    /// Processes hand their userfaultfds over to it; those of sidecars are kept in the wards.
    uffd_guardian: Option<UffdGuardian>,
    gone: ProcessStatistics,
    peak: Peak,
    /// Where the board is.
    folder: PathBuf,
    has_told_of_no_room: bool,
    /// The processes with sidecars, if that is the door.
    wards: Option<Wards>,
    /// Processes without the preloaded library, if that is the door.
    strangers: Option<Strangers>,
    strain: Strain,
}

impl Keeper {
    pub(crate) fn new(
        board: Arc<Board>,
        uffd_guardian: Option<UffdGuardian>,
        strain: Strain,
    ) -> Keeper {
        Keeper {
            board,
            uffd_guardian,
            gone: ProcessStatistics::empty(),
            peak: Peak::default(),
            folder: directory::base(),
            has_told_of_no_room: false,
            wards: None,
            strangers: None,
            strain,
        }
    }

    /// The programs are being detached.
    pub(crate) fn begin_to_leave(&mut self) {
        self.strain.stop();
    }

    /// Waits for the program and all its descendants. Returns the program's status.
    fn watch(&mut self, program: i32) -> ExitStatus {
        let mut status = ExitStatus::from_raw(0);
        // Its end wakes the wait. Without the handle it is seen at the next check.
        let handle = |pid| pidfd_open(pid, PidfdFlags::empty()).ok();
        let mut ending = Pid::from_raw(program).and_then(handle);
        loop {
            match reap() {
                Ok(Some((pid, wait_status))) => {
                    if pid.as_raw_nonzero().get() == program {
                        status = ExitStatus::from_raw(wait_status.as_raw());
                        ending = None;
                    }
                    self.sweep();
                }
                Ok(None) => {
                    let common_bytes = self.wards.as_ref().map_or(0, Wards::common_bytes);
                    self.count_native(common_bytes);
                    if let Some(strangers) = &mut self.strangers {
                        strangers.look(&self.board);
                    }
                    if self.must_end() {
                        outside::end_all();
                        std::thread::sleep(WATCH_STEP);
                        continue;
                    }
                    match &mut self.wards {
                        Some(wards) => {
                            let pause = wards.look(&self.board);
                            wards.wait(pause, ending.as_ref());
                        }
                        None => sidecars::wait(&[], ending.as_ref(), WATCH_STEP),
                    }
                }
                Err(_) => {
                    // No children are left. A sidecar has said why its program ends before it
                    // ended.
                    if let Some(wards) = &mut self.wards {
                        wards.hear(&self.board);
                    }
                    return status;
                }
            }
        }
    }

    /// True if a process is outside and must not be.
    fn must_end(&self) -> bool {
        let wards = self.wards.as_ref().map(|wards| &wards.outsiders);
        let strangers = self.strangers.as_ref().map(|strangers| &strangers.outsiders);
        wards.or(strangers).is_some_and(Outsiders::must_end)
    }

    /// Publishes the resident set of processes that have no pager of their own. `common_bytes`:
    /// shared memory of those that are not on the board.
    pub(crate) fn count_native(&mut self, common_bytes: u64) {
        self.peak.observe(&self.board);
        self.strain.look(&self.board, &self.gone, common_bytes);
        self.tell_of_no_room();
        RunBlades::new(&self.board).forget_left();
        let mut somebody_ended = false;
        for slot in self.board.processes() {
            let pid = slot.pid.load(Relaxed);
            match Holder::of(pid).map(Holder::resident) {
                Some(has) if slot.state() != ProcessState::Active => {
                    slot.set(Counter::ResidentPages, has.anonymous_pages);
                    slot.set(Counter::SharedPages, has.shared_pages);
                }
                Some(_) => {}
                // It has ended, or cannot end: see uffd_guardian.
                None => somebody_ended = true,
            }
        }
        if somebody_ended {
            self.sweep();
        }
    }

    /// A process that finds no slot cannot say why.
    fn tell_of_no_room(&mut self) {
        if self.has_told_of_no_room || self.board.header().processes_without_room.load(Relaxed) == 0
        {
            return;
        }
        self.has_told_of_no_room = true;
        say!(
            "farpool: the run has no room for more processes, because the file system of {0} is \
             full; free some space there (df {0})",
            self.folder.display()
        );
    }

    /// Frees the slots of processes that are gone, keeping what they counted.
    fn sweep(&mut self) {
        let ended: Vec<ProcessStatistics> =
            self.board.processes().filter_map(|slot| self.sweep_slot(slot)).collect();
        for process in ended {
            self.gone.add(&process);
        }
        self.board.copies().sweep(is_alive);
        if let Some(uffd_guardian) = &self.uffd_guardian {
            uffd_guardian.sweep(is_alive);
        }
    }

    fn sweep_slot(&self, slot: &Slot) -> Option<ProcessStatistics> {
        let pid = slot.pid.load(Relaxed);
        if is_alive(pid)
            && !is_zombie(pid)
            && start_ticks(pid) == Some(slot.start_ticks.load(Relaxed))
        {
            return None;
        }
        let ended = ProcessStatistics::of(slot).ended();
        self.board.release(slot);
        Some(ended)
    }

    pub(crate) fn finish(&mut self, statistics_file: Option<std::fs::File>) {
        self.sweep();
        let mut statistics = stats::collect(&self.board, &self.gone, self.peak);
        statistics.working_set = self.strain.largest();
        if let Some(mut file) = statistics_file {
            let text = format!("{:#}\n", statistics.to_json());
            if let Err(error) = std::io::Write::write_all(&mut file, text.as_bytes()) {
                say!("farpool: the statistics cannot be written: {error}");
            }
        }
        self.tell_of_no_room();
        self.strain.conclude();
        let lost = statistics.total.counter("lost");
        if lost > 0 {
            say!("farpool: {lost} pages of the program were lost with their blade");
        }
    }
}

/// Changes the local memory of a run under way. Returns its previous limit in bytes.
pub fn set_limit(board_path: &Path, local: LocalLimit) -> Result<u64, RunError> {
    check_limit(local)?;
    let board = Board::open_settings(board_path)?;
    let (limit_bytes, percent) = limit_numbers(local);
    let before = board.header().limit_bytes.swap(limit_bytes, Relaxed);
    board.header().local_percent.store(percent, Relaxed);
    Ok(before)
}

/// A limit as stored on the board: bytes, and a percentage or 0.
fn limit_numbers(local: LocalLimit) -> (u64, u32) {
    match local {
        LocalLimit::Bytes(bytes) => (bytes, 0),
        LocalLimit::Percent(percent) => (PERCENT_FLOOR_BYTES, percent),
    }
}

/// Reaps a child that has ended. Returns None if none has.
///
/// # Errors
/// ECHILD if there are no children.
fn reap() -> Result<Option<(Pid, WaitStatus)>, Errno> {
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    if waitid(WaitId::All, ended)?.is_none() {
        return Ok(None);
    }
    at_usual_priority(|| wait(WaitOptions::NOHANG))
}

fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}

fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

fn start(
    options: &RunOptions,
    path: &Path,
    preload: Option<&Path>,
    board: &Path,
    [descriptors, file_size]: [Rlimit; 2],
) -> Result<i32, std::io::Error> {
    let mut command = Command::new(path);
    command.arg0(&options.program).args(&options.arguments);
    command.envs(rights::lost_variables().iter().map(|(name, value)| (name, value)));
    command.envs(options.environment.iter().map(|(name, value)| (name, value)));
    if let Some(preload) = preload {
        let mut libraries = preload.as_os_str().to_owned();
        if let Some(others) = rights::variable("LD_PRELOAD").filter(|others| !others.is_empty()) {
            libraries.push(":");
            libraries.push(others);
        }
        command.env("LD_PRELOAD", libraries).env(BOARD_VARIABLE, board);
    }
    let keeper = rustix::process::getpid();
    // SAFETY: only async-signal-safe system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // The keeper may have died before the line above took effect.
            if rustix::process::getppid() != Some(keeper) {
                return Err(std::io::Error::from_raw_os_error(libc::EPIPE));
            }
            rustix::process::setrlimit(Resource::Nofile, descriptors)?;
            rustix::process::setrlimit(Resource::Fsize, file_size)?;
            Ok(())
        });
    }
    let child = command.spawn()?;
    Ok(exactly(child.id()))
}

fn forward_signals(child: &Arc<AtomicI32>) -> Result<(), std::io::Error> {
    let mut signals = SignalsInfo::<WithOrigin>::new(FORWARDED)?;
    let child = Arc::clone(child);
    std::thread::Builder::new().name("farpool-signals".into()).spawn(move || {
        for origin in &mut signals {
            // Without a sender it came from the terminal, which sent it to the program as well.
            let pid = child.load(Relaxed);
            if origin.process.is_some() && pid > 0 {
                // SAFETY: sends a signal to our own child; a child that is gone is an error we
                // ignore.
                unsafe { libc::kill(pid, origin.signal) };
            }
        }
    })?;
    Ok(())
}

fn become_subreaper() -> Result<(), std::io::Error> {
    // SAFETY: PR_SET_CHILD_SUBREAPER takes a plain number.
    let result = unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1_usize, 0, 0, 0) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

pub(crate) fn settings(options: &RunOptions, blades: Vec<String>, path: &Path) -> Settings {
    let (limit_bytes, local_percent) = limit_numbers(options.local);
    let is_remote = options.rack.is_some() || blades.iter().any(|it| may_pass_a_network(it));
    let sealing = match options.seal {
        _ if redundancy(options) != Redundancy::NONE => Sealing::Sealed,
        policy if policy.seals(is_remote) => Sealing::Sealed,
        SealPolicy::Never => Sealing::Plain,
        _ => Sealing::PlainOnThisHost,
    };
    Settings {
        limit_bytes,
        local_percent,
        quota_bytes: quota_bytes(options),
        sharing_group: options.share_with.as_deref().map(group_named),
        blades: blades.into_iter().map(BladeOffer::open).collect(),
        allow_remote_tcp: options.allow_remote_tcp,
        secures_tcp: options.credentials.is_some(),
        sealing,
        redundancy: redundancy(options),
        when_full: options.when_full,
        victim_policy: options.victim_policy.clone(),
        prefetch_policy: options.prefetch_policy.clone(),
        pager_threads: options.pager_threads,
        threshold_bytes: options.threshold_bytes,
        deadline_ms: at_most(options.deadline.as_millis()),
        verify_every_ms: options.verify_every.map_or(0, |every| at_most(every.as_millis())),
        program: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

/// True unless the blade is certain to be on this host.
pub(crate) fn may_pass_a_network(address: &str) -> bool {
    address.parse().map_or(true, |address| matches!(address, Address::Tcp(_)))
}

pub(crate) fn check_quota(quota_bytes: Option<u64>) -> Result<(), RunError> {
    match quota_bytes {
        Some(asked) if asked < SUPERPAGE_BYTES => Err(RunError::QuotaTooSmall { asked }),
        _ => Ok(()),
    }
}

pub(crate) fn check_limit(local: LocalLimit) -> Result<(), RunError> {
    match local {
        LocalLimit::Bytes(asked) if asked < LIMIT_MIN_BYTES => {
            Err(RunError::LimitTooSmall { asked })
        }
        _ => Ok(()),
    }
}

/// The addresses of the blades as clients use them, and the private blade if none was named.
pub(crate) fn blades(
    options: &RunOptions,
    directory: &RunDirectory,
) -> Result<(Vec<String>, Option<Serving>), RunError> {
    for address in &options.blades {
        let parsed: Result<Address, _> = address.parse();
        if let Err(error) = parsed {
            let reason = error.to_string();
            return Err(RunError::Address { address: address.clone(), reason });
        }
    }
    let Some(memory_bytes) = private_bytes(options) else {
        return Ok((options.blades.clone(), None));
    };
    let socket = directory.join(BLADE_SOCKET);
    let to_address = |scheme: &str| format!("{scheme}://{}", socket.display());
    let listen: Address =
        to_address("unix").parse().map_err(|error: farpool_wire::AddressError| {
            RunError::Address { address: to_address("unix"), reason: error.to_string() }
        })?;
    let config = BladeConfig { memory_bytes, ..BladeConfig::default() };
    let serving = Server::bind(&[listen], config)?.serve()?;
    Ok((vec![to_address("shm")], Some(serving)))
}

/// The size of a private blade. None if others were named.
pub(crate) fn private_bytes(options: &RunOptions) -> Option<u64> {
    let is_private = options.blades.is_empty() && options.rack.is_none();
    is_private.then(|| quota_bytes(options))
}

fn quota_bytes(options: &RunOptions) -> u64 {
    // What a rack grants is limit enough.
    let default = || if options.rack.is_some() { u64::MAX } else { machine_bytes() };
    options.quota_bytes.unwrap_or_else(default)
}

fn machine_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit.max(1)))
}

/// Lets programs that change their user use root's runs: the directory's name cannot be guessed.
pub(crate) fn open_to_others(directory: &RunDirectory) -> Result<(), RunError> {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    for name in [BOARD, BLADE_SOCKET, UFFD_GUARDIAN_SOCKET, DIAL_SOCKET] {
        let path = directory.join(name);
        if path.exists() {
            let permissions = std::fs::Permissions::from_mode(0o666);
            std::fs::set_permissions(&path, permissions)
                .map_err(|error| RunError::Directory { path, error })?;
        }
    }
    Ok(())
}

/// True if a process has the preload library, by its /proc/PID/maps.
pub(crate) fn is_preloaded(maps: &[u8]) -> bool {
    let mut lines = maps.split(|byte| *byte == b'\n');
    lines.any(|line| line.ends_with(PRELOAD_NAME.as_bytes()))
}

/// Finds it beside the executable (a build tree), or in `../lib/farpool` (an installation).
fn preload_path(options: &RunOptions) -> Result<PathBuf, RunError> {
    if let Some(path) = &options.preload {
        return if path.exists() {
            Ok(path.clone())
        } else {
            Err(RunError::NoPreload { path: path.clone() })
        };
    }
    let kernel = |error| RunError::Kernel { what: "the executable's path is not known", error };
    let executable = std::env::current_exe().map_err(kernel)?;
    let directory = executable.parent().unwrap_or(Path::new("/")).to_owned();
    let beside = directory.join(PRELOAD_NAME);
    let candidates = [
        beside.clone(),
        // Test binaries of a build tree are one level deeper.
        directory.join("..").join(PRELOAD_NAME),
        directory.join("../lib/farpool").join(PRELOAD_NAME),
    ];
    let found = candidates.into_iter().find(|path| path.exists());
    found.ok_or(RunError::NoPreload { path: beside })
}
