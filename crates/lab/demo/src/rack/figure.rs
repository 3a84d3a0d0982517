//! The paper's Figure 6: a host's traffic over time, with its role below; pure.

use std::fmt::Write;
use std::time::Duration;

use farpool_units::{at_most, exactly};

use super::timeline::Timeline;

/// Eighths of a character cell, from nothing to all of it.
const BLOCKS: [char; 9] = [
    ' ', '\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}',
    '\u{2588}',
];
/// Least lines of a plot; each stands for four times the traffic of the one below, the lowest for 1
/// to 4 MiB/s.
const HEIGHT_MIN: u64 = 4;
/// Eighths of a cell for twice the traffic.
const EIGHTHS_PER_DOUBLING: f64 = 4.0;
/// Widest plot; a longer time has several seconds in a column.
const COLUMNS_MAX: u64 = 100;
/// Columns between two numbers on the time axis.
const TICK_COLUMNS: usize = 10;
/// Columns to the left of a plot, for the scale.
const MARGIN: usize = 8;

/// A column of a plot: the highest traffic in it, and the last role.
#[derive(Clone, Copy, Debug, Default)]
struct Column {
    traffic_bytes_per_s: u64,
    letter: Option<char>,
}

/// One letter of traffic: nothing below 1 MiB/s, full from 128 MiB/s, each step twice the one
/// before.
pub fn spark(traffic_bytes_per_s: u64) -> char {
    BLOCKS[at_most::<usize, _>(level(traffic_bytes_per_s, 1.0)).min(8)]
}

/// The plots of some hosts, one below the other, all on one scale; `moment` is marked.
pub fn plot(
    timeline: &Timeline,
    names: &[String],
    hosts: &[usize],
    until: Duration,
    moment: Duration,
) -> String {
    let seconds = until.as_secs().max(1);
    let step = seconds.div_ceil(COLUMNS_MAX);
    let count = seconds.div_ceil(step);
    let rows: Vec<Vec<Column>> =
        hosts.iter().map(|host| columns(timeline, *host, step, count)).collect();
    let most = rows.iter().flatten().map(|column| column.traffic_bytes_per_s).max().unwrap_or(0);
    let height = level(most, EIGHTHS_PER_DOUBLING).div_ceil(8).max(HEIGHT_MIN);
    let mut text = String::new();
    for (host, row) in hosts.iter().zip(&rows) {
        let name = names.get(*host).map_or("?", String::as_str);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name}, MiB/s in and out");
        for line in (0..height).rev() {
            let scale = 4_u64.saturating_pow(exactly::<u32, _>(line) + 1);
            let bar = |column: &Column| cell(column.traffic_bytes_per_s, line);
            let bars: String = row.iter().map(bar).collect();
            let _ = writeln!(text, "{scale:>width$} |{}", bars.trim_end(), width = MARGIN - 2);
        }
        let roles: String = row.iter().map(|column| column.letter.unwrap_or(' ')).collect();
        let _ = writeln!(text, "{:>width$} |{}", "role", roles.trim_end(), width = MARGIN - 2);
    }
    text + &axis(step, count, moment)
}

fn columns(timeline: &Timeline, host: usize, step: u64, count: u64) -> Vec<Column> {
    let mut columns = vec![Column::default(); exactly(count)];
    for sample in &timeline.samples {
        let at = usize::try_from(sample.at.as_secs() / step).ok();
        let column = at.and_then(|at| columns.get_mut(at));
        if let (Some(column), Some(host)) = (column, sample.hosts.get(host)) {
            let traffic = host.traffic_bytes_per_s();
            column.traffic_bytes_per_s = column.traffic_bytes_per_s.max(traffic);
            column.letter = Some(host.role.letter());
        }
    }
    // A second without a sample repeats the one before.
    for at in 1..columns.len() {
        if columns[at].letter.is_none() {
            columns[at] = columns[at - 1];
        }
    }
    columns
}

/// The part of a bar that is in one of its lines, counted from below.
fn cell(traffic_bytes_per_s: u64, line: u64) -> char {
    let eighths = level(traffic_bytes_per_s, EIGHTHS_PER_DOUBLING).saturating_sub(line * 8).min(8);
    BLOCKS[exactly::<usize, _>(eighths)]
}

/// The height of a bar that grows by this much with each doubling. Zero below 1 MiB/s.
fn level(traffic_bytes_per_s: u64, per_doubling: f64) -> u64 {
    if traffic_bytes_per_s < 1 << 20 {
        return 0;
    }
    #[expect(clippy::cast_precision_loss, reason = "eighths of a letter are seen")]
    let doublings = (traffic_bytes_per_s as f64 / f64::from(1 << 20)).log2();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 to 44 doublings"
    )]
    let level = (doublings * per_doubling) as u64 + 1;
    level
}

fn axis(step: u64, count: u64, moment: Duration) -> String {
    let mut line = " ".repeat(MARGIN);
    for tick in (0..count).step_by(TICK_COLUMNS) {
        let label = format!("{}", tick * step);
        line += &format!("{label:<TICK_COLUMNS$}");
    }
    let at: usize = exactly(moment.as_secs() / step);
    let mark = format!("{}^ the big program starts on A", " ".repeat(MARGIN + at));
    format!("{} s\n{mark}\n", line.trim_end())
}

#[cfg(test)]
mod tests {
    use super::super::timeline::tests::{host, sample};
    use super::super::timeline::{Role, Timeline};
    use super::*;

    #[test]
    fn a_plot_has_bars_roles_and_an_axis() {
        let names = ["A".to_owned()];
        let mut timeline = Timeline::default();
        for second in 0..12 {
            let role = if second < 6 { Role::Server } else { Role::Client };
            timeline.push(sample(second, &[host(role, 1 << (18 + second))]), &names);
        }
        let secs = Duration::from_secs;
        let text = plot(&timeline, &names, &[0], secs(12), secs(6));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + 5 + 1 + 2, "{text}");
        assert_eq!(lines[1], "  1024 |          \u{2581}\u{2585}", "512 MiB/s: {text}");
        assert_eq!(
            lines[5],
            "     4 \
             |  \u{2581}\u{2585}\u{2588}\u{2588}\u{2588}\u{2588}\u{2588}\u{2588}\u{2588}\u{2588}"
        );
        assert_eq!(lines[6], "  role |SSSSSSCCCCCC");
        assert_eq!(lines[7], "        0         10 s");
        assert_eq!(lines[8].find('^'), Some(8 + 6), "{text}");
    }

    #[test]
    fn a_long_time_fits_and_a_missing_second_is_bridged() {
        let names = ["A".to_owned()];
        let mut timeline = Timeline::default();
        for second in [0, 150, 299] {
            timeline.push(sample(second, &[host(Role::Neutral, 1)]), &names);
        }
        let secs = Duration::from_secs;
        let text = plot(&timeline, &names, &[0], secs(300), secs(0));
        let roles = text.lines().find(|line| line.contains("role")).expect("a line of roles");
        assert_eq!(roles.matches('.').count(), 100, "{text}");
    }

    #[test]
    fn each_letter_is_twice_the_one_before() {
        assert_eq!(spark(0), ' ');
        assert_eq!(spark((1 << 20) - 1), ' ');
        assert_eq!(spark(1 << 20), '\u{2581}');
        assert_eq!(spark(2 << 20), '\u{2582}');
        assert_eq!(spark(100 << 20), '\u{2587}');
        assert_eq!(spark(u64::MAX), '\u{2588}');
    }
}
