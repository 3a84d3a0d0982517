//! The two jobs of a row, and the folder they work in.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use farpool_bench::stage::{self, Door, Launch, Running, Stage, progress};
use farpool_bench::{BenchError, python_program};

use crate::error::{During, Error, Stopped};
use crate::memory::Peak;
use crate::place::Place;
use crate::records::{self, Records};
use crate::redis::{self, ANSWER_PATIENCE, Beliefs, Deadline};
use crate::{Options, latency::Latencies};

/// Records of the Python job: about half of what redis holds.
const PYTHON_RECORDS: u64 = 40_000;
/// Lookups of the Python job.
const PYTHON_LOOKUPS: u64 = 20_000;
/// How long each job may take: all-local they need a few seconds, and the demo does not wait for
/// ever to see how slow the kernel's swap can be.
const PYTHON_PATIENCE: Duration = Duration::from_secs(90);
const REDIS_PATIENCE: Duration = Duration::from_secs(120);
/// How long redis may take to answer after its start.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// How often a starting redis is checked.
const START_POLL: Duration = Duration::from_millis(10);

/// The records, the number of requests and the stage of a demo.
#[derive(Debug)]
pub struct Workspace {
    pub records: Records,
    requests: u64,
    stage: Stage,
    /// Holds the stage's folder.
    _folder: TempDir,
}

/// Most anonymous memory each job had resident when all was local.
#[derive(Clone, Copy, Debug)]
pub struct Footprint {
    pub redis_bytes: u64,
    pub python_bytes: u64,
}

/// Faults that needed a fetch from a blade, as the keeper reports them.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub count: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// What a row measured, with the digests that must be equal in all rows.
#[derive(Clone, Debug)]
pub struct Results {
    pub load: Duration,
    pub requests_per_s: f64,
    pub gets: Latencies,
    pub scan: Duration,
    pub redis_peak_bytes: u64,
    pub faults: Option<Faults>,
    pub python: Result<PythonResults, Stopped>,
    /// Local memory that zram took for what redis had swapped.
    pub zram_bytes: Option<u64>,
    pub redis_digest: String,
}

/// What the Python job measured.
#[derive(Clone, Debug)]
pub struct PythonResults {
    pub took: Duration,
    pub peak_bytes: u64,
    pub digest: String,
}

struct RedisResults {
    load: Duration,
    mixed: redis::Mixed,
    scan: Duration,
    scan_digest: u64,
    peak_bytes: u64,
    zram_bytes: Option<u64>,
    faults: Option<Faults>,
}

impl Workspace {
    /// Collects the records into a folder of the demo's own.
    pub fn prepare(options: &Options) -> Result<Workspace, Error> {
        progress("collecting this machine's records");
        let folder = tempfile::Builder::new()
            .prefix(&stage::own_name())
            .rand_bytes(0)
            .tempdir_in(&options.folder)
            .during("making a folder for the records")?;
        let records = records::collect(folder.path().join("records"), options.records_bytes)?;
        let farpool = options.farpool.clone();
        let (patience, door) = (PYTHON_PATIENCE, Door::usual(&farpool));
        let stage = Stage { farpool, folder: folder.path().to_owned(), patience, door };
        Ok(Workspace { records, requests: options.requests, stage, _folder: folder })
    }

    /// Runs the row that all others are compared with. Also returns what its jobs had resident, of
    /// which the other rows' limits are shares.
    pub fn run_all_local(&self, say: &dyn Fn(&str)) -> Result<(Results, Footprint), Error> {
        let results =
            self.run(Place::Local, &Footprint { redis_bytes: 0, python_bytes: 0 }, say)?;
        let footprint = Footprint {
            redis_bytes: results.redis_peak_bytes,
            python_bytes: results.python.as_ref().map_or(0, |python| python.peak_bytes),
        };
        Ok((results, footprint))
    }

