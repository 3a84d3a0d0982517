//! Full far memory, with allocations set to fail then.

use std::time::{Duration, Instant};

use crate::memory::*;

const MIB: usize = 1 << 20;
const REGION_BYTES: usize = 4 * MIB;
/// More regions than the blades of the tests have room for.
const MOST_REGIONS: usize = 64;
/// Pause between two steps, so that the keeper and the evictor can react.
const STEP: Duration = Duration::from_millis(30);
const PATIENCE: Duration = Duration::from_secs(60);

/// Fills memory until allocations fail, as they should.
pub fn fill_until_refused() {
    let regions = fill();
    // SAFETY: a plain allocation; the block is hidden from the optimizer and not used.
    let block = std::hint::black_box(unsafe { libc::malloc(256 * MIB) });
    require(block.is_null(), "malloc fails too");
    regions.iter().for_each(Filled::check);
    println!("refused after {}", regions.len());
}

/// Fills memory until allocations fail, then expects them to succeed again: far memory has room
/// once the file named by FARPOOL_CASE_GATE exists. A child that was forked while far memory was
/// full gets memory, too, and both have the same limit as before.
pub fn fill_until_given_back() {
    let before = data_limit();
    let regions = fill();
    println!("refused after {}", regions.len());
    // SAFETY: the child makes a few mappings and ends.
    let child = unsafe { libc::fork() };
    require(child >= 0, "fork");
    if child == 0 {
        await_memory(before);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let Some(gate) = std::env::var_os("FARPOOL_CASE_GATE") else { different("no gate") };
    wait_until("the gate opens", || std::path::Path::new(&gate).exists());
    await_memory(before);
    regions.iter().for_each(Filled::check);
    let mut status = 0;
    // SAFETY: waits for the child of this process.
    require(unsafe { libc::waitpid(child, &raw mut status, 0) } == child, "its end");
    require(status == 0, "the child got memory");
    println!("given back, and to its child");
}

fn fill() -> Vec<Filled> {
    let mut regions = Vec::new();
    for seed in 0..MOST_REGIONS {
        match region() {
            Some(at) => regions.push(Filled::at(at, REGION_BYTES, seed)),
            None => {
                require(errno() == libc::ENOMEM, "the error is ENOMEM");
                return regions;
            }
        }
        std::thread::sleep(STEP);
    }
    different("nothing was refused");
}

fn region() -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), REGION_BYTES, READ_WRITE, flags, -1, 0) };
    (at != libc::MAP_FAILED).then_some(at as usize)
}

/// Waits until an allocation succeeds and the limit is the same as before.
fn await_memory(limit: libc::rlim_t) {
    wait_until("memory is given", || region().is_some() && data_limit() == limit);
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        require(Instant::now() < until, what);
        std::thread::sleep(STEP);
    }
}

fn data_limit() -> libc::rlim_t {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one such structure.
    require(unsafe { libc::getrlimit(libc::RLIMIT_DATA, &raw mut limit) } == 0, "getrlimit");
    limit.rlim_cur
}
