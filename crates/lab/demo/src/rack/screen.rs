//! The display while the scenario runs: on a terminal a panel that stays at the bottom, elsewhere
//! lines.
//!
//! With JSON, standard output has only JSON lines, and what people read goes to standard error.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use super::rows;
use super::timeline::{Event, Sample, Timeline};

/// How often progress is printed if the output is no terminal.
const PROGRESS_PERIOD: Duration = Duration::from_secs(10);

/// The screen; it lives as long as all racks.
pub struct Screen {
    out: Box<dyn Write + Send>,
    is_json: bool,
    is_terminal: bool,
    may_colour: bool,
    /// Lines of the panel that are on the terminal now.
    drawn_lines: usize,
    panel: Vec<String>,
    last: Option<Sample>,
    step: String,
    started: Instant,
    expected: Duration,
    progress_after: Instant,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("step", &self.step).finish_non_exhaustive()
    }
}

impl Screen {
    /// Makes a screen for people and, with `json`, for programs too. `expected` is how long all
    /// takes.
    pub fn new(json: bool, expected: Duration) -> Screen {
        let is_terminal =
            if json { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let out: Box<dyn Write + Send> =
            if json { Box::new(io::stderr()) } else { Box::new(io::stdout()) };
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        let is_terminal = is_terminal && !is_dumb;
        let may_colour = is_terminal && !no_colour;
        Screen { is_json: json, is_terminal, may_colour, ..Screen::plain(out, expected) }
    }

    /// Makes a screen that prints only lines, to `out`.
    pub fn plain(out: Box<dyn Write + Send>, expected: Duration) -> Screen {
        let now = Instant::now();
        Screen {
            out,
            is_json: false,
            is_terminal: false,
            may_colour: false,
            drawn_lines: 0,
            panel: Vec::new(),
            last: None,
            step: String::new(),
            started: now,
            expected,
            progress_after: now,
        }
    }

    pub fn may_colour(&self) -> bool {
        self.may_colour
    }

    /// Begins a new rack, which is not compared with the one before.
    pub fn begin(&mut self) {
        self.last = None;
        self.panel.clear();
    }

    /// Sets the step that is shown from now on.
    pub fn step(&mut self, step: &str) {
        step.clone_into(&mut self.step);
        self.progress_after = Instant::now();
    }

    /// Prints text that stays.
    pub fn text(&mut self, text: &str) {
        self.clear();
        self.write(&format!("{}\n", text.trim_end_matches('\n')));
        self.draw();
    }

    pub fn event(&mut self, event: &Event) {
        self.text(&rows::event(event, self.may_colour));
    }

    /// Shows what the hosts do now: the last sample of the timeline.
    pub fn sample(&mut self, names: &[String], timeline: &Timeline) {
        let Some(sample) = timeline.samples.last() else {
            return;
        };
        if self.is_terminal {
            self.clear();
            self.panel = rows::panel(names, timeline, self.may_colour);
            self.draw();
        } else {
            if self.last.is_none() {
                self.write(&format!("         {}\n         {}\n", rows::HEADER, rows::UNITS));
            }
            let lines = rows::news(names, self.last.as_ref(), sample, self.may_colour);
            lines.iter().for_each(|line| self.write(&format!("{line}\n")));
            if Instant::now() >= self.progress_after {
                self.progress_after = Instant::now() + PROGRESS_PERIOD;
                let line = self.progress();
                self.write(&format!("         {line}\n"));
            }
        }
        self.last = Some(sample.clone());
    }

    /// Takes the panel away.
    pub fn end(&mut self) {
        self.clear();
        self.panel.clear();
    }

    /// Prints a line of JSON for programs.
    pub fn json(&self, value: &serde_json::Value) {
        if self.is_json {
            // A reader that has closed its end is no error.
            let _ = writeln!(io::stdout(), "{value}");
        }
    }

    fn progress(&self) -> String {
        rows::progress(&self.step, self.started.elapsed(), self.expected)
    }

    fn draw(&mut self) {
        if !self.is_terminal || self.panel.is_empty() {
            return;
        }
        // A line that is too long for the terminal must not become two.
        let mut text = "\x1b[?7l".to_owned();
        for line in &self.panel {
            text += &format!("{line}\n");
        }
        text += &format!("{}\n\x1b[?7h", self.progress());
        self.drawn_lines = self.panel.len() + 1;
        self.write(&text);
    }

    fn clear(&mut self) {
        if self.drawn_lines > 0 {
            let up = format!("\x1b[{}A\x1b[J", self.drawn_lines);
            self.drawn_lines = 0;
            self.write(&up);
        }
    }

    fn write(&mut self, text: &str) {
        // It does no harm if the text cannot be shown.
        let _ = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
    }
}
