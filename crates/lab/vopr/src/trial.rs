//! One trial: what a seed makes of hosts, network, faults and a program.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use farpool_acms::Rng;
use farpool_pool::{Redundancy, Refusals};
use farpool_units::{SUPERPAGE_BYTES, exactly};

use crate::clock;
use crate::network::{Weather, between};
use crate::program::{Habits, Program, Tally, Violation};
use crate::world::{self, Blades, Strike, World};

/// One trial in so many moves memory: a superpage is 16 MiB, and takes as long as some trials.
const MOVES_ONE_IN: u64 = 50;
/// In one trial in so many, what blades lend outlives their processes. It takes longer: there the
/// blade clears each superpage itself.
const PERSISTS_ONE_IN: u64 = 50;
const PERSIST_SALT: u64 = 0x7065_7273_6973_7421;
/// In one trial in so many of safety a program has parity.
const PARITY_ONE_IN: u64 = 8;
const PARITY_SALT: u64 = 0x7061_7269_7479_2121;
/// Superpages of a program, and of one that has parity: a group, and one of another.
const SUPERPAGES: u32 = 3;
const PARITY_SUPERPAGES: u32 = 5;
/// Hosts where there is parity, at least: a group is on so many.
const PARITY_HOSTS: usize = 5;
/// In one trial in so many a blade is full for a while.
const FILLS_ONE_IN: u64 = 4;
/// In one trial in so many of those that seal pages a blade lies.
const LIES_ONE_IN: u64 = 3;
/// Things that the program does in a trial.
const ACTS: u64 = 40;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

/// In liveness mode no page takes longer: the longest fault, and what it takes to notice its end.
pub const PAGE_TIME_MAX_NS: u64 = 5 * SECOND;
/// With copies, no page takes longer: a blade is given up after 800 ms of silence.
pub const SPARED_TIME_MAX_NS: u64 = SECOND;
/// Faults of a host or the way to it. The last one ends its blade's process, and what that lends
/// has to outlive it.
const OUTAGES: u64 = 5;
/// In liveness mode, the longest time that a blade pauses or the network refuses.
const OUTAGE_MAX_NS: u64 = 3 * SECOND;
/// In liveness mode, the time from one fault to the next.
const FAULT_REST_NS: u64 = 6 * SECOND;

/// In liveness mode, the longest time that a blade refuses writes; it may also do so to the end.
const FULL_MAX_NS: u64 = 40 * SECOND;
/// The longest time that a blade lies.
const LYING_MAX_NS: u64 = 20 * SECOND;
/// Writes that a full blade may have to refuse at once, in any second, and in each second besides:
/// what is on its way when it becomes full, and tries that become rarer and rarer.
const REFUSED_AT_ONCE: u64 = 16;
const REFUSED_PER_S: u64 = 4;

/// What is asked of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No wrong byte, whatever happens.
    Safety,
    /// No error, and no page that takes long, while only the network fails, and not for long. A
    /// full blade is not asked all the time, and gets what it did not take once it takes it.
    Liveness,
    /// The same of a program that has copies, while one blade besides dies or lies.
    Copies,
    /// The same of a program that has parity.
    Parity,
}

impl Mode {
    /// One blade dies or lies, and nothing may be lost with it.
    fn loses_a_blade(self) -> bool {
        matches!(self, Mode::Copies | Mode::Parity)
    }
}

/// What a trial came to. Equal for equal seeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// What happened to pages.
    pub tally: Tally,
    /// How long it took by its own clock.
    pub time_ns: u64,
    /// Pages that blades replaced by others.
    pub lies: u64,
}

/// What is wrong with the program, to test that it is noticed.
#[derive(Clone, Debug, Default)]
pub struct Flaws {
    /// What it begins to know of refusals, and how long it leaves a blade alone.
    pub refusals: Refusals,
    /// It stores pages as they are on blades that lie.
    pub believes_lies: bool,
    /// It has one copy of everything where there should be several, or parity.
    pub has_one_copy: bool,
}

/// Runs the trial of a seed.
///
/// # Errors
/// Something that must not be, also a panic of the product's code.
pub fn run(seed: u64, mode: Mode) -> Result<Report, Violation> {
    run_with(seed, mode, &Flaws::default())
}

