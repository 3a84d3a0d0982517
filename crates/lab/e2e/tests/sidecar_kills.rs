//! kill -9 at any instant, of each process of a far program: its sidecar, its keeper, the program
//! itself, a forked child, a child's sidecar. No process may read a wrong byte meanwhile or
//! afterwards, and nothing may be left.
//!
//! FARPOOL_KILL_TRIALS is the number of kills (of all kinds together), FARPOOL_KILL_SEED selects
//! the instants: a trial that fails prints its seed. FARPOOL_KILL_KIND, an index into [`KINDS`],
//! makes all trials of one kind.

use std::path::{Path, PathBuf};
use std::time::Duration;

use farpool_e2e::jobs::{compile_c, scratch};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{have, tree, turn, wait_until};

const TRIALS: &str = "FARPOOL_KILL_TRIALS";
const SEED: &str = "FARPOOL_KILL_SEED";
const KIND: &str = "FARPOOL_KILL_KIND";
const FEW_TRIALS: u64 = 40;
/// Kills between two lines of progress, which show how many trials of a failed series succeeded.
const PROGRESS: u64 = 20;
/// The environment variable that marks all processes of a trial, including sidecars.
const MARK: &str = "FARPOOL_KILL_TRIAL";
const LIMIT: &str = "8MiB";
const HELD_MIB: &str = "20";
/// Memory in MiB and depth of a tree of children, which ends by itself.
const FORKS: [&str; 2] = ["16", "2"];
/// How long a trial may take, also if the trials run with the lowest priority on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// Latest instants of a kill: most kills are while the program starts, some while it is running.
const EARLY_US: u64 = 80_000;
const LATE_US: u64 = 300_000;
const RUNS: &str = "/run/farpool";
const KILLED: i32 = 128 + libc::SIGKILL;
/// What forks.c adds to its count for a child that was killed. For a wrong word it adds one.
const ENDED_BADLY: u64 = 1 << 20;
/// Exit code of verify.c for a wrong word.
const WRONG_DATA: i32 = 9;

/// The process to kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Keeper,
    Program,
    Sidecar,
    /// A process that the program has forked.
    Child,
    ChildsSidecar,
}

/// The program, and how it gets far memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Story {
    /// verify.c under `farpool run`.
    Run,
    /// verify.c under `farpool attach`.
    Attach,
    /// forks.c under `farpool run`.
    Forks,
}

const KINDS: [(Story, Victim); 11] = [
    (Story::Run, Victim::Sidecar),
    (Story::Run, Victim::Keeper),
    (Story::Run, Victim::Program),
    (Story::Attach, Victim::Sidecar),
    (Story::Attach, Victim::Keeper),
    (Story::Attach, Victim::Program),
    (Story::Forks, Victim::Sidecar),
    (Story::Forks, Victim::Keeper),
    (Story::Forks, Victim::Program),
    (Story::Forks, Victim::Child),
    (Story::Forks, Victim::ChildsSidecar),
];

/// Reproducible random numbers: xorshift.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The high bits are of better quality.
        (self.0 >> 11) % limit
    }
}

/// The programs, and their directory.
struct Stage {
    _directory: tempfile::TempDir,
    verify: PathBuf,
    forks: PathBuf,
}

/// One trial: its processes, and their mark.
struct Trial {
    mark: String,
    /// The process that was started first, and the keeper if that is another process.
    program: Running,
    keeper: Option<Running>,
}

impl Stage {
    fn new() -> Stage {
        let directory = scratch();
        let make = |name, source| compile_c(name, source, &[], directory.path());
        let verify = make("verify", include_str!("sidecar/verify.c"));
        let forks = make("forks", include_str!("sidecar/forks.c"));
        Stage { _directory: directory, verify, forks }
    }

    fn start(&self, story: Story, seed: u64) -> Trial {
        let mark = format!("{}-{seed}", std::process::id());
        let marked = |run: Run| run.env(MARK, &mark).patience(PATIENCE).start();
        let far = |program: &Path| Run::through(Door::Sidecar, LIMIT).program(program);
        let verify = [HELD_MIB, "2"];
        let program = match story {
            Story::Run => marked(far(&self.verify).args(verify)),
            Story::Attach => marked(Run::local(&self.verify).args(verify)),
            Story::Forks => marked(far(&self.forks).args(FORKS).arg(seed.to_string())),
        };
        let keeper = (story == Story::Attach).then(|| {
            wait_until("the program to run", PATIENCE, || {
                let name = std::fs::read_to_string(format!("/proc/{}/comm", program.pid()));
                name.is_ok_and(|name| name == "verify\n").then_some(())
            });
            marked(Run::attach(program.pid(), LIMIT))
        });
        Trial { mark, program, keeper }
    }
}

