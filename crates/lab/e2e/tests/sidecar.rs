//! The sidecar door: programs that a preloaded library cannot serve, or not well. Each checks every
//! page it reads.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use farpool_e2e::jobs::{Job, PATIENCE, allowed_bytes, compile, compile_c, require_limit, scratch};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::{binaries, have, redis, skip, tree, turn, wait_until};

const LIMIT_MIB: u64 = 32;
/// The device that a program with its own userfaultfd opens.
const OWN_DEVICE: &str = "/dev/userfaultfd";
/// The ways to link a C program.
const LINKS: [(&str, &[&str]); 3] =
    [("dynamic", &["-fPIE", "-pie"]), ("static", &["-static"]), ("static-pie", &["-static-pie"])];

/// A C program in its own directory.
struct Program {
    path: PathBuf,
    directory: tempfile::TempDir,
}

impl Program {
    fn new(name: &str, source: &str, options: &[&str]) -> Program {
        let directory = scratch();
        Program { path: compile_c(name, source, options, directory.path()), directory }
    }

    /// Runs the program at a limit. It must succeed; its peak is printed but not checked.
    fn succeeds(&self, arguments: &[&str], limit_mib: u64) -> Outcome {
        let (outcome, peak_bytes) = self.run(arguments, limit_mib);
        outcome.require_success();
        println!("peak {peak_bytes} bytes, allowed {}", allowed_bytes(limit_mib));
        outcome
    }

    fn run(&self, arguments: &[&str], limit_mib: u64) -> (Outcome, u64) {
        let program = self.path.to_string_lossy().into_owned();
        let job = Job { program: &program, arguments, directory: self.directory.path() };
        let (outcome, peak_bytes) = job.run(Door::Sidecar, limit_mib);
        println!("{arguments:?}: {}{}", outcome.stdout, outcome.stderr);
        (outcome, peak_bytes)
    }
}

/// Runs a C program, linked dynamically and statically, whose memory calls must all have the right
/// results.
fn calls(modes: &[&str]) {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    for (link, options) in &LINKS[..2] {
        let program = Program::new("raw", include_str!("sidecar/raw.c"), options);
        for mode in modes {
            let outcome = program.succeeds(&[mode, "96"], LIMIT_MIB);
            assert_eq!(outcome.stdout, format!("{mode}: 0 wrong\n"), "{link}");
            outcome.require_far();
        }
    }
}

fn case(name: &str, source: &str, options: &[&str], arguments: &[&str], expected: &str) -> Outcome {
    let program = Program::new(name, source, options);
    let outcome = program.succeeds(arguments, LIMIT_MIB);
    assert_eq!(outcome.stdout, expected, "{arguments:?} {}", outcome.stderr);
    outcome.require_far();
    outcome
}

#[test]
fn memory_that_was_mapped_by_a_raw_call_is_far() {
    calls(&["plain"]);
}

#[test]
fn memory_that_was_dropped_reads_as_zeros() {
    calls(&["discard"]);
}

#[test]
fn memory_that_was_moved_keeps_its_data() {
    calls(&["move"]);
}

/// Pages that no blade has room for stay in the program, above its limit.
#[test]
fn memory_that_is_moved_while_no_blade_has_room() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("carried", include_str!("sidecar/carried.c"), &["-pthread"]);
    let run = Run::through(Door::Sidecar, "24MiB").args(["--quota", "48MiB"]);
    let outcome = run.program(&program.path).arg("moves").patience(PATIENCE).start().finish();
    // The move may have brought all pages back before any fault requested one.
    let (written, lost) =
        (outcome.require_success().counter("pages_written"), outcome.counter("lost"));
    assert!(written > 0 && lost == 0, "{written} pages written, {lost} lost: {}", outcome.stderr);
    assert_eq!(outcome.stdout, "0 wrong\n", "{}", outcome.stderr);
}

/// An mmap over the memory is refused after the kernel has reported the memory's unmapping.
#[test]
fn memory_that_is_not_replaced_after_all() {
    if !have("gcc") {
        return;
    }
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").expect("a number");
    if overcommit.trim() == "1" {
        return skip("this machine refuses no mapping (vm.overcommit_memory)");
    }
    let _turn = turn();
    let program = Program::new("carried", include_str!("sidecar/carried.c"), &["-pthread"]);
    for (mode, times) in [("fails", 1), ("fails-among-changes", 5)] {
        let outcome = program.succeeds(&[mode], LIMIT_MIB);
        assert_eq!(outcome.stdout, "0 wrong\n".repeat(times), "{mode} {}", outcome.stderr);
        outcome.require_far();
    }
}

