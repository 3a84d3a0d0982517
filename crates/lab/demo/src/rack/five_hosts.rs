//! Five hosts with what runs on them.
//!
//! Invariant: everything that is started here is owned here, and ends in the order of the fields:
//! programs, then daemons, then the hosts with whatever is left on them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farpool_bench::stage::{check_interrupted, own_name};
use farpool_hosts::{Hosts, Wiring};
use farpool_kernel::lock;
use tempfile::TempDir;

use super::checks::Checks;
use super::log::{Log, SharedScreen};
use super::organiser::{Organiser, Status};
use super::plan::{Plan, Program};
use super::programs::{Daemon, Role, StartedProgram, limit_words, tenant_words};
use super::sampler::{Sampler, Watched};
use super::timeline::Source;
use super::{A, Options, Variant};
use crate::Error;
use crate::error::During;

/// How many hosts there are.
const HOSTS: usize = 5;
/// Time between two checks of a condition.
const STEP: Duration = Duration::from_millis(50);
/// Time between two checks of a condition that asks the organiser.
const ASK_STEP: Duration = Duration::from_millis(200);
/// How long a daemon may take to say that it is ready, and a program to fill its memory.
pub const START_PATIENCE: Duration = Duration::from_secs(60);

/// The rack while its scenario goes on.
#[derive(Debug)]
pub struct Rack {
    programs: Vec<StartedProgram>,
    nodes: BTreeMap<usize, Daemon>,
    controller: Option<Daemon>,
    _sampler: Sampler,
    watched: Arc<Mutex<Watched>>,
    organiser: Arc<dyn Organiser>,
    pub log: Arc<Log>,
    pub checks: Checks,
    pub plan: Plan,
    options: Options,
    folder: TempDir,
    hosts: Arc<Hosts>,
}

impl Rack {
    /// Makes the hosts; nothing runs on them but the controller, if there is one.
    pub fn start(
        options: &Options,
        variant: Variant,
        screen: &SharedScreen,
    ) -> Result<Rack, Error> {
        let plan = options.plan.clone();
        let builder = Hosts::builder(HOSTS, Wiring::Bridge).memory_limit_bytes(plan.host_bytes);
        let hosts = Arc::new(builder.make()?);
        let folder = tempfile::Builder::new()
            .prefix(&own_name())
            .rand_bytes(0)
            .tempdir_in(&options.folder)
            .during("making a folder for the rack")?;
        let organiser = variant.organiser(&options.farpool, folder.path(), &hosts)?;
        let names = hosts.iter().map(|host| host.name().to_owned()).collect();
        let log = Arc::new(Log::new(organiser.name(), names, Arc::clone(screen)));
        let watched = Arc::<Mutex<Watched>>::default();
        let sampler = Sampler::start(
            options.farpool.clone(),
            Arc::clone(&hosts),
            Arc::clone(&organiser),
            Arc::clone(&watched),
            Arc::clone(&log),
        )?;
        let mut rack = Rack {
            programs: Vec::new(),
            nodes: BTreeMap::new(),
            controller: None,
            _sampler: sampler,
            watched,
            organiser,
            log,
            checks: Checks::default(),
            plan,
            options: options.clone(),
            folder,
            hosts,
        };
        rack.start_controller()?;
        Ok(rack)
    }

    pub fn name(&self, host: usize) -> String {
        self.hosts[host].name().to_owned()
    }

    pub fn address(&self, host: usize) -> String {
        self.hosts[host].address().to_string()
    }

    pub fn organiser(&self) -> &dyn Organiser {
        &*self.organiser
    }

    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// What the far programs of A or of B, companions included, ask the rack for.
    pub fn asked_bytes(&self, host: usize) -> u64 {
        let own = if host == A { self.plan.of_a } else { self.plan.of_b };
        let companions = self.options.companions.iter().filter(|it| it.host == host);
        own.quota_bytes + companions.map(|it| it.limits.quota_bytes).sum::<u64>()
    }

    pub fn done(&self, text: &str) {
        self.log.event(Source::Done, text);
    }