impl Trial {
    fn keeper_pid(&self) -> u32 {
        self.keeper.as_ref().map_or(self.program.pid(), Running::pid)
    }

    /// The process to kill. Returns None if it does not exist yet, or no more.
    fn find(&self, victim: Victim) -> Option<u32> {
        let program = || match &self.keeper {
            Some(_) => Some(self.program.pid()),
            None => tree::children(self.program.pid()).into_iter().find(|pid| is_image(*pid)),
        };
        // Children may end during the search.
        let child = || tree::forked(program()?).into_iter().max();
        let alive = match victim {
            Victim::Keeper => Some(self.keeper_pid()),
            Victim::Program => program(),
            Victim::Sidecar => tree::sidecars_in(program()?).pop(),
            Victim::Child => child(),
            Victim::ChildsSidecar => {
                tree::forked(program()?).into_iter().find_map(|pid| tree::sidecars_in(pid).pop())
            }
        };
        alive.filter(|pid| tree::is_alive(*pid))
    }

    /// Kills the victim, at an instant that the dice choose. Returns None if the program had ended
    /// before.
    fn kill(&mut self, victim: Victim, dice: &mut Dice) -> Option<u32> {
        let most_us = if dice.below(3) == 0 { LATE_US } else { EARLY_US };
        // The instant is the point of the trial; nothing is waited for.
        std::thread::sleep(Duration::from_micros(dice.below(most_us)));
        // In every other trial, on average, the kill waits for the sidecar, when the first pages
        // are moved out.
        let is_entered = dice.below(2) == 0;
        let mut has_ended = false;
        let pid = wait_until("somebody to kill", PATIENCE, || {
            has_ended = !self.program.is_running();
            let is_early = is_entered && self.find(Victim::Sidecar).is_none();
            if has_ended { Some(0) } else { self.find(victim).filter(|_| !is_early) }
        });
        if has_ended {
            return None;
        }
        std::thread::sleep(Duration::from_micros(dice.below(most_us / 4)));
        tree::signal(pid, libc::SIGKILL);
        Some(pid)
    }

    /// Checks that an attached program outlives its keeper with all its data: signals it to check,
    /// then to end. If the keeper was making calls on its behalf, the program has ended with the
    /// keeper.
    fn outlives(&mut self) {
        let program = self.program.pid();
        wait_until("the sidecar to leave", PATIENCE, || {
            let keeper_lives = self.keeper.as_mut().is_some_and(Running::is_running);
            (!keeper_lives && tree::sidecars_in(program).is_empty()).then_some(())
        });
        wait_until("the program to be ready", PATIENCE, || self.has_said("ready"));
        tree::signal(program, libc::SIGUSR1);
        wait_until("the program to check", PATIENCE, || self.has_said("checked"));
        tree::signal(program, libc::SIGTERM);
    }

    /// Some if the program has printed `word`, or has ended.
    fn has_said(&mut self, word: &str) -> Option<()> {
        (self.program.stdout().contains(word) || !self.program.is_running()).then_some(())
    }

    /// If a sidecar is killed before any memory is far, nothing is lost and the program continues,
    /// with another sidecar or without. Signals it to end.
    fn goes_on(&mut self, killed: u32) {
        let known = self.find(Victim::Program);
        wait_until("the end of the program, or another sidecar", PATIENCE, || {
            let keeper_lives = self.keeper.as_mut().is_none_or(Running::is_running);
            let has_other = || tree::sidecars_in(known?).into_iter().find(|pid| *pid != killed);
            let is_over = !keeper_lives || !self.program.is_running() || has_other().is_some();
            is_over.then_some(())
        });
        if let Some(program) = known {
            tree::signal(program, libc::SIGTERM);
        }
    }

    /// Waits until all processes of the trial have ended by themselves. Returns the exit code and
    /// the output.
    fn ends(self) -> (i32, String) {
        let keeper = self.keeper.map(Running::finish);
        let outcome = self.program.finish();
        wait_until("the last process to end", PATIENCE, || {
            let left = tree::bearers(MARK, &self.mark);
            if !left.is_empty() {
                println!("left: {left:?}");
            }
            left.is_empty().then_some(())
        });
        let said = keeper.map_or_else(String::new, |keeper| keeper.stderr);
        (outcome.code, format!("{}{}{said}", outcome.stdout, outcome.stderr))
    }
}