/// The same, of a program that has flaws.
///
/// # Errors
/// As for [`run`].
pub fn run_with(seed: u64, mode: Mode, flaws: &Flaws) -> Result<Report, Violation> {
    let report = catch_unwind(AssertUnwindSafe(|| run_in(seed, mode, flaws)));
    world::end();
    report.unwrap_or_else(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        let text = text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(Violation(format!("panic: {}", text.unwrap_or_default())))
    })
}

/// What a seed makes of a trial.
struct Setting {
    hosts: usize,
    lanes: usize,
    deadline: Duration,
    calm: Weather,
    habits: Habits,
    /// A blade is full for a while.
    fills: bool,
    /// A blade lies for a while.
    lies: bool,
    /// After one blade, and the copies that were made of what it had, another one dies.
    dies_twice: bool,
    /// What blades lend outlives their processes, which end every now and then.
    persist: bool,
}

impl Setting {
    /// Draws a setting, and makes its hosts.
    fn draw(seed: u64, mode: Mode, flaws: &Flaws, random: &mut Rng) -> Setting {
        let own = &mut Rng::new(seed ^ PARITY_SALT);
        let has_parity =
            mode == Mode::Parity || mode == Mode::Safety && own.below(PARITY_ONE_IN) == 0;
        let hosts = match mode {
            Mode::Safety | Mode::Liveness => 1 + random.index(3),
            Mode::Copies | Mode::Parity => 2 + random.index(2),
        };
        let hosts = if has_parity { PARITY_HOSTS + own.index(2) } else { hosts };
        let superpages = if has_parity { PARITY_SUPERPAGES } else { SUPERPAGES };
        let lanes = 1 + random.index(3);
        let is_short = mode == Mode::Safety && random.below(4) == 0;
        // Of a generator of its own: a seed's other faults do not depend on it.
        let persist = Rng::new(seed ^ PERSIST_SALT).below(PERSISTS_ONE_IN) == 0;
        let of_blade = match (is_short, persist) {
            (true, _) => 2,
            (false, true) => u64::from(superpages) + 1,
            (false, false) => 4 * u64::from(superpages),
        };
        let lease = match mode {
            Mode::Safety => Duration::from_nanos(between(random, SECOND, 30 * SECOND)),
            Mode::Liveness | Mode::Copies | Mode::Parity => Duration::from_secs(30),
        };
        let deadline = match mode {
            Mode::Safety => Duration::from_nanos(between(random, SECOND / 2, 10 * SECOND)),
            Mode::Liveness | Mode::Copies | Mode::Parity => Duration::from_secs(10),
        };
        let calm = Weather {
            delay_max_ns: between(random, 10_000, 5 * MS),
            is_choppy: random.below(2) == 0,
            flip_one_in: 0,
            flip_rest_ns: 0,
        };
        let memory_bytes = of_blade * SUPERPAGE_BYTES;
        world::begin(!seed, Blades { hosts, memory_bytes, lease, persist }, calm);
        let fills = random.below(FILLS_ONE_IN) == 0 && !mode.loses_a_blade();
        // Memory cannot move to a full blade, which is an error and right.
        let moves = random.below(MOVES_ONE_IN) == 0 && !fills && !persist;
        let seals_pages = random.below(2) == 0 || mode.loses_a_blade() || has_parity;
        let copies = match mode {
            Mode::Copies => 2 + random.index(hosts - 1),
            // Without seals, or with one blade, there is one copy.
            Mode::Safety if seals_pages => 1 + random.index(hosts.min(3)),
            _ => 1,
        };
        let redundancy = match has_parity {
            true => Redundancy::Parity,
            false => Redundancy::Copies(exactly(copies)),
        };
        let lies = mode == Mode::Safety && seals_pages && random.below(LIES_ONE_IN) == 0;
        let is_credulous = lies && flaws.believes_lies;
        let habits = Habits {
            // Where a blade dies, there may be no other one to move to: an error, and right.
            moves: moves && !mode.loses_a_blade(),
            seals_pages: seals_pages && !is_credulous,
            redundancy: match is_credulous || flaws.has_one_copy {
                true => Redundancy::NONE,
                false => redundancy,
            },
            superpages,
        };
        let has_rest = if has_parity { hosts > PARITY_HOSTS } else { copies < hosts };
        let dies_twice = mode.loses_a_blade() && has_rest && random.below(3) == 0;
        Setting { hosts, lanes, deadline, calm, habits, fills, lies, dies_twice, persist }
    }

