//! Reads of pages with two copies, while one blade is slow.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use common::{Blades, Pages, drive_until_idle, finish, pattern};
use farpool_pool::{
    Address, Lane, PageError, PageRead, Pool, PoolConfig, Redundancy, SegmentHandle, SegmentPage,
};
use farpool_units::PAGE_BYTES;

const PAGES: u32 = 64;

/// Passes everything on to a blade, or nothing while it is shut.
struct Gate {
    address: Address,
    is_shut: Arc<(Mutex<bool>, Condvar)>,
}

impl Gate {
    fn before(blade: &Address) -> Gate {
        let Address::Tcp(target) = blade.clone() else { panic!("{blade} is no TCP address") };
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = format!("tcp://{}", listener.local_addr().expect("address"));
        let is_shut: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let shut = Arc::clone(&is_shut);
        // The threads end with the process, or with their connection.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let blade = TcpStream::connect(target).expect("connect");
                let pairs = [(&client, &blade), (&blade, &client)];
                for (from, to) in pairs.map(|it| (it.0.try_clone(), it.1.try_clone())) {
                    let (from, to) = (from.expect("clone"), to.expect("clone"));
                    let shut = Arc::clone(&shut);
                    std::thread::spawn(move || pass_on(from, to, &shut));
                }
            }
        });
        Gate { address: address.parse().expect("address"), is_shut }
    }

    fn set_shut(&self, is_shut: bool) {
        *self.is_shut.0.lock().expect("lock") = is_shut;
        self.is_shut.1.notify_all();
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, shut: &(Mutex<bool>, Condvar)) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let is_shut = shut.0.lock().expect("lock");
        drop(shut.1.wait_while(is_shut, |is_shut| *is_shut).expect("lock"));
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

fn pool(blades: &Blades, addresses: Vec<Address>) -> (Pool, SegmentHandle, Lane) {
    let config = PoolConfig {
        blades: addresses.into_iter().map(Into::into).collect(),
        seals_pages: true,
        redundancy: Redundancy::Copies(2),
        ..common::config(blades)
    };
    let pool = Pool::connect(config).expect("connect");
    let segment = common::allocate(&pool, 1);
    let lane = pool.lane().expect("lane");
    (pool, segment, lane)
}

fn write(lane: &mut Lane, segment: SegmentHandle) {
    common::write(lane, segment, &(0..PAGES).collect::<Vec<_>>(), 0);
}

/// Reads all pages one after the other; false if one is not what was written.
fn read_each(lane: &mut Lane, segment: SegmentHandle) -> Result<bool, PageError> {
    let each: Result<Vec<bool>, _> =
        (0..PAGES).map(|page| common::reads(lane, segment, &[page], 0)).collect();
    each.map(|each| each.into_iter().all(|is_right| is_right))
}

#[test]
fn a_read_that_one_blade_does_not_answer_is_answered_by_the_other() {
    let blades = Blades::start(&["tcp", "tcp"]);
    let gates: Vec<Gate> = blades.addresses.iter().map(Gate::before).collect();
    let addresses = gates.iter().map(|gate| gate.address.clone()).collect();
    let (pool, segment, mut lane) = pool(&blades, addresses);
    write(&mut lane, segment);
    assert_eq!(read_each(&mut lane, segment), Ok(true));
    let before = pool.hedged_reads();
    for gate in &gates {
        gate.set_shut(true);
        assert_eq!(read_each(&mut lane, segment), Ok(true));
        gate.set_shut(false);
        // Its answers arrive, and go nowhere.
        assert_eq!(read_each(&mut lane, segment), Ok(true));
    }
    assert!(pool.hedged_reads() > before, "one of the two was asked first");
    write(&mut lane, segment);
    assert_eq!(read_each(&mut lane, segment), Ok(true));
}

/// Memory goes back to its owner with the first answer: what the other blade says later is written
/// nowhere.
#[test]
fn a_late_answer_changes_nothing() {
    let blades = Blades::start(&["tcp", "tcp"]);
    let gates: Vec<Gate> = blades.addresses.iter().map(Gate::before).collect();
    let addresses = gates.iter().map(|gate| gate.address.clone()).collect();
    let (pool, segment, mut lane) = pool(&blades, addresses);
    write(&mut lane, segment);
    let mut local = Pages::of_patterns([!0]);
    let at = SegmentPage { segment, page: 5 };
    let mut late = 0;
    for gate in &gates {
        gate.set_shut(true);
        let read = PageRead { at, into: local.at_mut(0), token: 0 };
        // SAFETY: the page outlives the wait for its completion.
        unsafe { lane.read(&[read]) }.expect("submitted");
        assert_eq!(finish(&mut lane, 1), [Ok(())]);
        assert_eq!(*local.bytes(0), pattern(5));
        late += u32::from(!lane.is_idle());
        // SAFETY: the page is this test's again.
        unsafe { local.at_mut(0).write_bytes(77, PAGE_BYTES) };
        gate.set_shut(false);
        drive_until_idle(&mut lane);
        assert_eq!(*local.bytes(0), [77; PAGE_BYTES]);
    }
    assert!(late > 0 && pool.hedged_reads() > 0, "one of the two was asked first");
}

/// While there is one copy, nothing is kept of the reads that it answered.
#[test]
fn reads_of_the_last_copy_leave_nothing_behind() {
    let blades = Blades::start(&["tcp"]);
    let (_pool, segment, mut lane) = pool(&blades, blades.addresses.clone());
    write(&mut lane, segment);
    for _ in 0..20 {
        assert_eq!(read_each(&mut lane, segment), Ok(true));
    }
    let kept = format!("{lane:?}").matches("Asked {").count();
    assert!(kept < 10, "{kept} of {}", 20 * PAGES);
}