/// The kernel does not report the growth, and the earlier contents must not reappear.
#[test]
fn a_mapping_that_grows_has_zeros_where_other_memory_was() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("carried", include_str!("sidecar/carried.c"), &["-pthread"]);
    for mode in ["regrows", "grows-over", "grows-down"] {
        let outcome = program.succeeds(&[mode], LIMIT_MIB);
        assert_eq!(outcome.stdout, "0 wrong\n", "{mode} {}", outcome.stderr);
        outcome.require_far();
    }
}

/// The reader of the keeper's output is gone, as in `farpool run … 2>&1 | head`.
#[test]
fn a_keeper_whose_messages_nobody_reads_goes_on() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("carried", include_str!("sidecar/carried.c"), &["-pthread"]);
    let options = ["run", "--door", "sidecar", "--quota", "48MiB", "--local", "24MiB", "--"];
    let mut keeper = Command::new(binaries::program("farpool"));
    keeper.args(options).arg(&program.path).arg("moves");
    let mut keeper = keeper.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("farpool");
    // The keeper would report there that the quota is used up.
    drop(keeper.stderr.take());
    let outcome = keeper.wait_with_output().expect("its end");
    let stdout = String::from_utf8_lossy(&outcome.stdout);
    assert!(outcome.status.success() && stdout == "0 wrong\n", "{outcome:?}");
}

/// The old addresses are touched while the pages are moved.
#[test]
fn memory_whose_old_place_stays_when_it_is_moved() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    case("carried", include_str!("sidecar/carried.c"), &[], &["stays"], "0 wrong\n");
}

#[test]
fn memory_that_was_mapped_over_reads_as_zeros() {
    calls(&["replace"]);
}

/// With the preload door this never ended.
#[test]
fn memory_that_was_unmapped_and_mapped_again() {
    calls(&["again"]);
}

#[test]
fn a_child_of_a_raw_fork_has_its_parents_data() {
    calls(&["fork"]);
}

/// Children of children, each of which makes its own calls on inherited memory. Children with
/// enough memory get their own sidecar, which takes over from their parent's; the parent's sidecar
/// serves the others.
#[test]
fn a_tree_of_children_has_what_was_there_at_each_fork() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("forks", include_str!("sidecar/forks.c"), &[]);
    for seed in ["1", "5", "12"] {
        let outcome = program.succeeds(&["64", "2", seed], LIMIT_MIB);
        assert_eq!(outcome.stdout, "0 wrong\n", "seed {seed}");
        outcome.require_far();
    }
}

/// Shared pages are made private to a process and moved out while it and its relatives write, drop
/// and unmap them.
#[test]
fn memory_that_a_parent_and_its_children_change_at_a_time() {
    change_memory(["48", "2", "1000"], &["1", "2", "3"]);
}

/// The kernel reports threads' calls late, and not in the order in which they were made: a thread
/// gets addresses that another thread has just released, and moves memory there.
#[test]
fn memory_that_is_moved_to_where_other_memory_was() {
    change_memory(["64", "0", "700"], &["1", "2", "3", "4"]);
}

/// Moves by a single-threaded program are reported in order, so it is never ended for an ambiguity.
#[test]
fn memory_that_one_thread_moves_to_and_fro() {
    move_about("0", "0 wrong\n");
}

/// A page that could not be filled because its mapping was being moved must not be forgotten.
#[test]
fn memory_that_children_move_while_all_of_it_comes() {
    move_about("2", "0 wrong\n0 wrong\n");
}

fn move_about(children: &str, said: &str) {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("nomad", include_str!("sidecar/nomad.c"), &[]);
    for _ in 0..4 {
        let outcome = program.succeeds(&["48", children], 8);
        assert_eq!(outcome.stdout, said, "{}", outcome.stderr);
    }
}

fn change_memory([mib, forks, changes]: [&str; 3], seeds: &[&str]) {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("shares", include_str!("sidecar/shares.c"), &[]);
    for seed in seeds {
        let outcome = program.succeeds(&[mib, forks, changes, seed], LIMIT_MIB);
        assert_eq!(outcome.stdout, "0 wrong\n", "seed {seed}");
        outcome.require_far();
    }
}

