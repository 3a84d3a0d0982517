//! A run whose far memory comes from a rack: the keeper is a client of the controller.
//!
//! A thread of the keeper reports, learns where the run's segments lie, and keeps the board's table
//! of blades up to date ([`farpool_api::placements`] decides). The processes of the tree do the
//! rest by themselves. While no controller answers nothing changes. Memory that must leave a blade,
//! and for which no other has room, goes into this machine's memory or, if that is short, a file
//! ([`spill`]).

mod growing;
mod spill;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use farpool_api::placements::{Action, ENTRIES_LIMIT, Piece, Placements, Reach, first_bytes};
use farpool_api::tenant::{Tenant, Wish, best_address, retry_after};
use farpool_api::{
    Access, ApiError, Client, ClientId, ClientSpec, DEFAULT_TENANT, Place, ProblemKind, Segment,
    SegmentId,
};
use farpool_board::{
    BLADE_ENTRIES, BladeDomain, BladeOffer, BladeRole, Board, Counter, PARITY_DOMAINS, Redundancy,
};
use farpool_kernel::fill_random;
use farpool_policy::RateLimit;
use farpool_units::plain;

use crate::blades::{BladeUse, RunBlades};
use crate::redundancy::redundancy;
use crate::say::say;
use crate::{LocalLimit, PERCENT_FLOOR_BYTES, RunOptions};
use spill::Spill;

/// Longest that a report waits for news while nothing moves.
const QUIET_WAIT: Duration = Duration::from_secs(1);
/// The same while something moves.
const BUSY_WAIT: Duration = Duration::from_millis(50);
/// Pause after a report that was not answered.
const RETRY: Duration = Duration::from_secs(1);
/// Longest that the start of a run waits for its first segment.
const FIRST_WAIT: Duration = Duration::from_secs(30);
/// After this time the run says what it waits for: circuits and nodes take a part of a second.
const FIRST_PATIENCE: Duration = Duration::from_secs(2);
/// How long a program insists on all of a segment while memory of the rack is on its way back to
/// it; then less is taken, if there is less.
const WHOLE_WAIT: Duration = Duration::from_secs(10);
/// Shortest pause before a segment that the rack has no room for is asked for again.
const GROW_RETRY: Duration = Duration::from_secs(10);
/// The reason given when nothing was granted that could be waited for.
const NOBODY: &str = "nobody has memory to lend";
/// How long memory without room elsewhere waits for a controller to find a place before it is
/// spilled.
const STUCK_PATIENCE: Duration = Duration::from_secs(2);

const _: () = assert!(BLADE_ENTRIES == ENTRIES_LIMIT);

/// Longest name of a program at a rack, in bytes; of a longer one the end is given.
const NAME_LIMIT_BYTES: usize = 256;

/// How a run reaches its rack.
#[derive(Clone, Debug)]
pub struct RackOptions {
    /// The controllers, separated by commas.
    pub controllers: String,
    /// What is shown to the controllers.
    pub access: Access,
    /// The compute brick that the program runs on; this machine's name by default.
    pub host: Option<String>,
    /// The tenant whose promise and quota the program counts towards; none for `default`.
    pub tenant: Option<String>,
    /// Bandwidth wanted for each segment, in each direction.
    pub rate_bytes_per_s: Option<u64>,
    /// Folder for the file if memory must be spilled.
    pub spill_directory: PathBuf,
}

/// Why a run gets no memory from its rack.
#[derive(Debug, thiserror::Error)]
pub enum RackError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(
        "no far memory came within {} s: {why}; look at `farpool node list`", FIRST_WAIT.as_secs()
    )]
    NotReady { why: String },
    #[error(
        "the memory granted is on another machine ({address}): give a certificate (--pki), or \
         --allow-remote-tcp if the network is trusted"
    )]
    RemoteTcp { address: String },
    #[error(
        "{copies} copies need memory on as many failure domains of the rack, and there are too few \
         with room: {error}; start nodes on more hosts, or ask for fewer copies (--redundancy)"
    )]
    TooFewDomains { copies: u8, error: ApiError },
    #[error(
        "--redundancy parity needs memory on {PARITY_DOMAINS} failure domains (hosts) of the rack, \
         and {domains} had room: {error}; start nodes on more hosts (farpool node), or have copies, \
         which need 2 hosts (--redundancy 2)"
    )]
    TooFewForParity { domains: usize, error: ApiError },
    #[error("no random numbers for an id: {0}")]
    Random(std::io::Error),
    #[error("the thread that talks to the controller cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Returns what the rack's operator has set for the programs of a tenant. Where nodes lend without
