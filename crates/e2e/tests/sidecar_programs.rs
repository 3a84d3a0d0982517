//! Real programs through the sidecar door: the same results as all-local, and the limit holds all the
//! while, but for what a fork shares (docs/sidecar.md; `the_limit_holds_at_a_fork` of sidecar.rs).

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use farpool_e2e::compaction::Compaction;
use farpool_e2e::jobs::{Job, PATIENCE, allowed_bytes, compile, scratch};
use farpool_e2e::run::{Door, Run};
use farpool_e2e::tree::Peak;
use farpool_e2e::{have, redis, tree, turn, wait_until};

/// Where Go is unless it is in the PATH.
const GO: &str = "/usr/local/go/bin/go";

fn compare(limit_mib: u64, program: &str, arguments: &[&str], directory: &Path) {
    Job { program, arguments, directory }.compare(Door::Sidecar, limit_mib);
}

/// Maps, slices and strings that live and die, under the garbage collector.
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

#[test]
fn a_java_program() {
    if !have("javac") || !have("java") {
        return;
    }
    let directory = scratch();
    let source = r#"
import java.util.*;
public class Main {
    public static void main(String[] a) {
        Map<Integer, byte[]> map = new TreeMap<>();
        Random random = new Random(5);
        long sum = 0;
        for (int i = 0; i < 300000; i++) {
            byte[] value = new byte[80 + random.nextInt(240)];
            value[7] = (byte) i;
            map.put(random.nextInt(150000), value);
        }
        for (var entry : map.entrySet()) sum = sum * 31 + entry.getKey() + entry.getValue()[7] + entry.getValue().length;
        System.out.println(map.size() + " " + sum);
    }
}"#;
    std::fs::write(directory.path().join("Main.java"), source).expect("source");
    compile("javac", &["Main.java"], directory.path());
    compare(64, "java", &["-Xmx256m", "-XX:+UseSerialGC", "-cp", ".", "Main"], directory.path());
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
    let script = r#"
import hashlib, multiprocessing
data = [(i, str(i * 7919), [i]) for i in range(200000)]
def work(part):
    h = hashlib.sha256()
    for number, text, items in data[part::3]:
        items.append(part)
        h.update(f"{number}{text}{sum(items)}".encode())
    return h.hexdigest()
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(work, range(3)))
    print(len(data), sum(len(text) + len(items) for _, text, items in data))
"#;
    std::fs::write(directory.path().join("mp.py"), script).expect("script");
    let job = Job { program: "python3", arguments: &["mp.py"], directory: directory.path() };
    job.compare_results(Door::Sidecar, 48);
}

#[test]
fn sqlite_in_memory() {
    if !have("sqlite3") {
        return;
    }
    let directory = scratch();
    let script = "
        create table t(id integer primary key, k text, v blob);
        with recursive c(i) as (select 1 union all select i + 1 from c where i < 120000)
          insert into t select i, printf('key-%08d', (i * 7919) % 1000003), zeroblob(i % 300) from c;
        create index tk on t(k);
        select count(*), sum(length(v)), min(k), max(k) from t;
        delete from t where id % 3 = 0;
        select count(*), sum(id), total(length(v)) from t where k > 'key-00200000';
        pragma integrity_check;";
    compare(24, "sqlite3", &[":memory:", script], directory.path());
}

#[test]
fn redis_with_a_background_save() {
    if have("redis-server") && have("redis-cli") {
        let _turn = turn();
        redis::save_in_the_background(Door::Sidecar, 32);
    }
}

/// An etcd that is asked over HTTP. Keys and values are words that are their own base64.
struct Etcd {
    running: farpool_e2e::run::Running,
    port: u16,
}

impl Etcd {
    fn start(limit: &str, directory: &Path) -> Etcd {
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
        let (port, peer) = (free().expect("a port").port(), free().expect("a port").port());
        let (url, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer}"));
        let cluster = format!("default={peer}");
        let running = Run::through(Door::Sidecar, limit)
            .program("etcd")
            .args(["--data-dir", "data", "--listen-client-urls", &url, "--advertise-client-urls"])
            .args([&url, "--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &cluster, "--unsafe-no-fsync"])
            .directory(directory)
            .patience(PATIENCE)
            .start();
        let etcd = Etcd { running, port };
        wait_until("etcd to answer", Duration::from_secs(40), || {
            etcd.ask("maintenance/status", "{}").filter(|answer| answer.contains("leader"))
        });
        etcd
    }

    fn ask(&self, what: &str, body: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        let length = body.len();
        let head = format!("POST /v3/{what} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all((head + body).as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        head.contains(" 200 ").then(|| body.to_owned())
    }
}

#[test]
fn etcd_gives_back_what_was_put() {
    const KEYS: usize = 1500;
    const LIMIT_MIB: u64 = 48;
    if !have("etcd") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let etcd = Etcd::start(&format!("{LIMIT_MIB}MiB"), directory.path());
    let peak = Peak::watch(etcd.running.pid());
    let key = |number: usize| format!("key{number:05}");
    let value = |number: usize| format!("{number:08}").repeat(512);
    for number in 0..KEYS {
        let body = format!(r#"{{"key":"{}","value":"{}"}}"#, key(number), value(number));
        etcd.ask("kv/put", &body).expect("a put");
    }
    for number in 0..KEYS {
        let answer = etcd.ask("kv/range", &format!(r#"{{"key":"{}"}}"#, key(number)));
        let answer = answer.expect("a value");
        assert!(answer.contains(&format!(r#""value":"{}""#, value(number))), "{number}: {answer}");
    }
    tree::signal(etcd.running.program_pid(), libc::SIGINT);
    let outcome = etcd.running.finish();
    let (peak_bytes, looks) = peak.end();
    println!(
        "etcd: peak {} MiB at a limit of {LIMIT_MIB} MiB, {looks} looks, {} fetches",
        peak_bytes >> 20,
        outcome.counter("demand_fetches")
    );
    assert!(outcome.stderr.lines().all(|line| !line.starts_with("farpool:")), "{}", outcome.stderr);
    assert!(peak_bytes <= allowed_bytes(LIMIT_MIB), "peak {peak_bytes} bytes: {}", outcome.stats);
}

const STRESS_MIB: &str = "96";
const STRESS_LIMIT: &str = "40MiB";
const SEEDS: std::ops::RangeInclusive<u64> = 1..=3;

/// Every kind of memory call there is, fork among them, by every seed.
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
    /// Rounds of compaction below which the noise was none.
    const LEAST_ROUNDS: u32 = 10;
    let _turn = turn();
    let Some(compaction) = Compaction::start() else { return };
    stress();
    assert!(compaction.rounds() >= LEAST_ROUNDS, "{} rounds", compaction.rounds());
}
