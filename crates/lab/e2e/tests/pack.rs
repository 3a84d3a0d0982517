//! Programs whose memory is on a blade that packs what is cold.

use std::path::Path;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{PATIENCE, have, turn, wait_until};

fn figure(blade: &Blade, name: &str) -> u64 {
    blade.stat()["blades"][0]["pack"][name].as_u64().expect("a number")
}

#[test]
fn forking_programs_find_what_was_packed() {
    let _turn = turn();
    for (door, transport) in [(Door::Usual, Transport::Unix), (Door::Preload, Transport::Tcp)] {
        let blade =
            Blade::start_with("256MiB", &["--pack", "--lend", "2GiB", "--pack-after", "100ms"]);
        let run = Run::through(door, "32MiB").blade(&blade.address(transport));
        let run = run.args(["--seal", "never"]).patience(PATIENCE * 3);
        let program = run.own_program("farpool-stress");
        let outcome = program.args(["--mib", "96", "--seconds", "5"]).finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
        assert!(figure(&blade, "pages_packed") > 1000, "{}", blade.stat());
        assert!(figure(&blade, "pages_unpacked") > 1000, "{}", blade.stat());
        assert_eq!(figure(&blade, "pages_failed"), 0);
    }
}

/// Holds numbers that do not compress and text, both the same in all who run it, and checks them
/// once a file is there.
const EQUAL: &str = "
import hashlib, os, random, sys, time
random.seed(1)
held = [random.randbytes(1 << 20) for _ in range(48)]
held += [(b'customer %d, ' % i * (1 << 17))[:1 << 20] for i in range(48)]
digest = lambda: hashlib.sha256(b''.join(hashlib.sha256(it).digest() for it in held)).hexdigest()
before = digest()
print('filled', flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.05)
print('right' if digest() == before else 'wrong', flush=True)
";

fn holding(blade: &Blade, group: Option<&str>, end: &Path) -> Running {
    let mut run = Run::far("32MiB").blade(&blade.address(Transport::Unix));
    if let Some(name) = group {
        run = run.args(["--share-with", name]);
    }
    let run = run.patience(PATIENCE).program("python3").args(["-c", EQUAL]);
    let mut running = run.arg(end).start();
    running.wait_for_output("filled", 1);
    running.wait_until_far_pages();
    running
}

#[test]
fn programs_of_a_group_share_what_is_equal() {
    if !have("python3") {
        return;
    }
    let _turn = turn();
    let blade = Blade::start_with("256MiB", &["--pack", "--lend", "1GiB", "--pack-after", "100ms"]);
    let folder = tempfile::tempdir().expect("a folder");
    let end = folder.path().join("end");
    let groups = [Some("twins"), Some("twins"), None];
    let all = groups.map(|group| holding(&blade, group, &end));
    let shared = || figure(&blade, "pages_in_frames").saturating_sub(figure(&blade, "frames"));
    // Of 96 MiB each has 64 or more far, and most of that is equal.
    wait_until("equal pages are kept once", PATIENCE, || (shared() > 12_000).then_some(()));
    std::fs::write(&end, "").expect("a file");
    for running in all {
        let outcome = running.finish();
        assert!(outcome.require_success().stdout.ends_with("right\n"), "{}", outcome.stdout);
    }
    assert_eq!(figure(&blade, "pages_failed"), 0);
}

#[test]
fn sealed_pages_are_not_asked_to_be_shared() {
    let blade = Blade::start("64MiB");
    let run = Run::far("32MiB").blade(&blade.address(Transport::Tcp));
    let outcome = run.args(["--share-with", "twins"]).program("true").finish();
    assert_eq!(outcome.code, 2, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("--share-with would share nothing"), "{}", outcome.stderr);
}

/// What the program writes does not pack, and is more than the blade has: it goes on with what it
/// cannot evict in local memory, and loses nothing.
#[test]
fn a_full_blade_ends_no_program() {
    if !have("python3") {
        return;
    }
    let _turn = turn();
    let blade = Blade::start_with("128MiB", &["--pack", "--lend", "1GiB"]);
    let program = "
import hashlib, os
held = [os.urandom(1 << 20) for _ in range(240)]
digests = [hashlib.sha256(it).digest() for it in held]
print('right' if digests == [hashlib.sha256(it).digest() for it in held] else 'wrong')
";
    let run = Run::far("64MiB").blade(&blade.address(Transport::Unix)).patience(PATIENCE * 2);
    let outcome = run.program("python3").args(["-c", program]).finish();
    assert_eq!(outcome.require_success().require_far().stdout, "right\n");
    assert!(outcome.stderr.contains("takes no pages"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("over its limit"), "{}", outcome.stderr);
    assert_eq!(figure(&blade, "pages_failed"), 0);
}
