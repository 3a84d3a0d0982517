//! Monitors that speak as Cloud Hypervisor does: one that hands a snapshot off, and others that are
//! restored from it, with real memory and a real userfaultfd, on a real blade.

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    Blade, Ender, Guest, News, await_go, pattern, read_page, role, say, stop, write_page,
};
use farpool_kernel::{MappedMemory, memfd_of, receive_with_descriptor, send_with_descriptors};
use farpool_testkit::skip;
use farpool_uffd::{Message, Uffd, features, register_mode};
use farpool_units::{PAGE_BYTES, exactly};
use farpool_vmm::cloud_hypervisor::{Options, serve};
use farpool_vmm::wire::cloud_hypervisor::{
    Command, FAULT_ROLE, HEAD_BYTES, Range, Request, Response,
};
use farpool_vmm::{Listening, Store};
use rustix::fs::FallocateFlags;
use rustix::net::{RecvFlags, SendFlags};

/// Slots of the guest: number, first address, pages, and first page in the slot's file.
const SLOTS: [(u32, u64, u32, u32); 2] = [(4, 0, 3000, 0), (1, 4 << 30, 1500, 3000)];
const PAGES: u32 = 4500;
const STATE: &[u8] = b"{\"cpus\": [\"any\", \"bytes\"]}";

fn can_run() -> bool {
    match Uffd::open(features::MISSING_SHMEM, true) {
        Ok(_) => true,
        Err(error) => {
            skip(&error.to_string());
            false
        }
    }
}

fn config() -> Vec<u8> {
    let mappings = SLOTS.map(|(slot, gpa, pages, first)| {
        let (size, file_offset) = (u64::from(pages) * 4096, u64::from(first) * 4096);
        serde_json::json!({
            "slot": slot, "gpa": gpa, "size": size, "file_offset": file_offset,
            "zone_id": "mem0", "virtio_mem": false,
        })
    });
    let config = serde_json::json!({
        "vm_config": {"cpus": {"boot_vcpus": 4}},
        "memory_manager_data": {"guest_ram_mappings": mappings},
    });
    config.to_string().into_bytes()
}

/// The page of the pattern that a slot begins with: the image has them by address.
fn first_of(slot: u32) -> u32 {
    if slot == SLOTS[0].0 { 0 } else { SLOTS[0].2 }
}

fn file_of(slot: u32) -> File {
    let (_, _, pages, first) = SLOTS.into_iter().find(|it| it.0 == slot).expect("a slot");
    let file = memfd_of("guest", u64::from(first + pages) * 4096).expect("memory");
    let file = File::from(file);
    for page in 0..pages {
        let bytes = pattern(first_of(slot) + page);
        file.write_all_at(&bytes, u64::from(first + page) * 4096).expect("written");
    }
    file
}

/// Sends a request, and waits for its answer.
fn ask(mut socket: &UnixStream, command: Command, payload: &[u8], fd: Option<&File>) -> Response {
    let head = Request { command, length: payload.len() as u64 }.encode();
    socket.write_all(&head).expect("sent");
    match fd {
        Some(fd) => {
            let sent = send_with_descriptors(socket, payload, &[fd.as_fd()], SendFlags::empty());
            assert_eq!(sent, Ok(payload.len()));
        }
        None => socket.write_all(payload).expect("sent"),
    }
    let mut head = [0; HEAD_BYTES];
    socket.read_exact(&mut head).expect("an answer");
    Response::decode(&head).expect("an answer")
}

fn must(socket: &UnixStream, command: Command, payload: &[u8], fd: Option<&File>) {
    assert_eq!(ask(socket, command, payload, fd), Response::DONE, "{command}");
}

/// Hands a snapshot off, until just before its end.
fn hand_off_all_but_end(path: &Path) -> UnixStream {
    let socket = UnixStream::connect(path).expect("a server");
    must(&socket, Command::Start, &[], None);
    for (slot, ..) in SLOTS {
        must(&socket, Command::MemoryFd, &slot.to_le_bytes(), Some(&file_of(slot)));
    }
    must(&socket, Command::Config, &config(), None);
    must(&socket, Command::State, STATE, None);
    socket
}

struct Daemon {
    news: News,
    snapshot: PathBuf,
    target: PathBuf,
}

