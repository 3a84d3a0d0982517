//! The ACMS paper's Figure 6 (Samih 2011): A serves B's program; a big program starts on A and B's
//! demand shrinks; A takes its memory back, B's data moves, and A becomes a client of C.

use std::time::Duration;

use super::five_hosts::Rack;
use super::{A, B, C};
use crate::Error;

/// B's program; it goes on through all parts of the scenario.
pub const OF_B: &str = "B's program";
/// The far part of the big program on A.
pub const OF_A: &str = "A's big program";
/// What the big program keeps local.
pub const OWN_OF_A: &str = "the rest of A's big program";
const OWN_OF_B: &str = "B's other programs";
const OWN_OF_C: &str = "C's own program";

/// How long an offer may take to rise, and memory to be found.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long A's data may take to leave A's own blade.
const ALONE_PATIENCE: Duration = Duration::from_secs(20);
/// Time within which a donor has its memory back, whatever its clients do
/// (docs/operators/control.md, docs/operators/collaboration.md).
const RECLAIM_DEADLINE: Duration = Duration::from_secs(30);
/// Between two steps of B's demand.
const SHRINK_STEP: Duration = Duration::from_secs(2);
/// How long before the moment C's own program ends, so that C can offer enough by then.
const C_LEAD: Duration = Duration::from_secs(17);

/// When the big program started, and when the figure ends.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    pub moment: Duration,
    pub until: Duration,
}

/// Plays the figure's scenario. A failed condition on which the rest depends ends it; everything
/// else is a check.
///
/// # Errors
/// What ended it.
pub fn play(rack: &mut Rack) -> Result<Figure, Error> {
    a_serves_b(rack)?;
    let lead = rack.plan.moment.saturating_sub(C_LEAD);
    rack.rest_until(lead)?;
    rack.done("C's own program ends: C has memory to offer");
    end_quietly(rack, OWN_OF_C)?;
    let needed = rack.asked_bytes(A) + rack.asked_bytes(B);
    rack.wait_status("C to offer enough for A and B", PATIENCE, |_, status| {
        (status.offered_bytes("C") >= needed).then_some(())
    })?;
    rack.log.step("A serves B");
    rack.rest_until(rack.plan.moment)?;
    let moment = rack.log.elapsed();
    the_moment(rack)?;
    a_takes_back(rack, moment)?;
    a_is_a_client(rack)?;
    rack.log.step("A is C's client");
    rack.rest(rack.plan.after)?;
    b_is_home(rack)?;
    let until = rack.log.elapsed();
    traffic(rack, moment, until);
    Ok(Figure { moment, until })
}

/// Only A has anything to lend, so it serves B's program.
fn a_serves_b(rack: &mut Rack) -> Result<(), Error> {
    let plan = rack.plan.clone();
    rack.log.step("programs of their own start on B and C");
    rack.start_own(OWN_OF_C, C, plan.own_of_c_bytes)?;
    rack.start_own(OWN_OF_B, B, plan.own_of_b_bytes)?;
    rack.done(&format!(
        "B and C are busy: {} MiB and {} MiB of their own; A is idle",
        plan.own_of_b_bytes >> 20,
        plan.own_of_c_bytes >> 20
    ));
    for host in [A, B, C] {
        rack.join(host, plan.donate_bytes)?;
    }
    rack.done("A, B and C take part; each lends what its own programs leave");
    rack.log.step("A's offer rises");
    let needed = rack.asked_bytes(B);
    rack.wait_status("A to offer enough for B", PATIENCE, |_, status| {
        (status.offered_bytes("A") >= needed).then_some(())
    })?;
    rack.done(&format!(
        "{OF_B} starts: {} MiB, of which {} MiB may be local",
        plan.of_b.bytes >> 20,
        plan.of_b.local_bytes >> 20
    ));
    rack.log.step("B's program fills its memory");
    rack.start_far(OF_B, B, &plan.of_b)?;
    let lenders = rack.wait_status("B's memory to be ready", PATIENCE, |_, status| {
        let lenders = status.lenders_of("B");
        (!lenders.is_empty()).then(|| lenders.join(", "))
    })?;
    rack.checks.add("A serves B: B's far memory is on A", lenders == "A", format!("on {lenders}"));
    wait_borrowed(rack, B, PATIENCE)?;
    rack.log.step("A serves B");
    Ok(())
}

/// The injected change, as in the paper.
fn the_moment(rack: &mut Rack) -> Result<(), Error> {
    let plan = rack.plan.clone();
    rack.log.step("A reclaims");
    rack.done(&format!(
        "a big program starts on A: {} MiB, of which {} MiB may be local; B's demand begins to \
         shrink",
        (plan.own_of_a_bytes + plan.of_a.bytes) >> 20,
        (plan.own_of_a_bytes + plan.of_a.local_bytes) >> 20
    ));
    shrink(rack, 0)?;
    rack.start_own(OWN_OF_A, A, plan.own_of_a_bytes)?;
    rack.start_far(OF_A, A, &plan.of_a)
}

