//! How long a program takes natively, without QEMU: the time that a trace's clock stands for.

use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use farpool_units::{PAGE_BYTES_U64, at_most};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, SeekFrom, fstat, major, minor, seek};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::program::Command;
use crate::error::TraceError;

/// A native run of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeRun {
    /// Wall-clock time from its start to its end.
    pub time_ps: u64,
    /// The most memory of files and shared memory seen in it, in bytes.
    pub file_bytes: u64,
    /// How it ended.
    pub status: ExitStatus,
}

/// How often the program's memory and `is_cancelled` are checked.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Runs `command` `runs` times, one after the other, and returns the fastest run. The program's
/// output is discarded. Each run finds standard input at the same position, and so does the capture
/// after them. The program is killed when `is_cancelled` becomes true.
///
/// # Errors
/// Standard input cannot be rewound, the program cannot be started, a signal ended it, or
/// `is_cancelled`.
pub fn time_native(
    command: &Command,
    runs: u32,
    is_cancelled: &AtomicBool,
) -> Result<NativeRun, TraceError> {
    let stdin = std::io::stdin();
    let input = Input::look(stdin.as_fd())?;
    let mut fastest: Option<NativeRun> = None;
    for _ in 0..runs.max(1) {
        let run = run(command, is_cancelled)?;
        input.rewind()?;
        if run.status.code().is_none() {
            let reason =
                format!("the timed run was ended by {}; its time does not count", run.status);
            return Err(TraceError::Capture(reason));
        }
        fastest = match fastest {
            Some(other) if other.time_ps <= run.time_ps => Some(other),
            _ => Some(run),
        };
    }
    fastest.ok_or_else(|| TraceError::Capture("the program was not timed".to_owned()))
}

fn run(command: &Command, is_cancelled: &AtomicBool) -> Result<NativeRun, TraceError> {
    let mut native = std::process::Command::new(&command.file);
    native.arg0(&command.name).args(&command.arguments).stdin(Stdio::inherit());
    native.stdout(Stdio::null()).stderr(Stdio::null());
    let began = Instant::now();
    let mut child = native.spawn().map_err(TraceError::io(&command.file))?;
    let (status, file_bytes) =
        wait(&mut child, is_cancelled).map_err(TraceError::io(&command.file))?;
    let time_ps = began.elapsed().as_nanos().saturating_mul(1000);
    if is_cancelled.load(Ordering::Relaxed) {
        return Err(TraceError::Capture("ended while the program was timed".to_owned()));
    }
    Ok(NativeRun { time_ps: at_most(time_ps), file_bytes, status })
}

/// Waits until the program has ended, and kills it when `is_cancelled`. Returns its status and its
/// peak memory of files.
fn wait(child: &mut Child, is_cancelled: &AtomicBool) -> std::io::Result<(ExitStatus, u64)> {
    let mut most_bytes = 0;
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    loop {
        let mut ended = [PollFd::new(&process, PollFlags::IN)];
        match poll(&mut ended, Some(&LOOK)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok((child.wait()?, most_bytes)),
            Err(error) => return Err(error.into()),
        }
        most_bytes = most_bytes.max(file_bytes(child.id()));
        if is_cancelled.load(Ordering::Relaxed) {
            child.kill()?;
        }
    }
}

/// Returns the resident bytes of files and shared memory, from the third number of statm; 0 for a
/// process that has ended.
fn file_bytes(process: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(2).and_then(|number| number.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE_BYTES_U64
}

/// Standard input, which every run must find as the first one did.
enum Input<'a> {
    /// A terminal or /dev/null: nothing to rewind.
    Endless,
    /// A file, and its position at the first run.
    File(BorrowedFd<'a>, u64),
}

/// The device number of /dev/null.
const NULL_DEVICE: (u32, u32) = (1, 3);

impl<'a> Input<'a> {
    fn look(input: BorrowedFd<'a>) -> Result<Self, TraceError> {
        let failed =
            |error: rustix::io::Errno| TraceError::io(Path::new("standard input"))(error.into());
        let data = fstat(input).map_err(failed)?;
        let kind = FileType::from_raw_mode(data.st_mode);
        let device = (major(data.st_rdev), minor(data.st_rdev));
        if kind.is_file() {
            return Ok(Self::File(input, seek(input, SeekFrom::Current(0)).map_err(failed)?));
        }
        if input.is_terminal() || (kind == FileType::CharacterDevice && device == NULL_DEVICE) {
            return Ok(Self::Endless);
        }
        Err(TraceError::Capture(
            "standard input can be read only once, and a timed program runs several times: give it \
             a file, /dev/null or a terminal, or leave --time out"
                .to_owned(),
        ))
    }

    fn rewind(&self) -> Result<(), TraceError> {
        let Self::File(input, start) = self else { return Ok(()) };
        let sought = seek(*input, SeekFrom::Start(*start));
        sought.map(drop).map_err(|error| TraceError::io(Path::new("standard input"))(error.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;

    fn command(words: &[&str]) -> Command {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        super::super::program::resolve(&words, std::env::var_os("PATH").as_deref()).unwrap()
    }

    #[test]
    fn the_time_is_the_programs_and_its_end_is_told() {
        let never = AtomicBool::new(false);
        let native = run(&command(&["sh", "-c", "sleep 0.2; exit 3"]), &never).unwrap();
        assert_eq!(native.status.code(), Some(3));
        assert!((200_000_000_000..20_000_000_000_000).contains(&native.time_ps));
        // A shell and its C library: some hundred KiB, far less than the whole machine.
        assert!((100 << 10..64 << 20).contains(&native.file_bytes), "{}", native.file_bytes);
    }

    #[test]
    fn a_run_that_is_cancelled_ends_and_has_no_time() {
        let at_once = AtomicBool::new(true);
        let refusal = run(&command(&["sleep", "600"]), &at_once).unwrap_err().to_string();
        assert!(refusal.contains("while the program was timed"), "{refusal}");
    }

    #[test]
    fn files_are_rewound_to_where_they_stood_and_pipes_refused() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        file.seek(std::io::SeekFrom::Start(4)).unwrap();
        let input = Input::look(file.as_fd()).unwrap();
        let mut rest = String::new();
        (&file).read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "456789");
        input.rewind().unwrap();
        assert_eq!((&file).stream_position().unwrap(), 4);
        let null = File::open("/dev/null").unwrap();
        assert!(matches!(Input::look(null.as_fd()).unwrap(), Input::Endless));
        let zero = File::open("/dev/zero").unwrap();
        assert!(Input::look(zero.as_fd()).is_err());
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        let refusal = Input::look(pipe.as_fd()).err().unwrap().to_string();
        assert!(refusal.contains("can be read only once"), "{refusal}");
    }
}
