//! Leadership, and what the leader does besides answering: the reconciler's ticks, and the
//! switches. With a file as the store this controller leads from the start; with etcd, once it
//! wins.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_placement::Graph;
use farpool_switch::SwitchError;
use farpool_units::at_most;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::core::Core;
use crate::history::History;
use crate::model::record::Records;
use crate::model::{Command, State};
use crate::rest::{App, Role};
use crate::store::backup::keep_older;
use crate::store::version::{STORE_VERSION, upgrade, version_of};
use crate::store::{Committer, Etcd, EtcdStore, KEEP_ALIVE_EVERY, RedbStore, Store, StoreError};
use crate::{ControlError, NamedSwitch, StoreChoice, reconcile};

/// How often the reconciler runs and the switches are checked. Far below every time limit here (1 s
/// and more), far above the cost of a run.
const TICK: Duration = Duration::from_millis(200);
/// How often a standby asks whether it may lead; this loses at most a tenth of the lease.
const CAMPAIGN_EVERY: Duration = Duration::from_millis(500);

/// The threads behind a controller.
#[derive(Debug)]
pub(crate) struct Lead {
    app: Arc<App>,
    ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    failures: UnboundedReceiver<ControlError>,
}

impl Lead {
    /// Waits until the controller cannot continue. Returns the reason.
    pub(crate) async fn failed(&mut self) -> ControlError {
        match self.failures.recv().await {
            Some(error) => error,
            None => std::future::pending().await,
        }
    }

    /// Ends all threads.
    pub(crate) async fn end(mut self) {
        self.ending.store(true, Ordering::Release);
        if let Role::Leading(core) = self.app.role() {
            core.end();
        }
        let threads: Vec<_> = self.threads.drain(..).inspect(|one| one.thread().unpark()).collect();
        let join = || threads.into_iter().for_each(|one| drop(one.join()));
        // A thread that panicked has ended the process.
        let _ = tokio::task::spawn_blocking(join).await;
        self.app.set_role(Role::Standby { leader: None });
    }
}

/// What the threads share.
#[derive(Clone)]
struct Common {
    app: Arc<App>,
    ending: Arc<AtomicBool>,
    failures: UnboundedSender<ControlError>,
    started: Instant,
}

impl Common {
    fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Waits for `time`, or less if the controller ends.
    fn pause(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.is_ending() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::park_timeout(left);
        }
    }

    /// Returns a core with what the store holds. All nodes and clients have a fresh lease.
    fn load(
        &self,
        mut store: Box<dyn Store>,
        graph: Option<Graph>,
        fenced: Arc<AtomicBool>,
    ) -> Result<Arc<Core>, ControlError> {
        let mut pairs = store.load()?;
        let before = version_of(&pairs)?;
        let mut ops = upgrade(&mut pairs)?;
        let mut records = Records::read(&pairs)?;
        let history = History::of(std::mem::take(&mut records.events));
        let now_ms = at_most(self.started.elapsed().as_millis());
        let (state, more) = State::load(graph, records, now_ms)?;
        ops.extend(more);
        // One batch: the store is of the old version, or of the new one and led.
        store.commit(&ops)?;
        if let Some(before) = before.filter(|before| *before != STORE_VERSION) {
            tracing::info!(from = before, to = STORE_VERSION, "the store was upgraded");
        }
        let failures = self.failures.clone();
        let is_etcd = Arc::clone(&fenced);
        let committer = Committer::start(store, move |reason| {
            // With etcd, leadership is lost, which its thread notices; a file that fails ends the
            // controller.
            if !is_etcd.swap(true, Ordering::AcqRel) {
                drop(failures.send(ControlError::StoreFailed(reason.to_owned())));
            }
        })?;
        Ok(Core::new(state, history, committer, self.started))
    }
}

/// Starts to lead, or to campaign.
pub(crate) fn start(
    app: &Arc<App>,
    graph: Option<Graph>,
    store: StoreChoice,
    advertise: String,
    switches: Vec<NamedSwitch>,
) -> Result<Lead, ControlError> {
    let (failed, failures) = unbounded_channel();
    let ending = Arc::new(AtomicBool::new(false));
    let common = Common {
        app: Arc::clone(app),
        ending: Arc::clone(&ending),
        failures: failed,
        started: Instant::now(),
    };
    let mut lead = Lead { app: Arc::clone(app), ending, threads: Vec::new(), failures };
    match store {
        StoreChoice::Redb(path) => {
            let mut store = Box::new(RedbStore::open(&path)?);
            if let Some(kept) = keep_older(&path, &mut store)? {
                tracing::info!(path = %kept.display(), "the store of the older version is kept");
            }
            let core = common.load(store, graph, Arc::new(AtomicBool::new(false)))?;
            app.set_role(Role::Leading(core));
        }
        StoreChoice::Etcd(endpoints) => {
            let etcd = Etcd::new(endpoints);
            let common = common.clone();
            let work = move || campaign(&common, &etcd, graph.as_ref(), &advertise);
            lead.threads.push(std::thread::Builder::new().name("lead".into()).spawn(work)?);
        }
    }
    let work = move || look_after(&common, switches);
    lead.threads.push(std::thread::Builder::new().name("reconcile".into()).spawn(work)?);
    Ok(lead)
}

