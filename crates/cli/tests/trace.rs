//! `farpool trace` with real programs under qemu-user.

#[path = "trace/children.rs"]
mod children;
mod common;

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{ended, farpool};
use farpool_trace::{
    Access, Batch, CacheFilter, Clock, Columns, Filter, PageFilter, Record, TraceInfo, TraceReader,
};

/// Whether programs can be captured here. Prints why not otherwise.
fn can_capture() -> bool {
    let can = farpool_trace::capture::find_qemu().is_some();
    if !can {
        farpool_testkit::skip("qemu-user is not installed (apt-get install qemu-user)");
    }
    can
}

fn read(path: &Path) -> (TraceInfo, Vec<Record>) {
    let mut reader = TraceReader::open(path, Columns::ALL).expect("a whole trace");
    let (mut records, mut batch) = (Vec::new(), Batch::default());
    while reader.next_batch(&mut batch).expect("an undamaged trace") {
        records.extend(batch.records());
    }
    (reader.info().clone(), records)
}

/// A `farpool trace` command with these flags, `--out` and the program.
fn trace(home: &Path, out: &str, flags: &[&str], program: &[&str]) -> Command {
    let mut command = farpool(home);
    command.args(["trace", "--out"]).arg(home.join(out)).args(flags).arg("--").args(program);
    command
}

/// A cache level: per set, its lines and whether each is dirty, the most recently used last.
struct Level {
    sets: Vec<Vec<(u64, bool)>>,
    ways: usize,
}

impl Level {
    fn new(bytes: usize, ways: usize) -> Self {
        Self { sets: vec![Vec::new(); bytes / 64 / ways], ways }
    }

    fn set(&mut self, line: u64) -> &mut Vec<(u64, bool)> {
        let sets = self.sets.len() as u64;
        &mut self.sets[usize::try_from(line % sets).expect("a set")]
    }

    /// References a line. Returns None for a hit, otherwise the dirty line that was evicted, if
    /// any.
    fn reference(&mut self, line: u64, is_store: bool) -> Option<Option<u64>> {
        let ways = self.ways;
        let set = self.set(line);
        if let Some(at) = set.iter().position(|(held, _)| *held == line) {
            let (_, changed) = set.remove(at);
            set.push((line, changed || is_store));
            return None;
        }
        let leaving = (set.len() == ways).then(|| set.remove(0));
        set.push((line, is_store));
        Some(leaving.filter(|(_, changed)| *changed).map(|(line, _)| line))
    }

    fn take_back(&mut self, line: u64) -> bool {
        let held = self.set(line).iter_mut().find(|(held, _)| *held == line);
        held.map(|held| held.1 = true).is_some()
    }
}

/// The references that pass two cache levels, out of all accesses of one thread.
fn through_caches(accesses: &[Record]) -> Vec<(u64, Access)> {
    let (mut l1, mut llc) = (Level::new(8 << 10, 4), Level::new(128 << 10, 8));
    let mut through = Vec::new();
    for record in accesses {
        let Some(changed) = l1.reference(record.block, record.access.is_write()) else { continue };
        if let Some(changed) = changed.filter(|changed| !llc.take_back(*changed)) {
            through.push((changed, Access::WriteBack));
        }
        if let Some(changed) = llc.reference(record.block, false) {
            through.push((record.block, record.access));
            through.extend(changed.map(|line| (line, Access::WriteBack)));
        }
    }
    through
}

/// Writes lines of digits in no order.
fn write_lines(path: &Path, count: u64) {
    let line = |n: u64| format!("{:020}\n", n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    std::fs::write(path, (0..count).map(line).collect::<String>()).expect("the input is written");
}

/// Captures a small sort with these flags. Its accesses are the same every time.
fn sorted(home: &Path, out: &str, flags: &[&str]) -> (TraceInfo, Vec<Record>) {
    let input = home.join("lines");
    write_lines(&input, 8000);
    let input = input.to_str().expect("a plain path");
    let whole = trace(home, out, flags, &["sort", "--parallel=1", "-S", "4M", input]);
    // Without randomised addresses two runs refer to the same memory.
    let mut fixed = Command::new("setarch");
    fixed.arg("-R").arg(whole.get_program()).args(whole.get_args());
    fixed.env("LC_ALL", "C").env("HOME", home);
    let (code, printed, error) = ended(&mut fixed);
    assert_eq!(code, 0, "{error}");
    assert_eq!(printed.lines().count(), 8000);
    assert!(printed.lines().is_sorted());
    read(&home.join(out))
}

#[test]
fn the_caches_let_through_what_a_plain_model_of_them_does() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let (_, all) = sorted(home.path(), "all.parquet", &["--unfiltered"]);
    let (info, filtered) =
        sorted(home.path(), "filtered.parquet", &["--l1", "8KiB:4", "--llc", "128KiB:8"]);
    assert!(all.len() > 1_000_000, "{} accesses", all.len());
    let expected = through_caches(&all);
    let found: Vec<(u64, Access)> = filtered.iter().map(|r| (r.block, r.access)).collect();
    let first = expected.iter().zip(&found).position(|(a, b)| a != b);
    assert_eq!(first, None, "of {} and {} records", expected.len(), found.len());
    assert_eq!(expected.len(), found.len());
    assert!(found.iter().any(|(_, access)| *access == Access::WriteBack));
    assert_eq!(info.program[..2], ["sort", "--parallel=1"]);
    let caches = CacheFilter { l1_bytes: 8 << 10, l1_ways: 4, llc_bytes: 128 << 10, llc_ways: 8 };
    assert_eq!(info.filter, Some(Filter::Caches(caches)));
}

