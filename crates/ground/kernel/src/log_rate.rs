//! How often a peer may cause a log line: a few times, then once in a while with a count.
//!
//! A peer can cause such lines as fast as it can connect (6,139 lines in 15 s were seen), and a log
//! that fills a disk stops more than the server. Counters are to count every event.

use std::sync::Mutex;
use std::time::Duration;

use crate::lock;

/// Lines of a kind in a window, so that a few faults are each seen with their reason.
const LINES_PER_WINDOW: u64 = 5;
/// Length of a window; at its end one line says how many more there were.
const WINDOW: Duration = Duration::from_secs(10);

/// Lines of one kind. Times are since any fixed moment.
#[derive(Debug, Default)]
pub struct LogRate(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    began: Duration,
    lines: u64,
    hidden: u64,
}

impl LogRate {
    /// True if a line may be written now; if not it is counted.
    #[must_use]
    pub fn may_write(&self, now: Duration) -> bool {
        let mut window = lock(&self.0);
        if window.lines == 0 {
            window.began = now;
        }
        let may = window.lines < LINES_PER_WINDOW;
        window.lines += 1;
        window.hidden += u64::from(!may);
        may
    }

    /// After the end of a window, how many lines were suppressed in it, and its seconds. To be
    /// called now and then.
    pub fn more(&self, now: Duration) -> Option<(u64, u64)> {
        let mut window = lock(&self.0);
        if window.lines == 0 || now.saturating_sub(window.began) < WINDOW {
            return None;
        }
        let hidden = std::mem::take(&mut *window).hidden;
        (hidden > 0).then_some((hidden, WINDOW.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_lines_are_written_and_the_rest_counted() {
        let (rate, at) = (LogRate::default(), Duration::from_millis);
        let written = (0..1000).filter(|n| rate.may_write(at(*n))).count();
        assert_eq!(written as u64, LINES_PER_WINDOW);
        assert_eq!(rate.more(at(9_999)), None, "the window is not over");
        assert_eq!(rate.more(at(10_000)), Some((995, 10)));
        assert_eq!(rate.more(at(30_000)), None, "told once");
        assert!(rate.may_write(at(30_000)), "a new window");
        assert_eq!(rate.more(at(50_000)), None, "nothing was hidden");
    }
}
