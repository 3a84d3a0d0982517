//! What may fail, and what happens then (docs of the design: a drained blade, a killed controller,
//! a node cut off).

use std::time::{Duration, Instant};

use farpool_units::at_most;

use super::five_hosts::Rack;
use super::organiser::{Drain, Status};
use super::programs::StartedProgram;
use super::scenario::{OF_A, OF_B, wait_borrowed};
use super::{B, C, D, E};
use crate::Error;

const PATIENCE: Duration = Duration::from_secs(60);
/// A node that was cut off is noticed after 30 s at the latest, and returns a few seconds after its
/// link does.
const RETURN_PATIENCE: Duration = Duration::from_secs(60);
/// How long programs that a failure does not concern are watched for progress.
const LOOK: Duration = Duration::from_secs(3);

/// Longest wait for 64 KiB in a program that a failure does not concern: a fifth of what a page may
/// take.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Such a program reads at least its pace divided by this.
const SLOWEST_PART: u64 = 16;

/// Plays the failures one after the other.
///
/// # Errors
/// What ended it.
pub fn play(rack: &mut Rack) -> Result<(), Error> {
    others_join(rack)?;
    drain(rack)?;
    if rack.kill_controller() {
        controller_dies(rack)?;
    } else {
        rack.done("there is no controller that could die");
    }
    let Some(cut) = whom_to_cut(rack)? else {
        rack.checks.add("D lends to somebody", false, "nobody has anything there");
        return Ok(());
    };
    short_cut(rack, &cut)?;
    long_cut(rack, &cut)
}

/// A node to cut off, and the programs with and without memory on it.
struct Cut {
    host: usize,
    node: String,
    /// Programs that have memory there.
    victims: Vec<String>,
    /// Programs that have no memory there.
    bystanders: Vec<String>,
}

/// D and E take part, each with room for one program; B needs far memory again.
fn others_join(rack: &mut Rack) -> Result<(), Error> {
    let plan = rack.plan.clone();
    rack.log.step("D and E join");
    rack.done("D and E take part too; B's program needs more memory again");
    rack.join(D, plan.small_donate_bytes)?;
    rack.join(E, plan.small_donate_bytes)?;
    rack.started(OF_B)?.tell(&format!("size {}", plan.of_b.bytes));
    wait_borrowed(rack, B, PATIENCE)?;
    let needed = plan.small_donate_bytes;
    rack.wait_status("D and E to offer enough", PATIENCE, |_, status| {
        ["D", "E"].iter().all(|node| status.offered_bytes(node) >= needed).then_some(())
    })
}

/// Drains a blade: everything moves away, programs go on.
fn drain(rack: &mut Rack) -> Result<(), Error> {
    rack.log.step("C is drained");
    let before = Progress::of(rack)?;
    rack.done("C is drained: everything on it has to move away");
    let started = Instant::now();
    if rack.organiser().drain(rack.hosts(), "C")? == Drain::ByEnding {
        rack.ask_node_to_end(C);
    }
    let empty = |_: &Rack, status: &Status| {
        let is_moved = ["A", "B"].iter().all(|host| !status.lenders_of(host).is_empty());
        (status.granted_bytes("C") == 0 && is_moved)
            .then(|| (status.lenders_of("A").join(", "), status.lenders_of("B").join(", ")))
    };
    let (of_a, of_b) = rack.wait_status("C to be empty", PATIENCE, empty)?;
    let took = started.elapsed().as_secs_f64();
    rack.done(&format!("C is empty; A's data is on {of_a} now, B's on {of_b}"));
    let seen = format!("in {took:.1} s; A's data to {of_a}, B's to {of_b}");
    rack.checks.add("a blade is drained: everything moves away", true, seen);
    before.compare(rack, "a blade is drained: programs go on meanwhile")
}

