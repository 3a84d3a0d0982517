//! Programs whose memory is on a blade with flash below its own.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::{PATIENCE, turn};

/// What the blade lends: enough for the layers that forks leave.
const FLASH_MIB: u64 = 2048;

/// A blade above flash, and the file of that.
struct Flash {
    blade: Blade,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Flash {
    fn start() -> Flash {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder on a disk");
        let path = folder.path().join("flash");
        let blade = Blade::start_with(
            "128MiB",
            &["--flash", &format!("{}:{FLASH_MIB}MiB", path.display())],
        );
        Flash { blade, path, _folder: folder }
    }

    fn figure(&self, name: &str) -> u64 {
        self.blade.stat()["blades"][0]["flash"][name].as_u64().expect("a number")
    }
}

fn run(door: Door, flash: &Flash, transport: Transport) -> Run {
    Run::through(door, "32MiB").blade(&flash.blade.address(transport)).patience(PATIENCE * 3)
}

/// A program of more memory than the blade's 128 MiB and its own 32 MiB.
fn program(run: Run, mib: &str, seconds: &str) -> Run {
    run.own_program("farpool-stress").args(["--mib", mib, "--seconds", seconds])
}

fn check_spilled(outcome: &Outcome, flash: &Flash) {
    outcome.require_success().require_far();
    assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    assert!(flash.figure("pages_written") > 10_000, "{}", flash.blade.stat());
    assert!(flash.figure("pages_fetched") > 1_000, "{}", flash.blade.stat());
    assert_eq!(flash.figure("pages_failed"), 0);
    assert!(flash.figure("memory_used_bytes") <= 128 << 20);
}

#[test]
fn forking_programs_find_what_went_to_flash() {
    let _turn = turn();
    for (door, transport) in [(Door::Usual, Transport::Tcp), (Door::Preload, Transport::Unix)] {
        let flash = Flash::start();
        let outcome = program(run(door, &flash, transport), "176", "5").finish();
        check_spilled(&outcome, &flash);
    }
}

#[test]
fn another_copy_is_read_where_flash_garbles_pages() {
    let _turn = turn();
    let (flash, other) = (Flash::start(), Blade::start("2GiB"));
    let both = run(Door::Usual, &flash, Transport::Tcp)
        .blade(&other.address(Transport::Tcp))
        .redundancy("2");
    let mut running = program(both, "256", "10")
        .args(["--threads", "1", "--ops", "discard,heap", "--progress"])
        .start();
    running.wait_for_output("filled", 1);
    let file = File::options().write(true).open(&flash.path).expect("the flash");
    let zeros = vec![0; 1 << 20];
    (1..FLASH_MIB).for_each(|mib| file.write_all_at(&zeros, mib << 20).expect("written"));
    let outcome = running.finish();
    outcome.require_success().require_far();
    assert!(flash.figure("pages_failed") > 0, "{}", flash.blade.stat());
    assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
}
