//! Real programs through the sidecar door: the same results as all-local, and the limit holds all
//! the time, except for memory that a fork shares (docs/users/sidecar.md;
//! `the_limit_holds_at_a_fork` of sidecar.rs).

use std::path::Path;

use farpool_e2e::compaction::Compaction;
use farpool_e2e::jobs::{Job, PATIENCE, compile, compile_c, require_limit, scratch};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::{have, skip, sources, turn};

/// The path of Go, which is tried before the PATH.
const GO: &str = "/usr/local/go/bin/go";

fn compare(limit_mib: u64, program: &str, arguments: &[&str], directory: &Path) -> Outcome {
    Job { program, arguments, directory }.compare(Door::Sidecar, limit_mib)
}

/// A program with short-lived and long-lived maps and slices, under the garbage collector.
const GO_SOURCE: &str = r#"
package main

import "fmt"

type node struct {
	next *node
	key  int
	data []byte
}

func main() {
	table := make(map[int]*node)
	x, sum := uint64(88172645463325252), 0
	for i := 0; i < 200000; i++ {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		key := int(x % 25000)
		n := &node{table[key], i, make([]byte, 64+x%300)}
		n.data[5] = byte(i)
		if i%3 == 0 {
			n.next = nil
		}
		table[key] = n
	}
	for key := 0; key < 25000; key++ {
		for n := table[key]; n != nil; n = n.next {
			sum = sum*31 + n.key + int(n.data[5]) + len(n.data)
		}
	}
	fmt.Println(len(table), sum)
}
"#;

fn go(has_c: bool) {
    if !Path::new(GO).exists() && !have("go") {
        return;
    }
    let directory = scratch();
    let source = if has_c {
        GO_SOURCE.replace("import \"fmt\"", "import \"C\"\nimport \"fmt\"")
    } else {
        GO_SOURCE.into()
    };
    std::fs::write(directory.path().join("main.go"), source).expect("source");
    let go = if Path::new(GO).exists() { GO } else { "go" };
    let setting = format!("CGO_ENABLED={}", u8::from(has_c));
    compile("env", &[&setting, go, "build", "-o", "main", "main.go"], directory.path());
    compare(32, &directory.path().join("main").to_string_lossy(), &[], directory.path());
}

#[test]
fn a_static_go_program() {
    go(false);
}

#[test]
fn a_go_program_with_c() {
    if have("gcc") {
        go(true);
    }
}

fn java(options: &[&str]) -> Option<tempfile::TempDir> {
    if !have("javac") || !have("java") {
        return None;
    }
    let mut java = std::process::Command::new("java");
    if !java.args(options).arg("-version").output().is_ok_and(|output| output.status.success()) {
        skip(&format!("this java does not know {options:?}"));
        return None;
    }
    let directory = scratch();
    sources::java(directory.path());
    Some(directory)
}

fn words<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [options, &["-Xmx256m", "-cp", ".", "Main", "300000"]].concat()
}

#[test]
fn a_java_program() {
    for (collector, limit_mib) in [("-XX:+UseSerialGC", 80), ("-XX:+UseG1GC", 112)] {
        let Some(directory) = java(&[collector]) else { return };
        compare(limit_mib, "java", &words(&[collector]), directory.path());
    }
}

/// ZGC's heap is shared memory, which it maps more than once. That stays local, so the limit cannot
/// be checked.
#[test]
fn a_java_program_whose_heap_is_shared_memory() {
    let options = ["-XX:+UseZGC"];
    let Some(directory) = java(&options) else { return };
    let _turn = turn();
    let arguments = words(&options);
    let job = Job { program: "java", arguments: &arguments, directory: directory.path() };
    let expected = Run::local("java").args(&arguments).directory(directory.path()).finish();
    let (outcome, _) = job.run(Door::Sidecar, 80);
    assert_eq!(outcome.require_success().stdout, expected.require_success().stdout);
}

#[test]
fn a_node_program() {
    if !have("node") {
        return;
    }
    let directory = scratch();
    let script = "const kept = []; let x = 12345, sum = 0;
for (let i = 0; i < 400000; i++) {
  x = (x * 1103515245 + 12345) % 2147483648;
  kept[i % 150000] = { key: i, text: 'value ' + x, list: [x, i, x % 7] };
}
for (const it of kept) sum = (sum * 31 + it.key + it.text.length + it.list[0]) % 1000000007;
console.log(kept.length, sum);";
    compare(96, "node", &["-e", script], directory.path());
}

/// PHP loads its extensions with RTLD_DEEPBIND: with another allocator preloaded, it crashed at its
/// start.
#[test]
fn php_tells_its_version() {
    if have("php") {
        let _turn = turn();
        let outcome = Run::through(Door::Sidecar, "32MiB").program("php").args(["-v"]).finish();
        assert!(outcome.require_success().stdout.starts_with("PHP "), "{}", outcome.stdout);
    }
}

#[test]
fn a_php_program() {
    if !have("php") {
        return;
    }
    let directory = scratch();
    let script = "ini_set('memory_limit', -1); $kept = []; $x = 12345; $sum = 0;
for ($i = 0; $i < 250000; $i++) { $x = ($x * 1103515245 + 12345) % 2147483648; $kept[$i % 250000] = 'value ' . $x . str_repeat('-', $x % 200); }
foreach ($kept as $key => $text) $sum = ($sum * 31 + $key + strlen($text)) % 1000000007;
echo count($kept), ' ', $sum, \"\\n\";";
    compare(48, "php", &["-r", script], directory.path());
}