/// The parent ends before the child is served, while it is handed over, and long after.
#[test]
fn a_child_that_outlives_its_parent_has_all_its_data() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("orphan", include_str!("sidecar/orphan.c"), &[]);
    for delay_us in ["0", "2000", "5000", "20000", "100000"] {
        let file = program.directory.path().join(delay_us);
        let outcome = program.succeeds(&["96", delay_us, &file.to_string_lossy()], LIMIT_MIB);
        assert!(outcome.counter("pages_written") > 0, "nothing was far: {}", outcome.stats);
        let found = wait_until("the child to end", PATIENCE, || {
            std::fs::read_to_string(&file).ok().filter(|found| found.ends_with('\n'))
        });
        assert_eq!(found, "0 wrong\n", "delay {delay_us}");
    }
}

/// The kernel places new mappings where memory was just unmapped; the sidecar's mappings were once
/// found there.
#[test]
fn what_was_unmapped_is_free_until_the_program_maps_it_again() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("holes", include_str!("sidecar/holes.c"), &[]);
    for _ in 0..3 {
        let outcome = program.succeeds(&["96", "20000"], LIMIT_MIB);
        assert_eq!(outcome.stdout, "0 wrong, 0 taken\n");
        outcome.require_far();
    }
}

#[test]
fn a_static_child_of_a_shell_has_a_pager() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("raw", include_str!("sidecar/raw.c"), &["-static"]);
    let script = "./raw plain 96; status=$?; echo ends; exit $status";
    let job =
        Job { program: "sh", arguments: &["-c", script], directory: program.directory.path() };
    let (outcome, peak_bytes) = job.run(Door::Sidecar, LIMIT_MIB);
    outcome.require_success().require_far();
    assert_eq!(outcome.stdout, "plain: 0 wrong\nends\n");
    println!("peak {peak_bytes} bytes, allowed {}", allowed_bytes(LIMIT_MIB));
}

#[test]
fn a_program_with_its_own_malloc() {
    if have("gcc") {
        let _turn = turn();
        let source = include_str!("sidecar/own_malloc.c");
        for (_, options) in LINKS {
            case("own_malloc", source, &[options, &["-fno-builtin"]].concat(), &[], "ok\n");
        }
    }
}

#[test]
fn a_plugin_that_binds_deeply() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("plugin_host", include_str!("sidecar/plugin_host.c"), &["-ldl"]);
    let directory = program.directory.path();
    std::fs::write(directory.join("plugin.c"), include_str!("sidecar/plugin.c")).expect("source");
    compile("gcc", &["-shared", "-fPIC", "plugin.c", "-o", "plugin.so"], directory);
    let outcome = program.succeeds(&[], LIMIT_MIB);
    assert_eq!(outcome.stdout, "0 wrong\n");
    outcome.require_far();
}

#[test]
fn a_process_whose_first_thread_has_ended() {
    if have("gcc") {
        let _turn = turn();
        let source = include_str!("sidecar/last_thread.c");
        for mode in ["returns", "ends", "forks", "exits"] {
            case("last_thread", source, &[], &[mode], "0 wrong, child 0\n");
        }
    }
}

#[test]
fn a_filter_for_all_threads_does_not_bind_the_pager() {
    if have("gcc") {
        let _turn = turn();
        case("sandbox", include_str!("sidecar/sandbox.c"), &[], &[], "ok\n");
    }
}

/// QEMU under libvirt has such a filter. The pager needs a process of its own beside its threads.
#[test]
fn a_filter_that_kills_who_makes_processes_does_not_keep_a_pager_out() {
    if have("gcc") {
        let _turn = turn();
        case("threads_only", include_str!("sidecar/threads_only.c"), &[], &[], "0 wrong\n");
    }
}

#[test]
fn a_program_with_a_userfaultfd_of_its_own() {
    if !have("gcc") {
        return;
    }
    if std::fs::File::open(OWN_DEVICE).is_err() {
        return skip("/dev/userfaultfd cannot be opened");
    }
    let _turn = turn();
    case("own_uffd", include_str!("sidecar/own_uffd.c"), &[], &[], "0 wrong\n");
}

fn advice(mode: &str) -> Option<(Outcome, u64)> {
    have("gcc").then(|| {
        let program = Program::new("advice", include_str!("sidecar/advice.c"), &[]);
        let (outcome, peak_bytes) = program.run(&[mode], LIMIT_MIB);
        outcome.require_success();
        assert_eq!(outcome.stdout, "refused 0, child 0, 0 wrong\n");
        (outcome, peak_bytes)
    })
}

