//! Guests that speak as Firecracker does, with real memory and a real userfaultfd, on a real blade.
//! Each is a process of its own, for a server may kill it.

mod common;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{AMPLE, Blade, Guest, News, await_go, pattern, read_page, role, say, stop};
use farpool_kernel::{MappedMemory, send_with_descriptors};
use farpool_testkit::{skip, wait_until};
use farpool_uffd::{Uffd, features, register_mode};
use farpool_units::{PAGE_BYTES, exactly};
use farpool_vmm::firecracker::{Options, serve};
use farpool_vmm::wire::firecracker::{MESSAGE_BYTES_MAX, Mapping, encode};
use farpool_vmm::{Image, Listening, Store};
use rustix::mm::Advice;
use rustix::net::SendFlags;

/// Pages of the image.
const PAGES: u32 = 6000;
/// The guest's memory is in two regions, as with more than 3 GiB: the first pages come second.
const SPLIT: u32 = 4500;
/// Threads of a guest that touch its memory.
const PROCESSORS: u32 = 4;
/// What a guest has touched before it drops something of it, and something else.
const TOUCHED: std::ops::Range<u32> = 0..2000;
const DROPPED_TOUCHED: std::ops::Range<u32> = 1000..1200;
const DROPPED_UNTOUCHED: std::ops::Range<u32> = 4600..4700;

fn can_run() -> bool {
    match Uffd::open(features::EVENT_REMOVE, true) {
        Ok(_) => true,
        Err(error) => {
            skip(&error.to_string());
            false
        }
    }
}

fn image(blade: &Blade) -> Arc<Image> {
    let path = blade.folder.path().join("memory.img");
    let mut file = File::create_new(&path).expect("a file");
    (0..PAGES).for_each(|page| file.write_all(&pattern(page)).expect("written"));
    let store = Store::connect(blade.config()).expect("a blade");
    let mut loader = store.begin(PAGES).expect("room");
    let file = File::open(&path).expect("a file");
    loader.put_file(&file, 0, 0, PAGES, |_| true).expect("room");
    let image = loader.finish().expect("stored");
    assert_eq!(image.stored_pages(), PAGES - PAGES.div_ceil(3));
    image
}

/// Runs a test beside a server, which ends with it.
fn beside_server(blade: &Blade, options: Options, test: impl FnOnce(&Path, &News)) {
    beside_server_of(&image(blade), blade, options, test);
}

fn beside_server_of(
    image: &Arc<Image>,
    blade: &Blade,
    options: Options,
    test: impl FnOnce(&Path, &News),
) {
    let path = blade.folder.path().join("firecracker.sock");
    let listening = Listening::bind(&path).expect("it listens");
    let (news, (stop, ender)) = (News::default(), stop());
    std::thread::scope(|scope| {
        let tell = |line: &str| news.tell(line);
        let server = scope.spawn(move || {
            let served = serve(&listening, image, options, &stop, &tell);
            drop(listening);
            served
        });
        test(&path, &news);
        drop(ender);
        server.join().expect("no panic").expect("it served");
    });
    assert!(!path.exists(), "nothing is left");
}

fn guest(how: &str, path: &Path) -> Guest {
    Guest::start("a_guest", &[how, path.to_str().expect("a name")])
}

/// What a guest of Firecracker's has: its memory, registered, and its message.
struct Machine {
    memory: [MappedMemory; 2],
    uffd: Uffd,
    message: Vec<u8>,
}

impl Machine {
    fn new() -> Machine {
        let uffd = Uffd::open(features::EVENT_REMOVE, true).expect("it could before");
        let pages = [PAGES - SPLIT, SPLIT];
        let memory = pages.map(|pages| {
            MappedMemory::anonymous(exactly::<usize, _>(pages) * PAGE_BYTES).expect("memory")
        });
        let mut mappings = Vec::new();
        for (memory, first_page) in memory.iter().zip([SPLIT, 0]) {
            let start = memory.start().as_ptr() as usize;
            uffd.register(start, memory.bytes(), register_mode::MISSING).expect("registered");
            mappings.push(Mapping {
                base_host_virt_addr: start as u64,
                size: memory.bytes() as u64,
                offset: u64::from(first_page) * 4096,
                page_size: Some(4096),
                page_size_kib: Some(4096),
            });
        }
        Machine { memory, uffd, message: encode(&mappings) }
    }

