//! kill -9 of anything in a rack at any instant: programs with and without redundancy, through both
//! doors, their keepers and sidecars, nodes, the controller. Only what dies by it may end, nobody
//! may read a wrong byte, and nothing may be left.
//!
//! FARPOOL_RACK_KILLS is the number of kills, FARPOOL_RACK_KILLS_SEED selects victims and instants.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farpool_e2e::lenders::{HOST, NAMES, PATIENCE, Rack, degraded};
use farpool_e2e::rack::answer;
use farpool_e2e::run::{Door, Outcome, Run, Running};
use farpool_e2e::{tree, turn, wait_until};
use farpool_policy::Rng;
use serde_json::Value;

const KILLS: &str = "FARPOOL_RACK_KILLS";
const SEED: &str = "FARPOOL_RACK_KILLS_SEED";
const FEW_KILLS: u64 = 25;
/// Kills between two lines of progress.
const PROGRESS: u64 = 20;
/// The environment variable that marks all processes of a program, including sidecars.
const MARK: &str = "FARPOOL_RACK_KILL";
/// Latest instant of a kill after the one before.
const PAUSE_US: u32 = 400_000;
/// How long a program may take to start while nodes and the controller die, and to end.
const START_PATIENCE: Duration = Duration::from_secs(120);
/// How long what a node had may take to be made again, beside programs that start.
const MENDING: Duration = Duration::from_secs(120);
/// A killed program's memory is its own until its lease with the controller has run out: 30 s.
const LEASES: Duration = Duration::from_secs(90);
/// What each node lends: enough also for what programs had that were killed.
const DONATED: &str = "1GiB";
/// Pause before a program is started again that was refused: the rack has no room or is not there.
const START_PAUSE: Duration = Duration::from_millis(500);
const KILLED: i32 = 128 + libc::SIGKILL;

/// How a program uses the rack.
#[derive(Clone, Copy, Debug)]
struct Kind {
    redundancy: &'static str,
    door: Door,
    operations: &'static str,
    quota: &'static str,
}

/// One of each is running at any time.
const KINDS: [Kind; 4] = [
    Kind {
        redundancy: "none",
        door: Door::Sidecar,
        operations: "discard,heap,pipe,protect",
        quota: "256MiB",
    },
    Kind {
        redundancy: "2",
        door: Door::Sidecar,
        operations: "discard,heap,protect,file",
        quota: "512MiB",
    },
    Kind {
        redundancy: "2",
        door: Door::Preload,
        operations: "discard,heap,pipe,protect",
        quota: "512MiB",
    },
    Kind {
        redundancy: "parity",
        door: Door::Sidecar,
        operations: "discard,heap,pipe,protect",
        quota: "512MiB",
    },
];

/// The process to kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Program,
    Keeper,
    Sidecar,
    Node,
    Controller,
}

const VICTIMS: [Victim; 5] =
    [Victim::Program, Victim::Keeper, Victim::Sidecar, Victim::Node, Victim::Controller];

/// A program of a kind, and the next one once it has ended.
struct Slot {
    kind: Kind,
    mark: String,
    over: PathBuf,
    running: Running,
    /// Starts that were refused, as nodes and the controller die.
    refused: u64,
}

impl Slot {
    fn start(rack: &Rack, folder: &Path, kind: Kind, number: u64) -> Slot {
        let until = Instant::now() + START_PATIENCE;
        let mark = format!("{}-{number}", std::process::id());
        let over = folder.join(&mark);
        for refused in 0.. {
            let running = launch(rack, kind, &mark, &over, number);
            match is_up(running, until) {
                Ok(running) => return Slot { kind, mark, over, running, refused },
                Err(outcome) => {
                    // Too little memory, a node that died before it was used, no controller: in
                    // words, and before the program has begun.
                    let said = format!("{kind:?}: {outcome:?}");
                    assert!(outcome.require_right().code != 0, "{said}");
                    assert!(outcome.stderr.contains("farpool: "), "{said}");
                    assert!(Instant::now() < until, "it does not start: {said}");
                    println!("refused: {}", outcome.stderr.trim_end());
                    std::thread::sleep(START_PAUSE);
                }
            }
        }
        unreachable!("there are more numbers")
    }

    fn has_redundancy(&self) -> bool {
        self.kind.redundancy != "none"
    }