#[test]
fn memory_that_children_do_not_get_can_be_far() {
    let _turn = turn();
    if let Some((outcome, _)) = advice("leave-out") {
        outcome.require_far();
    }
}

#[test]
fn memory_that_children_get_empty_can_be_far() {
    let _turn = turn();
    if let Some((outcome, _)) = advice("wipe") {
        outcome.require_far();
    }
}

/// 48 MiB that must stay, at a limit of 32 MiB: the program is slowed for the locking, but not for
/// everything that it does after.
#[test]
fn locking_more_than_the_limit_ends_soon() {
    // It takes 2 to 5 s here. If each page had to wait for a pause of the evictor (5 ms), it would
    // take minutes.
    const SOON: Duration = Duration::from_secs(40);
    let _turn = turn();
    let started = Instant::now();
    if let Some((outcome, _)) = advice("lock") {
        let took = started.elapsed();
        assert!(took < SOON, "{took:?}: {}", outcome.stats);
    }
}

/// The kernel populates a mapping in one call. Either the limit holds, or a message says that it
/// did not, and it holds again afterwards.
#[test]
fn memory_that_is_populated_at_once() {
    let _turn = turn();
    for mode in ["populate-map", "populate-advice"] {
        let Some((outcome, peak_bytes)) = advice(mode) else { return };
        outcome.require_far();
        let is_said = outcome.stderr.contains("more than its limit");
        let holds = peak_bytes <= allowed_bytes(LIMIT_MIB);
        assert!(holds || is_said, "{mode}: peak {peak_bytes} bytes and not a word");
    }
}

/// None of the memory can be moved: an evictor that kept searching for victims would take a
/// processor from the program.
#[test]
fn memory_that_becomes_code_does_not_keep_the_evictor_busy() {
    const WINDOW: Duration = Duration::from_secs(2);
    if !have("gcc") || !cfg!(target_arch = "x86_64") {
        return;
    }
    let _turn = turn();
    let program = Program::new("jit", include_str!("sidecar/jit.c"), &["-static"]);
    let run = Run::through(Door::Sidecar, "32MiB").program(&program.path).patience(PATIENCE);
    let mut running = run.start();
    running.wait_for_output("settled", 1);
    let pid = running.program_pid();
    let sidecar = wait_until("the sidecar", PATIENCE, || tree::sidecars_in(pid).pop());
    let used = || tree::processor_time(sidecar).expect("the sidecar runs");
    let (started, before) = (Instant::now(), used());
    wait_until("the window to end", PATIENCE, || (started.elapsed() >= WINDOW).then_some(()));
    let (share, window) = (used() - before, started.elapsed());
    println!("the sidecar used {share:?} in {window:?}");
    assert!(share < window / 4, "it used {share:?} in {window:?} beside an idle program");
    tree::signal(pid, libc::SIGTERM);
    let outcome = running.finish();
    assert_eq!(outcome.require_success().stdout, "settled\n0 wrong\n");
}

/// The program protections. Returns None if it cannot run: it generates x86-64 code, and needs that
/// writable memory without read access can still be read, as on x86-64.
fn protections() -> Option<Program> {
    let runs = have("gcc") && cfg!(target_arch = "x86_64");
    let source = include_str!("sidecar/protections.c");
    runs.then(|| Program::new("protections", source, &["-pthread"]))
}

/// The kernel moves pages only between mappings with equal access rights, and only if they are
/// writable.
#[test]
fn memory_of_any_rights_is_far() {
    let _turn = turn();
    let Some(program) = protections() else { return };
    for rights in ["rwx", "w", "wx", "r", "rx", "x", "none"] {
        let outcome = program.succeeds(&["settle", rights, "35"], LIMIT_MIB);
        assert_eq!(outcome.stdout, "0 wrong\n", "{rights} {}", outcome.stderr);
        outcome.require_far();
    }
}

/// The program is stopped for moments in which its memory has other access rights.
#[test]
fn rights_that_change_all_the_time_are_kept() {
    let _turn = turn();
    let Some(program) = protections() else { return };
    for threads in ["1", "3", "8"] {
        let outcome = program.succeeds(&["toggle", "5", threads], LIMIT_MIB);
        assert_eq!(outcome.stdout, "0 wrong\n", "{threads} {}", outcome.stderr);
        outcome.require_far();
        assert!(outcome.counter("standstills") > 0, "it never stood still");
    }
}

