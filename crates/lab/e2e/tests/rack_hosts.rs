//! The scenario of the collaborating rack (ACMS, Samih 2011, figure 6): five hosts with their own
//! memory and addresses. A serves B's program; a big program starts on A; A takes its memory back,
//! B's data moves to another host, and A's program becomes a borrower itself. It is the scenario of
//! `farpool demo rack`, with further programs beside the demo's.

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

use farpool_demo::Error;
use farpool_demo::rack::plan::{Plan, Program};
use farpool_demo::rack::timeline::Role;
use farpool_demo::rack::{self, A, B, C, Companion, Options, Outcome, Screen, Variant};
use farpool_e2e::{binaries, skip, turn};
use farpool_kernel::lock;

const OPS: &str = "discard,pipe,heap,file";
/// The memory of a companion, its local memory, and its quota: blades lend memory in superpages of
/// 16 MiB, and glibc's arenas and the threads' stacks are in other superpages than its regions.
const COMPANION: Program =
    Program { bytes: 64 << 20, local_bytes: 24 << 20, quota_bytes: 240 << 20 };

/// Collects the demo's output, to print it if the test fails.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<u8>>>);

impl Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Shown {
    fn text(&self) -> String {
        let bytes = lock(&self.0);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A program that uses its memory in many ways, and checks every page.
fn stress(host: usize, seed: &str, seconds: &str) -> Companion {
    let words = ["--mib", "64", "--threads", "2", "--seconds", seconds, "--seed", seed];
    let program = binaries::program("farpool-stress").into_os_string();
    let words = words.into_iter().chain(["--ops", OPS]).map(Into::into);
    Companion { host, words: std::iter::once(program).chain(words).collect(), limits: COMPANION }
}

/// Plays the scenario up to the end of the figure. Returns None, with a visible reason, if it
/// cannot be played.
fn play(variant: Variant, plan: Plan, companions: Vec<Companion>) -> Option<Outcome> {
    let folder = tempfile::tempdir().expect("folder");
    let options = Options {
        farpool: binaries::program("farpool"),
        folder: folder.path().to_owned(),
        plan,
        variants: vec![variant],
        only_figure: true,
        spoil: false,
        companions,
        json: false,
    };
    let shown = Shown::default();
    let screen = Screen::plain(Box::new(shown.clone()), options.plan.expected);
    let outcome = match rack::play(&options, variant, &Arc::new(Mutex::new(screen))) {
        Err(Error::Unavailable(reason)) => {
            skip(&reason);
            return None;
        }
        played => played.unwrap_or_else(|error| panic!("{error}\n{}", shown.text())),
    };
    assert!(outcome.checks.all_passed(), "{:#?}\n{}", outcome.checks, shown.text());
    assert_eq!(std::fs::read_dir(folder.path()).map(Iterator::count).ok(), Some(0));
    assert_eq!(groups_left(), 0);
    Some(outcome)
}

/// Control groups of this process's hosts.
fn groups_left() -> usize {
    let ours = format!("-{}", std::process::id());
    let is_ours = |name: &str| name.starts_with("farpool-host-") && name.ends_with(&ours);
    let roots = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(Path::new);
    let entries = roots.into_iter().filter_map(|root| std::fs::read_dir(root).ok()).flatten();
    entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_ours)).count()
}

/// Requires that checks with these names were made. [`play`] has already required that all passed.
fn require(outcome: &Outcome, names: &[&str]) {
    for name in names {
        let made = outcome.checks.list().iter().any(|check| check.name.starts_with(name));
        assert!(made, "nobody looked at {name:?}: {:#?}", outcome.checks);
    }
}

#[test]
fn a_server_takes_its_memory_back_and_becomes_a_client() {
    let _turn = turn();
    // Smaller than the demo's, so that the companions' memory fits, too. A must need all the memory
    // it lends.
    let plan = Plan {
        of_b: Program::of_mib(48, 24),
        of_a: Program::of_mib(48, 24),
        own_of_a_bytes: 740 << 20,
        shrunk_bytes: vec![8 << 20],
        ..Plan::quick()
    };
    let companions = vec![stress(B, "11", "40"), stress(A, "12", "15")];
    let Some(outcome) = play(Variant::Controller, plan, companions) else {
        return;
    };
    require(
        &outcome,
        &[
            "A serves B",
            "A takes back what B had",
            "B's data has moved away from A",
            "A has become a client of C",
            "B's program: every byte right",
            "B's program: its memory was far, none lost",
            "A's big program: its memory was far, none lost",
            "B's companion: ends well",
            "B's companion: its memory was far, none lost",
            "A's companion: ends well",
            "A's companion: its memory was far, none lost",
        ],
    );
    let roles = |host: usize| -> Vec<Role> {
        let mut roles: Vec<Role> =
            outcome.timeline.samples.iter().map(|sample| sample.hosts[host].role).collect();
        roles.dedup();
        roles
    };
    let server = roles(A).iter().position(|role| *role == Role::Server);
    let client = roles(A).iter().rposition(|role| *role == Role::Client);
    assert!(server.is_some() && server < client, "A was server, then client: {:?}", roles(A));
    assert!(roles(C).contains(&Role::Server), "{:?}", roles(C));
}

#[test]
fn the_same_happens_when_nodes_agree_among_themselves() {
    let _turn = turn();
    let Some(outcome) = play(Variant::Collaboration, Plan::quick(), Vec::new()) else {
        return;
    };
    require(&outcome, &["A serves B", "A takes back what B had", "A has become a client of C"]);
}
