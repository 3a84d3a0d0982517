//! Forks while other threads and signal handlers are active.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::memory::*;

const MIB: usize = 1 << 20;

/// Forks. The child does `work` and ends, and the parent waits for it.
pub fn fork_once(work: impl FnOnce()) {
    // SAFETY: the child calls nothing that another thread could have left locked, and ends with
    // _exit.
    match unsafe { libc::fork() } {
        -1 => different("fork"),
        0 => {
            work();
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: a live place for the status.
            while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1 {
                require(errno() == libc::EINTR, "waitpid");
            }
            require(status == 0, &format!("the child ended with {status:#x}"));
        }
    }
}

/// Waits until the test creates the file named by FARPOOL_CASE_GATE.
fn wait_for_gate() {
    const MOST: std::time::Duration = std::time::Duration::from_secs(60);
    println!("filled");
    let Some(gate) = std::env::var_os("FARPOOL_CASE_GATE") else { different("no gate") };
    let until = std::time::Instant::now() + MOST;
    while !std::path::Path::new(&gate).exists() {
        require(std::time::Instant::now() < until, "the gate opens");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Forks once the gate is open. The child has the memory, and so has the parent afterwards.
pub fn fork_at_gate() {
    let far = ballast();
    wait_for_gate();
    fork_once(|| far.check());
    far.check();
}

/// After the blade has died, a fork fails, as far memory cannot be shared with the child, and
/// existing memory stays right. The gate opens once the blade is dead.
pub fn fork_without_blade() {
    let far = ballast();
    wait_for_gate();
    for _ in 0..3 {
        // SAFETY: there is no child, or it only ends.
        match unsafe { libc::fork() } {
            -1 => require(errno() == libc::ENOMEM, "the error is ENOMEM"),
            // SAFETY: ends the child.
            0 => unsafe { libc::_exit(0) },
            _ => different("fork is refused"),
        }
        far.check();
    }
}

/// Memory that children do not inherit (MADV_DONTFORK: a JIT's heap, a guest's RAM) can be far like
/// any other. In a child nothing is mapped there, and what the child maps there is its own. After
/// MADV_DOFORK children inherit it again.
pub fn fork_unshared() {
    const BYTES: usize = 64 * MIB;
    let hidden = Filled::new(BYTES, 7);
    require(advise(hidden.start, BYTES, libc::MADV_DONTFORK) == 0, "MADV_DONTFORK");
    let far = ballast();
    let resident = resident_pages();
    require(
        resident < BYTES / PAGE,
        &format!("memory that children do not get stays local: {resident} pages are resident"),
    );
    let moved = Filled {
        start: remap(hidden.start, BYTES, BYTES + MIB, libc::MREMAP_MAYMOVE, 0),
        ..hidden
    };
    for _ in 0..2 {
        fork_once(|| {
            let mut there = 0_u8;
            let at = (moved.start + MIB) as *mut _;
            // SAFETY: asks whether a page is mapped, with room for one answer.
            let found = unsafe { libc::mincore(at, PAGE, &raw mut there) };
            require(found == -1 && errno() == libc::ENOMEM, "a child has nothing there");
            map(moved.start, BYTES, READ_WRITE, libc::MAP_FIXED);
            require(slice(moved.start, BYTES).iter().all(|byte| *byte == 0), "zeros there");
            Filled::at(moved.start, BYTES, 8).check();
            far.check();
        });
        moved.check();
    }
    require(advise(moved.start, BYTES, libc::MADV_DOFORK) == 0, "MADV_DOFORK");
    fork_once(|| moved.check());
    moved.check();
    far.check();
}

/// The number of resident pages of this process, by the kernel's count.
fn resident_pages() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(usize::MAX)
}

/// Does `work` while there is a child that does nothing.
pub fn fork_while(work: impl FnOnce()) {
    let Ok((mut end, begin)) = std::io::pipe() else { different("pipe") };
    // SAFETY: the child only reads and ends.
    match unsafe { libc::fork() } {
        -1 => different("fork"),
        0 => {
            drop(begin);
            let _ends = std::io::Read::read(&mut end, &mut [0]);
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) }
        }
        child => {
            work();
            drop(begin);
            let mut status = 0;
            // SAFETY: a live place for the status.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            require(waited == child && status == 0, "waitpid");
        }
    }
}

