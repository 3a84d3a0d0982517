//! A real blade, a server of this crate, and guests that are processes of their own: a server may
//! kill them.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use farpool_blade::{BladeConfig, Server, Serving};
use farpool_kernel::lock;
use farpool_pool::{Address, PoolConfig, Redundancy, Time, fresh_client};
use farpool_testkit::wait_until;
use farpool_units::PAGE_BYTES;
use farpool_vmm::Stop;

/// Long enough for everything that must happen; a test that waits this long fails.
pub(crate) const AMPLE: Duration = Duration::from_secs(60);
/// A blade that is silent for this long is lost: short where one is stopped, and longer than a busy
/// machine lets a thread wait.
const DEADLINE: Duration = Duration::from_secs(3);
const SIGKILL: i32 = 9;

/// A blade over a unix socket, so that its end is seen.
pub(crate) struct Blade {
    serving: Option<Serving>,
    address: Address,
    pub(crate) folder: tempfile::TempDir,
}

impl Blade {
    pub(crate) fn start() -> Blade {
        let folder = tempfile::tempdir().expect("a folder");
        let address = Address::Unix(folder.path().join("blade.sock"));
        let config = BladeConfig { memory_bytes: 256 << 20, threads: 2, ..BladeConfig::default() };
        let server = Server::bind(std::slice::from_ref(&address), config).expect("it listens");
        Blade { serving: Some(server.serve().expect("it serves")), address, folder }
    }

    pub(crate) fn stop(&mut self) {
        self.serving.take().expect("it runs").shutdown();
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.serving.as_ref().expect("it runs").stat().totals.used_bytes.get()
    }

    pub(crate) fn config(&self) -> PoolConfig {
        PoolConfig {
            blades: vec![self.address.clone().into()],
            client: fresh_client().expect("random"),
            client_name: "vmm test".into(),
            quota_bytes: 1 << 30,
            sharing_group: None,
            deadline: DEADLINE,
            allow_remote_tcp: false,
            redundancy: Redundancy::NONE,
            seals_pages: false,
            secures_tcp: false,
            asks: None,
            time: Time::KERNEL,
        }
    }
}

/// Ends a server when it is dropped, also by a test that fails.
pub(crate) struct Ender(UnixStream);

pub(crate) fn stop() -> (Stop, Ender) {
    let (near, far) = UnixStream::pair().expect("sockets");
    (Stop::when_readable(near), Ender(far))
}

/// What a server tells.
#[derive(Default)]
pub(crate) struct News(Mutex<Vec<String>>);

impl News {
    pub(crate) fn tell(&self, line: &str) {
        lock(&self.0).push(line.to_owned());
    }

    /// Waits until a line has this in it.
    #[track_caller]
    pub(crate) fn await_line(&self, words: &str) {
        self.await_lines(words, 1);
    }

    #[track_caller]
    pub(crate) fn await_lines(&self, words: &str, count: usize) {
        let seen = || lock(&self.0).iter().filter(|line| line.contains(words)).count() >= count;
        let end = std::time::Instant::now() + AMPLE;
        while !seen() {
            assert!(std::time::Instant::now() < end, "no {words:?} in {:?}", lock(&self.0));
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// What a page of a guest's memory holds in its snapshot: every third page zeros.
pub(crate) fn pattern(page: u32) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    if page.is_multiple_of(3) {
        return bytes;
    }
    let mut word = u64::from(page) << 32 | 0x5bd1_e995;
    for chunk in bytes.chunks_exact_mut(8) {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The bytes of a page of memory that may be far. Waits for them.
pub(crate) fn read_page(address: usize) -> [u8; PAGE_BYTES] {
    // SAFETY: the tests only pass pages of their own live mappings, and other threads that write
    // there meanwhile write to other pages.
    unsafe { (address as *const [u8; PAGE_BYTES]).read_volatile() }
}

pub(crate) fn write_page(address: usize, bytes: &[u8; PAGE_BYTES]) {
    // SAFETY: as for reading.
    unsafe { (address as *mut [u8; PAGE_BYTES]).write_volatile(*bytes) }
}

/// Set in the processes that are guests.
const ROLE: &str = "FARPOOL_TEST_VMM_ROLE";

/// What this process is to do, if it is a guest.
pub(crate) fn role() -> Option<Vec<String>> {
    let role = std::env::var(ROLE).ok()?;
    Some(role.split('\n').map(str::to_owned).collect())
}

/// A guest: this test program once more, that runs one test only. Killed when dropped.
pub(crate) struct Guest {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Guest {
    /// Starts the test `name` of this program with that role.
    pub(crate) fn start(name: &str, role: &[&str]) -> Guest {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role.join("\n")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Guest { child, input, output }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it go on to its next step.
    pub(crate) fn go(&mut self) {
        self.input.as_mut().expect("a pipe").write_all(b"\n").expect("it listens");
    }

    /// Waits until it says so. What the test harness prints is passed over.
    #[track_caller]
    pub(crate) fn await_word(&mut self, word: &str) {
        let mut all = String::new();
        loop {
            let before = all.len();
            let count = self.output.read_line(&mut all).expect("a pipe");
            assert!(count > 0, "it ended before {word:?}: {all}");
            if all[before..].contains(&format!("GUEST {word}")) {
                return;
            }
        }
    }

    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the guest ends", AMPLE, || {
            status = self.child.try_wait().expect("a child");
            status.is_some()
        });
        status.expect("it has ended")
    }

    /// Waits for its end, which must be that all it has checked was right.
    #[track_caller]
    pub(crate) fn must_be_right(&mut self) {
        self.await_word("right");
        drop(self.input.take());
        let status = self.ended();
        assert!(status.success(), "{status}");
    }

    /// Waits for its end, which must be that it was killed, and that it has read nothing wrong
    /// before.
    #[track_caller]
    pub(crate) fn must_be_killed(&mut self) {
        let status = self.ended();
        let mut rest = String::new();
        let _ = std::io::Read::read_to_string(&mut self.output, &mut rest);
        assert!(!rest.contains("GUEST"), "it said {rest}");
        assert_eq!(status.signal(), Some(SIGKILL), "{status}: {rest}");
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Said by a guest.
pub(crate) fn say(word: &str) {
    println!("GUEST {word}");
    std::io::stdout().flush().expect("a pipe");
}

/// A guest waits until it may go on.
pub(crate) fn await_go() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a pipe");
}