/// Access rights that the program may not restore are not removed even for a moment.
#[test]
fn code_stays_where_no_more_may_be_made() {
    let _turn = turn();
    let Some(program) = protections() else { return };
    // The limit is above the size of the code, which stays, so that the memory beside it must be
    // moved out and fetched.
    let (outcome, _) = program.run(&["deny", "2", "0"], 144);
    if outcome.code == 77 {
        return skip("the kernel knows no PR_SET_MDWE");
    }
    assert_eq!(outcome.require_success().stdout, "0 wrong\n");
    outcome.require_far();
    assert!(outcome.counter("standstills") > 0, "nothing tried to move the code");
}

/// For mlockall the kernel touches missing pages in all mappings, including the victim buffer, and
/// drops no locked page.
#[test]
fn all_memory_is_locked_and_unlocked_while_most_is_far() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("locks_all", include_str!("sidecar/locks_all.c"), &[]);
    // MCL_CURRENT, with MCL_FUTURE and MCL_ONFAULT.
    for flags in ["1", "3", "5", "7"] {
        let (outcome, _) = program.run(&[flags], LIMIT_MIB);
        if outcome.code == 77 {
            return skip("memory may not be locked here (RLIMIT_MEMLOCK)");
        }
        assert_eq!(outcome.require_success().stdout, "0 wrong\n", "{flags}");
        outcome.require_far();
    }
}

/// A sidecar's mappings in the program would be locked: none of them stays, and nothing is far.
#[test]
fn a_program_that_locks_what_it_maps_later_takes_no_sidecar() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("locks_all", include_str!("sidecar/locks_all.c"), &[]);
    let (outcome, _) = program.run(&["3", "first"], LIMIT_MIB);
    if outcome.code == 77 {
        return skip("memory may not be locked here (RLIMIT_MEMLOCK)");
    }
    assert_eq!(outcome.require_success().stdout, "0 mappings of farpool\n0 wrong\n");
    assert!(outcome.stderr.contains("(mlockall with MCL_FUTURE)"), "{}", outcome.stderr);
}

/// At a thread's end the kernel writes to the thread's descriptor without a userfaultfd event.
#[test]
fn a_thread_that_was_idle_for_long_is_joined() {
    // On other architectures a descriptor cannot be distinguished from other memory
    // (`pager::evict::exits`).
    if !have("gcc") || !cfg!(target_arch = "x86_64") {
        return;
    }
    let _turn = turn();
    let program = Program::new("joined", include_str!("sidecar/joined.c"), &["-pthread"]);
    let run = Run::through(Door::Sidecar, "16MiB").program(&program.path).patience(PATIENCE);
    // With restartable sequences the kernel would touch the descriptor whenever the thread is
    // scheduled.
    let outcome = run.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0").finish();
    assert_eq!(outcome.require_success().require_far().stdout, "joined, 0 wrong\n");
}

/// Children write to all their shared memory, and fork.
#[test]
#[ignore = "children that write before they have sidecars can pass the limit on a busy machine \
            (docs/users/sidecar.md)"]
fn the_limit_holds_at_a_fork() {
    if !have("redis-server") || !have("redis-cli") || !have("gcc") {
        return;
    }
    let _turn = turn();
    let program = Program::new("forks", include_str!("sidecar/forks.c"), &[]);
    for seed in ["1", "5", "12"] {
        let (outcome, peak_bytes) = program.run(&["64", "2", seed], LIMIT_MIB);
        require_limit(outcome.require_success(), peak_bytes, LIMIT_MIB);
    }
    let peak_bytes = redis::save_in_the_background(Door::Sidecar, LIMIT_MIB);
    assert!(peak_bytes <= allowed_bytes(LIMIT_MIB), "redis: peak {peak_bytes} bytes");
}

/// Programs that grow from nothing to three times the limit as fast as memory can be touched.
#[test]
fn the_limit_holds_while_programs_grow() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    for (link, options) in &LINKS {
        let program = Program::new("raw", include_str!("sidecar/raw.c"), options);
        for mode in ["plain", "replace"] {
            let (outcome, peak_bytes) = program.run(&[mode, "96"], LIMIT_MIB);
            println!("{link} {mode}");
            require_limit(outcome.require_success(), peak_bytes, LIMIT_MIB);
        }
    }
}
