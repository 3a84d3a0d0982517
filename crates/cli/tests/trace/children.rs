//! Children of a program that is captured under qemu-user, and programs that they start.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use farpool_trace::{PROCESS_SHIFT, Record, TraceInfo};
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::common::{ended, farpool};
use super::{can_capture, read, trace, write_lines};

/// The largest line number of an address that Linux gives without being asked: 47 bits, in lines
/// of 64 bytes.
const LINES: u64 = 1 << 41;
/// A program that was let go ends within this time, or hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Captures a program with these flags. Returns its exit code, what it printed, and the trace.
fn captured(
    home: &Path,
    flags: &[&str],
    program: &[&str],
) -> (i32, String, TraceInfo, Vec<Record>) {
    let (code, printed, error) = ended(&mut trace(home, "t.parquet", flags, program));
    assert!(home.join("t.parquet").exists(), "{code}: {error}");
    let (info, records) = read(&home.join("t.parquet"));
    (code, printed, info, records)
}

/// Counts the records of each process, by the process's number.
fn by_process(records: &[Record]) -> HashMap<u64, usize> {
    let mut counts = HashMap::new();
    for record in records {
        *counts.entry(record.block >> PROCESS_SHIFT).or_insert(0) += 1;
        assert!(record.block & ((1 << PROCESS_SHIFT) - 1) < LINES, "{record:?}");
    }
    counts
}

/// Records of the processes whose program begins so.
fn of_program(info: &TraceInfo, records: &[Record], program: &str) -> usize {
    let counts = by_process(records);
    let named = info.processes.iter().filter(|process| process.program.starts_with(program));
    named.filter_map(|process| counts.get(&process.number)).sum()
}

#[test]
fn the_programs_of_a_pipeline_are_recorded_and_told_apart() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let script = "seq 20000 | sort -r | tail -n 1; (exit 4); /bin/true; exit 3";
    let (code, printed, info, records) =
        captured(home.path(), &["--children"], &["sh", "-c", script]);
    assert_eq!((code, printed.as_str()), (3, "1\n"));
    let counts = by_process(&records);
    assert!(counts.keys().all(|number| info.processes.iter().any(|it| it.number == *number)));
    for program in ["sh -c", "seq 20000", "sort -r", "tail -n 1", "/bin/true"] {
        let found = of_program(&info, &records, program);
        assert!(found > 100, "{found} records of {program}: {:?}", info.processes);
    }
    let processes = info.processes.len();
    let note = format!("{processes} processes; page numbers carry theirs above bit 44");
    assert_eq!(info.notes, [note]);
    let told =
        ended(farpool(home.path()).args(["trace", "info"]).arg(home.path().join("t.parquet"))).1;
    assert!(told.lines().any(|line| line.starts_with("process") && line.ends_with(" sort -r")));
}

#[test]
fn one_program_of_a_tree_is_recorded_as_it_is_alone() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let input = home.path().join("lines");
    write_lines(&input, 8000);
    let job = format!("sort --parallel=1 -S 4M {} >/dev/null", input.display());
    let words: Vec<&str> = job.trim_end_matches(" >/dev/null").split(' ').collect();
    let alone = captured(home.path(), &["--unfiltered"], &words).3;
    let script = format!("seq 9 | tail -n 1; {job}; exit 5");
    let program = ["sh", "-c", script.as_str()];
    let (code, _, info, records) =
        captured(home.path(), &["--process", "sort", "--unfiltered"], &program);
    assert_eq!(code, 5);
    let programs: Vec<&str> = info.processes.iter().map(|it| it.program.as_str()).collect();
    assert_eq!(programs, [words.join(" ")]);
    let note = "followed and not recorded: seq (1), sh (4), tail (1)";
    assert_eq!(info.notes, [note]);
    // The rest is the shell's variables, and where memory happens to lie.
    let (one, other) = (alone.len(), records.len());
    assert!(one.abs_diff(other) < one / 100, "{one} records alone, {other} in a tree");
    let mut none = trace(home.path(), "no.parquet", &["--process", "cc1"], &program);
    let (code, _, error) = ended(&mut none);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("no process was called cc1; these ran: seq (1), sh (4)"), "{error}");
    assert!(!home.path().join("no.parquet").exists());
    let mut path = trace(home.path(), "no.parquet", &["--process", "/usr/bin/sort"], &program);
    let (code, _, error) = ended(&mut path);
    assert!(code == 2 && error.contains("without its folder"), "{error}");
}

