//! A host's processors as the kernel reports them: /proc/stat and the pressure. Shares refer to the
//! time between two samples.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use farpool_policy::donor_protection::ProcessorSight;
use farpool_units::{at_most, exactly};

/// Shortest time between two samples: /proc/stat counts in ticks of 10 ms, so a share of it is
/// accurate to a hundredth.
const SPAN_LEAST: Duration = Duration::from_secs(1);

/// Time since the kernel started, by the use that processors made of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Times {
    processors: u32,
    all_ticks: u64,
    idle_ticks: u64,
    /// Time in which some program waited for a processor, in microseconds.
    waiting_us: Option<u64>,
}

/// Samples the processors repeatedly.
#[derive(Clone, Debug)]
pub struct ProcessorFiles {
    proc: PathBuf,
    before: Option<(Instant, Times)>,
}

impl Default for ProcessorFiles {
    fn default() -> Self {
        Self::at("/proc")
    }
}

impl ProcessorFiles {
    /// Reads files below a folder other than `/proc`.
    #[must_use]
    pub fn at(proc: impl Into<PathBuf>) -> Self {
        Self { proc: proc.into(), before: None }
    }

    /// Returns the shares since the last valid sample. None if that is less than a second ago, or
    /// if the kernel's files are missing.
    pub fn look(&mut self, now: Instant) -> Option<ProcessorSight> {
        if self.before.is_some_and(|(then, _)| now.saturating_duration_since(then) < SPAN_LEAST) {
            return None;
        }
        let stat = fs::read_to_string(self.proc.join("stat")).ok()?;
        let pressure = fs::read_to_string(self.proc.join("pressure/cpu")).unwrap_or_default();
        let times = parse(&stat, &pressure)?;
        let (then, before) = self.before.replace((now, times))?;
        between(&before, &times, now.saturating_duration_since(then))
    }
}

/// Returns the processor time of a process and of its children that it has waited for, in clock
/// ticks, from the text of its `/proc/PID/stat`: utime, stime, cutime and cstime, fields 14 to 17
/// (proc_pid_stat(5)). None if that is no such text.
#[must_use]
pub fn process_ticks(stat: &str) -> Option<u64> {
    // The name in parentheses may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11).map(|field| field.parse::<u64>().ok());
    (0..4).try_fold(0_u64, |sum, _| sum.checked_add(fields.next()??))
}

fn between(before: &Times, after: &Times, span: Duration) -> Option<ProcessorSight> {
    let share = |part: u64, whole: u64| {
        let permille = u128::from(part) * 1000 / u128::from(whole.max(1));
        exactly(permille.min(1000))
    };
    let all_ticks = after.all_ticks.checked_sub(before.all_ticks).filter(|ticks| *ticks > 0)?;
    let idle_ticks = after.idle_ticks.saturating_sub(before.idle_ticks);
    let waited_us = before.waiting_us.zip(after.waiting_us).map(|(a, b)| b.saturating_sub(a));
    let span_us = at_most(span.as_micros());
    Some(ProcessorSight {
        processors: after.processors,
        idle_permille: share(idle_ticks, all_ticks),
        waiting_permille: waited_us.map(|waited_us| share(waited_us, span_us)),
    })
}

fn parse(stat: &str, pressure: &str) -> Option<Times> {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = all.split_whitespace().map_while(|word| word.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; the rest is already in user and nice.
    let counted = ticks.get(..8)?;
    let is_one = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "));
    let waiting_us = some.and_then(|line| {
        line.split_whitespace().find_map(|word| word.strip_prefix("total=")?.parse().ok())
    });
    Some(Times {
        processors: at_most::<u32, _>(stat.lines().filter(is_one).count()).max(1),
        all_ticks: counted.iter().sum(),
        idle_ticks: counted[3] + counted[4],
        waiting_us,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_of_a_process_is_that_of_its_children_too() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 1 2 3 4 10 20 30 40 20 0 1 0 5";
        assert_eq!(process_ticks(stat), Some(100));
        for cut in ["garbage", "7 (a) S 1 7 7 0 -1 0 1 2 3 4 10 20 30", "7 (a) S 1"] {
            assert_eq!(process_ticks(cut), None, "{cut}");
        }
    }

    const STAT: &str = "cpu  100 10 50 800 40 0 5 5 7 0\ncpu0 1 2\ncpu1 3 4\nintr 5 6\n";

    #[test]
    fn shares_are_of_the_time_between_two_looks() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let (mut files, start) = (ProcessorFiles::at(folder.path()), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(files.look(start), None, "there is nothing to read");
        write("stat", STAT);
        assert_eq!(files.look(start), None, "there is nothing to compare with");
        write("stat", &STAT.replace("100 10 50 800 40", "200 10 140 805 45"));
        assert_eq!(files.look(start + second / 2), None, "too soon");
        let seen = files.look(start + second).expect("a look");
        assert_eq!((seen.processors, seen.idle_permille, seen.waiting_permille), (2, 50, None));
        fs::create_dir(folder.path().join("pressure")).unwrap();
        let some = |total_us: u64| format!("some avg10=1.00 total={total_us}\nfull total=7\n");
        write("pressure/cpu", &some(1_000_000));
        assert_eq!(
            files.look(start + second * 2),
            None,
            "no time has passed by the kernel's count"
        );
        write("stat", STAT.replace("800", "1800").as_str());
        write("pressure/cpu", &some(1_250_000));
        let seen = files.look(start + second * 3).expect("a look");
        assert_eq!(seen.waiting_permille, Some(250));
    }

    #[test]
    fn what_is_no_statistics_is_not_understood() {
        for stat in ["", "cpu \n", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "intr 5\n"] {
            assert_eq!(parse(stat, ""), None, "{stat:?}");
        }
        assert!(parse("cpu 1 2 3 4 5 6 7 8\n", "some total=x").unwrap().waiting_us.is_none());
    }
}
