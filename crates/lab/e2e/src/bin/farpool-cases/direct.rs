//! Reads without the page cache, for which the kernel transfers directly into a program's pages.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::forks::fork_while;
use crate::memory::*;

const MIB: usize = 1 << 20;
/// Pages per read.
const READ_PAGES: usize = 16;
/// The number of rounds. Each has its own child.
const ROUNDS: u8 = 20;

/// A file that holds `bytes` bytes of the value `n` for each round `n`.
fn rounds_file(bytes: usize) -> File {
    let path = std::env::temp_dir().join(format!("farpool-cases-{}", std::process::id()));
    let mut options = File::options();
    options.read(true).write(true).create_new(true).custom_flags(libc::O_DIRECT);
    let Ok(file) = options.open(&path) else { different("a file with O_DIRECT") };
    require(std::fs::remove_file(&path).is_ok(), "remove_file");
    let source = map(0, bytes, READ_WRITE, 0);
    for round in 0..ROUNDS {
        slice(source, bytes).fill(round);
        let offset = u64::from(round) * bytes as u64;
        require(file.write_all_at(slice(source, bytes), offset).is_ok(), "writing with O_DIRECT");
    }
    require(unmap(source, bytes) == 0, "munmap");
    file
}

/// A device writes to pages that a child shares, while they are moved out.
pub fn fork_direct() {
    static OVER: AtomicBool = AtomicBool::new(false);
    const BYTES: usize = MIB;
    let file = rounds_file(BYTES);
    let target = map(0, BYTES, READ_WRITE, 0);
    let _ballast = ballast();
    let retirer = std::thread::spawn(move || {
        while !OVER.load(SeqCst) {
            require(advise(target, BYTES, libc::MADV_PAGEOUT) == 0, "MADV_PAGEOUT");
        }
    });
    for round in 0..ROUNDS {
        fork_while(|| {
            for at in (0..BYTES).step_by(READ_PAGES * PAGE) {
                let pages = slice(target + at, READ_PAGES * PAGE);
                let offset = u64::from(round) * BYTES as u64 + at as u64;
                require(file.read_exact_at(pages, offset).is_ok(), "reading with O_DIRECT");
            }
            if slice(target, BYTES).iter().any(|byte| *byte != round) {
                wrong_data("a page that a device wrote to");
            }
        });
    }
    OVER.store(true, SeqCst);
    require(retirer.join().is_ok(), "a thread");
}
