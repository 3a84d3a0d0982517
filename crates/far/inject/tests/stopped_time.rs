//! How long a program stands still for an injection: printed, and bounded generously.
//!
//! A binary of its own, so that no other test runs beside it.

mod common;

use std::time::{Duration, Instant};

use common::{Host, Link, await_end};
use rustix::process::{Signal, kill_process};

const ROUNDS: usize = 40;
/// Far beyond what is measured on a busy machine; the bar of the design is 100 ms.
const BAR: Duration = Duration::from_millis(100);

fn measure(threads: usize) {
    let count = threads.to_string();
    let Some(mut host) = Host::c(Link::Dynamic, &["many", &count]) else { return };
    let (mut stopped, mut whole) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let injected = host.inject().expect("a sidecar");
        whole.push(start.elapsed());
        assert_eq!(injected.threads, threads);
        stopped.push(injected.stopped);
        kill_process(injected.pid, Signal::KILL).expect("kill");
        await_end(&injected);
    }
    for (name, times) in [("stopped", &mut stopped), ("whole injection", &mut whole)] {
        times.sort();
        let (median, max) = (times[ROUNDS / 2], times[ROUNDS - 1]);
        println!("{threads} threads: {name}: median {median:?}, max {max:?}");
    }
    assert!(stopped[ROUNDS / 2] < BAR);
    assert_eq!(host.finish(), "ok");
}

#[test]
fn the_program_stands_still_for_a_moment() {
    measure(1);
    measure(64);
}