    /// Runs one row; `all` is what the jobs have resident when all is local.
    pub fn run(&self, place: Place, all: &Footprint, say: &dyn Fn(&str)) -> Result<Results, Error> {
        say("redis");
        let redis = self.redis(place.of_bytes(all.redis_bytes), all.redis_bytes)?;
        say("Python");
        let python = self.python(place.of_bytes(all.python_bytes), all.python_bytes)?;
        #[expect(clippy::cast_precision_loss, reason = "requests are far below 2^52")]
        let requests = redis.mixed.requests as f64;
        Ok(Results {
            load: redis.load,
            requests_per_s: requests / redis.mixed.took.as_secs_f64(),
            gets: redis.mixed.gets,
            scan: redis.scan,
            redis_peak_bytes: redis.peak_bytes,
            faults: redis.faults,
            python,
            zram_bytes: redis.zram_bytes,
            redis_digest: format!("{:016x}-{:016x}", redis.mixed.digest, redis.scan_digest),
        })
    }

    fn redis(&self, place: stage::Place, need_bytes: u64) -> Result<RedisResults, Error> {
        let socket = self.stage.folder.join("redis.sock");
        let mut launch = self.stage.launch(place, &redis_words(&socket), need_bytes)?;
        let log = self.quieten(&mut launch)?;
        let mut server = Running::start_as_given("redis-server", &mut launch.command)?;
        wait_ready(&mut server, &socket, &log)?;
        let peak = Peak::watch(server.id());
        let work = || -> Result<RedisResults, Error> {
            let mut beliefs = Beliefs::of(&self.records);
            let (until, records) = (Deadline::after(REDIS_PATIENCE), &self.records);
            let load = redis::load(&socket, records, until)?;
            let mixed = redis::mix(&socket, records, &mut beliefs, self.requests, until)?;
            let (scan, scan_digest) = redis::scan(&socket, records, &beliefs, until)?;
            let (peak_bytes, zram_bytes) = (peak.bytes(), launch.zram_bytes());
            Ok(RedisResults {
                load,
                mixed,
                scan,
                scan_digest,
                peak_bytes,
                zram_bytes,
                faults: None,
            })
        };
        let mut worked = work().map_err(|error| explained(error, &log));
        if worked.is_err() && place.is_swap() {
            let ended = server.check_alive().map_err(|error| launch.explained(error));
            let killed = ended.as_ref().err().and_then(stopped_by);
            worked = worked.map_err(|error| stopped_or(error, killed));
        }
        server.end();
        let faults = place.is_far().then(|| read_faults(&self.stage.stats_file()));
        Ok(RedisResults { faults: faults.flatten(), ..worked? })
    }

    fn python(
        &self,
        place: stage::Place,
        need_bytes: u64,
    ) -> Result<Result<PythonResults, Stopped>, Error> {
        let script = self.stage.folder.join("job.py");
        std::fs::write(&script, include_str!("job.py")).during("writing the Python job")?;
        let words = [
            python_program(),
            script.into(),
            self.records.path.clone().into(),
            PYTHON_RECORDS.to_string().into(),
            PYTHON_LOOKUPS.to_string().into(),
        ];
        let mut launch = self.stage.launch(place, &words, need_bytes)?;
        let log = self.quieten(&mut launch)?;
        launch.command.stdout(Stdio::piped());
        let started = Instant::now();
        let mut job = Running::start_as_given("python3", &mut launch.command)?;
        let peak = Peak::watch(job.id());
        let ended = job.wait(PYTHON_PATIENCE);
        let took = started.elapsed();
        let ended = ended.map_err(|error| launch.explained(error));
        let how = ended.as_ref().err().and_then(stopped_by);
        if let Some(how) = how {
            return Ok(Err(how));
        }
        ended.map_err(|error| explained(error.into(), &log))?;
        let digest = read_digest(&mut job)?;
        Ok(Ok(PythonResults { took, peak_bytes: peak.bytes(), digest }))
    }