#[test]
fn python_with_multiprocessing() {
    if !have("python3") {
        return;
    }
    let directory = scratch();
    sources::python_workers(directory.path());
    let arguments = &["mp.py", "200000", "2"];
    let job = Job { program: "python3", arguments, directory: directory.path() };
    job.compare_results(Door::Sidecar, 48);
}

#[test]
fn sqlite_in_memory() {
    if have("sqlite3") {
        let directory = scratch();
        compare(24, "sqlite3", &[":memory:", &sources::sql(150_000)], directory.path());
    }
}

/// A browser: a dozen processes, most of them forked from a zygote, with their own allocator.
#[test]
fn chromium_runs_a_page() {
    const LIMIT_MIB: u64 = 400;
    const PAGE: &str = "<html><body><div id=x></div><script>
        let sum = 0; const kept = [];
        for (let i = 0; i < 300000; i++) kept.push({ i, text: 'v' + i * 7919 });
        for (const it of kept) sum = (sum * 31 + it.i + it.text.length) % 1000000007;
        document.getElementById('x').textContent = 'SUM ' + sum;
        </script></body></html>";
    if !have("chromium") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    std::fs::write(directory.path().join("page.html"), PAGE).expect("a page");
    let page = format!("file://{}/page.html", directory.path().display());
    let profile = format!("--user-data-dir={}/profile", directory.path().display());
    let switches = ["--headless", "--no-sandbox", "--disable-gpu", &profile, "--dump-dom", &page];
    let job = Job { program: "chromium", arguments: &switches, directory: directory.path() };
    let expected = Run::local("chromium").args(switches).patience(PATIENCE).finish();
    let (outcome, peak_bytes) = job.run(Door::Sidecar, LIMIT_MIB);
    assert!(expected.require_success().stdout.contains("SUM "), "{}", expected.stdout);
    assert_eq!(outcome.require_success().stdout, expected.stdout, "{}", outcome.stderr);
    require_limit(&outcome, peak_bytes, LIMIT_MIB);
}

/// Unmodified QEMU, with a guest that has no operating system and checks its memory.
#[test]
fn a_virtual_machine() {
    if !have("qemu-system-x86_64") || !have("gcc") {
        return;
    }
    let directory = scratch();
    std::fs::write(directory.path().join("guest.c"), include_str!("sidecar/guest.c"))
        .expect("source");
    let mut gcc = std::process::Command::new("gcc");
    let options = [
        "-m32",
        "-O1",
        "-ffreestanding",
        "-nostdlib",
        "-static",
        "-fno-pie",
        "-no-pie",
        "-fno-stack-protector",
        "-Wl,-Ttext=0x200000",
        "-Wl,--build-id=none",
        "-Wl,-z,noseparate-code",
        "guest.c",
        "-o",
        "guest",
    ];
    let made = gcc.args(options).current_dir(directory.path()).output().expect("gcc");
    if !made.status.success() {
        return skip("gcc makes no programs of 32 bits here");
    }
    let machine = [
        "-accel",
        "tcg",
        "-m",
        "128",
        "-display",
        "none",
        "-no-reboot",
        "-serial",
        "stdio",
        "-kernel",
        "guest",
    ];
    let outcome = compare(64, "qemu-system-x86_64", &machine, directory.path());
    assert_eq!(outcome.stdout, "0 wrong\n");
}

/// A program under gdb is traced already, so that no sidecar can be injected: it is named once, and
/// runs.
#[test]
fn a_program_under_a_debugger_is_named_as_outside() {
    if !have("gdb") || !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("raw", include_str!("sidecar/raw.c"), &["-g"], directory.path());
    let run = Run::through(Door::Sidecar, "48MiB").program("gdb").patience(PATIENCE);
    let run = run.args(["-q", "-batch", "-ex", "run", "--args"]).arg(program);
    let outcome = run.args(["plain", "64"]).finish();
    assert!(outcome.require_success().stdout.contains("plain: 0 wrong\n"), "{}", outcome.stdout);
    let names = |line: &&str| line.contains("(raw) is not held to the limit");
    let named: Vec<&str> = outcome.stderr.lines().filter(names).collect();
    assert!(named.len() == 1 && named[0].contains("is traced already"), "{}", outcome.stderr);
}

const STRESS_MIB: &str = "96";
const STRESS_LIMIT: &str = "40MiB";
const SEEDS: std::ops::RangeInclusive<u64> = 1..=3;

/// Runs every kind of memory call, including fork, with every seed.
fn stress() {
    for seed in SEEDS {
        let run = Run::through(Door::Sidecar, STRESS_LIMIT)
            .own_program("farpool-stress")
            .args(["--mib", STRESS_MIB, "--threads", "3", "--seconds", "3"])
            .args(["--seed", &seed.to_string()])
            .patience(PATIENCE);
        run.finish().require_success().require_far();
    }
}

#[test]
fn every_memory_call() {
    let _turn = turn();
    stress();
}

#[test]
fn every_memory_call_under_compaction() {
    /// The least rounds of compaction with which the test counts as done under compaction.
    const LEAST_ROUNDS: u32 = 10;
    let _turn = turn();
    let Some(compaction) = Compaction::start() else { return };
    stress();
    assert!(compaction.rounds() >= LEAST_ROUNDS, "{} rounds", compaction.rounds());
}
