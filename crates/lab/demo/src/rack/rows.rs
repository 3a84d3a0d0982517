//! A host in one line, and the panel of all of them; pure.

use std::time::Duration;

use super::figure::spark;
use super::timeline::{Event, HostSample, Role, Sample, Source, Timeline};

/// Heading of the columns of [`row`].
pub const HEADER: &str = "             own  lent  borrowed     in   out";
/// Second line of the heading: the units.
pub const UNITS: &str = "host role    MiB   MiB       MiB  MiB/s MiB/s  checked";
/// Seconds of traffic beside a host of the panel.
const SPARKS: usize = 30;
/// Most characters of a text that are shown. JSON has all of them.
const EVENT_CHARS_MAX: usize = 150;
/// Smaller differences are not shown.
const NOISE_BYTES: u64 = 4 << 20;

/// One line of a host.
pub fn row(name: &str, host: &HostSample, may_colour: bool) -> String {
    let lent = host.lent_bytes.map_or("?".to_owned(), mib);
    let role = format!("{:<7}", host.role);
    format!(
        "{name:<4} {}{:>4} {lent:>5} {:>9} {:>6} {:>5} {:>8}",
        coloured(&role, host.role, may_colour),
        mib(host.own_bytes),
        mib(host.borrowed_bytes),
        mib(host.in_bytes_per_s),
        mib(host.out_bytes_per_s),
        checked(host.checked_bytes),
    )
}

/// The lines of the hosts that have changed since the sample `before`.
pub fn news(
    names: &[String],
    before: Option<&Sample>,
    sample: &Sample,
    may_colour: bool,
) -> Vec<String> {
    let told = |(at, host): (usize, &HostSample)| {
        let old = before.and_then(|before| before.hosts.get(at));
        let is_quiet = old.is_some_and(|old| is_alike(old, host));
        let name = names.get(at).filter(|_| !is_quiet)?;
        Some(format!("{:>5} s  {}", sample.at.as_secs(), row(name, host, may_colour)))
    };
    sample.hosts.iter().enumerate().filter_map(told).collect()
}

/// All hosts in the last sample, each with its traffic of the last half minute.
pub fn panel(names: &[String], timeline: &Timeline, may_colour: bool) -> Vec<String> {
    let Some(last) = timeline.samples.last() else {
        return Vec::new();
    };
    let shown = &timeline.samples[timeline.samples.len().saturating_sub(SPARKS)..];
    let traffic = |sample: &Sample, at: usize| {
        sample.hosts.get(at).map_or(0, HostSample::traffic_bytes_per_s)
    };
    let mut lines = vec![HEADER.to_owned(), UNITS.to_owned()];
    for (at, (host, name)) in last.hosts.iter().zip(names).enumerate() {
        let sparks: String = shown.iter().map(|sample| spark(traffic(sample, at))).collect();
        lines.push(format!("{}  {sparks}", row(name, host, may_colour)).trim_end().to_owned());
    }
    lines
}

/// One line of an event.
pub fn event(event: &Event, may_colour: bool) -> String {
    let seconds = event.at.as_secs_f64();
    let (sign, colour) = match event.source {
        Source::Done => (">>", "1"),
        Source::Seen => ("--", "36"),
        Source::Said => ("::", "2"),
    };
    let text: String = event.text.chars().take(EVENT_CHARS_MAX).collect();
    let more = if text.len() < event.text.len() { "..." } else { "" };
    let text = format!("{sign} {text}{more}");
    let text = if may_colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text };
    format!("{seconds:>5.1} s  {text}")
}

/// The current step, and how long all will take.
pub fn progress(step: &str, elapsed: Duration, expected: Duration) -> String {
    let left = expected.saturating_sub(elapsed).as_secs();
    let left = match left {
        0 => "done at any moment".to_owned(),
        left => format!("about {left} s left"),
    };
    format!("[{step}: {} s, {left}]", elapsed.as_secs())
}

