//! Samples all hosts once a second, on a thread of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_hosts::{Host, Hosts, LinkCounters};
use farpool_kernel::lock;
use farpool_units::{PAGE_BYTES_U64, at_most};

use super::log::Log;
use super::organiser::{NodeStatus, Organiser};
use super::programs::{Told, told_of};
use super::timeline::{HostSample, Role, Sample};
use crate::Error;

/// Time between two samples.
const PERIOD: Duration = Duration::from_secs(1);
/// Less than this does not count as borrowed: a page or two that have not been touched for long.
const NOTHING_BYTES: u64 = 1 << 20;

/// The scenario's input to the sampler.
#[derive(Debug, Default)]
pub struct Watched {
    /// Programs: host, process of the keeper, what they say.
    pub programs: Vec<(usize, u32, Arc<Mutex<Told>>)>,
    /// Hosts whose links are down.
    pub cut_off: BTreeSet<usize>,
}

/// The sampling thread, which ends when this is dropped.
#[derive(Debug)]
pub struct Sampler {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Eye {
    farpool: PathBuf,
    hosts: Arc<Hosts>,
    organiser: Arc<dyn Organiser>,
    watched: Arc<Mutex<Watched>>,
    before: Option<(Instant, Vec<LinkCounters>)>,
    /// The last report of each node, by its name.
    known: BTreeMap<String, NodeStatus>,
}

impl Sampler {
    pub fn start(
        farpool: PathBuf,
        hosts: Arc<Hosts>,
        organiser: Arc<dyn Organiser>,
        watched: Arc<Mutex<Watched>>,
        log: Arc<Log>,
    ) -> Result<Sampler, Error> {
        let (stop, stopped) = channel::<()>();
        let mut eye =
            Eye { farpool, hosts, organiser, watched, before: None, known: BTreeMap::new() };
        let work = move || {
            let mut due = Instant::now();
            loop {
                if let Some(hosts) = eye.look() {
                    log.sample(Sample { at: log.elapsed(), hosts });
                }
                due = (due + PERIOD).max(Instant::now());
                let pause = due.saturating_duration_since(Instant::now());
                if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("sampler".into()).spawn(work);
        let thread =
            thread.map_err(|source| Error::Io { what: "starting a thread".into(), source })?;
        Ok(Sampler { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // If it panicked, nothing can be done about it here.
            let _ = thread.join();
        }
    }
}

impl Eye {
    /// Takes one sample. Returns None the first time, because traffic is the difference to the last
    /// sample.
    fn look(&mut self) -> Option<Vec<HostSample>> {
        let counters = self.hosts.iter().map(|host| host.counters().unwrap_or_default());
        let counters: Vec<LinkCounters> = counters.collect();
        let (now, far) = (Instant::now(), far_bytes(&self.farpool));
        let told = self.hear();
        let (then, before) = self.before.replace((now, counters.clone()))?;
        let passed = now.duration_since(then);
        let per_s = |new: u64, old: u64| rate(new.saturating_sub(old), passed);
        let sample = |(at, host): (usize, &Host)| {
            let (new, old) = (counters.get(at)?, before.get(at)?);
            let (borrowed_bytes, checked_bytes) = self.of_guests(at, &far);
            let node = self.known.get(host.name());
            let lent_bytes = node.and_then(|node| node.lent_bytes).unwrap_or(0);
            let offered_bytes = node.filter(|it| it.is_up).map_or(0, |node| node.offered_bytes);
            let used_bytes = host.group().and_then(|group| group.used_bytes()).unwrap_or(0);
            let role = match node.and_then(|node| node.class) {
                _ if lock(&self.watched).cut_off.contains(&at) => Role::CutOff,
                Some(class) => class,
                None => Role::of(offered_bytes, lent_bytes, borrowed_bytes),
            };
            Some(HostSample {
                role,
                own_bytes: used_bytes.saturating_sub(lent_bytes),
                offered_bytes,
                lent_bytes: (node.is_none() || told.contains(host.name())).then_some(lent_bytes),
                borrowed_bytes,
                in_bytes_per_s: per_s(new.received_bytes, old.received_bytes),
                out_bytes_per_s: per_s(new.sent_bytes, old.sent_bytes),
                checked_bytes,
            })
        };
        self.hosts.iter().enumerate().map(sample).collect()
    }

    /// Asks who lends what. Returns the names of the nodes that report it now.
    fn hear(&mut self) -> BTreeSet<String> {
        let nodes = self.organiser.status(&self.hosts).map(|status| status.nodes);
        let told = nodes.unwrap_or_default().into_iter().filter(|(_, it)| it.lent_bytes.is_some());
        let told: BTreeMap<String, NodeStatus> = told.collect();
        let names = told.keys().cloned().collect();
        self.known.extend(told);
        names
    }

    /// What a host's programs have elsewhere, and what they have checked.
    fn of_guests(&self, host: usize, far: &BTreeMap<u32, u64>) -> (u64, u64) {
        let watched = lock(&self.watched);
        let ours = || watched.programs.iter().filter(|(at, _, _)| *at == host);
        let borrowed = ours().filter_map(|(_, keeper, _)| far.get(keeper)).sum();
        let checked = ours().map(|(_, _, told)| told_of(told).report.checked_bytes).sum();
        (if borrowed < NOTHING_BYTES { 0 } else { borrowed }, checked)
    }
}

fn rate(bytes: u64, passed: Duration) -> u64 {
    let ms = passed.as_millis().max(1);
    at_most(u128::from(bytes) * 1000 / ms)
}

/// The far memory of each run, by the process id of its keeper. Runs that do not report it are left
/// out.
fn far_bytes(farpool: &std::path::Path) -> BTreeMap<u32, u64> {
    let output = Command::new(farpool).args(["stat", "--json"]).stdin(Stdio::null()).output();
    let output = output.map(|output| output.stdout).unwrap_or_default();
    let told: serde_json::Value = serde_json::from_slice(&output).unwrap_or_default();
    let programs = told["programs"].as_array().cloned().unwrap_or_default();
    let far = programs.iter().filter_map(|program| {
        let keeper = u32::try_from(program["keeper_pid"].as_u64()?).ok()?;
        Some((keeper, program["total"]["far_pages"].as_u64()? * PAGE_BYTES_U64))
    });
    far.collect()
}
