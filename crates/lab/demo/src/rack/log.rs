//! The one record of a rack, which samplers, programs and the scenario write to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
        locked(&screen).begin();
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
        // In this order everywhere: the timeline, then the screen.
        let mut timeline = locked(&self.timeline);
        let mut screen = locked(&self.screen);
        screen.json(&event.to_json(self.rack));
        screen.event(&event);
        timeline.events.push(event);
    }

    pub fn sample(&self, sample: Sample) {
        let mut timeline = locked(&self.timeline);
        let mut screen = locked(&self.screen);
        screen.json(&sample.to_json(self.rack, &self.names));
        for change in timeline.push(sample, &self.names) {
            screen.json(&change.to_json(self.rack));
            screen.event(&change);
        }
        screen.sample(&self.names, &timeline);
    }

    pub fn step(&self, step: &str) {
        locked(&self.screen).step(step);
    }

    /// Text between what happens.
    pub fn text(&self, text: &str) {
        locked(&self.screen).text(text);
    }

    /// Looks at what has happened so far.
    pub fn look<R>(&self, look: impl FnOnce(&Timeline) -> R) -> R {
        look(&locked(&self.timeline))
    }

    /// All that has happened.
    pub fn timeline(&self) -> Timeline {
        locked(&self.timeline).clone()
    }
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