/// Whether a process has executed one of the programs.
fn is_image(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    matches!(name.trim_end(), "verify" | "forks")
}

/// Farpool's mounts.
fn mounts() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    text.lines().filter(|line| line.contains("farpool")).map(str::to_owned).collect()
}

/// Run directories that these keepers have left.
fn directories(keepers: &[u32]) -> Vec<PathBuf> {
    let is_of = |path: &Path, pid: &u32| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(&format!("run-{pid}-"))
    };
    let entries = std::fs::read_dir(RUNS).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| keepers.iter().any(|pid| is_of(path, pid))).collect()
}

fn number(variable: &str, usual: u64) -> u64 {
    let text = std::env::var(variable);
    text.map_or(usual, |text| text.parse().expect("a number"))
}

/// The count of forks.c over all its processes.
fn counted(said: &str) -> u64 {
    let line = said.lines().find_map(|line| line.strip_suffix(" wrong"));
    line.and_then(|number| number.parse().ok()).unwrap_or(u64::MAX)
}

/// Makes one trial. Returns false if the program had ended before the kill.
fn trial(
    stage: &Stage,
    (story, victim): (Story, Victim),
    seed: u64,
    keepers: &mut Vec<u32>,
) -> bool {
    let mut dice = Dice::new(seed);
    let mut trial = stage.start(story, seed);
    keepers.push(trial.keeper_pid());
    let killed = trial.kill(victim, &mut dice);
    match (story, victim, killed) {
        (Story::Attach, Victim::Keeper, Some(_)) => trial.outlives(),
        (Story::Run | Story::Attach, Victim::Sidecar, Some(pid)) => trial.goes_on(pid),
        _ => {}
    }
    let (code, said) = trial.ends();
    let what = format!("seed {seed}: {victim:?} of {story:?}: code {code}: {said}");
    assert!(!said.contains("WRONG") && code != WRONG_DATA, "{what}");
    let ended_well = code == 0 && said.contains("ends\n");
    let is_right = match (story, victim) {
        _ if killed.is_none() => code == 0,
        (Story::Forks, Victim::Child | Victim::ChildsSidecar) => {
            counted(&said).is_multiple_of(ENDED_BADLY)
        }
        (Story::Forks, _) => code == KILLED || said.contains("0 wrong\n"),
        (_, Victim::Sidecar) | (Story::Attach, Victim::Keeper) => code == KILLED || ended_well,
        _ => code == KILLED,
    };
    assert!(is_right, "{what}");
    killed.is_some()
}

#[test]
fn whoever_is_killed_no_byte_is_wrong_and_nothing_is_left() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let stage = Stage::new();
    let (trials, seed) = (number(TRIALS, FEW_TRIALS), number(SEED, 1));
    let (mut counts, mut keepers) = ([0_u64; KINDS.len()], Vec::new());
    let mounts_before = mounts();
    let mut missed = 0;
    for at in 0.. {
        let done: u64 = counts.iter().sum();
        if done >= trials {
            break;
        }
        assert!(missed <= 10 + done, "most trees end before anybody is killed");
        let kind = usize::try_from(number(KIND, at)).expect("small") % KINDS.len();
        if trial(&stage, KINDS[kind], seed.wrapping_mul(1 << 32) + at, &mut keepers) {
            counts[kind] += 1;
            if (done + 1).is_multiple_of(PROGRESS) {
                println!("{} kills", done + 1);
            }
        } else {
            missed += 1;
        }
    }
    // The next run removes the directories that killed keepers could not. A directory with the
    // process id of one of these keepers may also belong to a later keeper, of a series that runs
    // beside this one: it is removed with that keeper.
    wait_until("the runs' directories to go", PATIENCE, || {
        Run::through(Door::Sidecar, LIMIT).program("true").finish().require_success();
        let left = directories(&keepers);
        (!left.is_empty()).then(|| println!("left: {left:?}"));
        left.is_empty().then_some(())
    });
    assert_eq!(mounts(), mounts_before);
    for (kind, count) in KINDS.iter().zip(counts) {
        println!("{kind:?}: {count} kills, 0 wrong bytes, nothing left");
    }
    println!("{} kills, {missed} had ended before", counts.iter().sum::<u64>());
}