    pub fn status(&self) -> Result<Status, Error> {
        self.organiser.status(&self.hosts)
    }

    /// Starts or restarts the controller. Returns false if the rack has none.
    pub fn start_controller(&mut self) -> Result<bool, Error> {
        let Some(command) = self.organiser.controller(&self.hosts) else {
            return Ok(false);
        };
        self.controller = Some(Daemon::start("controller", command, self.folder.path())?);
        self.wait("the controller to be ready", START_PATIENCE, |rack| {
            Ok(rack.controller.as_ref().filter(|it| it.is_ready()).map(|_| ()))
        })?;
        Ok(true)
    }

    pub fn has_controller(&self) -> bool {
        self.controller.is_some()
    }

    /// Kills the controller with SIGKILL. Returns false if the rack has none.
    pub fn kill_controller(&mut self) -> bool {
        let Some(mut controller) = self.controller.take() else {
            return false;
        };
        controller.running.kill();
        true
    }

    /// Starts a host's daemon.
    pub fn join(&mut self, host: usize, donate_bytes: u64) -> Result<(), Error> {
        let name = self.name(host);
        let command = self.organiser.node(&self.hosts[host], donate_bytes);
        let daemon = Daemon::start(&format!("node-{name}"), command, self.folder.path())?;
        self.nodes.insert(host, daemon);
        self.wait(&format!("{name}'s daemon to be ready"), START_PATIENCE, |rack| {
            if let Some(daemon) = rack.nodes.get_mut(&host) {
                daemon.running.check_alive()?;
                return Ok(daemon.is_ready().then_some(()));
            }
            Ok(None)
        })
    }

    /// Asks a host's daemon to end in order.
    pub fn ask_node_to_end(&mut self, host: usize) {
        if let Some(daemon) = self.nodes.get(&host) {
            daemon.running.ask_to_end();
        }
    }

    /// Starts a program with all of its memory local. Returns once the memory is filled.
    pub fn start_own(&mut self, name: &str, host: usize, bytes: u64) -> Result<(), Error> {
        let mut command = self.hosts[host].command(&self.options.farpool);
        let pace = self.plan.pace_bytes_per_s / 8;
        command.args(tenant_words(bytes, bytes, pace, self.seed()));
        let role = Role { name, host, is_far: false, pace_bytes_per_s: pace };
        self.cast(&role, command)?;
        self.wait_filled(name)
    }

    /// Starts a program with a limit on its local memory, and the companions that the options have
    /// for its host.
    pub fn start_far(&mut self, name: &str, host: usize, program: &Program) -> Result<(), Error> {
        let words =
            tenant_words(program.bytes, program.bytes, self.plan.pace_bytes_per_s, self.seed());
        let farpool = self.options.farpool.clone().into_os_string();
        let words: Vec<OsString> =
            std::iter::once(farpool).chain(words.into_iter().map(OsString::from)).collect();
        let pace_bytes_per_s = self.plan.pace_bytes_per_s;
        let role = Role { name, host, is_far: true, pace_bytes_per_s };
        self.start_run(&role, program, &words)?;
        let companions: Vec<_> =
            self.options.companions.iter().filter(|it| it.host == host).cloned().collect();
        for companion in companions {
            let name = format!("{}'s companion", self.name(host));
            let role = Role { name: &name, host, is_far: true, pace_bytes_per_s: 0 };
            self.start_run(&role, &companion.limits, &companion.words)?;
        }
        self.wait_filled(name)
    }

    fn start_run(
        &mut self,
        role: &Role<'_>,
        limits: &Program,
        words: &[OsString],
    ) -> Result<(), Error> {
        let mut command = self.organiser.run(&self.hosts[role.host]);
        command.args(limit_words(limits, self.plan.rate_bytes_per_s));
        command.arg("--stats").arg(self.stats_file()).arg("--").args(words);
        self.cast(role, command)
    }

    fn stats_file(&self) -> PathBuf {
        self.folder.path().join(format!("stats-{}.json", self.programs.len()))
    }

    fn seed(&self) -> u64 {
        self.programs.len() as u64 + 11
    }

