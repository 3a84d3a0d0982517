//! What a pool tells blades of its requests: somebody waits for what lanes ask for, and nobody for
//! what is moved.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use common::{Blades, allocate, connect, read, sample, write};
use farpool_pool::{Alone, BladeIndex, Mover, Step};
use farpool_wire::{Address, Opcode, Priority, split_head};

type Seen = Arc<Mutex<Vec<(Opcode, Priority)>>>;

/// Stands between a pool and a blade, and notes what passes.
fn tap(blade: &Address) -> (Address, Seen) {
    let Address::Tcp(blade) = *blade else { panic!("a blade on TCP") };
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let (address, seen) = (listener.local_addr().expect("address"), Seen::default());
    let noted = Arc::clone(&seen);
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let blade = TcpStream::connect(blade).expect("connect");
            let (from, to) =
                (blade.try_clone().expect("clone"), client.try_clone().expect("clone"));
            let noted = Arc::clone(&noted);
            std::thread::spawn(move || pass_on(client, blade, |bytes| note(bytes, &noted)));
            std::thread::spawn(move || pass_on(from, to, <[u8]>::len));
        }
    });
    (Address::Tcp(address), seen)
}

/// Passes on what arrives; `take` returns how much of it need not be seen again.
fn pass_on(mut from: TcpStream, mut to: TcpStream, take: impl Fn(&[u8]) -> usize) {
    let (mut buffer, mut unseen) = (vec![0; 1 << 16], Vec::new());
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        unseen.extend_from_slice(&buffer[..count]);
        unseen.drain(..take(&unseen));
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // The other side may be gone.
    let _ = to.shutdown(Shutdown::Both);
}

fn note(bytes: &[u8], seen: &Mutex<Vec<(Opcode, Priority)>>) -> usize {
    let mut taken = 0;
    while let Some(head) = split_head(&bytes[taken..]).expect("a request") {
        let end = taken + head.header.head_bytes() + head.header.pages_bytes();
        if end > bytes.len() {
            break;
        }
        seen.lock().unwrap().push((head.header.opcode, head.header.priority()));
        taken = end;
    }
    taken
}

#[test]
fn nobody_waits_for_what_is_moved() {
    let mut blades = Blades::start(&["tcp", "tcp"]);
    let taps: Vec<_> = blades.addresses.iter().map(tap).collect();
    blades.addresses = vec![taps[0].0.clone()];
    let pool = connect(&blades);
    let segment = allocate(&pool, 1);
    let mut lane = pool.lane().expect("lane");
    write(&mut lane, segment, &sample(1), 7);
    let pages_of = |at: usize| {
        let seen = taps[at].1.lock().unwrap();
        let of_pages = |(opcode, _): &&_| matches!(opcode, Opcode::Read | Opcode::Write);
        let mut pages: Vec<_> = seen.iter().filter(of_pages).copied().collect();
        pages.dedup();
        pages
    };
    let evicted = (Opcode::Write, Priority::Eviction);
    assert_eq!(pages_of(0), [evicted]);

    let new = pool.add_blade(&taps[1].0.clone().into()).expect("added");
    pool.set_leaving(BladeIndex(0), true);
    let mut mover = Mover::new(&pool);
    assert!(matches!(mover.step(BladeIndex(0), &Alone, || true), Ok(Step::Moved)));
    assert_eq!(pool.superpages_on(new), 1);
    assert_eq!(pages_of(0), [evicted, (Opcode::Read, Priority::Background)]);
    let moved = (Opcode::Write, Priority::Background);
    assert_eq!(pages_of(1), [moved]);

    let found = read(&mut lane, segment, &sample(1), 7);
    assert!(found.iter().all(|it| *it == Ok(true)));
    assert_eq!(pages_of(1), [moved, (Opcode::Read, Priority::Demand)]);
}
