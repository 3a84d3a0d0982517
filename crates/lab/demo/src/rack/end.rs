//! The end of every program: all that it read was right, and so is all that it has.

use std::time::Duration;

use super::five_hosts::Rack;
use super::programs::StartedProgram;
use crate::Error;

/// Ends all programs that still run, and checks what they found.
pub fn all(rack: &mut Rack) -> Result<(), Error> {
    rack.log.step("every page once more");
    rack.done("all programs check all of their pages once more, and end");
    let names: Vec<String> = rack.programs().map(|started| started.name.clone()).collect();
    for name in names {
        let mut started = rack.take_guest(&name)?;
        finish(rack, &mut started)?;
    }
    Ok(())
}

/// Ends one program, which no longer belongs to the rack, and checks what it found.
pub fn finish(rack: &mut Rack, started: &mut StartedProgram) -> Result<(), Error> {
    started.tell("end");
    started.close();
    let what = format!("{} to end", started.name);
    let code = rack.wait(&what, PATIENCE, |_| started.exit_code())?;
    let told = started.told();
    let said = told.errors.trim().replace('\n', "; ");
    let name = &started.name;
    if started.is_tenant() {
        let right = code == 0 && told.report.ended;
        let seen = match right {
            true => format!(
                "{:.2} GiB read and compared, {} MiB of it at the end",
                gib(told.report.checked_bytes),
                told.report.bytes >> 20
            ),
            false => format!("ended with {code}: {said}"),
        };
        rack.checks.add(format!("{name}: every byte right"), right, seen);
    } else {
        let seen = if said.is_empty() { format!("ended with {code}") } else { said };
        rack.checks.add(format!("{name}: ends well"), code == 0, seen);
    }
    if started.is_far {
        let counters = started.statistics().unwrap_or_default();
        let count = |name: &str| counters[name].as_u64().unwrap_or(0);
        let (out, back, lost) = (count("pages_written"), count("demand_fetches"), count("lost"));
        let seen = format!("{out} pages written, {back} fetched on demand, {lost} lost");
        let passed = out > 0 && back > 0 && lost == 0;
        rack.checks.add(format!("{name}: its memory was far, none lost"), passed, seen);
    }
    Ok(())
}

/// How long a program may take to check its pages: all that are far come over the net.
const PATIENCE: Duration = Duration::from_secs(120);

#[expect(clippy::cast_precision_loss, reason = "two digits are enough")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