/// a controller there are no tenants to ask about.
pub(crate) fn redundancy_of_tenant(rack: &RackOptions) -> Result<Option<Redundancy>, RackError> {
    let own = rack.access.credentials.as_ref().map(|it| it.identity());
    let own = own.as_ref().and_then(|it| it.role.tenant());
    let tenant = rack.tenant.as_deref().or(own).unwrap_or(DEFAULT_TENANT);
    match Client::with(&rack.controllers, &rack.access)?.tenant(tenant) {
        Ok(tenant) => Ok(tenant.redundancy),
        Err(error) if error.is(ProblemKind::NotFound) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The keeper's part in the rack; ends the client when dropped.
#[derive(Debug)]
pub struct RackRun {
    client: Client,
    id: ClientId,
    stop: Arc<AtomicBool>,
}

impl RackRun {
    /// Registers, gets the first segment and enters it on the board. From then on a thread keeps
    /// the board up to date.
    pub fn start(
        rack: &RackOptions,
        options: &RunOptions,
        board: &Arc<Board>,
        directory: &Path,
    ) -> Result<RackRun, RackError> {
        let client = Client::with(&rack.controllers, &rack.access)?;
        let run = RackRun { client, id: ClientId::from_u128(random()?), stop: Arc::default() };
        let spec = ClientSpec {
            host: rack.host.clone().unwrap_or_else(host_name),
            name: client_name(&options.program),
            pid: std::process::id(),
            lease_ms: farpool_api::DEFAULT_LEASE_MS,
            tenant: rack.tenant.clone(),
        };
        let tenant = Tenant::new(run.client.clone(), run.id, spec);
        tenant.join()?;
        let local_bytes = match options.local {
            LocalLimit::Bytes(bytes) => bytes,
            LocalLimit::Percent(_) => PERCENT_FLOOR_BYTES,
        };
        let mut agent = Agent {
            tenant,
            board: Arc::clone(board),
            folder: directory.to_owned(),
            placements: match redundancy(options) {
                Redundancy::Copies(copies) => Placements::new(copies),
                Redundancy::Parity => Placements::with_parity(),
            },
            redundancy: redundancy(options),
            quota_bytes: options.quota_bytes.unwrap_or(u64::MAX),
            rate_bytes_per_s: rack.rate_bytes_per_s,
            allow_remote_tcp: options.allow_remote_tcp || options.credentials.is_some(),
            refused_since: None,
            grow_after: None,
            settles_until: None,
            release_after: None,
            may_grow: true,
            stuck_since: None,
            spill: Spill::new(directory, &rack.spill_directory),
            said: None,
            said_short: None,
            lost: BTreeSet::new(),
            stop: Arc::clone(&run.stop),
        };
        let quota_bytes = options.quota_bytes.map(|bytes| agent.placements.far_bytes_of(bytes));
        agent.begin(first_bytes(quota_bytes, local_bytes))?;
        let thread = std::thread::Builder::new().name("farpool-rack".into());
        thread.spawn(move || agent.keep_up()).map_err(RackError::Thread)?;
        Ok(run)
    }
}

impl Drop for RackRun {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        // If the controller cannot be told, the lease ends the client.
        let _ = self.client.delete_client(self.id);
    }
}

struct Agent {
    tenant: Tenant,
    board: Arc<Board>,
    /// The run's folder.
    folder: PathBuf,
    placements: Placements,
    redundancy: Redundancy,
    quota_bytes: u64,
    rate_bytes_per_s: Option<u64>,
    allow_remote_tcp: bool,
    /// Since when the rack refuses memory that is on its way back.
    refused_since: Option<Instant>,
    /// When the rack may be asked for more again.
    grow_after: Option<Instant>,
    /// Until when nodes and processes take in what has grown.
    settles_until: Option<Instant>,
    /// When memory may be given back again, after a refusal.
    release_after: Option<Instant>,
    /// Whether more would be of use: not once a place was granted that this program may not use.
    may_grow: bool,
    stuck_since: Option<Instant>,
    spill: Spill,
    /// The last message, so that it is not repeated.
    said: Option<String>,
    /// The last message about too little memory, until there is enough.
    said_short: Option<String>,
    /// Nodes that have lost memory of this program, as far as that was said.
    lost: BTreeSet<String>,
    stop: Arc<AtomicBool>,
}

impl Agent {
    /// Gets the first memory, so much of each copy, in several pieces if there is no single one.
    fn begin(&mut self, bytes: u64) -> Result<(), RackError> {
        let started = Instant::now();
        match self.placements.are_apart() {
            false => self.begin_with(bytes, started)?,
            true => self.begin_apart(bytes, started)?,
        }
        while !self.placements.can_store() {
            let why = self.placements.waits_for();
            if started.elapsed() >= FIRST_WAIT {
                return Err(RackError::NotReady { why: why.unwrap_or_else(|| NOBODY.to_owned()) });
            }
            if let Some(why) = why.filter(|_| started.elapsed() >= FIRST_PATIENCE) {
                self.say(&format!("no far memory yet: {why}"));
            }
            self.exchange(BUSY_WAIT)?;
            if self.placements.are_apart() {
                self.look();
                self.release();
                self.grow();
            }
        }
        Ok(())
    }

    /// Asks for so much, wherever it is.
    fn begin_with(&mut self, bytes: u64, started: Instant) -> Result<(), RackError> {
        let mut missing = bytes;
        while missing > 0 {
            let piece = Piece { bytes: missing, avoid: Vec::new(), avoid_first: Vec::new() };
            missing = missing.saturating_sub(self.ask_first(&piece, started)?);
            if !self.may_ask_more() {
                break;
            }
        }
        Ok(())
    }

    /// Asks for so much of each copy, or its share of each part of groups with parity, on as many
    /// failure domains. It takes less, but no fewer domains.
    fn begin_apart(&mut self, bytes: u64, started: Instant) -> Result<(), RackError> {
        while let Some(piece) = self.placements.piece_for(bytes) {
            if let Err(error) = self.ask_first(&piece, started) {
                if self.placements.will_store() {
                    break;
                }
                return Err(self.too_few_domains(error));
            }
            if !self.may_ask_more() {
                break;
            }
        }
        Ok(())
    }

    fn too_few_domains(&self, error: RackError) -> RackError {
        match (error, self.redundancy) {
            (RackError::Api(error), Redundancy::Copies(copies))
                if error.is(ProblemKind::NoRoom) =>
            {
                RackError::TooFewDomains { copies, error }
            }
            (RackError::Api(error), Redundancy::Parity) if error.is(ProblemKind::NoRoom) => {
                RackError::TooFewForParity { domains: self.placements.domain_count(), error }
            }
            (other, _) => other,
        }
    }

    /// True if the board has room for more segments and the moves of all.
    fn may_ask_more(&mut self) -> bool {
        // Reports without waiting: only the list of segments matters.
        let asked = self.exchange(Duration::ZERO);
        asked.is_ok() && self.placements.wanted(0, true, u64::MAX).is_some()
    }

    /// Asks for a piece, and again while memory of the rack is on its way back: a node that was
    /// restarted is part of the rack again within seconds. Returns the bytes granted.
    fn ask_first(&mut self, piece: &Piece, started: Instant) -> Result<u64, RackError> {
        loop {
            let error = match self.ask_for(piece, true) {
                Err(error) if started.elapsed() < FIRST_WAIT => error,
                other => return other,
            };
            let Some(pause) = pause_after(&error) else { return Err(error) };
            self.say(&format!("no far memory yet: {error}"));
            std::thread::sleep(pause.min(FIRST_WAIT));
            // Who asks is alive: without a report its lease would run out.
            self.exchange(Duration::ZERO)?;
        }
    }

    /// Asks for up to a piece, or for no less while memory is on its way back, if the program may
    /// wait for that. Returns the bytes granted.
    fn ask_for(&mut self, piece: &Piece, may_wait: bool) -> Result<u64, RackError> {
        let since = *self.refused_since.get_or_insert_with(Instant::now);
        let may_wait = may_wait && since.elapsed() < WHOLE_WAIT;
        let mut piece = piece.clone();
        let granted = loop {
            match self.ask_once(&piece, may_wait) {
                // The controller cannot tell that two nodes have one host.
                Ok(granted) if !self.placements.is_of_use(&granted.place, &piece) => {
                    self.tenant.release(granted.id)?;
                    piece.avoid.push(granted.place.failure_domain().to_owned());
                }
                other => break other,
            }
        };
        if granted.as_ref().err().and_then(pause_after).is_none() {
            self.refused_since = None;
        }
        Ok(granted?.place.bytes)
    }

    /// Asks for all of a piece on a further failure domain, or else for what there is where it is
    /// of use.
    fn ask_once(&self, piece: &Piece, may_wait: bool) -> Result<Segment, RackError> {
        let (bytes, rate_bytes_per_s) = (piece.bytes, self.rate_bytes_per_s);
        let fresh_id = || Ok::<_, RackError>(SegmentId::from_u128(random()?));
        let ask = |avoid: &[String], is_whole: bool| {
            let apart = self.placements.are_apart();
            let wish = Wish { bytes, rate_bytes_per_s, avoid, apart, is_whole, may_wait };
            self.tenant.ask(wish, fresh_id)
        };
        let apart = match piece.avoid_first.is_empty() {
            true => None,
            false => Some(ask(&[&piece.avoid[..], &piece.avoid_first[..]].concat(), true)),
        };
        match apart {
            Some(Ok(granted)) => Ok(granted),
            _ => ask(&piece.avoid, false),
        }
    }

    fn keep_up(mut self) {
        while !self.stop.load(SeqCst) {
            let wait = if self.placements.is_moving() { BUSY_WAIT } else { QUIET_WAIT };
            match self.exchange(wait) {
                Ok(()) => self.said = None,
                Err(error) => {
                    // More memory of that kind could not be used either.
                    self.may_grow &= !matches!(error, RackError::RemoteTcp { .. });
                    self.say(&format!("{error}; the program goes on with the far memory it has"));
                    std::thread::sleep(RETRY);
                }
            }
            self.look();
            self.release();
            self.grow();
            self.spill_if_stuck();
            self.unspill();
        }
    }

    /// Sends one report and acts on the answer.
    fn exchange(&mut self, wait: Duration) -> Result<(), RackError> {
        let entries = RunBlades::new(&self.board).list();
        self.placements.sweep(|entry, generation| {
            entries.iter().any(|it| (it.entry, it.generation) == (entry, generation))
        });
        let Some(segments) = self.tenant.report(self.placements.report(self.far_bytes()), wait)?
        else {
            // The controller may have just been told that this client ends.
            if !self.stop.load(SeqCst) {
                self.tenant.join()?;
            }
            return Ok(());
        };
        // One place that cannot be used must not keep others from being used, or left.
        let mut refused = Ok(());
        for action in self.placements.hear(segments) {
            refused = refused.and(self.carry_out(action));
        }
        let lost: BTreeSet<String> =
            self.placements.lost().map(|lost| lost.place.node.clone()).collect();
        // Once for each node: the loss stays, and so do its reports.
        for node in lost.difference(&self.lost) {
            let node = plain(node);
            match self.redundancy {
                Redundancy::NONE => say!("farpool: node {node} has lost memory of this program"),
                Redundancy::Copies(_) => say!(
                    "farpool: node {node} has lost memory of this program, of which there are \
                     copies elsewhere"
                ),
                Redundancy::Parity => say!(
                    "farpool: node {node} has lost memory of this program, which is made again \
                     from the rest of its groups"
                ),
            }
        }
        self.lost = lost;
        refused
    }

    fn carry_out(&mut self, action: Action) -> Result<(), RackError> {
        let table = &self.board.header().blades;
        match action {
            Action::Add { key, place } => {
                let offer = offer(&place, key.1, self.allow_remote_tcp)?;
                match RunBlades::new(&self.board).add(&offer, &self.folder) {
                    Ok((entry, generation)) => self.placements.taken(key, entry, generation),
                    Err(error) => self.say(&error.to_string()),
                }
            }
            Action::Leave { key, placement } => {
                table.set_role(placement.entry, placement.generation, BladeRole::Leaving);
                self.placements.leaving(key);
            }
        }
        Ok(())
    }

    fn far_bytes(&self) -> u64 {
        let pages = self.board.processes().map(|slot| slot.get(Counter::FarPages));
        pages.sum::<u64>().saturating_mul(farpool_units::PAGE_BYTES as u64)
    }

    /// Notes which places are used: what is to be given back and asked for depends on it.
    fn look(&mut self) {
        let entries = RunBlades::new(&self.board).list();
        self.placements.look(Instant::now(), |entry| {
            let entry = entries.iter().find(|it| it.entry == entry);
            entry.map_or(Reach::All, BladeUse::reach)
        });
    }

    /// Gives back what is of no use any more, which only copies or parity make possible.
    fn release(&mut self) {
        let now = Instant::now();
        if self.release_after.is_some_and(|after| now < after) {
            return;
        }
        for id in self.placements.to_release(now) {
            if let Err(error) = self.tenant.release(id) {
                self.release_after = Some(now + GROW_RETRY);
                self.say(&format!("memory that is of no use cannot be given back: {error}"));
            }
        }
    }

    /// Moves what was spilled back to the rack when that has room again.
    fn unspill(&mut self) {
        let Some((entry, generation)) = self.spill.placement() else { return };
        let entries = RunBlades::new(&self.board).list();
        let spill = entries.iter().find(|it| (it.entry, it.generation) == (entry, generation));
        match spill {
            None => self.spill.end(),
            Some(spill) if !spill.is_leaving && self.placements.has_room_for(self.far_bytes()) => {
                let table = &self.board.header().blades;
                table.set_role(entry, generation, BladeRole::Leaving);
            }
            Some(_) => {}
        }
    }

    /// The last resort: takes in what no other blade has room for.
    fn spill_if_stuck(&mut self) {
        let blades = RunBlades::new(&self.board);
        if !blades.list().iter().any(|blade| blade.is_stuck) {
            self.stuck_since = None;
            return;
        }
        let since = *self.stuck_since.get_or_insert_with(Instant::now);
        if since.elapsed() < STUCK_PATIENCE || self.spill.is_there() {
            return;
        }
        let spilled =
            self.spill.start(self.placements.leaving_bytes(), self.placements.granted_bytes());
        let message = match spilled {
            Ok((offer, what)) => match blades.add(&offer, &self.folder) {
                Ok((entry, generation)) => {
                    self.spill.seated(entry, generation);
                    format!("no node has room for memory that must move; it goes into {what}")
                }
                Err(error) => {
                    self.spill.end();
                    error.to_string()
                }
            },
            Err(error) => format!("memory that must move cannot be spilled either: {error}"),
        };
        self.say(&message);
    }

    fn say(&mut self, message: &str) {
        if self.said.as_deref() != Some(message) {
            say!("farpool: {}", plain(message));
            self.said = Some(message.to_owned());
        }
    }
}

/// Returns when to ask the rack again, if memory is on its way back.
fn pause_after(error: &RackError) -> Option<Duration> {
    match error {
        RackError::Api(error) => retry_after(error),
        _ => None,
    }
}

/// Returns the name under which a program is known to a rack, which takes no name that a terminal
/// would obey, and none above [`NAME_LIMIT_BYTES`]: the end of a path says more than its beginning.
fn client_name(program: &OsStr) -> String {
    let text = program.to_string_lossy();
    let name = plain(&text);
    let mut from = name.len().saturating_sub(NAME_LIMIT_BYTES);
    while !name.is_char_boundary(from) {
        from += 1;
    }
    name[from..].to_owned()
}

/// The place of a segment as a board entry.
fn offer(place: &Place, epoch: u64, allow_remote_tcp: bool) -> Result<BladeOffer, RackError> {
    let best = best_address(place);
    let text = best.as_ref().map_or_else(|| place.addresses.join(", "), ToString::to_string);
    if best.is_some_and(|address| !address.is_local()) && !allow_remote_tcp {
        return Err(RackError::RemoteTcp { address: text });
    }
    let rates = [place.read_bytes_per_s, place.write_bytes_per_s];
    Ok(BladeOffer {
        address: text,
        domain: place.domain.as_deref().map_or(BladeDomain::Host, domain_of_name),
        grant: place.key.map(|key| (key.0, epoch)),
        limits: Some(rates.map(RateLimit::paced)),
    })
}

/// Returns the failure domain of this name, by a number. Two names with one number, of 2^64, would
/// count as one domain.
fn domain_of_name(name: &str) -> BladeDomain {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    BladeDomain::named(hasher.finish())
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn random() -> Result<u128, RackError> {
    let mut bits = [0; 16];
    fill_random(&mut bits).map_err(|error| RackError::Random(error.into()))?;
    Ok(u128::from_le_bytes(bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The controller might have said that the tenant's programs are to have copies.
    #[test]
    fn a_redundancy_that_cannot_be_asked_for_is_not_guessed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let controllers = format!("http://{}", listener.local_addr().expect("an address"));
        drop(listener);
        let rack = RackOptions {
            controllers,
            access: Access::default(),
            host: None,
            tenant: None,
            rate_bytes_per_s: None,
            spill_directory: PathBuf::new(),
        };
        let asked = redundancy_of_tenant(&rack);
        assert!(matches!(asked, Err(RackError::Api(_))), "{asked:?}");
    }

    #[test]
    fn a_programs_name_is_one_that_a_rack_takes() {
        assert_eq!(client_name(OsStr::new("/usr/bin/redis")), "/usr/bin/redis");
        assert_eq!(client_name(OsStr::new("a\u{1b}[2Jb")), "a\\u{1b}[2Jb");
        let long = "\u{fc}".repeat(NAME_LIMIT_BYTES);
        let name = client_name(OsStr::new(&format!("x{long}")));
        assert!(name.len() <= NAME_LIMIT_BYTES && name.ends_with('\u{fc}'));
    }
}