/// Checks that programs go on without the controller, which was just killed, and restarts it.
fn controller_dies(rack: &mut Rack) -> Result<(), Error> {
    rack.log.step("no controller");
    rack.done("the controller is killed (SIGKILL)");
    let before = Progress::of(rack)?;
    rack.rest(rack.plan.outage)?;
    let nobody = rack.status().is_err();
    rack.checks.add("the controller is killed: nobody answers", nobody, answered(nobody));
    before.compare(rack, "the controller is away: programs do not notice")?;
    rack.done("the controller is started again");
    rack.log.step("a new controller");
    let started = Instant::now();
    rack.start_controller()?;
    let ready = |_: &Rack, status: &Status| {
        let has_ready = |host: &&str| !status.lenders_of(host).is_empty();
        let is_up = |node: &&str| status.nodes.get(*node).is_some_and(|node| node.is_up);
        let is_known = ["A", "B"].iter().all(has_ready) && ["D", "E"].iter().all(is_up);
        is_known.then_some(())
    };
    let found = rack.wait_status("the controller to find the truth again", PATIENCE, ready);
    let seen = match &found {
        Ok(()) => format!("after {:.1} s", started.elapsed().as_secs_f64()),
        Err(error) => error.to_string(),
    };
    rack.checks.add("the controller is back: it knows who has what", found.is_ok(), seen);
    found
}

/// Returns which of D and E has memory of the fewest programs, but of at least one. The
/// controller's host is never cut off.
fn whom_to_cut(rack: &mut Rack) -> Result<Option<Cut>, Error> {
    let has_controller = rack.has_controller();
    let status = rack.status()?;
    let all: Vec<String> = rack.programs().map(|started| started.name.clone()).collect();
    let cut = |host: usize| {
        let node = rack.name(host);
        let is_there = |name: &String| {
            (name == OF_A && status.has(&node, "A")) || (name == OF_B && status.has(&node, "B"))
        };
        let (victims, bystanders) = all.iter().cloned().partition(is_there);
        Cut { host, node, victims, bystanders }
    };
    let candidates = [D, E].into_iter().filter(|host| *host != E || !has_controller).map(cut);
    let candidates = candidates.filter(|cut| !cut.victims.is_empty());
    Ok(candidates.min_by_key(|cut| cut.victims.len()))
}

/// Takes the network away for less than a page may take: programs wait.
fn short_cut(rack: &mut Rack, cut: &Cut) -> Result<(), Error> {
    let (node, who) = (&cut.node, cut.victims.join(" and "));
    let pause = rack.plan.short_cut;
    rack.log.step(&format!("{node} is cut off for a while"));
    for victim in &cut.victims {
        rack.started(victim)?.take_longest_us();
    }
    rack.done(&format!("{node}'s link is down; {who} needs it"));
    rack.set_link(cut.host, false)?;
    rack.rest(pause)?;
    rack.set_link(cut.host, true)?;
    rack.done(&format!("{node}'s link is up again, after {} s", pause.as_secs()));
    let (mut passed, mut seen) = (true, Vec::new());
    for victim in &cut.victims {
        let before = rack.started(victim)?.told().report.checked_bytes;
        rack.wait(&format!("{victim} to go on"), PATIENCE, |rack| {
            Ok((rack.started(victim)?.told().report.checked_bytes > before + (1 << 20))
                .then_some(()))
        })?;
        let waited = Duration::from_micros(rack.started(victim)?.take_longest_us());
        passed &= waited >= pause / 2;
        seen.push(format!("{victim} waited {:.1} s, and went on", waited.as_secs_f64()));
    }
    rack.rest(LOOK)?;
    let name = "a node is cut off for a while: its programs wait";
    rack.checks.add(name, passed, seen.join("; "));
    Ok(())
}