/// Tries to lead, leads, and tries again, until the controller ends.
fn campaign(common: &Common, etcd: &Etcd, graph: Option<&Graph>, advertise: &str) {
    while !common.is_ending() {
        match etcd.campaign(advertise) {
            Ok(Ok(leadership)) => {
                tracing::info!("this controller leads now");
                let store = EtcdStore { etcd: etcd.clone(), leadership };
                if let Err(error) = hold(common, store, graph) {
                    etcd.resign(&leadership);
                    let unreachable = matches!(error, ControlError::Store(_));
                    if !unreachable {
                        drop(common.failures.send(error));
                        return;
                    }
                    tracing::warn!("cannot lead: {error}");
                }
                common.app.set_role(Role::Standby { leader: None });
            }
            Ok(Err(leader)) => {
                let leader = Some(leader).filter(|leader| !leader.is_empty());
                common.app.set_role(Role::Standby { leader });
                common.pause(CAMPAIGN_EVERY);
            }
            Err(error) => {
                common.app.set_role(Role::Standby { leader: None });
                tracing::warn!("cannot ask who leads: {error}");
                common.pause(CAMPAIGN_EVERY);
            }
        }
    }
}

/// Leads until the lease is lost or the controller ends.
fn hold(common: &Common, store: EtcdStore, graph: Option<&Graph>) -> Result<(), ControlError> {
    let (etcd, leadership) = (store.etcd.clone(), store.leadership);
    let lost = Arc::new(AtomicBool::new(false));
    // Because this is set beforehand, a failing store ends this leadership instead of the
    // controller.
    let etcd_fails = Arc::new(AtomicBool::new(true));
    let core = common.load(
        Box::new(Watched { store, lost: Arc::clone(&lost) }),
        graph.cloned(),
        etcd_fails,
    )?;
    let mut until = leadership.valid_until;
    core.lead_until(until);
    common.app.set_role(Role::Leading(Arc::clone(&core)));
    while !common.is_ending() && !lost.load(Ordering::Acquire) {
        match etcd.keep_alive(&leadership) {
            Ok(valid_until) => {
                until = valid_until;
                core.lead_until(until);
            }
            Err(StoreError::Fenced) => break,
            Err(error) if Instant::now() >= until => {
                tracing::warn!("the lease has run out: {error}");
                break;
            }
            Err(error) => tracing::warn!("the lease was not renewed: {error}"),
        }
        common.pause(KEEP_ALIVE_EVERY.min(until.saturating_duration_since(Instant::now())));
    }
    core.end();
    tracing::info!("this controller does not lead any more");
    etcd.resign(&leadership);
    Ok(())
}

/// A store that sets `lost` when a commit has failed.
struct Watched {
    store: EtcdStore,
    lost: Arc<AtomicBool>,
}

impl Store for Watched {
    fn load(&mut self) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        self.store.load()
    }

    fn commit(&mut self, ops: &[crate::store::StoreOp]) -> Result<(), StoreError> {
        let committed = self.store.commit(ops);
        if committed.is_err() {
            self.lost.store(true, Ordering::Release);
        }
        committed
    }
}

/// Does what is due while this controller leads. Returns when it ends.
fn look_after(common: &Common, mut switches: Vec<NamedSwitch>) {
    while !common.is_ending() {
        if let Role::Leading(core) = common.app.role() {
            core.tick();
            for switch in &mut switches {
                set_switch(&core, switch);
            }
        }
        common.pause(TICK);
    }
}

/// Sets a switch's circuits to the wanted ones, and notes which are up then.
fn set_switch(core: &Core, (name, driver): &mut NamedSwitch) {
    let wanted = core.peek(|state, _| reconcile::wanted_circuits(state));
    let wanted = wanted.get(name).map_or(&[][..], Vec::as_slice);
    let mut trouble = None;
    let mut note = |error: SwitchError| trouble = Some(error.to_string());
    // If a switch does not answer, none of its circuits is known to be up, so nothing over it
    // becomes ready.
    let mut circuits = Vec::new();
    match driver.circuits() {
        Err(error) => note(error),
        Ok(standing) => {
            let steps = reconcile::switch_steps(wanted, &standing);
            let (disconnect, connect) = (&steps.disconnect, &steps.connect);
            let results = disconnect.iter().map(|it| driver.disconnect(*it)).collect::<Vec<_>>();
            let connected = connect.iter().map(|it| driver.connect(*it));
            let results = results.into_iter().chain(connected);
            results.filter_map(Result::err).for_each(&mut note);
            circuits = match disconnect.is_empty() && connect.is_empty() {
                true => standing,
                false => driver.circuits().unwrap_or_default(),
            };
        }
    }
    // Checked five times a second, logged once.
    if let Some(trouble) = &trouble
        && core.peek(|state, _| state.trouble_of(name) != Some(trouble))
    {
        tracing::warn!("{trouble}");
    }
    core.command(Command::NoteCircuits { switch: name.clone(), circuits, trouble });
}