    /// Sends the program's output to a file, to be shown if it fails. Returns the file's path.
    fn quieten(&self, launch: &mut Launch) -> Result<PathBuf, Error> {
        let path = self.stage.folder.join("program.log");
        let file = std::fs::File::create(&path).during("making a log file")?;
        let also = file.try_clone().during("making a log file")?;
        launch.command.stdin(Stdio::null()).stdout(file).stderr(also);
        Ok(path)
    }
}

/// Returns how the kernel's swap stopped redis, if that is the cause of `error`.
fn stopped_or(error: Error, killed: Option<Stopped>) -> Error {
    match (error, killed) {
        (error @ (Error::Interrupted | Error::WrongData(_)), _) => error,
        (_, Some(how)) => Error::Stopped(how),
        (Error::TooSlow(seconds), None) => Error::Stopped(Stopped::TooSlow(seconds)),
        (error, None) => error,
    }
}

fn stopped_by(error: &BenchError) -> Option<Stopped> {
    match error {
        BenchError::TooSlow { .. } => Some(Stopped::TooSlow(PYTHON_PATIENCE.as_secs())),
        BenchError::OutOfMemory { .. } => Some(Stopped::OutOfMemory),
        _ => None,
    }
}

/// The digest in the JSON that the Python job wrote.
fn read_digest(job: &mut Running) -> Result<String, Error> {
    let mut text = String::new();
    if let Some(mut output) = job.stdout() {
        output.read_to_string(&mut text).during("reading the Python job's output")?;
    }
    let answer: Value = serde_json::from_str(&text).unwrap_or_default();
    let digest = answer["digest"].as_str().map(str::to_owned);
    digest.ok_or_else(|| Error::Program(format!("the Python job says {:?}", text.trim())))
}

/// Returns the command line of a redis in memory only, reached through a socket in the demo's own
/// folder.
fn redis_words(socket: &Path) -> Vec<OsString> {
    let folder = socket.parent().unwrap_or(Path::new("/")).as_os_str().to_owned();
    let mut words: Vec<OsString> =
        ["redis-server", "--port", "0", "--save", "", "--appendonly"].map(OsString::from).to_vec();
    words.extend(["no", "--daemonize", "no", "--unixsocket"].map(OsString::from));
    words.extend([socket.as_os_str().to_owned(), "--dir".into(), folder]);
    words
}

fn wait_ready(server: &mut Running, socket: &Path, log: &Path) -> Result<(), Error> {
    let deadline = Instant::now() + START_PATIENCE;
    while !redis::answers(socket) {
        server.check_alive().map_err(|error| explained(error.into(), log))?;
        if Instant::now() > deadline {
            return Err(explained(Error::Program("redis-server does not answer".into()), log));
        }
        thread::sleep(START_POLL);
    }
    Ok(())
}

/// Adds the last line that the program wrote: usually the reason, unless it is still running.
fn explained(error: Error, log: &Path) -> Error {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    match error {
        Error::Program(what) => Error::Program(format!("{what}: {}", last.trim())),
        Error::Io { what, source } if source.kind() == io::ErrorKind::WouldBlock => {
            Error::Program(format!("{what}: no answer for {} s", ANSWER_PATIENCE.as_secs()))
        }
        Error::Io { what, source } => Error::Program(format!("{what}: {source}: {}", last.trim())),
        error => error,
    }
}

/// Reads the fault latency from the statistics that the keeper wrote.
fn read_faults(stats: &Path) -> Option<Faults> {
    let stats: Value = serde_json::from_str(&std::fs::read_to_string(stats).ok()?).ok()?;
    let number = |name: &str| stats["total"][name].as_u64();
    Some(Faults {
        count: number("demand_fetches")?,
        p50_ns: number("fetch_p50_ns")?,
        p99_ns: number("fetch_p99_ns")?,
    })
}
