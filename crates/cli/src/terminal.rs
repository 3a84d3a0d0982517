//! Output for people: colours only where they are wanted, and aligned columns.

use std::io::{self, IsTerminal, Write, stdout};

use farpool_units::plain;

/// True when `stream` is a terminal and the user has not asked for plain text (NO_COLOR).
pub fn may_colour(stream: &impl IsTerminal) -> bool {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    stream.is_terminal() && !no_colour && !dumb
}

/// Writes to standard output. A reader that closes early (`farpool stat | head`) is not an error.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        written => written,
    }
}

/// Shows a counter on standard error while work lasts; nothing if that is not a terminal.
pub fn counter(what: &'static str) -> indicatif::ProgressBar {
    let style = indicatif::ProgressStyle::with_template("{spinner} {human_pos} {msg} ({elapsed})");
    let counter = indicatif::ProgressBar::new_spinner().with_message(what);
    counter.with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_spinner()))
}

/// Shows the current work on standard error; nothing if that is not a terminal.
pub fn status() -> indicatif::ProgressBar {
    let style = indicatif::ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    let status = indicatif::ProgressBar::new_spinner();
    status.with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_spinner()))
}

/// Shows a progress bar with a known end.
pub fn bar(what: &'static str, count: u64) -> indicatif::ProgressBar {
    let style = indicatif::ProgressStyle::with_template("{bar:40} {pos}/{len} {msg} ({eta} left)");
    let bar = indicatif::ProgressBar::new(count).with_message(what);
    bar.with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
}

/// As [`bar`], for bytes whose number is set later.
pub fn bytes_bar(what: &'static str) -> indicatif::ProgressBar {
    let style = "{bar:40} {binary_bytes}/{binary_total_bytes} {msg} ({eta} left)";
    let style = indicatif::ProgressStyle::with_template(style);
    let bar = indicatif::ProgressBar::new(0).with_message(what);
    bar.with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
}

/// The colours in use, each a role rather than a hue.
#[derive(Clone, Copy, Debug)]
pub enum Tone {
    Good,
    Bad,
    Faint,
}

/// `text` in its tone, or unchanged when colours are off.
pub fn toned(text: &str, tone: Tone, colour: bool) -> String {
    let code = match tone {
        Tone::Good => "32",
        Tone::Bad => "31",
        Tone::Faint => "2",
    };
    if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Formats rows under a header, columns two spaces apart: the first left-aligned, the others
/// right-aligned. Cells may hold names from elsewhere; what a terminal would obey is escaped.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(|&name| name.to_owned()).collect();
    let plain_row = |row: &Vec<String>| row.iter().map(|cell| plain(cell).into_owned()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(plain_row).collect();
    let all = || std::iter::once(&header).chain(&rows);
    let widths: Vec<usize> = (0..header.len())
        .map(|at| all().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max())
        .map(|widest| widest.unwrap_or(0))
        .collect();
    all().map(|row| line(row, &widths)).collect()
}

fn line(row: &[String], widths: &[usize]) -> String {
    let cells = row.iter().zip(widths).enumerate().map(|(at, (cell, width))| match at {
        0 => format!("{cell:<width$}"),
        _ => format!("  {cell:>width$}"),
    });
    format!("{}\n", cells.collect::<String>().trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_at_the_widest_cell() {
        let rows = [vec!["redis".into(), "7".into()], vec!["a".into(), "12345".into()]];
        let text = table(&["program", "faults"], &rows);
        assert_eq!(text, "program  faults\nredis         7\na         12345\n");
    }

    #[test]
    fn a_name_cannot_move_the_cursor() {
        let text = table(&["name"], &[vec!["\u{1b}[2Jx\ny".into()]]);
        assert_eq!(text, "name\n\\u{1b}[2Jx\\ny\n");
    }
}
