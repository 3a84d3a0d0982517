//! The control socket: one request per message, one answer per message, text, perhaps a descriptor.
//!
//! Some requests (MAPS, WORK, NET and others) prove the runtime that the pager stands on: memory,
//! threads, thread-local storage, sockets, /proc and userfaultfd, each inside another program.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};

use farpool_kernel::receive_with_descriptor;
use rustix::net::RecvFlags;

use crate::reply::{Answer, reply};
use crate::watch::Host;
use crate::{dialing, paging, raw, warden};

/// Largest request; longer ones are truncated by the kernel and then not understood.
const MAX_REQUEST_BYTES: usize = 256;
/// Numbers that each thread of WORK adds up.
const WORK_NUMBERS: u64 = 200_000;

/// Serves one request about the program `host`. False when the other end is closed.
pub fn serve(socket: BorrowedFd, host: Host) -> bool {
    let mut bytes = [0; MAX_REQUEST_BYTES];
    let Ok((got, fd)) = receive_with_descriptor(socket, &mut bytes, RecvFlags::empty()) else {
        return false;
    };
    if got == 0 {
        return false;
    }
    let request = String::from_utf8_lossy(&bytes[..got]).into_owned();
    let (tag, request) = split_tag(request.trim());
    let answer = answer(request, fd, host);
    let (text, fd) = answer.unwrap_or_else(|error| (format!("ERROR {error}"), None));
    reply(socket, Ok((format!("{tag}{text}"), fd)));
    true
}

/// Splits off the `@NUMBER ` that a request may begin with. Its answer then begins so, too: a
/// keeper that gave up on an answer does not take it for that to the next request. Pure.
fn split_tag(request: &str) -> (&str, &str) {
    match request.find(' ') {
        Some(end) if request.starts_with('@') => request.split_at(end + 1),
        _ => ("", request),
    }
}

fn answer(request: &str, fd: Option<OwnedFd>, host: Host) -> Answer {
    match request {
        "PING" => Ok((format!("PONG {}", std::process::id()), None)),
        "MAPS" => maps(),
        "WORK" => work(),
        "NET" => net(),
        "ARGS" => Ok((arguments(), None)),
        "RANGES" => Ok((ranges(), None)),
        "UFFD" => userfaultfd(fd),
        "DIALER" => dialing::begin(fd).map(|()| ("NOTED".into(), None)),
        "MAKE" => paging::make(fd).map(|made| ("MADE".into(), Some(made))),
        start if start.split(' ').next() == Some("START") => {
            paging::start(host.pid, fd, start).map(|()| ("STARTED".into(), None))
        }
        "PAGEMAP" => paging::keep_pagemap(fd).map(|()| ("KEPT".into(), None)),
        "MEMORY" => paging::keep_memory(fd).map(|()| ("KEPT".into(), None)),
        "WARD" => warden::make(host).map(|made| ("WARDED".into(), Some(made))),
        "DISMISS" => {
            warden::dismiss();
            Ok(("DISMISSED".into(), None))
        }
        "CLAIM" => {
            paging::claim(fd).map(|is_mine| (if is_mine { "MINE" } else { "OTHER" }.into(), None))
        }
        "DISCLAIM" => {
            paging::disclaim();
            Ok(("DISCLAIMED".into(), None))
        }
        "INHERIT" => paging::inherit(fd).map(|()| ("INHERITED".into(), None)),
        "STANDING" => {
            paging::stand_still().map(|stood| (if stood { "MOVED" } else { "PASSED" }.into(), None))
        }
        "LEAVE" => paging::leave().map(|()| ("LEAVING".into(), None)),
        "PANIC" => panic!("asked to panic"),
        other => about_child(other),
    }
}

/// Handles a request with the number of a child.
fn about_child(request: &str) -> Answer {
    match request.split_once(' ') {
        Some(("CEDE", number)) => paging::cede(number).map(|memory| ("CEDED".into(), Some(memory))),
        Some(("TAKEN", number)) => paging::taken(number).map(|()| ("NOTED".into(), None)),
        Some(("RETURN", number)) => paging::take_back(number).map(|()| ("NOTED".into(), None)),
        _ => Err(format!("{request} is not known")),
    }
}

/// The program's mappings are this task's own.
fn maps() -> Answer {
    let text = std::fs::read_to_string("/proc/self/maps").map_err(|e| format!("maps: {e}"))?;
    Ok((format!("MAPS {}", text.lines().count()), None))
}

thread_local! {
    static SUM: Cell<u64> = const { Cell::new(0) };
}

/// Runs two threads that allocate, and add up in thread-local storage.
fn work() -> Answer {
    let add = |seed: u64| {
        let numbers: Vec<Box<u64>> = (0..WORK_NUMBERS).map(|n| Box::new(n + seed)).collect();
        numbers.iter().for_each(|n| SUM.with(|sum| sum.set(sum.get() + **n)));
        SUM.with(Cell::get)
    };
    let threads: Vec<_> = [0, 1].map(|seed| std::thread::spawn(move || add(seed))).into();
    let sums: Result<Vec<u64>, _> =
        threads.into_iter().map(std::thread::JoinHandle::join).collect();
    let total: u64 = sums.map_err(|_| "a thread ended badly".to_owned())?.iter().sum();
    let expected = WORK_NUMBERS * (WORK_NUMBERS - 1) + WORK_NUMBERS;
    if total == expected { Ok(("WORK ok".into(), None)) } else { Err(format!("sum {total}")) }
}

/// Sends a message over TCP and one over a Unix socket.
fn net() -> Answer {
    let run = || -> std::io::Result<Vec<u8>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut here = TcpStream::connect(listener.local_addr()?)?;
        let (mut there, _) = listener.accept()?;
        let (mut one, mut two) = std::os::unix::net::UnixStream::pair()?;
        let mut bytes = vec![0; 4];
        here.write_all(b"over")?;
        there.read_exact(&mut bytes)?;
        one.write_all(&bytes)?;
        two.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = run().map_err(|error| format!("sockets: {error}"))?;
    Ok((format!("NET {}", String::from_utf8_lossy(&bytes)), None))
}

/// Arguments, and the environment without the injector's own variables.
fn arguments() -> String {
    let arguments: Vec<String> = std::env::args().collect();
    let variables = std::env::vars().filter(|(name, _)| !name.starts_with("FARPOOL_"));
    let variables: Vec<String> =
        variables.map(|(name, value)| format!(" {name}={value}")).collect();
    format!("ARGS {}{}", arguments.join("|"), variables.concat())
}

fn ranges() -> String {
    paging::ranges().iter().map(|(start, end)| format!("{start:x}-{end:x} ")).collect()
}

fn userfaultfd(device: Option<OwnedFd>) -> Answer {
    let device = device.ok_or("UFFD wants a descriptor of /dev/userfaultfd")?;
    let made = raw::new_userfaultfd(&device).map_err(|e| format!("USERFAULTFD_IOC_NEW: {e}"))?;
    Ok(("UFFD ok".into(), Some(made)))
}

/// Makes another warden after the previous one was killed. If that fails the program is ended, as
/// if the keeper had been killed.
pub fn replace_warden(socket: BorrowedFd, host: Host) {
    match warden::make(host) {
        Ok(made) => reply(socket, Ok(("WARDEN".into(), Some(made)))),
        Err(error) => {
            farpool_pager::sys::say(&format!("{error}; the program is ended"));
            farpool_pager::sys::kill_program();
        }
    }
}
