//! Real programs, unmodified: the same results as all-local, and the limit holds all the time.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use farpool_e2e::jobs::{
    Job, OpenDevice, PATIENCE, allowed_bytes, compile, require_limit, scratch,
};
use farpool_e2e::postgres::Cluster;
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::tree::Peak;
use farpool_e2e::{have, redis, skip, sources, tree, turn};

/// Runs a program all-local and at `limit_mib`. Both runs must print the same, and the limit must
/// hold. `doors` are those that no other test runs it through (sidecar_programs.rs,
/// sidecar_servers.rs).
fn compare(doors: &[Door], limit_mib: u64, program: &str, arguments: &[&str], directory: &Path) {
    for door in doors {
        println!("{door:?}");
        Job { program, arguments, directory }.compare(*door, limit_mib);
    }
}

const BOTH: [Door; 2] = [Door::Usual, Door::Preload];
const USUAL: [Door; 1] = [Door::Usual];
const PRELOAD: [Door; 1] = [Door::Preload];

#[test]
fn a_c_program_under_malloc() {
    if !have("gcc") {
        return;
    }
    let directory = scratch();
    let source = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct node { struct node *next; unsigned key; unsigned char fill[]; };
int main(void) {
    enum { N = 400000, M = 1 << 16 };
    static struct node *table[M];
    unsigned long long sum = 0, x = 88172645463325252ULL;
    for (int i = 0; i < N; i++) {
        x ^= x << 13; x ^= x >> 7; x ^= x << 17;
        unsigned size = 32 + x % 300;
        struct node *n = malloc(sizeof *n + size);
        n->key = i; memset(n->fill, i, size);
        n->next = table[x % M]; table[x % M] = n;
        if (i % 5 == 0) { struct node *o = table[x / 7 % M]; if (o) { table[x / 7 % M] = o->next; free(o); } }
    }
    for (int i = 0; i < M; i++)
        for (struct node *n = table[i]; n; n = n->next) sum = sum * 31 + n->key + n->fill[7];
    printf("%llu\n", sum);
    return 0;
}"#;
    std::fs::write(directory.path().join("m.c"), source).expect("source");
    compile("gcc", &["-O2", "m.c", "-o", "m"], directory.path());
    let program = directory.path().join("m");
    compare(&BOTH, 24, &program.to_string_lossy(), &[], directory.path());
}

#[test]
fn sixty_four_threads() {
    if !have("gcc") {
        return;
    }
    let directory = scratch();
    let source = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#define T 64
#define W (256 * 1024)
static unsigned long long *data[T]; static unsigned long long sums[T];
static pthread_barrier_t barrier;
static void *work(void *arg) {
    long me = (long)arg;
    data[me] = malloc(W * 8);
    for (long i = 0; i < W; i++) data[me][i] = me * 1000003ULL + i;
    pthread_barrier_wait(&barrier);
    for (int round = 0; round < 2; round++) {
        unsigned long long *other = data[(me + 17 + round) % T], sum = 0;
        for (long i = 0; i < W; i += 3) sum = sum * 33 + other[(i * 7919) % W];
        sums[me] += sum;
    }
    return 0;
}
int main(void) {
    pthread_t t[T]; unsigned long long sum = 0;
    pthread_barrier_init(&barrier, 0, T);
    for (long i = 0; i < T; i++) pthread_create(&t[i], 0, work, (void *)i);
    for (int i = 0; i < T; i++) { pthread_join(t[i], 0); sum = sum * 31 + sums[i]; }
    printf("%llu\n", sum);
    return 0;
}"#;
    std::fs::write(directory.path().join("t.c"), source).expect("source");
    compile("gcc", &["-O2", "-pthread", "t.c", "-o", "t"], directory.path());
    let program = directory.path().join("t").to_string_lossy().into_owned();
    compare(&PRELOAD, 32, &program, &[], directory.path());
    // Each thread maps 2 MiB and fills them before the sidecar has read the list of mappings: in 5
    // of 54 runs more was resident than the 67 MiB that are allowed (docs/users/sidecar.md).
    let job = Job { program: &program, arguments: &[], directory: directory.path() };
    job.compare_results(Door::Usual, 32);
}

