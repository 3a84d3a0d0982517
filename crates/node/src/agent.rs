//! The agent: reports to the controller in a long poll, and tells the blade what comes of it.

use std::time::{Duration, Instant};

use farpool_acms::{Class, Harvest, lend_limit_bytes, next_harvest};
use farpool_api::{
    ApiError, Client, NodeGrant, NodeGrantUse, NodeReport, NodeSpec, ProblemKind, SegmentId,
};
use farpool_blade::{GrantId, GrantSpec, Serving};
use farpool_wire::{GrantKey, PAGE_BYTES};

use crate::intent::{Action, Standing, actions};
use crate::memory::Reading;
use crate::{Ending, NodeError, NodeOptions};

/// Longest a report waits for news: memory is looked at as often.
const WAIT: Duration = Duration::from_secs(1);
/// And while the node ends, so that its end is noticed soon.
const ENDING_WAIT: Duration = Duration::from_millis(100);
/// Pause after the first report that was not answered; doubles up to the limit.
const BACKOFF_MIN: Duration = Duration::from_millis(250);
/// Longest pause between two tries to reach a controller.
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Reports of being empty before a node ends without having left: programs of its own may hold it in the rack.
const LEAVE_TRIES: u32 = 5;

pub(crate) struct Agent<'a> {
    options: &'a NodeOptions,
    serving: &'a Serving,
    client: Client,
    spec: NodeSpec,
    /// What the blade was told and has taken.
    standing: Standing,
    harvest: Harvest,
    started: Instant,
    sequence: u64,
    known_version: u64,
    is_registered: bool,
    backoff: Option<Duration>,
    /// Since when it is asked to end.
    ending_since: Option<Instant>,
}

impl<'a> Agent<'a> {
    pub(crate) fn new(options: &'a NodeOptions, serving: &'a Serving) -> Result<Self, NodeError> {
        let client = Client::new(&options.controllers, options.token.as_deref());
        let addresses = if options.advertise.is_empty() {
            serving.addresses()
        } else {
            options.advertise.as_slice()
        };
        let addresses = addresses.iter().map(ToString::to_string).collect();
        let mut spec =
            NodeSpec::new(addresses, options.donate_bytes, random()?, serving.blade().id());
        spec.compute_brick.clone_from(&options.compute_brick);
        spec.memory_brick.clone_from(&options.memory_brick);
        Ok(Agent {
            options,
            serving,
            client: client.map_err(NodeError::Url)?,
            spec,
            standing: Standing::new(),
            harvest: Harvest::default(),
            started: Instant::now(),
            sequence: 0,
            known_version: 0,
            is_registered: false,
            backoff: None,
            ending_since: None,
        })
    }

    /// Goes on until the node is told to end.
    pub(crate) fn run(mut self, ending: &Ending) -> Result<(), NodeError> {
        while !self.may_end(ending) {
            match self.exchange() {
                Ok(()) => {
                    if self.backoff.take().is_some() {
                        tracing::info!("the controller answers again");
                    }
                }
                // A token that was changed must not cost programs the memory that they have here.
                Err(error) if error.is(ProblemKind::Unauthorized) && self.standing.is_empty() => {
                    return Err(NodeError::Refused(error));
                }
                Err(error) => self.failed(&error, ending),
            }
        }
        self.leave();
        Ok(())
    }

    /// Takes an empty node out of the rack. The controller must have heard first that it is empty.
    fn leave(&mut self) {
        for _ in 0..LEAVE_TRIES {
            if !self.standing.is_empty() || self.exchange().is_err() {
                return;
            }
            if self.client.delete_node(&self.options.name).is_ok() {
                tracing::info!("left the rack");
                return;
            }
        }
    }

    /// Whether to end now. The first time it is asked to, the node is drained.
    fn may_end(&mut self, ending: &Ending) -> bool {
        match (ending.times(), self.ending_since) {
            (0, _) => false,
            (1, None) => {
                self.ending_since = Some(Instant::now());
                let is_lent = !self.standing.is_empty() && !self.options.drain_timeout.is_zero();
                if is_lent && let Err(error) = self.client.drain_node(&self.options.name) {
                    tracing::warn!(%error, "the controller does not drain this node");
                }
                !is_lent
            }
            (1, Some(since)) => {
                self.standing.is_empty() || since.elapsed() >= self.options.drain_timeout
            }
            _ => true,
        }
    }

    fn failed(&mut self, error: &ApiError, ending: &Ending) {
        if self.backoff.is_none() {
            tracing::warn!(%error, "no controller answers; what is lent stays lent");
        }
        let pause = self.backoff.map_or(BACKOFF_MIN, |pause| (pause * 2).min(BACKOFF_MAX));
        self.backoff = Some(pause);
        let until = Instant::now() + pause;
        while Instant::now() < until && ending.times() == 0 {
            std::thread::sleep(ENDING_WAIT.min(pause));
        }
    }

