//! The agent: reports the actual state to the controller, and applies the intent to the blade.
//!
//! Invariants:
//! - Grants change only by an answer of the controller: no answer, no change.
//! - A report names the grants that the blade itself lists; an order that the blade refused is
//!   therefore missing from it, and is tried again with the next answer.
//! - Grants keep the daemon running: a refused token ends it only while nothing is granted, because
//!   ending it would take memory away from running programs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_api::{
    ApiError, Client, NodeAnswer, NodeReport, NodeSpec, NodeState, ProblemKind, SegmentId,
};
use farpool_blade::{Blade, GrantError};
use farpool_units::SUPERPAGE_BYTES;

use crate::intent::{Action, Standing, diff, grant_id, grant_spec, standing};
use crate::link::{Link, Verdict, verdict};
use crate::observe::{LoadMeter, grants_of, totals_of};
use crate::shared::{Shared, Wish};
use crate::{Ended, NodeError};

/// How long the controller may hold a report's answer until there is news: the node's observations
/// are at most this old when they are reported.
const REPORT_WAIT_MS: u64 = 500;
/// How long an answer may be held while the node ends, so that it ends soon after its last grant
/// has gone or its time is over.
const ENDING_WAIT_MS: u64 = 100;
/// How long a new daemon waits for its name while another one reports under it: an earlier daemon
/// of this node that was killed counts as late after 5 s, and after 5 s more each time the
/// controller is restarted meanwhile. After this it is a second daemon, and ends.
const NAME_WAIT: Duration = Duration::from_secs(30);
/// Attempts to sign off from the controller, with a report between two of them.
const LEAVE_TRIES: u32 = 5;
/// Shortest time between two reports that brought nothing new, in case a controller does not wait.
const REPORT_GAP: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Agent {
    name: String,
    spec: NodeSpec,
    client: Client,
    blade: Arc<Blade>,
    shared: Arc<Shared>,
    link: Link,
    load: LoadMeter,
    registered: bool,
    /// It has been registered, so that it may have been told to grant memory.
    was_registered: bool,
    /// Since when it waits for its name, if it has never had it.
    name_awaited: Option<Instant>,
    sequence: u64,
    known_version: u64,
    standing: Standing,
    /// Orders that the blade refused, by segment: the epoch for which the refusal was logged.
    refused: BTreeMap<SegmentId, u64>,
    /// The controller has received that its last answer was carried out.
    is_heard: bool,
    /// Whether the node is being drained, by the last answer.
    is_draining: bool,
    /// `is_draining` at the time this daemon asked to be drained, or None if it has not asked.
    drain_asked: Option<bool>,
}

impl Agent {
    pub(crate) fn new(
        name: String,
        spec: NodeSpec,
        client: Client,
        blade: Arc<Blade>,
        shared: Arc<Shared>,
    ) -> Self {
        let load = LoadMeter::new(spec.read_bytes_per_s, spec.write_bytes_per_s);
        let standing = standing(&blade.grant_specs());
        Self {
            name,
            spec,
            client,
            blade,
            shared,
            link: Link::default(),
            load,
            registered: false,
            was_registered: false,
            name_awaited: None,
            sequence: 0,
            known_version: 0,
            standing,
            refused: BTreeMap::new(),
            is_heard: false,
            is_draining: false,
            drain_asked: None,
        }
    }

    /// Registers for the first time. An absent controller is no error: it may start later. Nor is a
    /// name that another daemon has: it may be an earlier one of this node, which has just ended.
    pub(crate) fn begin(&mut self) -> Result<(), NodeError> {
        let Err(error) = self.register() else { return Ok(()) };
        // What an earlier process has granted is served, whatever the controller says of this one.
        if error.is(ProblemKind::NameInUse) || !self.standing.is_empty() {
            return self.trouble(error).map(drop);
        }
        match verdict(&error) {
            Verdict::Unauthorized => Err(NodeError::Unauthorized(error)),
            Verdict::Lost => self.trouble(error).map(drop),
            _ => Err(NodeError::Refused { name: self.name.clone(), source: error }),
        }
    }

    /// Sends reports and carries out the answers until the daemon has to end.
    pub(crate) fn run(mut self) -> Result<Ended, NodeError> {
        loop {
            let wish = self.shared.wish();
            match wish {
                Wish::Stop if self.drain_asked.is_none() => {
                    self.sign_off();
                    return Ok(Ended::AtOnce);
                }
                Wish::Stop => return Ok(self.leave(wish)),
                Wish::Drain { until } if self.is_empty() || Instant::now() >= until => {
                    return Ok(self.leave(wish));
                }
                _ => {}
            }
            let began = Instant::now();
            match self.step(wish) {
                Ok(true) => {}
                Ok(false) => {
                    let early = REPORT_GAP.saturating_sub(began.elapsed());
                    if !early.is_zero() {
                        self.shared.pause(early, wish);
                    }
                }
                Err(error) => {
                    let mut pause = self.trouble(error)?;
                    if let Wish::Drain { until } = wish {
                        pause = pause.min(until.saturating_duration_since(Instant::now()));
                    }
                    self.shared.pause(pause, wish);
                }
            }
        }
    }

