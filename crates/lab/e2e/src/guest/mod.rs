//! A virtual machine with a stock kernel, whose only program (`init.c`) checks its memory.
//!
//! The kernel comes from scripts/install-deps.sh. The machine runs under QEMU's own translator
//! (TCG): a stock kernel does not boot under the KVM of every test machine, and a boot takes about
//! five seconds either way.

mod initramfs;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::jobs::{compile, scratch};
use crate::run::{Outcome, Run, Running};
use crate::tree::Peak;
use crate::{have, skip, turn};

/// QEMU's program.
pub const QEMU: &str = "qemu-system-x86_64";
/// Where scripts/install-deps.sh puts the kernel and its modules.
const KERNEL: &str = "/var/lib/farpool-tests/vmlinuz";
const MODULES: &str = "/var/lib/farpool-tests/modules";
/// Memory that a guest of 256 MiB can give its program: the kernel takes the rest.
pub const WORK_MIB: u64 = 160;
/// Resident memory of QEMU with a guest of 256 MiB that uses all of it is about 330 MiB; these are
/// 60 % and 33 % of it.
pub const MOST_MIB: u64 = 200;
pub const THIRD_MIB: u64 = 110;
/// How long a guest may take: under a limit on a busy machine ten times as long as on an idle one.
const PATIENCE: Duration = Duration::from_secs(150);

/// The kernel and the first program that guests boot.
#[derive(Debug)]
pub struct Image {
    directory: tempfile::TempDir,
}

impl Image {
    /// Makes one, or skips the test if something is missing here.
    ///
    /// # Panics
    /// If the program cannot be compiled.
    pub fn make() -> Option<Image> {
        if !have(QEMU) || !have("gcc") {
            return None;
        }
        if !Path::new(KERNEL).exists() {
            skip(&format!("there is no kernel for guests at {KERNEL}"));
            return None;
        }
        let directory = scratch();
        std::fs::write(directory.path().join("init.c"), include_str!("init.c")).expect("source");
        compile("gcc", &["-O2", "-static", "init.c", "-o", "init"], directory.path());
        let init = std::fs::read(directory.path().join("init")).expect("the program");
        let archive = initramfs::archive(&init, Path::new(MODULES));
        std::fs::write(directory.path().join("initramfs"), archive).expect("an archive");
        Some(Image { directory })
    }

    /// A folder for a test's files, as long as the image lives.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn initramfs(&self) -> PathBuf {
        self.directory.path().join("initramfs")
    }

    /// QEMU's arguments for a guest whose program gets these words, without those for its memory.
    pub fn arguments(&self, words: &str) -> Vec<String> {
        let (initramfs, words) =
            (self.initramfs(), format!("console=ttyS0 quiet panic=-1 {words}"));
        let fixed = "-accel tcg,tb-size=32 -cpu max -smp 1 -display none -nodefaults -no-reboot \
                     -serial stdio";
        let named = [
            ["-kernel", KERNEL],
            ["-initrd", initramfs.to_str().expect("a path of text")],
            ["-append", &words],
        ];
        fixed.split_whitespace().chain(named.into_iter().flatten()).map(str::to_owned).collect()
    }

    /// Runs a guest of 256 MiB, given as these options, under `run` to its end. Also returns the
    /// peak of the tree's resident memory in bytes.
    ///
    /// # Panics
    /// Unless the guest's memory was right.
    pub fn check(&self, run: Run, options: &[String], words: &str) -> (Outcome, u64) {
        let _turn = turn();
        let words = format!("work={WORK_MIB} {words}");
        let run = run.program(QEMU).args(self.arguments(&words)).args(options);
        let running = run.patience(PATIENCE).start();
        let peak = Peak::watch(running.pid());
        let began = std::time::Instant::now();
        let outcome = running.finish();
        let (peak_bytes, _) = peak.end();
        println!(
            "{options:?}: peak {} MiB, {:.1} s, {} fetches",
            peak_bytes >> 20,
            began.elapsed().as_secs_f64(),
            outcome.counter("demand_fetches")
        );
        require_right(&outcome);
        (outcome, peak_bytes)
    }
}