/// The records that pass a window, out of all accesses of one thread. Each line lies within one
/// page.
fn through_window(accesses: &[Record], window: u64) -> Vec<Record> {
    let (mut count, mut recorded) = (0, 0);
    let mut last: HashMap<u64, (u64, bool)> = HashMap::new();
    let mut through = Vec::new();
    for record in accesses {
        count += record.ticks;
        let (block, is_store) = (record.block / 64, record.access.is_write());
        let known = last.get(&block);
        if known.is_some_and(|(at, wrote)| count - at <= window && (*wrote || !is_store)) {
            continue;
        }
        last.insert(block, (count, is_store));
        through.push(Record { block, ticks: count - recorded, ..*record });
        recorded = count;
    }
    through
}

#[test]
fn pages_are_recorded_once_in_a_window_and_when_they_are_written() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let (_, all) = sorted(home.path(), "all.parquet", &["--unfiltered"]);
    for (flag, window) in [("--pages", 4096), ("--pages=50", 50)] {
        let (info, found) = sorted(home.path(), "pages.parquet", &[flag]);
        assert_eq!((info.block_bytes, info.clock), (4096, Clock::Accesses));
        assert_eq!(info.filter, Some(Filter::Pages(PageFilter { window_accesses: window })));
        assert_eq!(info.native_ps, None);
        let expected = through_window(&all, window);
        let first = expected.iter().zip(&found).position(|(a, b)| a != b);
        assert_eq!(first, None, "of {} and {} records", expected.len(), found.len());
        assert_eq!(expected.len(), found.len());
        assert!(found.len() > 1000 && found.iter().any(|record| record.access == Access::Write));
    }
    for other in [&["--l1", "none"][..], &["--llc", "none"], &["--unfiltered"]] {
        let flags = [&["--pages"], other].concat();
        let (code, _, error) = ended(&mut trace(home.path(), "no.parquet", &flags, &["true"]));
        assert_eq!(code, 2, "{error}");
        assert!(error.contains("cannot be used with"), "{error}");
    }
}

#[test]
fn the_programs_own_time_is_measured_before_it_is_captured() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let (input, runs) = (home.path().join("input"), home.path().join("runs"));
    std::fs::write(&input, "one\ntwo\n").expect("the input is written");
    let script = "cat; echo >>\"$0\"; sleep 0.1; exit 5";
    let program = ["sh", "-c", script, runs.to_str().expect("a plain path")];
    let mut command = trace(home.path(), "t.parquet", &["--time=2", "--pages"], &program);
    let (code, printed, error) = ended(command.stdin(File::open(&input).expect("the input")));
    assert_eq!((code, printed.as_str()), (5, "one\ntwo\n"), "{error}");
    assert_eq!(std::fs::read(&runs).expect("it ran").len(), 3);
    let (info, _) = read(&home.path().join("t.parquet"));
    let native_ps = info.native_ps.expect("the time");
    assert!((100_000_000_000..60_000_000_000_000).contains(&native_ps), "{native_ps}");
    let told =
        ended(farpool(home.path()).args(["trace", "info"]).arg(home.path().join("t.parquet")));
    let micros = native_ps / 1_000_000;
    let time = format!("native time  {}.{:06} s", micros / 1_000_000, micros % 1_000_000);
    assert!(told.1.contains(&time), "no {time:?} in {}", told.1);
    for (stdin, script, reason) in [
        (Stdio::piped(), "true", "standard input can be read only once"),
        (Stdio::null(), "kill -TERM $$", "its time does not count"),
    ] {
        let program = ["sh", "-c", script];
        let mut command = trace(home.path(), "no.parquet", &["--time"], &program);
        let (code, _, error) = ended(command.stdin(stdin));
        assert_eq!(code, 1, "{error}");
        assert!(error.contains(reason), "{error}");
        assert!(!home.path().join("no.parquet").exists());
    }
}

