//! A program of a given size that checks every byte it reads.
//!
//! It fills its memory, then reads runs of pages at random, at a steady pace, and rewrites some of
//! them. What a page must hold follows from its number and from how often it was written; the whole
//! page is compared at each read. Commands come as lines: `size BYTES`, `spoil` (flips one bit of
//! its own memory, to test that this is noticed), `end`. The end of its input means `end`, too. At
//! the end it checks all pages once more.

use std::io::{BufRead, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use farpool_policy::Rng;
use farpool_units::{PAGE_BYTES, at_most, exactly};
use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::parse_bytes;
use crate::sys::Mapping;
use crate::workload::mix;

/// Pages of one read: what a program does between two waits.
const RUN_PAGES: usize = 16;
/// Percent of the runs whose pages are rewritten after they are read.
const WRITE_PERCENT: u64 = 25;
/// How often it reports its state.
const SAY_PERIOD: Duration = Duration::from_millis(250);
/// Most delay that it catches up on: a longer pause has to show as a pause.
const BEHIND_MAX: Duration = Duration::from_millis(200);
/// Difference between neighbouring words of a page.
const WORD_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Arguments of the program.
#[derive(Debug, Clone, clap::Args)]
pub struct TenantArgs {
    /// Memory it begins with.
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub bytes: u64,
    /// Most memory that it may take [default: what it begins with].
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub bytes_max: Option<u64>,
    /// What it reads in a second.
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", default_value = "32MiB")]
    pub pace: u64,
    /// Seed of everything random in it.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
}

/// A line of its output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantReport {
    /// Memory it has now.
    pub bytes: u64,
    /// Bytes read and verified so far.
    pub checked_bytes: u64,
    /// Bytes written so far.
    pub written_bytes: u64,
    /// Longest time in microseconds that one run of 64 KiB took, read and perhaps rewritten, since
    /// the previous line.
    pub longest_us: u64,
    /// Whether it has ended, with all pages verified once more.
    pub ended: bool,
}

enum Command {
    Size(usize),
    Spoil,
    End,
}

/// Runs until the command `end` or the end of the input.
///
/// # Errors
/// Wrong data, memory that is refused, an unknown command.
pub fn tenant_main(args: &TenantArgs) -> Result<(), BenchError> {
    let (sender, commands) = channel();
    let reader = std::thread::Builder::new().name("commands".into());
    let read = move || {
        let lines = std::io::stdin().lock().lines().map_while(Result::ok);
        for line in lines.chain(std::iter::once("end".to_owned())) {
            if sender.send(line).is_err() {
                return;
            }
        }
    };
    reader.spawn(read).map_err(BenchError::os("start a thread"))?;
    let mut tenant = Tenant::new(args)?;
    tenant.run(&commands, &mut |report| {
        let line = serde_json::to_string(report).unwrap_or_default();
        // The process that started this one may be gone; the end of the input shows that.
        let _ = writeln!(std::io::stdout(), "{line}");
    })
}

struct Tenant {
    memory: Mapping,
    /// How often each page was written; 0 is a page never written.
    versions: Vec<u32>,
    pages: usize,
    seed: u64,
    pace_bytes_per_s: u64,
    rng: Rng,
    report: TenantReport,
    said: Instant,
}

impl Tenant {
    fn new(args: &TenantArgs) -> Result<Self, BenchError> {
        let pages = |bytes: u64| at_most::<usize, _>(bytes) / PAGE_BYTES;
        let first = pages(args.bytes).max(RUN_PAGES);
        let most = pages(args.bytes_max.unwrap_or(0)).max(first);
        let memory = Mapping::small_pages(most.saturating_mul(PAGE_BYTES))?;
        let mut tenant = Self {
            memory,
            versions: vec![0; most],
            pages: 0,
            seed: args.seed,
            pace_bytes_per_s: args.pace.max(1),
            rng: Rng::new(mix(args.seed)),
            report: TenantReport::default(),
            said: Instant::now(),
        };
        tenant.resize(first)?;
        Ok(tenant)
    }