#[test]
fn a_child_without_a_program_of_its_own_is_recorded() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let script = "import os\npid = os.fork()\nif pid == 0:\n    \
                  print(sum(bytearray(8 << 20)), flush=True)\n    os._exit(7)\n\
                  print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";
    let program = ["/usr/bin/python3", "-c", script];
    let (code, printed, info, records) = captured(home.path(), &["--children"], &program);
    assert_eq!((code, printed.as_str()), (0, "0\n7\n"));
    assert_eq!(info.processes.len(), 2, "{:?}", info.processes);
    let counts = by_process(&records);
    let lines = (8 << 20) / 64;
    assert!(counts[&0] < lines && counts[&1] > lines, "{counts:?}");
    let of_child = records.iter().filter(|record| record.block >> PROCESS_SHIFT == 1);
    assert!(of_child.clone().count() > 0 && of_child.clone().all(|record| record.thread == 1));
}

/// A process that is killed between two words of a record must neither damage the trace nor block
/// the others.
#[test]
fn killed_children_leave_a_whole_trace() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let script = "import os, signal\nfor turn in range(12):\n    r, w = os.pipe()\n    \
                  pid = os.fork()\n    if pid == 0:\n        os.write(w, b'.')\n        \
                  while True: sum(bytearray(1 << 20))\n    os.read(r, 1)\n    \
                  sum(bytearray(turn << 14))\n    os.kill(pid, signal.SIGKILL)\n    \
                  assert os.waitpid(pid, 0)[1] == signal.SIGKILL\nprint('all')";
    let program = ["/usr/bin/python3", "-c", script];
    let flags = ["--children", "--l1", "none", "--llc", "64KiB:8"];
    let (code, printed, info, records) = captured(home.path(), &flags, &program);
    assert_eq!((code, printed.as_str()), (0, "all\n"));
    assert_eq!(info.processes.len(), 13, "{:?}", info.processes);
    let counts = by_process(&records);
    assert_eq!(counts.len(), 13, "{counts:?}");
}

#[test]
fn a_program_that_becomes_another_goes_on_being_recorded() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let helper = home.path().join("helper");
    std::fs::write(&helper, "#!/bin/sh -e\necho \"$0 $1\"\nexec sleep 0\n").expect("a script");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&helper, mode).expect("it may be executed");
    let script = "/no/such/program 2>/dev/null || exec \"$0\" word";
    let helper = helper.to_str().expect("a plain path");
    let (code, printed, info, _) =
        captured(home.path(), &["--children"], &["sh", "-c", script, helper]);
    assert_eq!((code, printed), (0, format!("{helper} word\n")));
    let last: Vec<&str> =
        info.processes.iter().rev().take(2).map(|process| process.program.as_str()).collect();
    assert_eq!(last, ["sleep 0", format!("/bin/sh -e {helper} word").as_str()]);
    assert!(info.notes.iter().all(|note| !note.contains("unrecorded")), "{:?}", info.notes);
}

#[test]
fn who_outlives_the_program_is_named() {
    if !can_capture() {
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let fifo = home.path().join("fifo");
    let (kind, mode) = (FileType::Fifo, Mode::RUSR | Mode::WUSR);
    rustix::fs::mknodat(CWD, &fifo, kind, mode, 0).expect("a fifo");
    // The child reads until this is closed, also if the test fails. The shell opens the fifo, so
    // that a child that runs only later finds it open.
    let held = File::options().read(true).write(true).open(&fifo).expect("the fifo");
    let script = "exec 3<\"$0\"; cat <&3 >/dev/null 2>&1 & exit 0";
    let program = ["sh", "-c", script, fifo.to_str().expect("a plain path")];
    let (code, _, info, _) = captured(home.path(), &["--children"], &program);
    drop(held);
    assert_eq!(code, 0);
    let is_named =
        |note: &String| note.starts_with("recording ended with the first process; these");
    assert!(info.notes.iter().any(is_named), "{:?}", info.notes);
    farpool_testkit::wait_until("the child to end", PATIENCE, || {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        rustix::fs::open(&fifo, flags, Mode::empty()).is_err_and(|error| error == Errno::NXIO)
    });
}