    fn cast(&mut self, role: &Role<'_>, command: std::process::Command) -> Result<(), Error> {
        let started = StartedProgram::start(role, command, self.stats_file(), &self.log)?;
        lock(&self.watched).programs.push((role.host, started.id(), started.ear()));
        self.programs.push(started);
        Ok(())
    }

    fn wait_filled(&mut self, name: &str) -> Result<(), Error> {
        self.wait(&format!("{name} to fill its memory"), START_PATIENCE, |rack| {
            Ok((rack.started(name)?.told().report.bytes > 0).then_some(()))
        })
    }

    /// A program that was started and has not been taken away.
    pub fn started(&mut self, name: &str) -> Result<&mut StartedProgram, Error> {
        let found = self.programs.iter_mut().find(|started| started.name == name);
        found.ok_or_else(|| Error::Program(format!("there is no {name}")))
    }

    /// Takes a program away, to check how it ends. It is still sampled.
    pub fn take_guest(&mut self, name: &str) -> Result<StartedProgram, Error> {
        let at = self.programs.iter().position(|started| started.name == name);
        let at = at.ok_or_else(|| Error::Program(format!("there is no {name}")))?;
        Ok(self.programs.remove(at))
    }

    /// The programs that have not been taken away.
    pub fn programs(&self) -> impl Iterator<Item = &StartedProgram> {
        self.programs.iter()
    }

    /// Takes a host's link down, or up again.
    pub fn set_link(&mut self, host: usize, up: bool) -> Result<(), Error> {
        self.hosts[host].set_link(up)?;
        let mut watched = lock(&self.watched);
        if up {
            watched.cut_off.remove(&host);
        } else {
            watched.cut_off.insert(host);
        }
        Ok(())
    }

    /// Waits until `condition` returns a value.
    ///
    /// # Errors
    /// There was no value in time, a program ended that should not have, or the user interrupted.
    pub fn wait<T>(
        &mut self,
        what: &str,
        patience: Duration,
        mut condition: impl FnMut(&mut Rack) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + patience;
        loop {
            check_interrupted()?;
            if let Some(value) = condition(self)? {
                return Ok(value);
            }
            self.check_guests()?;
            if Instant::now() >= deadline {
                let seconds = patience.as_secs();
                return Err(Error::Program(format!("waited {seconds} s in vain for {what}")));
            }
            std::thread::sleep(STEP);
        }
    }

    /// Waits until `condition` returns a value for the organiser's status. An organiser that does
    /// not answer is asked again.
    pub fn wait_status<T>(
        &mut self,
        what: &str,
        patience: Duration,
        mut condition: impl FnMut(&Rack, &Status) -> Option<T>,
    ) -> Result<T, Error> {
        let mut ask_after = Instant::now();
        self.wait(what, patience, |rack| {
            if Instant::now() < ask_after {
                return Ok(None);
            }
            ask_after = Instant::now() + ASK_STEP;
            Ok(rack.status().ok().and_then(|status| condition(rack, &status)))
        })
    }

    /// Lets time pass.
    pub fn rest(&mut self, duration: Duration) -> Result<(), Error> {
        let until = Instant::now() + duration;
        let patience = duration + START_PATIENCE;
        self.wait("time to pass", patience, |_| Ok((Instant::now() >= until).then_some(())))
    }

    /// Lets time pass until this long after the start of the rack.
    pub fn rest_until(&mut self, at: Duration) -> Result<(), Error> {
        self.rest(at.saturating_sub(self.log.elapsed()))
    }

    /// Errors if a tenant has ended by itself, or another program has failed.
    fn check_guests(&mut self) -> Result<(), Error> {
        for started in &mut self.programs {
            let code = started.exit_code()?;
            if let Some(code) = code.filter(|code| started.is_tenant() || *code != 0) {
                let said = started.told().errors;
                let said = said.lines().last().unwrap_or("it said nothing");
                return Err(Error::Program(format!("{} ended with {code}: {said}", started.name)));
            }
        }
        Ok(())
    }
}