    /// One report, and what comes of the answer.
    fn exchange(&mut self) -> Result<(), ApiError> {
        if !self.is_registered {
            self.client.put_node(&self.options.name, &self.spec)?;
            self.is_registered = true;
        }
        let report = self.report();
        match self.client.report_node(&self.options.name, &report) {
            Ok(answer) => {
                self.apply(&answer.grants);
                self.known_version = answer.version;
                Ok(())
            }
            // The controller has forgotten this node, or knows an earlier start of it.
            Err(error) if error.is(ProblemKind::NotFound) || error.is(ProblemKind::Conflict) => {
                self.is_registered = false;
                self.known_version = 0;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    fn report(&mut self) -> NodeReport {
        let blade = self.serving.blade();
        let totals = self.serving.stat().totals;
        let used_bytes = totals.used_bytes.get();
        let wait = if self.ending_since.is_some() { ENDING_WAIT } else { WAIT };
        self.sequence += 1;
        let grants = blade.grants().into_iter().map(|grant| NodeGrantUse {
            segment: SegmentId::from_u128(grant.id.0),
            epoch: grant.epoch,
            used_bytes: grant.used_bytes,
            connections: grant.connections,
        });
        NodeReport {
            incarnation: self.spec.incarnation,
            sequence: self.sequence,
            blade_id: self.spec.blade_id,
            capacity_bytes: blade.capacity_bytes(),
            used_bytes,
            lendable_bytes: self.lendable_bytes(used_bytes),
            read_bytes_total: totals.pages_read.get().saturating_mul(PAGE_BYTES as u64),
            write_bytes_total: totals.pages_written.get().saturating_mul(PAGE_BYTES as u64),
            load_permille: load_permille(),
            grants: grants.collect(),
            known_version: self.known_version,
            wait_ms: u64::try_from(wait.as_millis()).unwrap_or(0),
        }
    }

    /// What may be lent now: all that was donated while this server's own programs leave it.
    fn lendable_bytes(&mut self, lent_bytes: u64) -> u64 {
        let own = Reading::now().own_use(lent_bytes);
        let limit = own
            .as_ref()
            .map_or(0, |own| lend_limit_bytes(&self.options.thresholds, Class::Server, own));
        let total = own.map_or(0, |own| own.total_bytes);
        self.harvest = next_harvest(self.harvest, limit, total, self.started.elapsed());
        self.harvest.offered_bytes.min(self.serving.blade().capacity_bytes())
    }

    fn apply(&mut self, wanted: &[NodeGrant]) {
        let blade = self.serving.blade();
        for action in actions(wanted, &self.standing) {
            match action {
                Action::Revoke { segment, epoch } => {
                    match blade.revoke_grant(grant_id(segment), epoch) {
                        Ok(revoked) => {
                            tracing::info!(%segment, epoch, clients = revoked.clients,
                                freed_bytes = revoked.freed_bytes, "memory taken back");
                        }
                        Err(error) => tracing::error!(%segment, %error, "not taken back"),
                    }
                    self.standing.remove(&segment);
                }
                Action::Set(grant) => match blade.set_grant(&spec_of(&grant)) {
                    Ok(()) => {
                        tracing::info!(segment = %grant.segment, epoch = grant.epoch,
                            bytes = grant.bytes, "memory lent");
                        self.standing.insert(grant.segment, grant);
                    }
                    // Not confirmed, so the controller does not count on it.
                    Err(error) => {
                        tracing::error!(segment = %grant.segment, %error, "not lent");
                    }
                },
            }
        }
    }
}

fn grant_id(segment: SegmentId) -> GrantId {
    GrantId(segment.0.as_u128())
}

fn spec_of(grant: &NodeGrant) -> GrantSpec {
    GrantSpec {
        id: grant_id(grant.segment),
        epoch: grant.epoch,
        key: GrantKey(grant.key.0),
        bytes: grant.bytes,
        read_bytes_per_s: grant.read_bytes_per_s,
        write_bytes_per_s: grant.write_bytes_per_s,
    }
}

/// Runnable threads for each processor over the last minute, in thousandths; 1000 is all busy.
fn load_permille() -> u16 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let average: f64 = text.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or(0.0);
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let permille = (average * 1000.0 / cpus as f64).clamp(0.0, 1000.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1000")]
    let permille = permille as u16;
    permille
}

fn random() -> Result<u64, NodeError> {
    let mut bits = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    rustix::rand::getrandom(&mut bits, flags).map_err(|error| NodeError::Random(error.into()))?;
    Ok(u64::from_le_bytes(bits))
}
