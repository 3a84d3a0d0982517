//! Host programs, built and run; requests to sidecars. Every host dies with its guard.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use farpool_inject::{Image, InjectError, Injected, Pid, Setup, inject};
use farpool_kernel::{receive_with_descriptor, send_with_descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Longest wait for a condition before a test fails. Far beyond what any takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How a host is linked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Link {
    Static,
    StaticPie,
    Dynamic,
}

fn build_c(link: Link) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/host.c");
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    // Built aside and renamed: test binaries of one run share the directory.
    let made = directory.join(format!("host-{link:?}"));
    let aside = directory.join(format!("host-{link:?}-{}", std::process::id()));
    let flags: &[&str] = match link {
        Link::Static => &["-static"],
        Link::StaticPie => &["-static-pie", "-fPIE"],
        Link::Dynamic => &[],
    };
    let mut gcc = Command::new("gcc");
    gcc.args(["-O1", "-pthread", "-w"]).args(flags).arg(source).arg("-o").arg(&aside);
    let status = gcc.status().map_err(|error| format!("gcc cannot be started: {error}"))?;
    if !status.success() {
        return Err(format!("gcc made no {link:?} program"));
    }
    std::fs::rename(&aside, &made).map_err(|error| error.to_string())?;
    Ok(made)
}

/// The C host, linked as requested. Err is why this machine has none.
pub(crate) fn c_host(link: Link) -> Result<PathBuf, String> {
    static BUILT: [OnceLock<Result<PathBuf, String>>; 3] = [const { OnceLock::new() }; 3];
    BUILT[link as usize].get_or_init(|| build_c(link)).clone()
}

/// A running host.
#[derive(Debug)]
pub(crate) struct Host {
    pub child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Host {
    pub(crate) fn start(command: &mut Command) -> Self {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.spawn().expect("the host starts");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let mut host = Self { child, input, output };
        assert_eq!(host.line(), "ready");
        host
    }

    pub(crate) fn c(link: Link, arguments: &[&str]) -> Option<Self> {
        match c_host(link) {
            Ok(program) => Some(Self::start(Command::new(program).args(arguments))),
            Err(reason) => {
                farpool_testkit::skip(&reason.to_string());
                None
            }
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The next line of its output, empty at the end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("its output");
        line.trim_end().to_owned()
    }

    pub(crate) fn write(&mut self, text: &str) {
        let input = self.input.as_mut().expect("its input is open");
        input.write_all(text.as_bytes()).expect("its input");
    }

    /// Closes its input. Returns its last line.
    pub(crate) fn finish(&mut self) -> String {
        self.input = None;
        let mut last = String::new();
        loop {
            match self.line() {
                line if line.is_empty() => break,
                line => last = line,
            }
        }
        let _ = self.child.wait();
        last
    }

    /// Waits until its first thread sleeps in a call that can be interrupted.
    pub(crate) fn await_sleep(&self) {
        self.await_state('S');
    }

    /// Waits until its first thread is in a state (a letter of proc(5)).
    pub(crate) fn await_state(&self, wanted: char) {
        let state = || {
            let path = format!("/proc/{}/stat", self.child.id());
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.rsplit(") ").next().and_then(|rest| rest.chars().next())
        };
        eventually("the host's state", || state() == Some(wanted));
    }

    pub(crate) fn inject(&self) -> Result<Injected, InjectError> {
        inject(self.pid(), image(), &Setup::default())
    }

    pub(crate) fn injected(&self) -> Injected {
        let injected = self.inject().expect("a sidecar");
        assert_eq!(ask(&injected, "PING").split(' ').next(), Some("PONG"));
        injected
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn image() -> &'static Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    IMAGE.get_or_init(|| Image::new(farpool_sidecar_image::SIDECAR_ELF).expect("the sidecar"))
}

/// Waits for a condition.
pub(crate) fn eventually(what: &str, is_so: impl FnMut() -> bool) {
    farpool_testkit::wait_until(what, PATIENCE, is_so);
}

fn readable(fd: impl AsFd, patience: Duration) -> bool {
    let time = Timespec { tv_sec: patience.as_secs().cast_signed(), tv_nsec: 0 };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&time)).is_ok_and(|ready| ready > 0)
}

/// Sends a request to the sidecar. Returns the answer, or "" if it is gone.
pub(crate) fn ask(injected: &Injected, request: &str) -> String {
    if send(&injected.control, request.as_bytes(), SendFlags::NOSIGNAL).is_err() {
        return String::new();
    }
    assert!(readable(&injected.control, PATIENCE), "the sidecar does not answer {request}");
    let mut bytes = [0; 65536];
    let got = recv(&injected.control, &mut bytes[..], RecvFlags::empty()).map_or(0, |(n, _)| n);
    String::from_utf8_lossy(&bytes[..got]).into_owned()
}

/// Waits for the sidecar's end. Returns how long it took.
pub(crate) fn await_end(injected: &Injected) -> Duration {
    let start = Instant::now();
    assert!(readable(&injected.pidfd, PATIENCE), "the sidecar does not end");
    start.elapsed()
}

/// Waits until a task is gone for good: its new parent (init) has reaped it.
pub(crate) fn await_zombieless(pid: Pid) {
    let path = format!("/proc/{}", pid.as_raw_nonzero());
    eventually("the sidecar is reaped", || !Path::new(&path).exists());
}

/// Properties of a mapping.
#[derive(Debug)]
pub(crate) struct Flags {
    pub name: String,
    pub is_hidden: bool,
    pub is_writable_text: bool,
}

fn range(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
}

/// The mappings of /proc/PID/smaps.
pub(crate) fn mappings(pid: Pid) -> Vec<(Range<u64>, Flags)> {
    let path = format!("/proc/{}/smaps", pid.as_raw_nonzero());
    let text = std::fs::read_to_string(path).expect("smaps");
    let mut found: Vec<(Range<u64>, Flags)> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some(range) = range(first) {
            let rights = words.next().unwrap_or_default();
            let is_writable_text = rights.contains('w') && rights.contains('x');
            let name = words.nth(3).unwrap_or_default().to_owned();
            found.push((range, Flags { name, is_hidden: false, is_writable_text }));
        } else if first == "VmFlags:"
            && let Some((_, flags)) = found.last_mut()
        {
            flags.is_hidden = words.any(|flag| flag == "dc");
        }
    }
    found
}

/// The answer to RANGES.
pub(crate) fn ranges(text: &str) -> Vec<Range<u64>> {
    text.split_whitespace().filter_map(range).collect()
}

/// Sends a request with a descriptor. Returns the one that came with the answer.
pub(crate) fn hand_over(injected: &Injected, request: &str, fd: impl AsFd) -> Option<OwnedFd> {
    let (request_bytes, flags) = (request.as_bytes(), SendFlags::empty());
    send_with_descriptors(&injected.control, request_bytes, &[fd.as_fd()], flags)
        .expect("it is sent");
    assert!(readable(&injected.control, PATIENCE), "the sidecar does not answer {request}");
    let answer = receive_with_descriptor(&injected.control, &mut [0; 256], RecvFlags::empty());
    answer.expect("an answer").1
}