/// Each call starts this same program, most with more arguments than registers hold, after the
/// library's variables were removed from the environment.
#[test]
fn a_c_program_calls_execl_execlp_and_execle() {
    if !have("gcc") {
        return;
    }
    let directory = scratch();
    let source = r#"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define TEN(t) t "0", t "1", t "2", t "3", t "4", t "5", t "6", t "7", t "8", t "9"
#define ALL TEN("0"), TEN("1"), TEN("2"), TEN("3"), TEN("4"), TEN("5"), TEN("6"), TEN("7"), TEN("8"), TEN("9")
static int started(const char *how, int count, char **words) {
    const char *preload = getenv("LD_PRELOAD"), *own = getenv("A");
    char expected[8];
    if (!preload || !strstr(preload, "farpool") || !getenv("FARPOOL_BOARD")) return 11;
    if (!strcmp(how, "execle") != (own && !strcmp(own, "b"))) return 12;
    if (!strcmp(how, "short") ? count != 2 : count != 102) return 13;
    for (int i = 2; i < count; i++) {
        sprintf(expected, "%02d", i - 2);
        if (strcmp(words[i], expected)) return 14;
    }
    return 0;
}
int main(int count, char **words) {
    if (count > 1) return started(words[1], count, words);
    char *path = words[0], *environment[] = { "A=b", 0 };
    const char *names[] = { "execl", "execlp", "execle", "short", "unlike" };
    for (int i = 0; i < 5; i++) {
        int status = 0;
        fflush(stdout);
        if (!fork()) {
            clearenv();
            if (i == 0) execl(path, path, "execl", ALL, (char *)0);
            if (i == 1) execlp(path, path, "execlp", ALL, (char *)0);
            if (i == 2) execle(path, path, "execle", ALL, (char *)0, environment);
            if (i == 3) execl(path, path, "short", (char *)0);
            if (i == 4) _exit(execl("/none", "none", ALL, (char *)0) == -1 && errno == ENOENT ? 0 : 15);
            _exit(16);
        }
        wait(&status);
        printf("%s %x\n", names[i], status);
    }
    return 0;
}"#;
    std::fs::write(directory.path().join("e.c"), source).expect("source");
    compile("gcc", &["-O2", "e.c", "-o", "e"], directory.path());
    let _turn = turn();
    let outcome = Run::through(Door::Preload, "64MiB").program(directory.path().join("e")).finish();
    let expected = "execl 0\nexeclp 0\nexecle 0\nshort 0\nunlike 0\n";
    assert_eq!(outcome.require_success().stdout, expected, "{}", outcome.stderr);
}

#[test]
fn gcc_compiles_something_large() {
    if !have("gcc") {
        return;
    }
    let directory = scratch();
    let mut source = String::from("static unsigned x;\n");
    for number in 0..3000 {
        source += &format!(
            "unsigned f{number}(unsigned a) {{ for (unsigned i = 0; i < a; i++) x = x * {number}u \
             + i ^ a; return x + a * {number}u; }}\n"
        );
    }
    std::fs::write(directory.path().join("large.c"), source).expect("source");
    let arguments = ["-O2", "-S", "-o", "-", "large.c"];
    compare(&USUAL, 32, "gcc", &arguments, directory.path());
}

#[test]
fn sqlite_in_memory() {
    if have("sqlite3") {
        let directory = scratch();
        compare(&PRELOAD, 24, "sqlite3", &[":memory:", &sources::sql(300_000)], directory.path());
    }
}

const MULTIPROCESSING_LIMIT_MIB: u64 = 48;

#[test]
fn python_with_multiprocessing() {
    if have("python3") {
        run_multiprocessing();
    }
}

#[test]
fn the_limit_holds_for_python_with_multiprocessing() {
    if have("python3") {
        let (outcome, peak_bytes) = run_multiprocessing();
        require_limit(&outcome, peak_bytes, MULTIPROCESSING_LIMIT_MIB);
    }
}

fn run_multiprocessing() -> (Outcome, u64) {
    let directory = scratch();
    sources::python_workers(directory.path());
    let arguments = &["mp.py", "350000", "3"];
    let job = Job { program: "python3", arguments, directory: directory.path() };
    job.compare_results(Door::Preload, MULTIPROCESSING_LIMIT_MIB)
}

#[test]
fn a_java_program() {
    if !have("javac") || !have("java") {
        return;
    }
    let directory = scratch();
    sources::java(directory.path());
    let words = ["-Xmx256m", "-XX:+UseSerialGC", "-cp", ".", "Main", "500000"];
    compare(&PRELOAD, 64, "java", &words, directory.path());
}

#[test]
fn redis_with_a_background_save() {
    if have("redis-server") && have("redis-cli") {
        let _turn = turn();
        let peak_bytes = redis::save_in_the_background(Door::Preload, 32);
        assert!(peak_bytes <= allowed_bytes(32), "peak {peak_bytes} bytes");
    }
}

