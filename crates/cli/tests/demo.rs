//! The demo with few records: it checks its own results, and leaves nothing behind.

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{ended, farpool};
use rustix::process::{Pid, Signal, kill_process};

/// Options that make it take only a second or two.
const SMALL: [&str; 4] = ["--records", "8MiB", "--requests", "2000"];

fn redis_is_there() -> bool {
    let there =
        Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !there {
        farpool_testkit::skip("redis-server is not installed; run scripts/install-deps.sh");
    }
    there
}

fn demo(folder: &Path, only: &str) -> Command {
    let mut command = farpool(folder);
    command.args(["demo", "--only", only, "--dir"]).arg(folder).args(SMALL);
    command
}

/// The contents of the folder, and swap files in it that are still in use.
fn leftovers(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("the folder is there").flatten();
    let mut left: Vec<String> = entries.map(|entry| entry.path().display().to_string()).collect();
    let swaps = std::fs::read_to_string("/proc/swaps").expect("there is /proc");
    let folder = folder.display().to_string();
    left.extend(swaps.lines().filter(|line| line.contains(&folder)).map(str::to_owned));
    left
}

#[test]
fn the_all_local_row_loads_queries_and_reads_back_every_record() {
    if !redis_is_there() {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder for the test");
    let (code, text, error) = ended(demo(folder.path(), "no such row").arg("--json"));
    assert_eq!(code, 0, "{text}{error}");
    assert!(text.contains("All results are identical;"), "{text}");
    let row = text.lines().rfind(|line| line.starts_with('{')).expect("a row as JSON");
    let row: serde_json::Value = serde_json::from_str(row).expect("JSON");
    assert_eq!(row["name"], "all-local");
    assert!(row["python_digest"].is_string() && row["redis_digest"].is_string(), "{row}");
    assert!(leftovers(folder.path()).is_empty(), "{:?}", leftovers(folder.path()));
}

#[test]
fn an_interruption_takes_down_what_was_set_up() {
    if !redis_is_there() {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder for the test");
    let mut command = demo(folder.path(), "kernel disk swap 50%");
    let mut child =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut progress = BufReader::new(child.stderr.take().expect("its progress is piped")).lines();
    let swapping = |line: &std::io::Result<String>| {
        line.as_ref().is_ok_and(|line| line.contains("kernel disk swap"))
    };
    assert!(progress.any(|line| swapping(&line)), "the row begins");
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, Signal::INT).expect("it takes the signal");
    progress.for_each(drop);
    child.wait().expect("it ends");
    assert!(leftovers(folder.path()).is_empty(), "{:?}", leftovers(folder.path()));
}
