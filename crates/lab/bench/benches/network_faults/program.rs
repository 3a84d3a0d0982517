//! The program under test: it touches pages at random, all the time, on some threads; reads the
//! whole page and compares every word; and rewrites some. Each thread says how long its longest
//! touch of a page took, and when that ended.

use std::io::Write;
use std::time::Duration;

use anyhow::bail;
use farpool_kernel::monotonic_ns;
use farpool_policy::Rng;
use farpool_units::{MIB, PAGE_BYTES, exactly};

/// Threads that touch pages.
pub(crate) const THREADS: usize = 2;
/// How often a thread speaks; a longer touch is told as soon as it ends.
pub(crate) const SAY: Duration = Duration::from_millis(20);
const WORDS: usize = PAGE_BYTES / 8;
/// One page in so many is rewritten.
const WRITE_ONE_IN: u32 = 4;

/// A line of the program: the longest touch since the thread's previous line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    pub(crate) thread: usize,
    /// Of the system's monotonic clock.
    pub(crate) ended_ns: u64,
    pub(crate) took_ns: u64,
    /// Pages that were read and compared since the previous line.
    pub(crate) pages: u64,
}

impl Touch {
    fn line(self) -> String {
        let Touch { thread, ended_ns, took_ns, pages } = self;
        format!("touch {thread} {ended_ns} {took_ns} {pages}\n")
    }

    /// None: another line.
    pub(crate) fn read(line: &str) -> Option<Touch> {
        let mut words = line.strip_prefix("touch ")?.split(' ');
        let thread = words.next()?.parse().ok()?;
        let mut number = || words.next()?.parse().ok();
        Some(Touch { thread, ended_ns: number()?, took_ns: number()?, pages: number()? })
    }
}

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u64; WORDS]);

/// Runs until it is ended from outside, or reads a wrong byte.
pub(crate) fn run(mib: u64) -> anyhow::Result<()> {
    let pages: usize = exactly::<usize, _>(mib * MIB) / PAGE_BYTES / THREADS;
    let threads: Vec<_> =
        (0..THREADS).map(|thread| std::thread::spawn(move || touch(thread, pages))).collect();
    for thread in threads {
        match thread.join() {
            Ok(ended) => ended?,
            Err(_) => bail!("a thread panicked"),
        }
    }
    Ok(())
}

fn touch(thread: usize, pages: usize) -> anyhow::Result<()> {
    let mut random = Rng::new(thread as u64 + 1);
    let mut memory = vec![Page([0; WORDS]); pages];
    let mut versions = vec![1_u64; pages];
    memory.iter_mut().enumerate().for_each(|(page, words)| fill(words, page, 1));
    say("filled\n")?;
    let mut watch = Watch::new(thread);
    loop {
        let page: usize = exactly(random.below(exactly(pages)));
        let version = versions[page];
        watch.touched();
        let mut words = memory[page].0.iter().enumerate();
        let wrong = words.find(|(at, word)| **word != content(page, version, *at));
        watch.touched();
        if let Some((at, word)) = wrong {
            say(&format!("WRONG word {at} of page {page}, version {version}: {word:#x}\n"))?;
            bail!("wrong data");
        }
        if random.below(WRITE_ONE_IN) == 0 {
            versions[page] = version + 1;
            watch.touched();
            fill(&mut memory[page], page, version + 1);
            watch.touched();
        }
        watch.longest.pages += 1;
        if Duration::from_nanos(watch.before_ns - watch.said_ns) >= SAY {
            watch.say()?;
        }
    }
}

/// Times each touch, from the end of the one before it, so that nothing is left out.
struct Watch {
    before_ns: u64,
    said_ns: u64,
    longest: Touch,
}

impl Watch {
    fn new(thread: usize) -> Self {
        let now_ns = monotonic_ns();
        let longest = Touch { thread, ended_ns: now_ns, took_ns: 0, pages: 0 };
        Watch { before_ns: now_ns, said_ns: now_ns, longest }
    }

    fn touched(&mut self) {
        let now_ns = monotonic_ns();
        let took_ns = now_ns - std::mem::replace(&mut self.before_ns, now_ns);
        if took_ns > self.longest.took_ns {
            (self.longest.ended_ns, self.longest.took_ns) = (now_ns, took_ns);
        }
    }

    fn say(&mut self) -> std::io::Result<()> {
        say(&self.longest.line())?;
        (self.longest.took_ns, self.longest.pages, self.said_ns) = (0, 0, self.before_ns);
        Ok(())
    }
}

fn fill(words: &mut Page, page: usize, version: u64) {
    words.0.iter_mut().enumerate().for_each(|(at, word)| *word = content(page, version, at));
}

fn content(page: usize, version: u64, at: usize) -> u64 {
    let first = (page as u64) << 32 ^ version;
    first.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(at as u64)
}

/// In one piece, so that the lines of threads do not mix.
fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.flush()
}