#[test]
fn a_pipeline_a_session_and_a_daemon() {
    if !have("python3") || !have("setsid") {
        return;
    }
    let directory = scratch();
    let job = r#"
import sys, hashlib
b = bytearray()
for i in range(1500000): b += b"%d " % i
h = hashlib.sha256(b); c = bytes(b); h.update(c[::-1]); print(h.hexdigest())
"#;
    let daemon = r#"
import os, sys, hashlib
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.closerange(0, 65536)
b = bytearray()
for i in range(1500000): b += b"%d " % i
h = hashlib.sha256(b); c = bytes(b); h.update(c[::-1])
open(sys.argv[1] + ".new", "w").write(h.hexdigest() + "\n"); os.rename(sys.argv[1] + ".new", sys.argv[1])
"#;
    std::fs::write(directory.path().join("job.py"), job).expect("script");
    std::fs::write(directory.path().join("daemon.py"), daemon).expect("script");
    let script = "python3 job.py | cat; setsid -w python3 job.py; nohup python3 job.py \
                  2>/dev/null; rm -f result; python3 daemon.py result; while [ ! -e result ]; do \
                  sleep 0.05; done; cat result";
    compare(&USUAL, 24, "sh", &["-c", script], directory.path());
}

/// The first program of the run changes its user and starts another program.
#[test]
fn setpriv_and_runuser() {
    if !have("setpriv") || !have("runuser") || !have("python3") {
        return;
    }
    let _turn = turn();
    let Some(_device) = OpenDevice::make() else {
        return skip("/dev/userfaultfd cannot be opened to another user (needs root)");
    };
    let library = farpool_e2e::binaries::program("libfarpool_preload.so");
    let mut reads = Command::new("setpriv");
    reads.args(["--reuid", "nobody", "--clear-groups", "head", "-c1"]).arg(library);
    let mut doors = vec![Door::Usual, Door::Preload];
    if !reads.output().is_ok_and(|output| output.status.success()) {
        doors.pop();
        println!("the preload library is in a directory that other users may not read: not tried");
    }
    let job = "import os; b = [bytes([i % 251]) * 4000 for i in range(20000)]; \
               print(os.getuid() == 0, sum(x[9] for x in b))";
    let changers: [&[&str]; 3] = [
        &["setpriv", "--clear-groups"],
        &["setpriv", "--reuid", "nobody", "--clear-groups"],
        &["runuser", "-u", "nobody", "--"],
    ];
    for changer in changers {
        let arguments = [&changer[1..], &["/usr/bin/env", "python3", "-c", job]].concat();
        let expected = Run::local(changer[0]).args(&arguments).directory(Path::new("/")).finish();
        for door in &doors {
            let outcome = Run::through(*door, "24MiB").program(changer[0]).args(&arguments);
            let outcome = outcome.directory(Path::new("/")).patience(PATIENCE).finish();
            outcome.require_success().require_far();
            assert_eq!(outcome.stdout, expected.stdout, "{changer:?}: {}", outcome.stderr);
        }
    }
}

/// The keeper runs as the user, who lacks the capability that a sidecar needs: the library is used,
/// and a message says why.
#[test]
fn postgres_with_twenty_connections() {
    let Some(cluster) = Cluster::make() else { return };
    let _turn = turn();
    let Some(_device) = OpenDevice::make() else {
        return skip("/dev/userfaultfd cannot be opened to the user postgres (needs root)");
    };
    let mut farpool = Command::new(farpool_e2e::binaries::program("farpool"));
    let stats = cluster.path().join("stats.json");
    farpool.args(["run", "--local", "96MiB", "--stats"]).arg(&stats).arg("--");
    farpool.args(cluster.server()).uid(cluster.user).gid(cluster.group);
    farpool.env("XDG_RUNTIME_DIR", cluster.path()).current_dir(cluster.path());
    let running = Run::with(farpool, Some(stats), None).patience(PATIENCE).start();
    let peak = Peak::watch(running.pid());
    cluster.await_answer();
    cluster.sort_with(20);
    tree::signal(running.program_pid(), libc::SIGINT);
    let outcome = running.finish();
    let (peak_bytes, looks) = peak.end();
    println!(
        "postgres: peak {} MiB at a limit of 96 MiB, {looks} looks, {} fetches",
        peak_bytes >> 20,
        outcome.counter("demand_fetches")
    );
    assert!(peak_bytes <= allowed_bytes(96), "peak {peak_bytes} bytes: {}", outcome.stats);
    outcome.require_success();
    let note = outcome.stderr.lines().find(|line| line.contains("the preloaded library is used"));
    assert!(note.is_some_and(|note| note.contains("CAP_SYS_PTRACE")), "{}", outcome.stderr);
}