/// QEMU's monitor, for people: commands in words.
#[derive(Debug)]
pub struct Monitor(PathBuf);

impl Monitor {
    /// The monitor at this socket, and the options that make QEMU open it.
    pub fn at(path: PathBuf) -> (Monitor, [String; 2]) {
        let option = format!("unix:{},server=on,wait=off", path.display());
        (Monitor(path), ["-monitor".into(), option])
    }

    /// Gives a command, and waits for what QEMU says to it.
    ///
    /// # Panics
    /// If there is no QEMU.
    pub fn command(&self, command: &str) -> String {
        const PROMPT: &str = "(qemu) ";
        let mut stream = UnixStream::connect(&self.0).expect("QEMU's monitor");
        stream.write_all(format!("{command}\n").as_bytes()).expect("a command");
        let (mut said, mut piece) = (Vec::new(), [0; 4096]);
        // One prompt comes before the answer, and one after it.
        while String::from_utf8_lossy(&said).matches(PROMPT).count() < 2 {
            match stream.read(&mut piece) {
                Ok(0) | Err(_) => break,
                Ok(length) => said.extend_from_slice(&piece[..length]),
            }
        }
        String::from_utf8_lossy(&said).into_owned()
    }
}

/// A running guest, which works until it is ended.
#[derive(Debug)]
pub struct Guest {
    pub running: Running,
    pub monitor: Monitor,
}

impl Guest {
    /// Starts a guest of this image whose program gets these words.
    pub fn start(image: &Image, run: Run, memory: &[&str], words: &str) -> Guest {
        static MONITORS: AtomicU32 = AtomicU32::new(0);
        let file = format!("monitor-{}", MONITORS.fetch_add(1, Relaxed));
        let (monitor, option) = Monitor::at(image.directory().join(file));
        let run = run.program(QEMU).args(image.arguments(&format!("stay=1 {words}")));
        Guest { running: run.args(memory).args(option).start(), monitor }
    }

    /// Waits for further rounds of checks of the guest.
    ///
    /// # Panics
    /// If they do not come, or one of the guest's checks failed.
    pub fn require_rounds(&mut self) {
        const ROUNDS: usize = 3;
        let before = self.running.stdout().matches("GUEST round").count();
        self.running.wait_for_output("GUEST round", before + ROUNDS);
        let said = self.running.stdout();
        // The last line may not be complete.
        let mut rounds = said.split_inclusive('\n').filter(|line| line.contains("GUEST round"));
        let is_wrong = |line: &str| line.ends_with('\n') && !line.trim_end().ends_with(" bad=0");
        assert!(!rounds.any(is_wrong), "{said}");
    }

    /// Switches the guest off.
    ///
    /// # Panics
    /// If QEMU fails.
    pub fn end(self) -> Outcome {
        self.monitor.command("quit");
        let outcome = self.running.finish();
        outcome.require_success();
        outcome
    }
}

/// QEMU's options for a guest of 256 MiB.
pub fn plain_memory() -> [String; 2] {
    ["-m".into(), "256".into()]
}

/// The same with a memory backend as the guest's whole memory.
pub fn with_backend(backend: &str) -> [String; 6] {
    let object = format!("{backend},id=ram,size=256M");
    ["-object", &object, "-machine", "q35,memory-backend=ram", "-m", "256"].map(str::to_owned)
}

/// Checks that a guest came to its end and read nothing but what it had written.
///
/// # Panics
/// If not.
pub fn require_right(outcome: &Outcome) {
    let mut lines = outcome.require_success().stdout.lines();
    let last = lines.rfind(|line| line.starts_with("GUEST done"));
    let said = format!("{}{}", outcome.stdout, outcome.stderr);
    assert!(last.is_some_and(|line| line.trim_end().ends_with(" bad=0")), "{said}");
}