/// Pages that a fork shares while they are inaccessible (PROT_NONE) are moved out or stay, but are
/// never touched.
pub fn fork_no_access() {
    let far = ballast();
    let hidden = Filled::new(12 * MIB, 5);
    protect(hidden.start, hidden.bytes, libc::PROT_NONE);
    fork_once(|| {
        far.check();
        protect(hidden.start, hidden.bytes, READ_WRITE);
        hidden.check();
    });
    protect(hidden.start, hidden.bytes, READ_WRITE);
    hidden.check();
}

/// glibc clears the data of the parent's other threads in the child before any handler runs. The
/// data are among ordinary blocks of the heap, which must keep their contents.
pub fn fork_thread_data() {
    const BLOCK_WORDS: usize = 64;
    let (tell, told) = std::sync::mpsc::channel();
    let holder = std::thread::spawn(move || {
        // Beyond 32 keys a thread's data are in blocks of 512 bytes from calloc.
        let keys: Vec<libc::pthread_key_t> = (0..100)
            .map(|_| {
                let mut key = 0;
                // SAFETY: a live place for the key.
                let result = unsafe { libc::pthread_key_create(&raw mut key, None) };
                require(result == 0, "pthread_key_create");
                key
            })
            .collect();
        let mut blocks = Vec::new();
        for key in keys.iter().skip(40).step_by(8) {
            blocks.extend((0..40).map(|number| vec![number + 1_u64; BLOCK_WORDS]));
            // SAFETY: a key of this thread's own; the value is only stored.
            let result = unsafe { libc::pthread_setspecific(*key, blocks.as_ptr().cast()) };
            require(result == 0, "pthread_setspecific");
        }
        require(tell.send(blocks).is_ok(), "sending");
        loop {
            std::thread::park();
        }
    });
    let Ok(blocks) = told.recv() else { different("receiving") };
    let _ballast = ballast();
    fork_once(|| {
        for block in &blocks {
            require(
                block.iter().all(|word| *word == block[0] && *word != 0),
                "a block of the heap",
            );
        }
    });
    require(!holder.is_finished(), "the other thread is there all the while");
}

/// One thread holds glibc's lock of open files most of the time, and waits for a file's far buffer,
/// while another thread forks.
pub fn fork_stdio() {
    const FILES: usize = 200;
    static OVER: AtomicBool = AtomicBool::new(false);
    let buffers = map(0, FILES * PAGE, READ_WRITE, 0);
    let files: Vec<usize> = (0..FILES)
        .map(|number| {
            let buffer = buffers + number * PAGE;
            // SAFETY: a buffer that is never unmapped.
            unsafe {
                let file = libc::tmpfile();
                require(!file.is_null(), "tmpfile");
                let result = libc::setvbuf(file, buffer as *mut _, libc::_IOFBF, PAGE);
                require(result == 0, "setvbuf");
                file as usize
            }
        })
        .collect();
    let _ballast = ballast();
    let flusher = std::thread::spawn(move || {
        while !OVER.load(SeqCst) {
            // SAFETY: files that stay open; null means all of them.
            unsafe {
                for file in &files {
                    libc::fputc(1, *file as *mut libc::FILE);
                }
                libc::fflush(std::ptr::null_mut());
            }
        }
    });
    let retirer = std::thread::spawn(move || {
        while !OVER.load(SeqCst) {
            let errno = advise(buffers, FILES * PAGE, libc::MADV_PAGEOUT);
            require(errno == 0, "MADV_PAGEOUT");
        }
    });
    (0..100).for_each(|_| fork_once(|| {}));
    OVER.store(true, SeqCst);
    require(flusher.join().is_ok() && retirer.join().is_ok(), "a thread");
}

/// A signal handler that maps and unmaps memory does not run while the pager is stopped for a fork.
pub fn fork_signals() {
    extern "C" fn handle(_: libc::c_int) {
        let start = map(0, MIB, READ_WRITE, 0);
        slice(start, 1)[0] = 1;
        require(unmap(start, MIB) == 0, "munmap");
    }
    let kept = Filled::new(16 * MIB, 1);
    let ballast = ballast();
    let step = libc::timeval { tv_sec: 0, tv_usec: 500 };
    let timer = libc::itimerval { it_interval: step, it_value: step };
    // SAFETY: the handler makes plain system calls only.
    unsafe {
        let handler: extern "C" fn(libc::c_int) = handle;
        require(libc::signal(libc::SIGALRM, handler as usize) != libc::SIG_ERR, "signal");
        require(
            libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) == 0,
            "setitimer",
        );
    }
    for _ in 0..30 {
        slice(ballast.start, ballast.bytes).iter().step_by(16 * PAGE).for_each(|byte| {
            std::hint::black_box(*byte);
        });
        fork_once(|| {});
    }
    kept.check();
}
