//! Runs one test program, with a limit to its time, and says what it cost.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use farpool_host::processors::process_ticks;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::outcome::Outcome;

/// Longest time of a test program. One that takes longer hangs, and is killed.
const PATIENCE: Duration = Duration::from_secs(20 * 60);
/// Time between two checks whether it has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Runs a command, writes what it prints to `log`, and reads the log.
///
/// # Errors
/// When it cannot be started, or the log cannot be written or read.
pub(crate) fn run(title: String, mut command: Command, log: &Path) -> anyhow::Result<Outcome> {
    let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let start = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot start {title}"))?;
    let is_in_time = has_ended(&child, start + PATIENCE)?;
    // /proc has the child's times until the child is waited for.
    let cpu = cpu_time(child.id());
    if !is_in_time {
        child.kill()?;
    }
    let status = child.wait()?;
    let bytes = std::fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
    let mut outcome =
        Outcome::read(title, &String::from_utf8_lossy(&bytes), is_in_time && status.success());
    outcome.took = start.elapsed();
    outcome.cpu = cpu;
    if !is_in_time {
        outcome.complaint.push_str("it had not ended after 20 minutes, and was killed\n");
    }
    Ok(outcome)
}

/// Waits until a child has ended, and leaves it to be waited for. Returns false if it has not ended
/// by the deadline.
fn has_ended(child: &Child, deadline: Instant) -> anyhow::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process id")?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    while waitid(WaitId::Pid(pid), options)?.is_none() {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(LOOK);
    }
    Ok(true)
}

/// The processor time of a process and of its children that it has waited for. None if /proc does
/// not say.
fn cpu_time(pid: u32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks = process_ticks(&text)?;
    Some(Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_run_and_its_end_is_seen() {
        let log = std::env::temp_dir().join(format!("farpool-testrun-{}", std::process::id()));
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            run("sh".into(), command, &log).expect("sh runs")
        };
        let good = shell("echo 'test result: ok. 2 passed; 0 failed; 0 ignored'");
        assert_eq!((good.passed, good.failed), (2, 0));
        assert_eq!(shell("exit 3").failed, 1);
        std::fs::remove_file(log).expect("the log is there");
    }
}
