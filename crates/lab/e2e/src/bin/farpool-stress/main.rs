//! A program that uses its memory in all the ways that programs do, and checks every page it reads.
//!
//! Each thread has its own regions and knows what every page must hold ([`region`]). It picks
//! operations at random ([`work`]) until the time is over or a file exists, then checks everything
//! once more. Exit codes: 0 all was right; 8 a system call failed unexpectedly; 9 wrong data.
//! `farpool-stress --mib 256 --threads 4 --seconds 5 --seed 1 --ops fork,mremap --until FILE`

#![allow(unreachable_pub, reason = "a program: nothing leaves the crate")]

mod io;
mod region;
mod rng;
mod sys;
mod work;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::rng::mix;
use crate::work::{Kind, Worker};

/// How often the time and the file are checked.
const LOOK_STEP: Duration = Duration::from_millis(20);

/// Set when workers are to stop.
static OVER: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Options {
    mib: usize,
    threads: usize,
    duration: Duration,
    seed: u64,
    kinds: Vec<Kind>,
    directory: std::path::PathBuf,
    progress: bool,
    /// The run also ends when this file exists.
    until: Option<std::path::PathBuf>,
}

fn main() {
    let options = match Options::from_arguments() {
        Ok(options) => options,
        Err(message) => {
            eprintln!("farpool-stress: {message}");
            std::process::exit(2);
        }
    };
    println!("seed {} pid {}", options.seed, std::process::id());
    let pages = options.mib * 256 / options.threads.max(1);
    let workers: Vec<_> = (0..options.threads)
        .map(|number| {
            let seed = mix(options.seed ^ mix(number as u64));
            let (kinds, directory) = (options.kinds.clone(), options.directory.clone());
            let progress = options.progress;
            std::thread::spawn(move || {
                let mut worker = Worker::new(seed, pages, kinds, &directory);
                if progress {
                    println!("filled");
                }
                while !OVER.load(Relaxed) {
                    worker.step();
                }
                worker.finish()
            })
        })
        .collect();
    wait(options.duration, options.until.as_deref());
    OVER.store(true, Relaxed);
    let mut steps = 0;
    for worker in workers {
        match worker.join() {
            Ok(count) => steps += count,
            Err(_) => std::process::exit(7),
        }
    }
    println!("ok {steps} operations");
}

/// Returns when the time is over or the file exists.
fn wait(duration: Duration, until: Option<&Path>) {
    let deadline = Instant::now() + duration;
    while Instant::now() < deadline && !until.is_some_and(Path::exists) {
        std::thread::sleep(LOOK_STEP);
    }
}

impl Options {
    fn from_arguments() -> Result<Options, String> {
        let mut options = Options {
            mib: 128,
            threads: 4,
            duration: Duration::from_secs(3),
            seed: 1,
            kinds: Kind::ALL.iter().map(|(_, kind)| *kind).collect(),
            directory: std::env::temp_dir(),
            progress: false,
            until: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(flag) = arguments.next() {
            if flag == "--progress" {
                options.progress = true;
                continue;
            }
            let value = arguments.next().ok_or(format!("{flag} needs a value"))?;
            let number =
                || value.parse::<u64>().map_err(|error| format!("{flag} {value}: {error}"));
            let small = || number().and_then(|n| usize::try_from(n).map_err(|e| e.to_string()));
            match flag.as_str() {
                "--mib" => options.mib = small()?,
                "--threads" => options.threads = small()?.max(1),
                "--seconds" => options.duration = Duration::from_secs(number()?),
                "--seed" => options.seed = number()?,
                "--dir" => options.directory = value.into(),
                "--until" => options.until = Some(value.into()),
                "--ops" => options.kinds = Kind::parse_list(&value)?,
                _ => return Err(format!("{flag} is not known")),
            }
        }
        Ok(options)
    }
}