/// Runs a test beside a server, which ends with it.
fn beside_server(
    blade: &mut Blade,
    options: Options,
    test: impl FnOnce(&Daemon, &mut Blade, Ender),
) {
    let folder = blade.folder.path();
    let (snapshot, target) = (folder.join("snapshot.sock"), folder.join("restore.sock"));
    let listening = Listening::bind(&snapshot).expect("it listens");
    let store = Store::connect(blade.config()).expect("a blade");
    let daemon = Daemon { news: News::default(), snapshot, target };
    let (stop, ender) = stop();
    std::thread::scope(|scope| {
        let daemon = &daemon;
        let server = scope.spawn(move || {
            let tell = |line: &str| daemon.news.tell(line);
            serve(&listening, &daemon.target, &store, options, &stop, &tell, &|_| ())
        });
        test(daemon, blade, ender);
        server.join().expect("no panic").expect("it served");
    });
    assert!(!daemon.snapshot.exists(), "nothing is left");
}

fn monitor(how: &str, target: &Path) -> Guest {
    Guest::start("a_monitor", &[how, target.to_str().expect("a name")])
}

/// Not a test of its own: the monitors of the tests below, each with a guest.
#[test]
fn a_monitor() {
    let Some(role) = role() else { return };
    let _ = std::fs::remove_file(&role[1]);
    let listener = UnixListener::bind(&role[1]).expect("it listens");
    let (mut main, _) = listener.accept().expect("a server");
    assert_eq!(heard(&mut main, Command::Start), b"");
    let mut slots = Vec::new();
    for _ in SLOTS {
        slots.push(receive_memory(&mut main));
    }
    assert_eq!(heard(&mut main, Command::Config), config());
    let (mut faults, _) = listener.accept().expect("a second connection");
    let mut announced = [0; 2];
    faults.read_exact(&mut announced).expect("a role");
    assert_eq!(announced, FAULT_ROLE);
    // As Cloud Hypervisor: no other listener, nor another guest, at this socket.
    drop(listener);
    let machine = Machine::new(slots);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| machine.serve_faults(faults, &is_over));
        expect(&mut main, Command::State, |payload| {
            assert_eq!(payload, STATE);
            // Devices look at the guest's memory before they are there.
            machine.check(1);
        });
        let end = head(&mut main);
        assert_eq!(end.command, Command::Complete);
        main.write_all(&Response::DONE.encode()).expect("sent");
        if role[0] == "half" {
            (0..PAGES / 2).for_each(|page| machine.check(page));
            say("half");
            await_go();
        }
        machine.check_all();
        machine.write_and_drop();
        say("right");
        await_go();
        is_over.store(true, Ordering::Relaxed);
    });
}

fn head(socket: &mut UnixStream) -> Request {
    let mut head = [0; HEAD_BYTES];
    socket.read_exact(&mut head).expect("a request");
    Request::decode(&head).expect("a request")
}

fn heard(socket: &mut UnixStream, command: Command) -> Vec<u8> {
    let mut heard = Vec::new();
    expect(socket, command, |payload| heard = payload.to_vec());
    heard
}

/// Takes a request, and answers that it is done.
fn expect(socket: &mut UnixStream, command: Command, take: impl FnOnce(&[u8])) {
    let request = head(socket);
    assert_eq!(request.command, command);
    let mut payload = vec![0; exactly(request.length)];
    socket.read_exact(&mut payload).expect("a payload");
    take(&payload);
    socket.write_all(&Response::DONE.encode()).expect("sent");
}

fn receive_memory(socket: &mut UnixStream) -> (u32, File) {
    let request = head(socket);
    assert_eq!((request.command, request.length), (Command::MemoryFd, 4));
    let mut slot = [0; 4];
    let received = receive_with_descriptor(&*socket, &mut slot, RecvFlags::WAITALL);
    let (count, descriptor) = received.expect("memory");
    assert_eq!(count, 4);
    socket.write_all(&Response::DONE.encode()).expect("sent");
    (u32::from_le_bytes(slot), descriptor.expect("memory").into())
}

/// A guest whose memory is shared with the server.
struct Machine {
    /// Pages of the pattern that a slot begins with, its memory and its file.
    slots: Vec<(u32, MappedMemory, File)>,
    uffd: Uffd,
}