    /// Plans what goes wrong.
    fn plan(&self, mode: Mode, random: &mut Rng) {
        let Setting { hosts, calm, persist, .. } = *self;
        let outages = if persist { OUTAGES } else { OUTAGES - 1 };
        match mode {
            Mode::Safety => plan_anything(random, hosts, calm, outages),
            Mode::Liveness => plan_outages(random, 0..hosts, calm, outages),
            Mode::Copies | Mode::Parity => {
                let host = random.index(hosts);
                plan_outages(random, host..host + 1, calm, outages);
                plan_for_good(random, host);
            }
        }
        if self.fills {
            plan_for_a_while(random, hosts, [Strike::Fill, Strike::Empty], FULL_MAX_NS);
        }
        if self.lies {
            plan_for_a_while(random, hosts, [Strike::Lie, Strike::BeHonest], LYING_MAX_NS);
        }
    }
}

fn run_in(seed: u64, mode: Mode, flaws: &Flaws) -> Result<Report, Violation> {
    let mut random = Rng::new(seed);
    let setting = Setting::draw(seed, mode, flaws, &mut random);
    let Setting { hosts, lanes, deadline, habits, .. } = setting;
    let program = Program::start(hosts, lanes, deadline, habits, flaws.refusals.clone())
        .map_err(|error| Violation(format!("cannot start though nothing is wrong: {error}")))?;
    setting.plan(mode, &mut random);
    for _ in 0..ACTS {
        program.act(&mut random)?;
        if mode != Mode::Safety {
            require_few_refusals()?;
        }
        match random.below(10) {
            0 => program.rest(Duration::from_nanos(random.below(2 * SECOND))),
            1..5 => program.wait_a_little(),
            5..8 => program.rest(Duration::from_nanos(random.below(20 * MS))),
            _ => {}
        }
    }
    world::with(World::heal);
    if mode != Mode::Safety {
        require_no_rest(&program)?;
    }
    if setting.dies_twice {
        // Whoever is dead is found to be.
        program.read_all()?;
        program.complete_copies(&mut random)?;
        world::with(|world| world.strike(Strike::Restart(random.index(hosts))));
    }
    let failed = program.read_all()?;
    let lies = world::with(|world| world.lies());
    let report = Report { tally: program.tally(), time_ns: clock::now_ns(), lies };
    let error = program.first_error();
    drop(program);
    if mode != Mode::Safety {
        judge(mode, &report, failed, error)?;
    }
    Ok(report)
}

/// Nobody sends to a full blade again and again.
fn require_few_refusals() -> Result<(), Violation> {
    world::with(|world| {
        for (time, requests) in world.full_hosts() {
            if requests > REFUSED_AT_ONCE + REFUSED_PER_S * time.as_secs() {
                return Err(Violation(format!("{requests} writes refused within {time:?}")));
            }
        }
        Ok(())
    })
}

/// What blades did not take they get now, since nothing fails any more.
fn require_no_rest(program: &Program) -> Result<(), Violation> {
    let until_ns = clock::now_ns() + exactly::<u64, _>(Refusals::LONGEST_PAUSE.as_nanos());
    let until_ns = until_ns + PAGE_TIME_MAX_NS;
    loop {
        // What is on its way may still be refused.
        program.finish()?;
        if program.local_pages() == 0 {
            return Ok(());
        }
        if clock::now_ns() >= until_ns {
            let pages = program.local_pages();
            return Err(Violation(format!("{pages} pages were never taken by a blade that lives")));
        }
        program.rest(Duration::from_millis(100));
    }
}