/// Takes the network away for good: exactly the programs that need it end, with a clear message.
fn long_cut(rack: &mut Rack, cut: &Cut) -> Result<(), Error> {
    let (node, who) = (&cut.node, cut.victims.join(" and "));
    rack.log.step(&format!("{node} is cut off"));
    rack.done(&format!("{node} is cut off for good; {who} needs it"));
    let mut lost = Vec::new();
    for victim in &cut.victims {
        lost.push(rack.take_guest(victim)?);
    }
    rack.set_link(cut.host, false)?;
    for mut started in lost {
        check_lost(rack, cut, &mut started)?;
    }
    rack.done(&format!("{} go on", cut.bystanders.join(", ")));
    let names: Vec<&str> = cut.bystanders.iter().map(String::as_str).collect();
    let before = Progress::look(rack, &names)?;
    rack.rest(LOOK)?;
    before.compare(rack, "a node is cut off: who has nothing there goes on")?;
    rack.set_link(cut.host, true)?;
    rack.done(&format!("{node}'s link is up again"));
    rack.log.step(&format!("{node} comes back"));
    let back = rack.wait_status("the node to be back", RETURN_PATIENCE, |_, status| {
        let is_up = status.nodes.get(node).is_some_and(|node| node.is_up);
        (is_up && status.granted_bytes(node) == 0).then_some(())
    });
    let seen = match &back {
        Ok(()) => format!("{node} takes part again and lends nothing"),
        Err(error) => error.to_string(),
    };
    rack.checks.add("a node that was cut off comes back by itself", back.is_ok(), seen);
    back
}

/// Checks a program whose memory is out of reach: it must end, say why, and never have read
/// anything wrong.
fn check_lost(rack: &mut Rack, cut: &Cut, started: &mut StartedProgram) -> Result<(), Error> {
    let name = started.name.clone();
    let code = rack.wait(&format!("{name} to end"), PATIENCE, |_| started.exit_code())?;
    // Its last lines may not have arrived yet.
    rack.rest(Duration::from_millis(300))?;
    let errors = started.told().errors;
    let address = rack.address(cut.host);
    let line = errors.lines().find(|line| line.contains("far memory is lost"));
    let is_clear = line.is_some_and(|line| line.contains(&address));
    let said = line.unwrap_or(errors.trim());
    let said = said.split(" Touching").next().unwrap_or(said).trim_start_matches("farpool: ");
    let passed = code != 0 && is_clear && !errors.contains("wrong data");
    let seen = format!("{name} ended with {code}: {said}");
    rack.checks.add("a node is cut off: its client ends and says why", passed, seen);
    rack.done(&format!("{name} has ended with {code}"));
    Ok(())
}

fn answered(nobody: bool) -> &'static str {
    if nobody { "no answer, as it must be" } else { "somebody does" }
}

/// How far the programs were at one moment.
struct Progress {
    at: Instant,
    checked: Vec<(String, u64)>,
}

impl Progress {
    fn of(rack: &mut Rack) -> Result<Progress, Error> {
        Progress::look(rack, &[OF_A, OF_B])
    }

    fn look(rack: &mut Rack, names: &[&str]) -> Result<Progress, Error> {
        let mut checked = Vec::new();
        for name in names {
            let started = rack.started(name)?;
            started.take_longest_us();
            checked.push(((*name).to_owned(), started.told().report.checked_bytes));
        }
        Ok(Progress { at: Instant::now(), checked })
    }

    /// Checks that each program has read on and never waited long. The rate says more about this
    /// machine, whose processors do the work of all five hosts, than about the rack; it is only
    /// shown.
    fn compare(self, rack: &mut Rack, name: &str) -> Result<(), Error> {
        // Programs report four times a second.
        let least = Duration::from_secs(1).saturating_sub(self.at.elapsed());
        rack.rest(least)?;
        let (mut passed, mut seen) = (true, Vec::new());
        let ms = at_most::<u64, _>(self.at.elapsed().as_millis()).max(1);
        for (started, before) in &self.checked {
            let started = rack.started(started)?;
            // Programs without far memory are shown only if they do not go on.
            let per_s = (started.told().report.checked_bytes - before).saturating_mul(1000) / ms;
            let longest = Duration::from_micros(started.take_longest_us());
            let goes_on = per_s >= started.pace_bytes_per_s / SLOWEST_PART && longest <= WAIT_MAX;
            passed &= goes_on;
            if started.is_far || !goes_on {
                let (rate, longest) = (per_s >> 20, longest.as_secs_f64());
                seen.push(format!("{} {rate} MiB/s, longest wait {longest:.2} s", started.name));
            }
        }
        rack.checks.add(name, passed, seen.join("; "));
        Ok(())
    }
}