    /// The process to kill; None if there is none now.
    fn find(&self, victim: Victim) -> Option<u32> {
        let keeper = self.running.pid();
        let program = || {
            tree::children(keeper).into_iter().find(|pid| {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
                name.is_ok_and(|name| name == "farpool-stress\n")
            })
        };
        let pid = match victim {
            Victim::Keeper => Some(keeper),
            Victim::Program => program(),
            Victim::Sidecar => tree::sidecars_in(program()?).pop(),
            Victim::Node | Victim::Controller => None,
        };
        pid.filter(|pid| tree::is_alive(*pid))
    }

    /// Waits until nothing of it would be lost with a node.
    fn wait_until_mended(&mut self) {
        let (kind, until) = (self.kind, Instant::now() + MENDING);
        wait_until("what a node had to be made again", MENDING * 2, || {
            let is_in_time = self.running.is_running() && Instant::now() < until;
            let (blades, said) = (self.running.blades(), self.running.stderr());
            assert!(is_in_time, "{kind:?}: {} {blades}{said}", self.running.pid());
            (degraded(&self.running)? == 0).then_some(())
        });
    }

    /// Takes the outcome of one that has ended. No process of it may be left.
    fn ended(self) -> Outcome {
        let outcome = self.running.finish();
        outcome.require_right();
        wait_until("its last process to end", PATIENCE, || {
            tree::bearers(MARK, &self.mark).is_empty().then_some(())
        });
        outcome
    }

    /// Ends it as if its time were over.
    fn end(mut self) {
        if self.has_redundancy() {
            self.wait_until_mended();
        }
        std::fs::write(&self.over, "").expect("a file");
        let kind = self.kind;
        let outcome = self.ended();
        assert_eq!(outcome.code, 0, "{kind:?}: {outcome:?}");
        assert_eq!(outcome.counter("lost"), 0, "{kind:?}: {outcome:?}");
    }
}

fn launch(rack: &Rack, kind: Kind, mark: &str, over: &Path, seed: u64) -> Running {
    let pool = ["--pool", &rack.control.address, "--host", HOST, "--quota", kind.quota];
    let run = Run::through(kind.door, "12MiB").args(pool).redundancy(kind.redundancy);
    let run = run.env(MARK, mark).own_program("farpool-stress");
    run.args(["--mib", "40", "--threads", "2", "--progress", "--seed", &seed.to_string()])
        .args(["--seconds", "86400", "--ops", kind.operations, "--until"])
        .arg(over)
        .patience(START_PATIENCE)
        .start()
}

/// Waits until the program has filled its memory, part of which is far. The outcome of one that
/// ends before.
fn is_up(mut running: Running, until: Instant) -> Result<Running, Outcome> {
    let mut is_up = false;
    wait_until("the program to fill its memory", START_PATIENCE, || {
        let has_filled = running.stdout().matches("filled").count() == 2;
        is_up = has_filled && running.fetched().is_some_and(|fetched| fetched > 0);
        (is_up || !running.is_running() || Instant::now() >= until).then_some(())
    });
    if is_up { Ok(running) } else { Err(running.finish()) }
}

