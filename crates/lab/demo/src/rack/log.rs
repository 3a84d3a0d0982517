//! The one record of a rack, which samplers, programs and the scenario write to.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farpool_kernel::lock;

use super::screen::Screen;
use super::timeline::{Event, Sample, Source, Timeline};

/// The screen, shared by all racks.
pub type SharedScreen = Arc<Mutex<Screen>>;

/// Times count from when it was made.
#[derive(Debug)]
pub struct Log {
    started: Instant,
    rack: &'static str,
    names: Vec<String>,
    timeline: Mutex<Timeline>,
    screen: SharedScreen,
}

impl Log {
    pub fn new(rack: &'static str, names: Vec<String>, screen: SharedScreen) -> Log {
        lock(&screen).begin();
        Log { started: Instant::now(), rack, names, timeline: Mutex::default(), screen }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub fn event(&self, source: Source, text: &str) {
        let event = Event { at: self.elapsed(), source, text: text.to_owned() };
        // Lock order everywhere: the timeline, then the screen.
        let mut timeline = lock(&self.timeline);
        let mut screen = lock(&self.screen);
        screen.json(&event.to_json(self.rack));
        screen.event(&event);
        timeline.events.push(event);
    }

    pub fn sample(&self, sample: Sample) {
        let mut timeline = lock(&self.timeline);
        let mut screen = lock(&self.screen);
        screen.json(&sample.to_json(self.rack, &self.names));
        for change in timeline.push(sample, &self.names) {
            screen.json(&change.to_json(self.rack));
            screen.event(&change);
        }
        screen.sample(&self.names, &timeline);
    }

    pub fn step(&self, step: &str) {
        lock(&self.screen).step(step);
    }

    /// Prints text between events.
    pub fn text(&self, text: &str) {
        lock(&self.screen).text(text);
    }

    /// Calls `look` with what has happened so far.
    pub fn look<R>(&self, look: impl FnOnce(&Timeline) -> R) -> R {
        look(&lock(&self.timeline))
    }

    /// All that has happened.
    pub fn timeline(&self) -> Timeline {
        lock(&self.timeline).clone()
    }
}