impl Machine {
    fn new(files: Vec<(u32, File)>) -> Machine {
        let uffd = Uffd::open(features::MISSING_SHMEM, true).expect("it could before");
        let map = |(slot, file): (u32, File)| {
            let (_, _, pages, first) = SLOTS.into_iter().find(|it| it.0 == slot).expect("a slot");
            let bytes = exactly::<usize, _>(pages) * PAGE_BYTES;
            let offset = u64::from(first) * 4096;
            let memory = MappedMemory::shared(&file, offset, bytes).expect("mapped");
            let start = memory.start().as_ptr() as usize;
            uffd.register(start, bytes, register_mode::MISSING).expect("registered");
            (slot, memory, file)
        };
        Machine { slots: files.into_iter().map(map).collect(), uffd }
    }

    /// Asks for each page that is missing, until it is over or the server has gone.
    fn serve_faults(&self, mut socket: UnixStream, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Relaxed) {
            let mut messages = [Message::default(); 1];
            let read = self.uffd.read(&mut messages);
            let Some(address) = read.ok().and_then(|it| it.first()?.event().page_address) else {
                std::thread::yield_now();
                continue;
            };
            let range = Range { gpa: self.gpa_of(address), length: 4096 };
            let request = Request { command: Command::PageFault, length: 16 };
            socket.write_all(&request.encode()).expect("sent");
            socket.write_all(&range.encode()).expect("sent");
            let mut head = [0; HEAD_BYTES];
            if socket.read_exact(&mut head).is_err()
                || Response::decode(&head) != Ok(Response::DONE)
            {
                // What waits goes on waiting.
                return;
            }
            self.uffd.wake(address, PAGE_BYTES).expect("woken");
        }
    }

    fn gpa_of(&self, address: usize) -> u64 {
        let within = |memory: &MappedMemory| {
            let within = address.checked_sub(memory.start().as_ptr() as usize)?;
            (within < memory.bytes()).then_some(within as u64)
        };
        let found = self.slots.iter().find_map(|(slot, memory, _)| Some((slot, within(memory)?)));
        let (slot, within) = found.expect("memory of the guest");
        SLOTS.into_iter().find(|it| it.0 == *slot).expect("a slot").1 + within
    }

    fn address(&self, page: u32) -> usize {
        let is_of = |slot: u32, memory: &MappedMemory| {
            let within = exactly::<usize, _>(page.checked_sub(first_of(slot))?) * PAGE_BYTES;
            (within < memory.bytes()).then_some(memory.start().as_ptr() as usize + within)
        };
        let found = self.slots.iter().find_map(|(slot, memory, _)| is_of(*slot, memory));
        found.expect("memory of the guest")
    }

    fn check(&self, page: u32) {
        self.must_hold(page, &pattern(page));
    }

    fn must_hold(&self, page: u32, expected: &[u8; PAGE_BYTES]) {
        if read_page(self.address(page)) != *expected {
            say(&format!("wrong: page {page}"));
            std::process::exit(1);
        }
    }

    /// Touches all pages by several threads, each in another order, and checks every byte.
    fn check_all(&self) {
        std::thread::scope(|scope| {
            for processor in 0..4 {
                scope.spawn(move || {
                    for nth in 0..PAGES {
                        self.check(match processor {
                            0 => nth,
                            1 => PAGES - 1 - nth,
                            _ => (nth * 1009 + processor * 2000) % PAGES,
                        });
                    }
                });
            }
        });
    }

    /// What the guest writes stays; what it drops, as a balloon does, is zeros.
    fn write_and_drop(&self) {
        let mine = [7; PAGE_BYTES];
        (0..100).for_each(|page| write_page(self.address(page), &mine));
        let (_, _, file) = self.slots.iter().find(|it| it.0 == SLOTS[0].0).expect("a slot");
        let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, holes, 50 * 4096, 20 * 4096).expect("dropped");
        for page in 0..100 {
            let expected = if (50..70).contains(&page) { [0; PAGE_BYTES] } else { mine };
            self.must_hold(page, &expected);
        }
    }
}

#[test]
fn guests_are_restored_from_what_was_handed_off() {
    if !can_run() {
        return;
    }
    for beforehand in [false, true] {
        let options = Options { beforehand, resume: true };
        beside_server(&mut Blade::start(), options, |daemon, _, _ender| {
            let sender = hand_off_all_but_end(&daemon.snapshot);
            must(&sender, Command::CompletePaused, &[], None);
            daemon.news.await_line("its guest is paused");
            let mut first = monitor("half", &daemon.target);
            first.await_word("half");
            daemon.news.await_line("has a guest restored, running");
            let mut second = monitor("all", &daemon.target);
            second.must_be_right();
            first.go();
            first.must_be_right();
            daemon.news.await_lines("needs no more of its guest's memory", 2);
        });
    }
}