fn is_alike(old: &HostSample, new: &HostSample) -> bool {
    let near = |a: u64, b: u64| a.abs_diff(b) < NOISE_BYTES;
    let is_still = |host: &HostSample| host.traffic_bytes_per_s() < NOISE_BYTES;
    old.role == new.role
        && is_still(old)
        && is_still(new)
        && near(old.own_bytes, new.own_bytes)
        && near(old.borrowed_bytes, new.borrowed_bytes)
        && near(old.lent_bytes.unwrap_or(0), new.lent_bytes.unwrap_or(0))
}

fn mib(bytes: u64) -> String {
    ((bytes + (1 << 19)) >> 20).to_string()
}

#[expect(clippy::cast_precision_loss, reason = "a digit is enough")]
fn checked(bytes: u64) -> String {
    match bytes {
        0 => "-".to_owned(),
        bytes => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

fn coloured(text: &str, role: Role, may_colour: bool) -> String {
    let code = match role {
        Role::Server => "32",
        Role::Client => "33",
        Role::Both => "35",
        Role::Neutral => "2",
        Role::CutOff => "1;31",
    };
    if may_colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::timeline::tests::{host, sample};
    use super::*;

    fn names() -> Vec<String> {
        ["A", "B"].map(str::to_owned).into()
    }

    #[test]
    fn columns_line_up_with_their_header() {
        let mut one = host(Role::Client, 12 << 20);
        (one.own_bytes, one.borrowed_bytes) = (712 << 20, 336 << 20);
        (one.checked_bytes, one.lent_bytes) = (3 << 30, None);
        let line = row("A", &one, false);
        assert_eq!(line, "A    client  712     ?       336     12     0  3.0 GiB");
        let ends = |text: &str, word: &str| text.find(word).map(|at| at + word.len());
        assert_eq!(ends(&line, "712"), ends(HEADER, "own"));
        assert_eq!(ends(&line, "?"), ends(HEADER, "lent"));
        assert_eq!(ends(&line, "336"), ends(HEADER, "borrowed"));
        assert_eq!(ends(&line, " 12"), ends(HEADER, " in"));
        assert_eq!(ends(&line, " 0"), ends(HEADER, "out"));
        assert_eq!(ends(&line, "GiB"), ends(UNITS, "checked"));
    }

    #[test]
    fn a_quiet_host_is_not_told_again() {
        let quiet = host(Role::Neutral, 100);
        let first = sample(1, &[quiet, host(Role::Server, 50 << 20)]);
        assert_eq!(news(&names(), None, &first, false).len(), 2);
        let second = sample(2, &[quiet, host(Role::Server, 50 << 20)]);
        let lines = news(&names(), Some(&first), &second, false);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].starts_with("    2 s  B    server"), "{lines:?}");
        let third = sample(3, &[host(Role::CutOff, 100), quiet]);
        assert_eq!(news(&names(), Some(&second), &third, false).len(), 2);
    }

    #[test]
    fn a_panel_has_a_line_for_each_host() {
        let mut timeline = Timeline::default();
        assert!(panel(&names(), &timeline, false).is_empty());
        for second in 0..40 {
            let hosts = [host(Role::Server, second << 20), host(Role::Neutral, 0)];
            timeline.push(sample(second, &hosts), &names());
        }
        let lines = panel(&names(), &timeline, false);
        assert_eq!(lines.len(), 4);
        assert!(lines[2].ends_with('\u{2586}'), "39 MiB/s: {lines:?}");
        assert!(panel(&names(), &timeline, true)[2].contains("\x1b[32mserver"));
    }

    #[test]
    fn a_long_speech_is_cut() {
        let text = "x".repeat(500);
        let long = Event { at: Duration::ZERO, source: Source::Said, text };
        let line = event(&long, false);
        assert!(line.len() < 200 && line.ends_with("x..."), "{line}");
    }

    #[test]
    fn progress_says_what_is_left() {
        let secs = Duration::from_secs;
        assert_eq!(progress("x", secs(5), secs(65)), "[x: 5 s, about 60 s left]");
        assert_eq!(progress("x", secs(70), secs(65)), "[x: 70 s, done at any moment]");
    }
}