    /// Sends one report and carries out its answer. Returns whether the answer had news.
    fn step(&mut self, wish: Wish) -> Result<bool, ApiError> {
        if !self.registered {
            self.register()?;
        }
        // Not while the controller refuses or is lost: the name may be another daemon's.
        let may_ask = self.drain_asked.is_none() && !self.link.is_troubled();
        if matches!(wish, Wish::Drain { .. }) && may_ask {
            self.client.drain_node(&self.name)?;
            self.drain_asked = Some(self.is_draining);
            tracing::info!("the node is being drained");
        }
        let wait_ms = if wish == Wish::Run { REPORT_WAIT_MS } else { ENDING_WAIT_MS };
        let report = self.report(wait_ms);
        let answer = self.client.report_node(&self.name, &report)?;
        if self.link.answered() {
            tracing::info!("the controller answers again");
        }
        let is_news = answer.version != self.known_version;
        self.is_heard = !is_news;
        self.carry_out(&answer);
        Ok(is_news)
    }

    fn register(&mut self) -> Result<(), ApiError> {
        let node = self.client.put_node(&self.name, &self.spec)?;
        self.registered = true;
        self.was_registered = true;
        self.is_draining = node.draining;
        tracing::info!(name = self.name, blade_id = self.spec.blade_id, "registered");
        if node.draining {
            tracing::warn!("the node is drained: nothing is placed on it until that is undone");
        }
        Ok(())
    }

    fn report(&mut self, wait_ms: u64) -> NodeReport {
        self.sequence += 1;
        let (used_bytes, traffic) = totals_of(&self.blade);
        // The table's limits are whole superpages, and so is what counts as donated.
        let capacity_bytes = self.spec.donate_bytes / SUPERPAGE_BYTES * SUPERPAGE_BYTES;
        NodeReport {
            incarnation: self.spec.incarnation,
            sequence: self.sequence,
            blade_id: self.spec.blade_id,
            capacity_bytes,
            used_bytes: used_bytes.min(capacity_bytes),
            lendable_bytes: self.shared.lendable_bytes(),
            read_bytes_total: traffic.read_bytes,
            write_bytes_total: traffic.written_bytes,
            load_permille: self.load.permille(traffic, self.blade.now()),
            grants: grants_of(&self.blade),
            known_version: self.known_version,
            wait_ms,
            ending: false,
        }
    }

    /// Makes the blade's grants match the answer.
    fn carry_out(&mut self, answer: &NodeAnswer) {
        for action in diff(&answer.grants, &self.standing) {
            let (segment, epoch, done) = match &action {
                Action::Revoke { segment, epoch } => {
                    let revoked = self.blade.revoke_grant(grant_id(*segment), *epoch);
                    (*segment, *epoch, revoked.map(|revoked| self.note_revoked(*segment, revoked)))
                }
                Action::Set(grant) => {
                    (grant.segment, grant.epoch, self.blade.set_grant(&grant_spec(grant)))
                }
            };
            match done {
                Ok(()) => self.note_done(action),
                Err(error) => self.note_refused(segment, epoch, error),
            }
        }
        self.known_version = answer.version;
        self.is_draining = answer.draining;
    }

    fn note_done(&mut self, action: Action) {
        match action {
            Action::Revoke { segment, .. } => {
                self.standing.remove(&segment);
                self.refused.remove(&segment);
            }
            Action::Set(grant) => {
                tracing::info!(segment = %grant.segment, epoch = grant.epoch, "granted");
                self.refused.remove(&grant.segment);
                self.standing.insert(grant.segment, grant);
            }
        }
    }

    fn note_revoked(&self, segment: SegmentId, revoked: farpool_blade::Revoked) {
        let farpool_blade::Revoked { clients, freed_bytes, .. } = revoked;
        tracing::info!(%segment, clients, freed_bytes, "taken back");
    }

    /// Logs a refusal once for each epoch; the order is tried again with every answer.
    fn note_refused(&mut self, segment: SegmentId, epoch: u64, error: GrantError) {
        if self.refused.insert(segment, epoch) != Some(epoch) {
            tracing::error!(%segment, epoch, %error, "the blade refuses the controller's order");
        }
    }