#[test]
fn what_is_no_hand_off_is_refused_and_the_next_one_is_taken() {
    if !can_run() {
        return;
    }
    beside_server(&mut Blade::start(), Options::default(), |daemon, _, _ender| {
        let connect = || UnixStream::connect(&daemon.snapshot).expect("a server");
        let refused = |said: &str, command, payload: &[u8], fd: Option<&File>| {
            let socket = connect();
            must(&socket, Command::Start, &[], None);
            assert_eq!(ask(&socket, command, payload, fd), Response::Error, "{said}");
            daemon.news.await_line(said);
        };
        connect().write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
        daemon.news.await_line("does not speak Cloud Hypervisor's migration protocol");
        refused("0 descriptors came", Command::MemoryFd, &[0; 4], None);
        refused("1 descriptors came", Command::State, b"s", Some(&file_of(1)));
        refused("State comes where", Command::State, b"s", None);
        refused("is not as Cloud Hypervisor writes it", Command::Config, b"{}", None);
        refused("its memory was not handed over", Command::Config, &config(), None);
        refused("sent through the socket", Command::Memory, &[], None);
        let long = Request { command: Command::Config, length: u64::MAX }.encode();
        let mut socket = connect();
        socket.write_all(&long).expect("sent");
        daemon.news.await_line("more than 16777216 are not taken");
        drop(hand_off_all_but_end(&daemon.snapshot));
        daemon.news.await_line("in the middle of a message");
        let given_up = hand_off_all_but_end(&daemon.snapshot);
        must(&given_up, Command::Abandon, &[], None);
        daemon.news.await_line("was given up");
        let short = connect();
        must(&short, Command::Start, &[], None);
        for (slot, ..) in SLOTS {
            let file = File::from(memfd_of("short", 4096).expect("memory"));
            must(&short, Command::MemoryFd, &slot.to_le_bytes(), Some(&file));
        }
        must(&short, Command::Config, &config(), None);
        must(&short, Command::State, STATE, None);
        assert_eq!(ask(&short, Command::Complete, &[], None), Response::Error);
        daemon.news.await_line("its file is too short");
        must(&hand_off_all_but_end(&daemon.snapshot), Command::Complete, &[], None);
        daemon.news.await_line("its guest runs");
        monitor("all", &daemon.target).must_be_right();
    });
}

#[test]
fn a_monitor_that_refuses_or_dies_is_told_and_the_next_one_is_served() {
    if !can_run() {
        return;
    }
    beside_server(&mut Blade::start(), Options::default(), |daemon, _, _ender| {
        must(&hand_off_all_but_end(&daemon.snapshot), Command::Complete, &[], None);
        let listener = UnixListener::bind(&daemon.target).expect("it listens");
        let (mut refusing, _) = listener.accept().expect("a server");
        assert_eq!(head(&mut refusing).command, Command::Start);
        refusing.write_all(&Response::Error.encode()).expect("sent");
        daemon.news.await_line("Cloud Hypervisor refuses Start");
        drop(listener);
        let mut dying = monitor("half", &daemon.target);
        dying.await_word("half");
        dying.kill();
        dying.ended();
        daemon.news.await_line("needs no more of its guest's memory");
        monitor("all", &daemon.target).must_be_right();
    });
}

#[test]
fn a_guest_whose_blade_is_lost_is_killed_and_reads_no_zeros() {
    if !can_run() {
        return;
    }
    beside_server(&mut Blade::start(), Options::default(), |daemon, blade, _ender| {
        must(&hand_off_all_but_end(&daemon.snapshot), Command::Complete, &[], None);
        let mut bereft = monitor("half", &daemon.target);
        bereft.await_word("half");
        blade.stop();
        bereft.go();
        bereft.must_be_killed();
        daemon.news.await_line("of the guest's memory is lost");
    });
}

#[test]
fn a_server_that_ends_leaves_no_guest_that_waits_for_ever() {
    if !can_run() {
        return;
    }
    let mut left = None;
    beside_server(&mut Blade::start(), Options::default(), |daemon, _, _ender| {
        must(&hand_off_all_but_end(&daemon.snapshot), Command::Complete, &[], None);
        let mut monitor = monitor("half", &daemon.target);
        monitor.await_word("half");
        left = Some(monitor);
    });
    left.expect("a monitor").must_be_killed();
}