    fn address(&self, page: u32) -> usize {
        let (memory, within) = match page.checked_sub(SPLIT) {
            Some(within) => (&self.memory[0], within),
            None => (&self.memory[1], page),
        };
        memory.start().as_ptr() as usize + exactly::<usize, _>(within) * PAGE_BYTES
    }

    /// Drops pages, as a balloon does.
    fn drop_pages(&self, pages: std::ops::Range<u32>) {
        let memory = &self.memory[usize::from(pages.start < SPLIT)];
        let start = self.address(pages.start) - memory.start().as_ptr() as usize;
        let bytes = pages.len() * PAGE_BYTES;
        // SAFETY: nobody has a reference into the memory.
        unsafe { memory.advise(start..start + bytes, Advice::LinuxDontNeed) }.expect("dropped");
    }

    fn must_hold(&self, page: u32, expected: &[u8; PAGE_BYTES]) {
        if read_page(self.address(page)) != *expected {
            say(&format!("wrong: page {page}"));
            std::process::exit(1);
        }
    }

    /// Touches all pages by several threads, each in another order, and checks every byte.
    fn check_all(&self, zeros: &[std::ops::Range<u32>]) {
        std::thread::scope(|scope| {
            for processor in 0..PROCESSORS {
                scope.spawn(move || {
                    for nth in 0..PAGES {
                        let page = match processor {
                            0 => nth,
                            1 => PAGES - 1 - nth,
                            _ => (nth * 1009 + processor * 2000) % PAGES,
                        };
                        let is_zero = zeros.iter().any(|range| range.contains(&page));
                        let expected = if is_zero { [0; PAGE_BYTES] } else { pattern(page) };
                        self.must_hold(page, &expected);
                    }
                });
            }
        });
    }
}