    /// True if nothing is granted and, if the controller is reachable, it knows that and will not
    /// grant anything.
    fn is_empty(&self) -> bool {
        let is_closed = self.is_draining && self.drain_asked.is_some() && self.is_heard;
        self.standing.is_empty() && (is_closed || !self.registered || self.link.is_troubled())
    }

    /// Handles an error. Returns the pause before the next attempt.
    ///
    /// Errors if the daemon has to end.
    fn trouble(&mut self, error: ApiError) -> Result<Duration, NodeError> {
        let verdict = verdict(&error);
        let (pause, is_new) = self.link.failed(verdict);
        match verdict {
            Verdict::Unauthorized if self.standing.is_empty() => {
                return Err(NodeError::Unauthorized(error));
            }
            Verdict::Unknown => self.registered = false,
            Verdict::Superseded if !self.was_registered => return self.wait_for_name(error, pause),
            Verdict::Superseded if self.other_is_lost() => self.registered = false,
            _ => {}
        }
        if is_new {
            match verdict {
                Verdict::Lost => {
                    tracing::warn!(%error, "the controller is lost; what is granted stays");
                }
                Verdict::Unknown => tracing::warn!("the controller does not know this node"),
                Verdict::Superseded => tracing::error!(
                    %error,
                    "another daemon has registered under this name; what is granted here stays"
                ),
                Verdict::Unauthorized | Verdict::Refused => {
                    tracing::error!(%error, "the controller refuses; what is granted stays");
                }
            }
        }
        Ok(pause)
    }

    /// Handles the refusal of a name that this daemon has never had. Returns the pause before the
    /// next attempt.
    ///
    /// Errors if the other daemon goes on reporting.
    fn wait_for_name(&mut self, error: ApiError, pause: Duration) -> Result<Duration, NodeError> {
        match self.name_awaited {
            None => {
                tracing::warn!(
                    %error,
                    wait_ms = NAME_WAIT.as_millis(),
                    "another daemon has this name; waiting until it has ended"
                );
                self.name_awaited = Some(Instant::now());
            }
            Some(since) if since.elapsed() >= NAME_WAIT && self.standing.is_empty() => {
                return Err(NodeError::Refused { name: self.name.clone(), source: error });
            }
            Some(_) => {}
        }
        Ok(pause)
    }

    /// Whether the daemon that took the name no longer reports.
    fn other_is_lost(&self) -> bool {
        self.client.node(&self.name).is_ok_and(|node| node.state == NodeState::Lost)
    }

    /// Signs off if the controller answers: an empty node is deleted. A node that stays registered
    /// is undrained, if the drain was requested only because this daemon ends.
    fn leave(&mut self, wish: Wish) -> Ended {
        let can_say = self.registered && !self.link.is_troubled();
        let has_left = can_say && self.standing.is_empty() && self.delete(wish);
        let is_empty = self.standing.is_empty();
        if !is_empty {
            let grants = self.standing.len();
            match self.blade.config().persist {
                None => tracing::warn!(grants, "the node ends; what is granted is lost"),
                Some(_) => tracing::info!(grants, "the node ends; what is granted is kept"),
            }
        }
        if can_say
            && !has_left
            && self.drain_asked == Some(false)
            && let Err(error) = self.client.undrain_node(&self.name)
        {
            tracing::warn!(%error, "the node stays drained");
        }
        if !has_left {
            self.sign_off();
        }
        match (wish, is_empty) {
            (Wish::Stop, _) => Ended::AtOnce,
            (_, true) => Ended::Empty,
            (_, false) => Ended::Overdue,
        }
    }

    /// Says in a last report that this daemon ends, so that the next one of this node need not wait
    /// until this one counts as late.
    fn sign_off(&mut self) {
        if !self.registered || self.link.is_troubled() {
            return;
        }
        let report = NodeReport { ending: true, ..self.report(0) };
        if let Err(error) = self.client.report_node(&self.name, &report) {
            tracing::info!(%error, "the controller has not heard that this daemon ends");
        }
    }

    /// Deletes this node at the controller. Returns whether that was done. The controller refuses
    /// while it has not received that the last grant is gone, and while programs of this machine
    /// use the rack's memory: those that end with the machine get some time to report that.
    fn delete(&mut self, wish: Wish) -> bool {
        for attempt in 1..=LEAVE_TRIES {
            let Err(error) = self.client.delete_node(&self.name) else {
                tracing::info!("left the rack");
                return true;
            };
            let is_over = attempt == LEAVE_TRIES || self.shared.wish() == Wish::Stop;
            let may_change = error.is(ProblemKind::Conflict) && !is_over;
            if !may_change || self.step(wish).is_err() || !self.standing.is_empty() {
                tracing::info!(%error, "the node stays registered");
                return false;
            }
        }
        false
    }
}
