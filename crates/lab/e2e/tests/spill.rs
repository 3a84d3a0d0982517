//! The last resort: a donor needs its memory back, and no other host has any. The program's data
//! goes into its own host's memory, or into a file if that is short, and back to the rack when the
//! rack has room again.

use farpool_e2e::hog::Hog;
use farpool_e2e::rack::Daemon;
use farpool_e2e::run::Running;
use farpool_e2e::stage::{PATIENCE, Stage};
use farpool_e2e::{network, turn, wait_until};
use farpool_hosts::{Hosts, Wiring};

const A: usize = 0;
const B: usize = 1;
/// Each host's memory.
const HOST_BYTES: u64 = 1 << 30;
/// Memory in use on a host so that it lends nothing any more, and takes no spill into its memory.
const HOG_BYTES: u64 = 760 << 20;
/// Pages that the program must fetch, and check, from wherever its data has moved to.
const CHECKED_PAGES: u64 = 10_000;

/// A lends to the program on B; the controller is on B, too. The fields are in the order in which
/// they must be dropped.
struct Two {
    node: Daemon,
    /// The node of B, which lends nothing. The rack knows B by it.
    _borrower: Daemon,
    stage: Stage,
}

impl Two {
    fn start() -> Option<Two> {
        let hosts =
            network::make(Hosts::builder(2, Wiring::Direct).memory_limit_bytes(HOST_BYTES))?;
        let address = hosts[A].address();
        let mut stage = Stage::new(hosts, B);
        stage.start_control(&[]);
        let node = stage.node(A, address, "512MiB");
        Some(Two { node, _borrower: stage.borrower(B), stage })
    }

    /// States of all segments.
    fn segments(&self) -> Vec<String> {
        self.stage.segments().iter().map(|segment| segment["state"].to_string()).collect()
    }

    /// Starts the program. It runs until it is told to end.
    fn program(&self) -> Running {
        let mut running = self.stage.program(B, "600");
        running.wait_for_output("filled", 2);
        running
    }

    /// Waits until the program, which must run, has left A.
    fn wait_until_left(&self, running: &mut Running) {
        wait_until("nothing of A's is used any more", PATIENCE, || {
            self.segments().is_empty().then_some(())
        });
        assert!(running.is_running(), "{}", running.stderr());
    }

    /// Ends the program. None of its data may be lost or wrong.
    fn end(&self, running: Running) {
        self.stage.end_programs();
        let outcome = running.finish();
        outcome.require_success().require_far();
        assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
    }
}

/// Waits until the program has fetched pages from where its data is now.
fn wait_until_used(running: &Running) {
    let fetched = wait_until("the program's counters", PATIENCE, || running.fetched());
    running.wait_until_fetched(fetched + CHECKED_PAGES);
}

#[test]
fn into_memory_and_back_to_the_rack() {
    let _turn = turn();
    let Some(two) = Two::start() else {
        return;
    };
    let mut running = two.program();
    assert_eq!(two.segments(), ["\"ready\""]);
    let hog = Hog::start(&two.stage.hosts()[A], HOG_BYTES);
    two.wait_until_left(&mut running);
    let said = running.stderr();
    assert!(said.contains("no node has room") && said.contains("this machine's memory"), "{said}");
    wait_until_used(&running);
    drop(hog);
    wait_until("the rack has the data again", PATIENCE, || {
        (two.segments() == ["\"ready\""]).then_some(())
    });
    wait_until("the spill is left", PATIENCE, || {
        let blades = running.blades();
        (blades.contains("tcp://") && !blades.contains("spill.sock")).then_some(())
    });
    assert!(running.is_running(), "{}", running.stderr());
    wait_until_used(&running);
    two.end(running);
    assert!(two.node.end());
}

#[test]
fn into_a_file_where_memory_is_short() {
    let _turn = turn();
    let Some(two) = Two::start() else {
        return;
    };
    let mut running = two.program();
    let _own = Hog::start(&two.stage.hosts()[B], HOG_BYTES);
    let _hog = Hog::start(&two.stage.hosts()[A], HOG_BYTES);
    two.wait_until_left(&mut running);
    let said = running.stderr();
    assert!(said.contains("it goes into a file in "), "{said}");
    wait_until_used(&running);
    two.end(running);
}