/// Sets B's demand to that of a step of the plan.
fn shrink(rack: &mut Rack, step: usize) -> Result<(), Error> {
    if let Some(bytes) = rack.plan.shrunk_bytes.get(step).copied() {
        rack.started(OF_B)?.tell(&format!("size {bytes}"));
        rack.done(&format!("{OF_B} needs {} MiB now", bytes >> 20));
    }
    Ok(())
}

fn a_takes_back(rack: &mut Rack, moment: Duration) -> Result<(), Error> {
    let lenders = rack.wait_status("A to have its memory back", PATIENCE, |_, status| {
        (!status.has("A", "B")).then(|| status.lenders_of("B").join(", "))
    })?;
    let took = rack.log.elapsed().saturating_sub(moment);
    rack.done("A has its memory back; B's data is elsewhere");
    let seen = format!("{:.1} s after the big program's start", took.as_secs_f64());
    rack.checks.add("A takes back what B had, within 30 s", took <= RECLAIM_DEADLINE, seen);
    let is_elsewhere = !lenders.split(", ").any(|node| node == "A");
    let seen = match lenders.as_str() {
        "" => "B has it at home".to_owned(),
        nodes => format!("to {nodes}"),
    };
    rack.checks.add("B's data has moved away from A", is_elsewhere, seen);
    for step in 1..rack.plan.shrunk_bytes.len() {
        rack.rest(SHRINK_STEP)?;
        shrink(rack, step)?;
    }
    Ok(())
}

fn a_is_a_client(rack: &mut Rack) -> Result<(), Error> {
    wait_borrowed(rack, A, PATIENCE)?;
    // Without a controller A's own blade serves the program until A's use of memory makes it a
    // client.
    let alone = rack.wait_status("A's memory to be on C alone", ALONE_PATIENCE, |_, status| {
        (status.lenders_of("A") == ["C"]).then_some(())
    });
    if matches!(alone, Err(Error::Interrupted)) {
        return alone;
    }
    let lenders = rack.status()?.lenders_of("A").join(", ");
    let borrowed = rack.log.look(|timeline| timeline.last(A).map_or(0, |host| host.borrowed_bytes));
    let seen = format!("{} MiB of A's data on {lenders}", borrowed >> 20);
    rack.checks.add("A has become a client of C", alone.is_ok() && borrowed > 0, seen);
    Ok(())
}

/// Bytes that may stay elsewhere: pages that are not touched do not come home. Those are start-up
/// data of B's programs for the most part; up to 10 MiB were seen on a busy machine.
const COLD_BYTES: u64 = 12 << 20;

/// With less demand than local memory B's pages come home as they are touched.
fn b_is_home(rack: &mut Rack) -> Result<(), Error> {
    let borrowed = |rack: &Rack| {
        rack.log.look(|timeline| timeline.last(B).map_or(u64::MAX, |host| host.borrowed_bytes))
    };
    let home = rack.wait("B's data to come home", PATIENCE, |rack| {
        Ok((borrowed(rack) <= COLD_BYTES).then_some(()))
    });
    // Data that does not come home is no reason to stop.
    if matches!(home, Err(Error::Interrupted)) {
        return home;
    }
    let role = rack.log.look(|timeline| timeline.last(B).map(|host| host.role));
    let is = role.map_or_else(|| "unknown".to_owned(), |role| role.to_string());
    let seen = format!("{} MiB elsewhere, B is {is}", borrowed(rack) >> 20);
    rack.checks.add("B's data is home, but for a rest", borrowed(rack) <= COLD_BYTES, seen);
    Ok(())
}

/// Checks what the figure shows: traffic between A and B before, between A and C after.
fn traffic(rack: &mut Rack, moment: Duration, until: Duration) {
    let from = moment.saturating_sub(until - moment);
    let (before, after) = rack.log.look(|timeline| {
        let carried = |from, to| timeline.carried_bytes(C, from, to) >> 20;
        (carried(from, moment), carried(moment, until))
    });
    let seen = format!("{before} MiB in as long a time before, {after} MiB after");
    rack.checks.add("C's link is quiet before and busy after", before * 4 < after, seen);
}

/// Waits until a host's programs have data elsewhere.
pub fn wait_borrowed(rack: &mut Rack, host: usize, patience: Duration) -> Result<(), Error> {
    let name = rack.name(host);
    rack.wait(&format!("{name} to use far memory"), patience, |rack| {
        let borrowed = |host: &super::timeline::HostSample| host.borrowed_bytes > 0;
        let seen = rack.log.look(|timeline| timeline.last(host).is_some_and(borrowed));
        Ok(seen.then_some(()))
    })
}

/// Ends a program that has done its part, and checks that all was right.
pub fn end_quietly(rack: &mut Rack, name: &str) -> Result<(), Error> {
    let mut started = rack.take_guest(name)?;
    super::end::finish(rack, &mut started)
}