/// The rack, and one program of each kind.
struct World {
    rack: Rack,
    slots: Vec<Slot>,
    folder: tempfile::TempDir,
    dice: Rng,
    started: u64,
    refused: u64,
    kills: [u64; VICTIMS.len()],
    /// Programs that a node without a copy took with it.
    lost: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let rack = Rack::start_with(&[DONATED; NAMES.len()], "none");
        let folder = tempfile::tempdir().expect("a folder");
        let mut world = World {
            rack,
            slots: Vec::new(),
            folder,
            dice: Rng::new(seed),
            started: seed << 20,
            refused: 0,
            kills: [0; VICTIMS.len()],
            lost: 0,
        };
        for kind in KINDS {
            let slot = world.start(kind);
            world.slots.push(slot);
        }
        world
    }

    fn start(&mut self, kind: Kind) -> Slot {
        self.started += 1;
        let slot = Slot::start(&self.rack, self.folder.path(), kind, self.started);
        self.refused += slot.refused;
        slot
    }

    /// Replaces a program that has ended. Returns its outcome.
    fn replace(&mut self, at: usize) -> Outcome {
        let old = self.slots.remove(at);
        let kind = old.kind;
        let outcome = old.ended();
        let slot = self.start(kind);
        self.slots.insert(at, slot);
        outcome
    }

    fn kill_one(&mut self) {
        // The instant is the point; nothing is waited for.
        std::thread::sleep(Duration::from_micros(self.dice.below(PAUSE_US).into()));
        let which = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4][self.dice.below(12) as usize];
        let at = self.dice.below(u32::try_from(self.slots.len()).expect("few")) as usize;
        match VICTIMS[which] {
            Victim::Node => self.kill_node(),
            Victim::Controller => self.rack.restart_control(),
            victim => {
                let Some(pid) = self.slots[at].find(victim) else { return };
                tree::signal(pid, libc::SIGKILL);
                // It has memory that is far, so it ends with whatever was killed of it.
                let outcome = self.replace(at);
                assert_eq!(outcome.code, KILLED, "{victim:?}: {outcome:?}");
            }
        }
        self.kills[which] += 1;
        self.check_others();
    }

    /// Kills a node, and has another one take its place, once all programs can spare one.
    fn kill_node(&mut self) {
        let moves = |segment: &Value| segment["state"] != "ready" && segment["state"] != "lost";
        for at in 0..self.slots.len() {
            if self.slots[at].has_redundancy() {
                self.slots[at].wait_until_mended();
            }
        }
        wait_until("nothing to move", MENDING, || {
            (!self.rack.segments().iter().any(moves)).then_some(())
        });
        let number = self.dice.below(u32::try_from(NAMES.len()).expect("few")) as usize;
        let address = self.rack.address_of(number);
        let uses = |slot: &Slot| slot.running.blades().contains(&address);
        let are_used: Vec<bool> = self.slots.iter().map(uses).collect();
        self.rack.replace(number);
        for (at, is_used) in are_used.into_iter().enumerate() {
            if !is_used {
                continue;
            }
            if self.slots[at].has_redundancy() {
                let running = &mut self.slots[at].running;
                // It finds out by a read or a write, or is told by the controller.
                wait_until("the loss to be noticed", MENDING, || {
                    assert!(running.is_running(), "{}", running.stderr());
                    (degraded(running)? > 0 || has_left(running, &address)).then_some(())
                });
                continue;
            }
            wait_until("the end of a program without a copy", START_PATIENCE, || {
                let running = &mut self.slots[at].running;
                (!running.is_running() || has_left(running, &address)).then_some(())
            });
            if !self.slots[at].running.is_running() {
                self.replace(at).require_lost(&address);
                self.lost += 1;
            }
        }
    }

    /// Nobody else ends.
    fn check_others(&mut self) {
        for slot in &mut self.slots {
            let is_running = slot.running.is_running();
            assert!(is_running, "{:?} has ended: {}", slot.kind, slot.running.stderr());
        }
    }

    fn end(mut self) {
        self.slots.drain(..).for_each(Slot::end);
        wait_until("killed programs' memory to come back", LEASES, || {
            let segments = answer(&self.rack.control.address, &["segment", "list"]);
            segments["segments"].as_array().is_some_and(Vec::is_empty).then_some(())
        });
        let until = Instant::now() + LEASES;
        wait_until("the nodes to have it again", LEASES * 2, || {
            let nodes = answer(&self.rack.control.address, &["node", "list"]);
            let has_any = |node: &&Value| node["granted_bytes"] != 0 || node["used_bytes"] != 0;
            let left: Vec<&Value> = nodes["nodes"].as_array()?.iter().filter(has_any).collect();
            assert!(left.is_empty() || Instant::now() < until, "{left:?}");
            left.is_empty().then_some(())
        });
        let told =
            VICTIMS.iter().zip(self.kills).map(|(victim, count)| format!("{count} of {victim:?}"));
        println!(
            "kills: {}; {} programs lost with a node, {} starts refused",
            told.collect::<Vec<_>>().join(", "),
            self.lost,
            self.refused
        );
    }
}

/// True if a program has blades, and this one is none of them. Of a program that ends none is told.
fn has_left(running: &Running, address: &str) -> bool {
    let blades = running.blades();
    blades.contains("tcp://") && !blades.contains(address)
}

fn number(variable: &str, usual: u64) -> u64 {
    let text = std::env::var(variable);
    text.map_or(usual, |text| text.parse().expect("a number"))
}

#[test]
fn whoever_is_killed_in_a_rack_nobody_else_ends_and_no_byte_is_wrong() {
    let _turn = turn();
    let (kills, seed) = (number(KILLS, FEW_KILLS), number(SEED, 1));
    let mut world = World::new(seed);
    let mut told = 0;
    loop {
        let done: u64 = world.kills.iter().sum();
        if done >= kills {
            break;
        }
        if done >= told + PROGRESS {
            told = done;
            println!("{done} kills");
        }
        world.kill_one();
    }
    world.end();
}
