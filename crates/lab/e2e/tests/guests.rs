//! Virtual machines under `farpool run` and `attach`: an unmodified QEMU with a stock kernel, whose
//! memory is far. Each guest fills and checks its memory itself, and the limit holds all the time.

use std::time::Instant;

use farpool_e2e::guest::{
    Guest, Image, MOST_MIB, QEMU, THIRD_MIB, WORK_MIB, plain_memory, require_right, with_backend,
};
use farpool_e2e::jobs::require_limit;
use farpool_e2e::merging::Merging;
use farpool_e2e::run::{Door, Run};
use farpool_e2e::{PATIENCE, tree, turn, wait_until};

fn far(image: &Image, door: Door, limit_mib: u64, options: &[String]) {
    let run = Run::through(door, &format!("{limit_mib}MiB"));
    let (outcome, peak_bytes) = image.check(run, options, "rounds=8");
    require_limit(outcome.require_far(), peak_bytes, limit_mib);
}

#[test]
fn a_guest_is_right_in_60_and_in_33_percent_of_its_memory() {
    let Some(image) = Image::make() else { return };
    for (door, limit_mib) in
        [(Door::Usual, MOST_MIB), (Door::Usual, THIRD_MIB), (Door::Preload, THIRD_MIB)]
    {
        far(&image, door, limit_mib, &plain_memory());
    }
}

#[test]
fn a_guest_with_a_memory_backend_of_its_own() {
    let Some(image) = Image::make() else { return };
    far(&image, Door::Usual, MOST_MIB, &with_backend("memory-backend-ram"));
}

/// QEMU under the filter of system calls that libvirt gives it.
#[test]
fn a_guest_in_a_sandbox() {
    let Some(image) = Image::make() else { return };
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let [memory, mib] = plain_memory();
    far(&image, Door::Usual, MOST_MIB, &[memory, mib, "-sandbox".into(), sandbox.into()]);
}

/// QEMU lets the kernel merge equal pages of a guest, which it does while they become far, come
/// back, and are written to.
#[test]
fn a_guest_whose_pages_are_merged() {
    let Some(image) = Image::make() else { return };
    let Some(_merging) = Merging::start() else { return };
    for door in [Door::Preload, Door::Sidecar] {
        far(&image, door, THIRD_MIB, &plain_memory());
    }
}

/// Shared memory cannot be far. That is told if it alone is more than the limit.
#[test]
fn shared_guest_memory_stays_local_and_is_told() {
    let Some(image) = Image::make() else { return };
    let run = Run::through(Door::Usual, &format!("{MOST_MIB}MiB"));
    let options = with_backend("memory-backend-memfd,share=on");
    let (outcome, _) = image.check(run, &options, "rounds=60");
    assert!(outcome.stderr.contains("shared memory"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("the limit cannot hold"), "{}", outcome.stderr);
}

/// The disk's I/O reads and writes far memory of the guest: by threads, and by the kernel.
#[test]
fn disks_read_and_write_memory_that_is_far() {
    const LIMIT_MIB: u64 = 160;
    let Some(image) = Image::make() else { return };
    let mut options = plain_memory().to_vec();
    let kinds = ["threads", "native,cache.direct=on", "io_uring,cache.direct=on"];
    for (number, kind) in kinds.iter().enumerate() {
        let path = image.directory().join(format!("disk{number}"));
        let file = std::fs::File::create(&path).expect("a disk");
        file.set_len(256 << 20).expect("a disk");
        let drive = format!("if=none,id=d{number},format=raw,file={},aio={kind}", path.display());
        let device = format!("virtio-blk-pci,drive=d{number}");
        options.extend(["-drive".into(), drive, "-device".into(), device]);
    }
    let run = Run::through(Door::Usual, &format!("{LIMIT_MIB}MiB"));
    let (outcome, peak_bytes) = image.check(run, &options, "rounds=2 disks=3");
    require_limit(outcome.require_far(), peak_bytes, LIMIT_MIB);
}

/// Memory is plugged in, taken away by the balloon, and given back, while the guest works.
#[test]
fn a_guest_whose_memory_grows_and_shrinks() {
    const LIMIT_MIB: u64 = 180;
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let memory = ["-m", "192,slots=2,maxmem=1G", "-device", "virtio-balloon-pci"];
    let run = Run::far(&format!("{LIMIT_MIB}MiB"));
    let words = "work=160 memory=190 memhp_default_state=online";
    let mut guest = Guest::start(&image, run, &memory, words);
    let peak = tree::Peak::watch(guest.running.pid());
    guest.running.wait_for_output("GUEST up", 1);
    guest.monitor.command("object_add memory-backend-ram,id=more,size=128M");
    guest.monitor.command("device_add pc-dimm,id=dimm,memdev=more");
    guest.running.wait_for_output("GUEST filled", 1);
    guest.require_rounds();
    for balloon_mib in [300, 320] {
        guest.monitor.command(&format!("balloon {balloon_mib}"));
        wait_until("the balloon", PATIENCE, || {
            let said = guest.monitor.command("info balloon");
            said.contains(&format!("actual={balloon_mib}")).then_some(())
        });
        guest.require_rounds();
    }
    let (peak_bytes, _) = peak.end();
    let outcome = guest.end();
    require_limit(outcome.require_far(), peak_bytes, LIMIT_MIB);
}

/// A guest that is attached to while it runs.
#[test]
fn a_running_guest_is_attached_to() {
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let words = format!("work={WORK_MIB} rounds=200");
    let run = Run::local(QEMU).args(image.arguments(&words)).args(plain_memory());
    let mut guest = run.patience(PATIENCE * 2).start();
    guest.wait_for_output("GUEST filled", 1);
    let attached = Run::attach(guest.pid(), &format!("{MOST_MIB}MiB")).start();
    let outcome = guest.finish();
    require_right(&outcome);
    attached.finish().require_success().require_far();
}

/// Wall time at 60 and 33 % of QEMU's memory against all-local, in rounds of one run each, so that
/// what else the machine does falls on all of them.
#[test]
#[ignore = "measures; wants an idle machine"]
fn how_long_guests_take() {
    const ROUNDS: usize = 7;
    let Some(image) = Image::make() else { return };
    let runs: [(&str, &dyn Fn() -> Run); 5] = [
        ("all-local", &|| Run::local("env")),
        ("60 %, sidecar", &|| Run::through(Door::Sidecar, &format!("{MOST_MIB}MiB"))),
        ("33 %, sidecar", &|| Run::through(Door::Sidecar, &format!("{THIRD_MIB}MiB"))),
        ("60 %, library", &|| Run::through(Door::Preload, &format!("{MOST_MIB}MiB"))),
        ("33 %, library", &|| Run::through(Door::Preload, &format!("{THIRD_MIB}MiB"))),
    ];
    let mut seconds = runs.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for ((_, run), seconds) in runs.iter().zip(&mut seconds) {
            let began = Instant::now();
            image.check(run(), &plain_memory(), "rounds=8");
            seconds.push(began.elapsed().as_secs_f64());
        }
    }
    seconds.iter_mut().for_each(|of_kind| of_kind.sort_by(f64::total_cmp));
    let median = |of_kind: &[f64]| of_kind[ROUNDS / 2];
    for ((name, _), of_kind) in runs.iter().zip(&seconds) {
        let ratio = median(of_kind) / median(&seconds[0]);
        let (least, most) = (of_kind[0], of_kind[ROUNDS - 1]);
        println!("{name}: {:.1} s ({least:.1} to {most:.1}), {ratio:.2}", median(of_kind));
    }
}