/// Not a test of its own: the guests of the tests below.
#[test]
fn a_guest() {
    let Some(role) = role() else { return };
    let mut machine = Machine::new();
    let mut mapping = Mapping {
        base_host_virt_addr: machine.address(SPLIT) as u64,
        size: u64::from(PAGES) * 4096,
        offset: 4096,
        page_size: Some(4096),
        page_size_kib: None,
    };
    match role[0].as_str() {
        "outside" => machine.message = encode(&[mapping]),
        "huge" => {
            mapping.page_size = Some(2 << 20);
            machine.message = encode(&[mapping]);
        }
        _ => {}
    }
    let socket = UnixStream::connect(&role[1]).expect("a server");
    let message = &machine.message;
    let send = |bytes: &[u8]| {
        let fds = [machine.uffd.as_fd()];
        let sent = send_with_descriptors(&socket, bytes, &fds, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
    };
    match role[0].as_str() {
        "late descriptor" => {
            let (begin, end) = message.split_at(message.len() - 1);
            begin.chunks(7).for_each(|it| (&socket).write_all(it).expect("sent"));
            send(end);
        }
        "early descriptor" => {
            send(&message[..1]);
            (&socket).write_all(&message[1..]).expect("sent");
        }
        _ => send(message),
    }
    match role[0].as_str() {
        "alone" => be_left_alone(machine),
        "half" => touch_half(machine),
        "outside" | "huge" => forget_userfaultfd(machine).check_all(&[]),
        _ => {
            TOUCHED.for_each(|page| machine.must_hold(page, &pattern(page)));
            machine.drop_pages(DROPPED_TOUCHED);
            machine.drop_pages(DROPPED_UNTOUCHED);
            machine.check_all(&[DROPPED_TOUCHED, DROPPED_UNTOUCHED]);
            say("right");
            await_go();
        }
    }
}

/// Waits until its server has gone, and then needs it no more.
fn be_left_alone(machine: Machine) {
    say("there");
    await_go();
    machine.check_all(&[]);
    machine.drop_pages(DROPPED_TOUCHED);
    machine.check_all(&[DROPPED_TOUCHED]);
    say("right");
    await_go();
}

/// Touches the first half, waits, and touches the rest.
fn touch_half(machine: Machine) {
    (0..SPLIT / 2).for_each(|page| machine.must_hold(page, &pattern(page)));
    let machine = forget_userfaultfd(machine);
    say("half");
    await_go();
    machine.check_all(&[]);
    say("right");
    await_go();
}

/// Leaves the userfaultfd to the server alone: when that closes it, what is missing reads as zeros.
fn forget_userfaultfd(machine: Machine) -> Machine {
    let other = Uffd::open(0, true).expect("another one");
    Machine { uffd: other, ..machine }
}

#[test]
fn every_page_of_several_guests_is_right() {
    if !can_run() {
        return;
    }
    let blade = Blade::start();
    let image = image(&blade);
    beside_server_of(&image, &blade, Options::default(), |path, news| {
        let mut guests =
            ["plain", "early descriptor", "late descriptor"].map(|how| guest(how, path));
        guests.iter_mut().for_each(Guest::must_be_right);
        news.await_lines("has all of its memory", 3);
    });
    assert!(blade.used_bytes() > 0, "the image is there");
    drop(image);
    wait_until("the image is given back", AMPLE, || blade.used_bytes() == 0);
}

#[test]
fn a_guest_that_has_all_its_memory_needs_no_server() {
    if !can_run() {
        return;
    }
    let blade = Blade::start();
    let mut other = None;
    beside_server(&blade, Options { beforehand: true }, |path, news| {
        let mut alone = guest("alone", path);
        alone.await_word("there");
        news.await_line("has all of its memory");
        other = Some(alone);
        // One that touches and drops while it gets its memory.
        let mut busy = guest("plain", path);
        busy.must_be_right();
    });
    let mut alone = other.expect("a guest");
    alone.go();
    alone.must_be_right();
}

#[test]
fn what_is_no_guest_is_turned_away_and_others_are_served() {
    if !can_run() {
        return;
    }
    let blade = Blade::start();
    beside_server(&blade, Options::default(), |path, news| {
        let connect = || UnixStream::connect(path).expect("a server");
        let send = |bytes: &[u8], fd: &dyn AsFd| {
            let socket = connect();
            send_with_descriptors(&socket, bytes, &[fd.as_fd()], SendFlags::empty()).expect("sent");
            socket
        };
        let mut held = Vec::new();
        let pipe = std::io::pipe().expect("a pipe");
        held.push(send(b"GET / HTTP/1.1\r\n\r\n", &pipe.0));
        news.await_line("does not speak Firecracker's page fault protocol");
        let mut long = connect();
        // The server may close before all is sent.
        let _ = long.write_all(&vec![b'['; MESSAGE_BYTES_MAX + 9]);
        news.await_line("the message is longer than");
        let machine = Machine::new();
        let mut without = connect();
        without.write_all(&machine.message).expect("sent");
        without.shutdown(std::net::Shutdown::Write).expect("shut");
        news.await_line("came without a userfaultfd");
        held.push(send(&machine.message, &pipe.0));
        news.await_line("is no userfaultfd");
        let mut half = connect();
        half.write_all(&machine.message[..20]).expect("sent");
        drop(half);
        news.await_line("in the middle of a message");
        for (how, said) in [
            ("outside", "it is the memory file of another snapshot"),
            ("huge", "only pages of 4096 bytes can be served"),
        ] {
            guest(how, path).must_be_killed();
            news.await_line(said);
        }
        guest("plain", path).must_be_right();
    });
}

#[test]
fn a_guest_that_dies_is_forgotten() {
    if !can_run() {
        return;
    }
    let blade = Blade::start();
    beside_server(&blade, Options::default(), |path, news| {
        let mut dying = guest("half", path);
        dying.await_word("half");
        dying.kill();
        dying.ended();
        news.await_line(&format!("process {} has ended", dying.pid()));
        guest("plain", path).must_be_right();
    });
}

#[test]
fn a_guest_whose_blade_is_lost_is_killed_and_reads_no_zeros() {
    if !can_run() {
        return;
    }
    let mut blade = Blade::start();
    let image = image(&blade);
    let path: PathBuf = blade.folder.path().join("firecracker.sock");
    let (news, (stop, ender)) = (News::default(), stop());
    let listening = Listening::bind(&path).expect("it listens");
    std::thread::scope(|scope| {
        let tell = |line: &str| news.tell(line);
        let (image, stop, listening) = (&image, &stop, &listening);
        scope.spawn(move || serve(listening, image, Options::default(), stop, &tell));
        let mut bereft = guest("half", &path);
        bereft.await_word("half");
        blade.stop();
        bereft.go();
        bereft.must_be_killed();
        news.await_line("of the guest's memory is lost");
        drop(ender);
    });
}

#[test]
fn a_server_that_ends_leaves_no_guest_that_would_read_zeros() {
    if !can_run() {
        return;
    }
    let blade = Blade::start();
    let mut left = None;
    beside_server(&blade, Options::default(), |path, _| {
        let mut guest = guest("half", path);
        guest.await_word("half");
        left = Some(guest);
    });
    left.expect("a guest").must_be_killed();
}