#[test]
fn all_threads_are_recorded() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let input = home.path().join("lines");
    write_lines(&input, 200_000);
    let program = ["sort", "--parallel=2", "-S", "64M", input.to_str().expect("a plain path")];
    let (code, printed, error) = ended(&mut trace(home.path(), "t.parquet", &[], &program));
    assert_eq!(code, 0, "{error}");
    assert!(printed.lines().is_sorted() && printed.lines().count() == 200_000);
    let (_, records) = read(&home.path().join("t.parquet"));
    let of_thread = |thread| records.iter().filter(|record| record.thread == thread).count();
    assert!(of_thread(0) > 10_000 && of_thread(1) > 10_000, "{} {}", of_thread(0), of_thread(1));
}

#[test]
fn the_programs_end_is_passed_on_and_the_trace_says_what_it_lacks() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let script = "(exit 4); /bin/true; exit 3";
    let (code, _, error) = ended(&mut trace(home.path(), "sh.parquet", &[], &["sh", "-c", script]));
    assert_eq!(code, 3, "{error}");
    assert!(error.contains("forked children ran unrecorded"), "{error}");
    assert!(error.contains("programs started by exec ran unrecorded"), "{error}");
    let (info, _) = read(&home.path().join("sh.parquet"));
    assert_eq!(info.notes.len(), 2, "{:?}", info.notes);
    let program = ["sh", "-c", "kill -KILL $$"];
    let (code, _, error) = ended(&mut trace(home.path(), "killed.parquet", &[], &program));
    assert_eq!(code, 128 + 9, "{error}");
    assert!(!read(&home.path().join("killed.parquet")).1.is_empty());
    let program = ["sh", "-c", "exec sleep 1"];
    let (code, _, error) = ended(&mut trace(home.path(), "exec.parquet", &[], &program));
    assert_eq!(code, 0, "{error}");
    assert!(
        error.contains("replaced itself by /") && error.contains("sleep, unrecorded"),
        "{error}"
    );
    let flags = ["--max-records", "100", "--json"];
    let (code, printed, error) =
        ended(&mut trace(home.path(), "few.parquet", &flags, &["ls", "/"]));
    assert_eq!(code, 0, "{error}");
    let told = printed.lines().last().expect("the answer is the last line");
    let told: serde_json::Value = serde_json::from_str(told).expect("JSON");
    assert_eq!(told["records"], 100);
    assert_eq!(told["notes"][0], "recording ended at 100 records, as asked");
}

#[test]
fn a_program_that_closes_every_descriptor_is_recorded_all_the_same() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let script = "import os; os.closerange(3, 4096)\nprint(sum(bytearray(8 << 20)))";
    let program = ["/usr/bin/python3", "-c", script];
    let (code, printed, error) = ended(&mut trace(home.path(), "py.parquet", &[], &program));
    assert_eq!((code, printed.as_str()), (0, "0\n"), "{error}");
    let (_, records) = read(&home.path().join("py.parquet"));
    assert!(records.len() > (8 << 20) / 64, "{} records", records.len());
}

#[test]
fn what_cannot_be_captured_leaves_no_trace() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let text = home.path().join("text");
    std::fs::write(&text, "no program\n").expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&text, mode).expect("it may be executed");
    let text = text.to_str().expect("a plain path");
    for (program, reason) in [
        ("no-such-program", "there is no such program in PATH"),
        ("/no/such/program", "no such program, or it may not be executed"),
        (text, "neither an ELF program nor a script"),
    ] {
        let (code, _, error) = ended(&mut trace(home.path(), "t.parquet", &[], &[program]));
        assert_eq!(code, 1);
        assert!(error.contains(reason), "{program}: {error}");
    }
    let (code, _, error) = ended(&mut trace(home.path(), "no/t.parquet", &[], &["true"]));
    assert_eq!(code, 1);
    assert!(error.contains("No such file or directory"), "{error}");
    let (code, _, error) =
        ended(&mut trace(home.path(), "t.parquet", &["--l1", "64KiB:7"], &["true"]));
    assert_eq!(code, 2, "{error}");
    let left: Vec<_> = std::fs::read_dir(home.path()).expect("a folder").collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn termination_is_passed_on_and_the_trace_is_finished() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let script = "print('up', flush=True)\nwhile True: sum(bytearray(1 << 20))";
    let mut command = trace(home.path(), "t.parquet", &[], &["/usr/bin/python3", "-c", script]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut said = [0; 3];
    let mut output = child.stdout.take().expect("a pipe");
    std::io::Read::read_exact(&mut output, &mut said).expect("the program says that it runs");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(128 + 15));
    assert!(!read(&home.path().join("t.parquet")).1.is_empty());
}