/// A blade that is struck at some time soon, and for a while or to the end.
fn plan_for_a_while(
    random: &mut Rng,
    hosts: usize,
    [begin, end]: [fn(usize) -> Strike; 2],
    longest_ns: u64,
) {
    world::with(|world| {
        let host = random.index(hosts);
        let at_ns = clock::now_ns() + random.below(SECOND);
        world.plan(at_ns, begin(host));
        world.plan(at_ns + between(random, MS, longest_ns), end(host));
    });
}

fn judge(
    mode: Mode,
    report: &Report,
    failed_at_end: u64,
    error: Option<String>,
) -> Result<(), Violation> {
    let Tally { failed, refused, slowest_ns, damaged, .. } = report.tally;
    if failed + refused + failed_at_end > 0 {
        let error = error.unwrap_or_default();
        return Err(Violation(format!("failed though blades live: {error}; {:?}", report.tally)));
    }
    let longest_ns = match mode {
        // Until a copy is made anew that was given up for damage, a silent blade is waited for.
        Mode::Copies | Mode::Parity if damaged == 0 => SPARED_TIME_MAX_NS,
        Mode::Copies | Mode::Parity => PAGE_TIME_MAX_NS,
        Mode::Safety | Mode::Liveness => PAGE_TIME_MAX_NS,
    };
    if slowest_ns > longest_ns {
        return Err(Violation(format!("a page took {} ms", slowest_ns / MS)));
    }
    Ok(())
}

/// Any faults, at any time, over each other.
fn plan_anything(random: &mut Rng, hosts: usize, calm: Weather, outages: u64) {
    let flip_one_in = [0, 0, 400, 40][random.index(4)];
    let restarts = random.below(3);
    world::with(|world| {
        world.set_weather(Weather { flip_one_in, ..calm });
        for _ in 0..random.below(14) {
            let at_ns = random.below(20 * SECOND);
            let host = random.index(hosts);
            let until_ns = at_ns + random.below(15 * SECOND);
            plan_outage(world, random, host, at_ns..until_ns, outages);
        }
        if restarts == 0 {
            world.plan(random.below(20 * SECOND), Strike::Restart(random.index(hosts)));
        }
    });
}

/// Faults of the network and pauses of blades, one after the other and none for long.
fn plan_outages(random: &mut Rng, hosts: Range<usize>, calm: Weather, outages: u64) {
    world::with(|world| {
        let flip_one_in = [0, 100][random.index(2)];
        world.set_weather(Weather { flip_one_in, flip_rest_ns: FAULT_REST_NS, ..calm });
        let mut at_ns = clock::now_ns() + random.below(SECOND / 2);
        for _ in 0..8 {
            let host = hosts.start + random.index(hosts.len());
            let until_ns = at_ns + between(random, MS, OUTAGE_MAX_NS);
            plan_outage(world, random, host, at_ns..until_ns, outages);
            at_ns = until_ns + FAULT_REST_NS;
        }
    });
}

/// A blade dies, or lies from some time on.
fn plan_for_good(random: &mut Rng, host: usize) {
    world::with(|world| {
        let at_ns = clock::now_ns() + random.below(5 * SECOND);
        world.plan(at_ns, [Strike::Restart, Strike::Lie][random.index(2)](host));
    });
}

/// Any one of the first `outages` faults of a host or the way to it; those that end do so at the
/// end of `when_ns`.
fn plan_outage(
    world: &mut World,
    random: &mut Rng,
    host: usize,
    when_ns: Range<u64>,
    outages: u64,
) {
    let Range { start: at_ns, end: until_ns } = when_ns;
    match random.below(outages) {
        0 => world.plan(at_ns, Strike::Cut(host)),
        1 => {
            let (up, down) = (random.below(2) == 0, random.below(2) == 0);
            world.plan(at_ns, Strike::Deaden(host, up || !down, down));
        }
        2 => {
            world.plan(at_ns, Strike::Refuse(host));
            world.plan(at_ns, Strike::Cut(host));
            world.plan(until_ns, Strike::Accept(host));
        }
        3 => {
            world.plan(at_ns, Strike::Pause(host));
            world.plan(until_ns, Strike::Resume(host));
        }
        _ => world.plan(at_ns, Strike::Reopen(host)),
    }
}