    fn run(
        &mut self,
        commands: &Receiver<String>,
        say: &mut dyn FnMut(&TenantReport),
    ) -> Result<(), BenchError> {
        self.say(say, false);
        let step = Duration::from_secs(1).as_nanos() * u128::from(run_bytes());
        let step = step / u128::from(self.pace_bytes_per_s);
        let step = Duration::from_nanos(at_most(step));
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            due = (due + step).max(now.checked_sub(BEHIND_MAX).unwrap_or(now));
            match commands.recv_timeout(due.saturating_duration_since(now)) {
                Ok(line) => match parse(&line)? {
                    Command::Size(pages) => self.resize(pages)?,
                    Command::Spoil => words_of(self.memory.words_mut(), self.pages / 2)[0] ^= 1,
                    Command::End => break,
                },
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => self.work()?,
            }
            if self.said.elapsed() >= SAY_PERIOD {
                self.say(say, false);
            }
        }
        for page in 0..self.pages {
            self.check(page)?;
        }
        self.say(say, true);
        Ok(())
    }

    fn say(&mut self, say: &mut dyn FnMut(&TenantReport), ended: bool) {
        self.report.ended = ended;
        say(&self.report);
        self.report.longest_us = 0;
        self.said = Instant::now();
    }

    /// Reads and compares one run of pages, and rewrites it in [`WRITE_PERCENT`] of the calls.
    fn work(&mut self) -> Result<(), BenchError> {
        let random = self.rng.next_u64();
        let first = exactly::<usize, _>(random >> 8) % (self.pages - RUN_PAGES + 1);
        let started = Instant::now();
        for page in first..first + RUN_PAGES {
            self.check(page)?;
            if random % 100 < WRITE_PERCENT {
                self.write(page);
            }
        }
        let took_us = at_most(started.elapsed().as_micros());
        self.report.longest_us = self.report.longest_us.max(took_us);
        Ok(())
    }

    /// Fills new pages, or gives those beyond the new size up.
    fn resize(&mut self, pages: usize) -> Result<(), BenchError> {
        let pages = pages.clamp(RUN_PAGES, self.versions.len());
        let before = std::mem::replace(&mut self.pages, pages);
        for page in before..pages {
            self.write(page);
        }
        if pages < before {
            self.memory.give_up(pages..before).map_err(BenchError::os("give memory up"))?;
        }
        self.report.bytes = (pages * PAGE_BYTES) as u64;
        Ok(())
    }

    fn write(&mut self, page: usize) {
        self.versions[page] = self.versions[page].wrapping_add(1).max(1);
        let first = first_word(self.seed, page, self.versions[page]);
        for (at, word) in words_of(self.memory.words_mut(), page).iter_mut().enumerate() {
            *word = nth_word(first, at);
        }
        self.report.written_bytes += PAGE_BYTES as u64;
    }

    fn check(&mut self, page: usize) -> Result<(), BenchError> {
        let first = first_word(self.seed, page, self.versions[page]);
        let words = &self.memory.words()[page * PAGE_BYTES / 8..][..PAGE_BYTES / 8];
        if let Some(at) = (0..words.len()).find(|at| words[*at] != nth_word(first, *at)) {
            let detail = format!(
                "byte {} of page {page} holds {:#x}, not {:#x} as written",
                at * 8,
                words[at],
                nth_word(first, at)
            );
            return Err(BenchError::WrongData { workload: "tenant", detail });
        }
        self.report.checked_bytes += PAGE_BYTES as u64;
        Ok(())
    }
}

fn words_of(words: &mut [u64], page: usize) -> &mut [u64] {
    &mut words[page * PAGE_BYTES / 8..][..PAGE_BYTES / 8]
}

fn first_word(seed: u64, page: usize, version: u32) -> u64 {
    mix(mix(seed) ^ (page as u64) << 32 ^ u64::from(version))
}

fn nth_word(first: u64, at: usize) -> u64 {
    first.wrapping_add((at as u64).wrapping_mul(WORD_STEP))
}

fn run_bytes() -> u64 {
    (RUN_PAGES * PAGE_BYTES) as u64
}

fn parse(line: &str) -> Result<Command, BenchError> {
    let wrong = || BenchError::Arguments(format!("{line:?} is no command"));
    match line.split_once(' ') {
        Some(("size", bytes)) => {
            let bytes: usize = bytes.trim().parse().map_err(|_| wrong())?;
            Ok(Command::Size(bytes / PAGE_BYTES))
        }
        None if line == "spoil" => Ok(Command::Spoil),
        None if line == "end" => Ok(Command::End),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use farpool_units::MIB;

    fn told(lines: &[&str]) -> (Result<(), BenchError>, Vec<TenantReport>) {
        let args = TenantArgs { bytes: MIB, bytes_max: Some(3 * MIB), pace: 1 << 40, seed: 7 };
        let (sender, commands) = channel();
        lines.iter().for_each(|line| sender.send((*line).to_owned()).expect("it listens"));
        drop(sender);
        let mut tenant = Tenant::new(&args).expect("memory");
        let mut said = Vec::new();
        let result = tenant.run(&commands, &mut |report| said.push(*report));
        (result, said)
    }

    #[test]
    fn it_is_as_large_as_it_is_told_and_checks_all_at_its_end() {
        let (result, said) = told(&["size 3145728", "size 2097152", "size 2500000", "end"]);
        result.expect("all is right");
        let last = said.last().expect("a last line");
        assert!(last.ended && last.bytes == 2_500_000 / 4096 * 4096, "{last:?}");
        assert!(last.checked_bytes >= last.bytes && last.written_bytes >= 3 * MIB, "{last:?}");
        let (result, said) = told(&["size 99999999999"]);
        result.expect("it takes what it may");
        assert_eq!(said.last().map(|last| last.bytes), Some(3 * MIB));
    }

    #[test]
    fn one_wrong_bit_is_noticed() {
        let (result, said) = told(&["spoil", "end"]);
        let error = result.expect_err("a bit is wrong").to_string();
        assert!(error.contains("byte 0 of page 128"), "{error}");
        assert!(said.iter().all(|report| !report.ended));
    }

    #[test]
    fn what_is_no_command_is_refused() {
        for line in ["size", "size x", "end now", ""] {
            assert!(matches!(told(&[line]).0, Err(BenchError::Arguments(_))), "{line:?}");
        }
    }

    #[test]
    fn two_pages_or_two_versions_never_look_alike() {
        let mut seen = std::collections::BTreeSet::new();
        for page in 0..64 {
            for version in 1..16 {
                assert!(seen.insert(first_word(3, page, version)));
            }
        }
    }
}
