//! How much slower programs run while they are captured.
//!
//! `cargo build --release -p farpool-capture-qemu && cargo bench -p farpool-trace --bench
//! capture_speed -- $PWD/target/release/libfarpool_capture_qemu.so [--rounds N] [--only NAME]`.
//! Each round runs a program by itself, under QEMU alone and captured, one after the other, so that
//! what else the machine does meets all of them; the best of all rounds counts. Needs sort, python3
//! and qemu-user.

use std::error::Error;
use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use farpool_trace::capture::{
    Command, PAGE_WINDOW_ACCESSES, QemuCapture, QemuSettings, find_qemu, resolve, time_native,
};
use farpool_trace::{CacheFilter, Filter, PageFilter};

const LINES: u64 = 500_000;

const GATHER: &str = "
import array
count = 1000000
numbers = array.array('q', (n * 2654435761 % count for n in range(count)))
total = 0
for n in numbers:
    total += numbers[n]
assert sum(sorted(numbers)[:10]) == 45 and total > 0
";

const SQLITE: &str = "
import random, sqlite3
random.seed(1)
number = lambda: random.randrange(10**9)
db = sqlite3.connect(':memory:')
db.execute('create table t (id integer primary key, k integer, v text)')
db.execute('create index i on t (k)')
db.executemany('insert into t values (?, ?, ?)', ((n, number(), 'value %d' % n) for n in range(400000)))
for n in range(200000):
    db.execute('update t set k = ? where id = ?', (number(), random.randrange(400000)))
assert db.execute('select count(*) from t').fetchone()[0] == 400000
";

const PAGERANK: &str = "
import random
random.seed(1)
count = 200000
edges = [[random.randrange(count) for _ in range(4)] for _ in range(count)]
rank = [1.0] * count
for _ in range(6):
    incoming = [0.15] * count
    for node, targets in enumerate(edges):
        share = 0.85 * rank[node] / 4
        for target in targets:
            incoming[target] += share
    rank = incoming
assert abs(sum(rank) - count) < 1
";

struct Options {
    plugin: PathBuf,
    rounds: u32,
    only: Option<String>,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut words = farpool_benchargs::arguments();
    let plugin = words.next().ok_or("which plugin? libfarpool_capture_qemu.so")?.into();
    let mut options = Options { plugin, rounds: 3, only: None };
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} of what?"))?;
        match word.as_str() {
            "--rounds" => options.rounds = value.parse()?,
            "--only" => options.only = Some(value),
            _ => return Err(format!("{word}: unknown").into()),
        }
    }
    Ok(options)
}

/// Programs by name; their inputs lie in `folder`.
fn programs(folder: &Path) -> Result<Vec<(&'static str, Command)>, Box<dyn Error>> {
    let lines = folder.join("lines");
    let text = (0..LINES).fold(String::new(), |mut text, n| {
        // A string takes every line.
        let _ = writeln!(text, "{:026}", n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        text
    });
    std::fs::write(&lines, text)?;
    let path = std::env::var_os("PATH");
    let program = |words: &[&str]| {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        resolve(&words, path.as_deref())
    };
    let lines = lines.to_str().ok_or("a folder whose name is no text")?;
    // A version manager's python3 may be a script that starts another program, which would not be
    // captured.
    let python =
        if Path::new("/usr/bin/python3").exists() { "/usr/bin/python3" } else { "python3" };
    Ok(vec![
        ("sort", program(&["sort", "--parallel=1", "-o", "/dev/null", lines])?),
        ("sort-2", program(&["sort", "--parallel=2", "-o", "/dev/null", lines])?),
        ("gather", program(&[python, "-c", GATHER])?),
        ("sqlite", program(&[python, "-c", SQLITE])?),
        ("pagerank", program(&[python, "-c", PAGERANK])?),
    ])
}

/// QEMU without a plugin: the lower bound for any capture.
fn under_qemu(qemu: &Path, command: &Command) -> Result<f64, Box<dyn Error>> {
    let began = Instant::now();
    let status = std::process::Command::new(qemu)
        .args(["-cpu", "max", "-0"])
        .arg(&command.name)
        .arg(&command.file)
        .args(&command.arguments)
        .stdin(Stdio::null())
        .status()?;
    if !status.success() {
        return Err(format!("{status} under QEMU").into());
    }
    Ok(began.elapsed().as_secs_f64())
}

fn captured(command: &Command, settings: &QemuSettings, out: &Path) -> Result<f64, Box<dyn Error>> {
    let began = Instant::now();
    let captured = QemuCapture::start(command, settings, out)?.finish(&mut |_| {})?;
    if !captured.status.success() {
        return Err(format!("{} while it was captured", captured.status).into());
    }
    Ok(began.elapsed().as_secs_f64())
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let qemu = find_qemu().ok_or("qemu-user is not installed")?;
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("t.parquet");
    let never = AtomicBool::new(false);
    let lines = QemuSettings {
        qemu: qemu.clone(),
        plugin: options.plugin.canonicalize()?,
        filter: Filter::Caches(CacheFilter::default()),
        native: None,
        max_records: None,
        skip_records: 0,
        children: None,
    };
    let window = PageFilter { window_accesses: PAGE_WINDOW_ACCESSES };
    let pages = QemuSettings { filter: Filter::Pages(window), ..lines.clone() };
    println!("program    native      QEMU alone     caches         --pages");
    for (name, command) in programs(folder.path())? {
        if options.only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let mut best = [f64::INFINITY; 4];
        for _ in 0..options.rounds {
            let native = time_native(&command, 3, &never)?;
            let round = [
                std::time::Duration::from_nanos(native.time_ps / 1000).as_secs_f64(),
                under_qemu(&qemu, &command)?,
                captured(&command, &lines, &out)?,
                captured(&command, &pages, &out)?,
            ];
            best.iter_mut().zip(round).for_each(|(best, time)| *best = best.min(time));
        }
        let [native, alone, lines, pages] = best;
        let cell = |time: f64| format!("{time:5.2} s {:4.1} x", time / native);
        println!("{name:9} {native:6.3} s  {}  {}  {}", cell(alone), cell(lines), cell(pages));
    }
    Ok(())
}
