//! The thread that keeps far memory: renews leases, carries out what [`plan`](super::plan) decides,
//! informs the shards.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_api::Place;
use farpool_api::placements::PlaceKey;
use farpool_api::tenant::{Tenant, best_address};
use farpool_handshake::Dialer;
use farpool_pool::{
    Address, BladeIndex, BladeSpec, ClientLimits, Grant, GrantKey, Pool, PoolConfig, PoolError,
    RateLimit, fresh_client,
};
use farpool_units::SUPERPAGE_BYTES;

use super::away::Away;
use super::news::News;
use super::order::{FarOrder, Held};
use super::plan::{Answer, Order, Plan, deal};
use super::rack::{self, LEAVE_WAIT, ToRack};
use super::{FarError, FarSettings, FarSource};
use crate::mail::mailbox::Message;
use crate::settings::Shared;
use farpool_kv_tier::far::{GrantNumber, Share};

/// The longest time between two renewals of the pool's leases.
const KEEP_ALIVE_MAX: Duration = Duration::from_secs(5);
/// How often blades are checked, and how often while memory moves.
const LOOK: Duration = Duration::from_millis(200);
const BUSY_LOOK: Duration = Duration::from_millis(20);
/// Emptying ends this long before the pool takes the memory back: what is left then has to be
/// dropped, and reported.
const DEADLINE_RESERVE: Duration = Duration::from_secs(2);
/// The longest that emptying may take in any case: draining a node should not wait longer for a
/// cache.
const EMPTY_MAX: Duration = Duration::from_secs(60);

/// One piece of far memory.
#[derive(Debug)]
struct Granted {
    pool: Arc<Pool>,
    /// Its blades, in the order of their numbers, if the settings name them: what is lost is asked
    /// for again there.
    named: Vec<Address>,
    held: Arc<Held>,
    /// Superpages of each shard.
    dealt: Vec<u64>,
    bytes: u64,
    /// Number of lost blades already reported.
    known_lost: usize,
    leaves: bool,
}

/// A server's far memory, before and after it runs.
#[derive(Debug)]
pub struct Keeper {
    shared: Arc<Shared>,
    settings: FarSettings,
    /// Connects over TCP, with a certificate.
    dialer: Option<Arc<Dialer>>,
    granted: BTreeMap<GrantNumber, Granted>,
    next_grant: u64,
    rack: Option<(Plan, Option<Tenant>)>,
    /// Blades named by the settings that were lost.
    away: Vec<Away>,
    started: Instant,
}

/// A running keeper.
#[derive(Debug)]
pub struct Keeping {
    news: Sender<News>,
    thread: JoinHandle<()>,
}

impl Keeping {
    /// Gives all far memory back, once no shard uses it any more.
    pub fn end(self) {
        // It makes no difference if the thread has ended already.
        let _ = self.news.send(News::End);
        let _ = self.thread.join();
    }
}

impl Keeper {
    /// Connects to the blades of the settings and takes their memory. A pool is asked only later.
    pub fn start(shared: &Arc<Shared>, settings: &FarSettings) -> Result<Self, FarError> {
        let dial = |credentials| Dialer::new(credentials, |news| tracing::warn!("{news}"));
        let dialer = settings.credentials.clone().map(dial).transpose();
        let mut keeper = Self {
            shared: Arc::clone(shared),
            settings: settings.clone(),
            dialer: dialer.map_err(FarError::Certificate)?,
            granted: BTreeMap::new(),
            next_grant: 0,
            rack: None,
            away: Vec::new(),
            started: Instant::now(),
        };
        shared.far.wanted_bytes.store(settings.bytes, Ordering::Relaxed);
        match &settings.source {
            FarSource::Blades(blades) => {
                keeper.connect_named(blades, whole_superpages(settings, shared.shards())?)?;
            }
            FarSource::Pool(options) => {
                keeper.rack = Some((Plan::new(settings.bytes), Some(rack::tenant(options)?)));
            }
        }
        Ok(keeper)
    }

    /// Starts the thread that keeps far memory.
    pub fn run(mut self) -> std::io::Result<Keeping> {
        let (news, heard) = channel();
        let to_rack = match &mut self.rack {
            Some((_, tenant)) => {
                let (questions, asked) = channel();
                let answers = news.clone();
                let tenant = tenant.take();
                let rate = match &self.settings.source {
                    FarSource::Pool(options) => options.rate_bytes_per_s,
                    FarSource::Blades(_) => None,
                };
                let talk = move || {
                    if let Some(tenant) = tenant {
                        rack::talk(tenant, rate, &asked, &answers);
                    }
                };
                std::thread::Builder::new().name("kv-pool".into()).spawn(talk)?;
                Some(questions)
            }
            None => None,
        };
        let keep = move || self.keep(&heard, to_rack.as_ref());
        let thread = std::thread::Builder::new().name("kv-far".into()).spawn(keep)?;
        Ok(Keeping { news, thread })
    }

    fn keep(mut self, heard: &Receiver<News>, to_rack: Option<&Sender<ToRack>>) {
        let mut renewed = Instant::now();
        loop {
            self.ask(to_rack);
            let leases = self.granted.values().map(|it| it.pool.lease()).min();
            let pause = leases.map_or(KEEP_ALIVE_MAX, |lease| (lease / 3).min(KEEP_ALIVE_MAX));
            let is_busy = self.granted.values().any(|it| it.leaves);
            let look = if is_busy { BUSY_LOOK } else { LOOK };
            match heard.recv_timeout(look.min(pause.saturating_sub(renewed.elapsed()))) {
                Ok(News::Answer(answer)) => self.hear(answer),
                Ok(News::End) => break,
                Ok(News::Left) | Err(RecvTimeoutError::Timeout) => {}
                // No sender is left that could end this.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.take_back();
            self.look_for_losses();
            self.ask_away();
            if renewed.elapsed() >= pause {
                renewed = Instant::now();
                self.granted.values().for_each(|it| it.pool.keep_alive());
            }
        }
        self.granted.values().for_each(|it| it.pool.goodbye());
        if let Some(to_rack) = to_rack
            && to_rack.send(ToRack::Leave).is_ok()
        {
            let until = Instant::now() + LEAVE_WAIT;
            while let Some(left) = until.checked_duration_since(Instant::now())
                && matches!(heard.recv_timeout(left), Ok(News::Answer(_) | News::End))
            {}
        }
    }

    /// Asks the pool the next question if one is due.
    fn ask(&mut self, to_rack: Option<&Sender<ToRack>>) {
        let used_bytes = self.used_bytes();
        let now = self.started.elapsed();
        let Some(((plan, _), to_rack)) = self.rack.as_mut().zip(to_rack) else { return };
        if let Some(question) = plan.question(now, used_bytes) {
            // If the thread is gone there are no answers: far memory stays as it is.
            let _ = to_rack.send(ToRack::Ask(question));
        }
        for text in plan.take_messages() {
            tracing::warn!("{text}");
        }
    }

    /// Upper bound of the bytes that hold data: a cache fills what it has.
    fn used_bytes(&self) -> u64 {
        let granted = self.granted.values().map(|it| it.bytes).sum();
        self.shared.far_written_bytes().min(granted)
    }

    fn hear(&mut self, answer: Answer) {
        let now = self.started.elapsed();
        let Some((plan, _)) = &mut self.rack else { return };
        let orders = plan.take(answer, now);
        self.carry_out(orders);
    }

    fn carry_out(&mut self, orders: Vec<Order>) {
        for order in orders {
            match order {
                Order::Take { key, place } => self.take(key, &place),
                Order::Empty { grant, within } => self.empty(grant, within),
                Order::Drop { grant } => self.drop_lost(grant),
            }
        }
    }

    fn empty(&mut self, grant: GrantNumber, within: Option<Duration>) {
        let within = within.map_or(EMPTY_MAX, |it| it.saturating_sub(DEADLINE_RESERVE));
        let within = within.min(EMPTY_MAX);
        let until = Instant::now() + within;
        tracing::info!(grant = grant.0, ?within, "far memory has to be given back");
        // The same request may be repeated with an earlier deadline.
        let is_new = self.granted.get(&grant).is_some_and(|it| !it.leaves);
        self.shared.far.reclaims.fetch_add(u64::from(is_new), Ordering::Relaxed);
        self.leave(grant, || FarOrder::Empty { grant, until });
    }

    fn drop_lost(&mut self, grant: GrantNumber) {
        tracing::warn!(grant = grant.0, "far memory is gone: its items are misses now");
        self.give_up(grant);
    }

    fn give_up(&mut self, grant: GrantNumber) {
        self.shared.far.lost_grants.fetch_add(1, Ordering::Relaxed);
        self.leave(grant, || FarOrder::Drop { grant, is_lost: true });
    }

    fn leave(&mut self, grant: GrantNumber, order: impl Fn() -> FarOrder) {
        let Some(granted) = self.granted.get_mut(&grant) else { return };
        if !std::mem::replace(&mut granted.leaves, true) {
            self.shared.far.granted_bytes.fetch_sub(granted.bytes, Ordering::Relaxed);
            self.shared.far.leaving_bytes.fetch_add(granted.bytes, Ordering::Relaxed);
        }
        self.tell_shards(order);
    }

    fn tell_shards(&self, order: impl Fn() -> FarOrder) {
        self.shared.mailboxes.iter().for_each(|mailbox| mailbox.put(Message::Far(order())));
    }

    fn take(&mut self, key: PlaceKey, place: &Place) {
        let taken = self.blade_of(key, place).and_then(|spec| {
            let superpages = u32::try_from(place.bytes / SUPERPAGE_BYTES)
                .map_err(|_| FarError::TooLarge { bytes: place.bytes })?;
            self.connect(vec![spec], superpages)
        });
        let now = self.started.elapsed();
        let Some((plan, _)) = &mut self.rack else { return };
        match taken {
            Ok(grant) => {
                plan.taken(key, grant);
                let (node, bytes) = (&place.node, place.bytes);
                tracing::info!(node, bytes, grant = grant.0, "far memory has come");
            }
            Err(error) => plan.not_taken(key, &place.node, &error.to_string(), now),
        }
    }

    fn blade_of(&self, (_, epoch): PlaceKey, place: &Place) -> Result<BladeSpec, FarError> {
        let nowhere = || FarError::Address { addresses: place.addresses.join(", ") };
        let address: Address = best_address(place).ok_or_else(nowhere)?;
        let rates = [place.read_bytes_per_s, place.write_bytes_per_s].map(RateLimit::paced);
        Ok(BladeSpec {
            domain: None,
            is_of_client: false,
            address,
            grant: place.key.map(|key| Grant { key: GrantKey(key.0), epoch }),
            limits: Some(Arc::new(ClientLimits::new(rates[0], rates[1]))),
            is_met: false,
        })
    }

    /// Connects to the blades of one piece of far memory and deals its superpages out to the
    /// shards.
    fn connect(
        &mut self,
        blades: Vec<BladeSpec>,
        superpages: u32,
    ) -> Result<GrantNumber, FarError> {
        let pool = Arc::new(Pool::connect(PoolConfig {
            blades,
            client: fresh_client()?,
            client_name: format!("kv:{}", std::process::id()),
            quota_bytes: u64::from(superpages) * SUPERPAGE_BYTES,
            sharing_group: None,
            deadline: self.settings.deadline,
            allow_remote_tcp: self.settings.allow_remote_tcp,
            secures_tcp: self.dialer.is_some(),
            redundancy: farpool_pool::Redundancy::NONE,
            seals_pages: self.settings.seal.seals(self.settings.source.is_remote()),
            asks: self.dialer.clone().map(|dialer| dialer as _),
            time: farpool_pool::Time::KERNEL,
        })?);
        // A blade would keep what it has given so far until its lease is over.
        self.deal_out(&pool, superpages).inspect_err(|_| pool.goodbye())
    }

    /// Takes superpages from the pool's blades and deals them out to the shards.
    fn deal_out(&mut self, pool: &Arc<Pool>, superpages: u32) -> Result<GrantNumber, FarError> {
        let segment = pool.create_segment()?;
        (0..superpages).try_for_each(|superpage| pool.allocate_superpage(segment, superpage))?;
        let mut have = vec![0; self.shared.shards()];
        for granted in self.granted.values().filter(|it| !it.leaves) {
            have.iter_mut().zip(&granted.dealt).for_each(|(have, dealt)| *have += dealt);
        }
        let grant = GrantNumber(self.next_grant);
        self.next_grant += 1;
        let dealt = deal(superpages, &have);
        let lanes = dealt.iter().map(|_| pool.lane()).collect::<Result<Vec<_>, PoolError>>()?;
        let held = Held::by(dealt.len());
        let bytes = u64::from(superpages) * SUPERPAGE_BYTES;
        let counts = dealt.iter().map(|it| it.len() as u64).collect();
        for ((mailbox, lane), superpages) in self.shared.mailboxes.iter().zip(lanes).zip(dealt) {
            let share = Share { grant, pool: Arc::clone(pool), lane, segment, superpages };
            let (share, held) = (Box::new(share), Arc::clone(&held));
            mailbox.put(Message::Far(FarOrder::Take { share, held }));
        }
        self.shared.far.granted_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.granted.insert(
            grant,
            Granted {
                pool: Arc::clone(pool),
                named: Vec::new(),
                held,
                dealt: counts,
                bytes,
                known_lost: 0,
                leaves: false,
            },
        );
        Ok(grant)
    }

    /// As [`Self::connect`], for blades that the settings name.
    fn connect_named(&mut self, blades: &[Address], superpages: u32) -> Result<(), FarError> {
        let specs = blades.iter().cloned().map(BladeSpec::from).collect();
        let grant = self.connect(specs, superpages)?;
        if let Some(granted) = self.granted.get_mut(&grant) {
            granted.named = blades.to_vec();
        }
        Ok(())
    }

    /// Asks the next lost blade for its memory again, if that is due.
    fn ask_away(&mut self) {
        let now = self.started.elapsed();
        let Some(at) = self.away.iter().position(|it| it.is_due(now)) else { return };
        let Away { address, superpages, since, .. } = self.away[at].clone();
        match self.connect_named(std::slice::from_ref(&address), superpages) {
            Ok(()) => {
                let bytes = u64::from(superpages) * SUPERPAGE_BYTES;
                let away = now.saturating_sub(since);
                tracing::info!(%address, bytes, ?away, "a blade is back: its memory is used again");
                self.away.remove(at);
            }
            Err(error) => {
                tracing::debug!(%address, %error, "a lost blade was asked in vain");
                self.away[at].asked_in_vain(self.started.elapsed());
            }
        }
    }

    /// Gives back the pieces in which no shard has anything left.
    fn take_back(&mut self) {
        let free: Vec<GrantNumber> = self
            .granted
            .iter()
            .filter(|(_, it)| it.leaves && it.held.is_free())
            .map(|(grant, _)| *grant)
            .collect();
        for grant in free {
            if let Some(granted) = self.granted.remove(&grant) {
                self.shared.far.leaving_bytes.fetch_sub(granted.bytes, Ordering::Relaxed);
                granted.pool.goodbye();
            }
            if let Some((plan, _)) = &mut self.rack {
                plan.freed(grant);
                tracing::info!(grant = grant.0, "far memory was given back");
            }
        }
    }

    /// Reports each lost blade once. A grant of a pool is given up with its blade, and so is one of
    /// named blades with the last of them; until then the shards give up what the lost ones held.
    fn look_for_losses(&mut self) {
        let now = self.started.elapsed();
        let (mut orders, mut gone, mut partly) = (Vec::new(), Vec::new(), Vec::new());
        for (grant, granted) in &mut self.granted {
            let lost = granted.pool.lost();
            for blade in lost.iter().skip(granted.known_lost) {
                tracing::error!(
                    address = blade.address,
                    reason = blade.reason,
                    "a blade is lost: its items are misses now"
                );
            }
            if lost.len() > granted.known_lost
                && let Some((plan, _)) = &mut self.rack
            {
                orders.extend(plan.lost(*grant, now));
            }
            if !granted.named.is_empty() {
                for blade in lost.iter().skip(granted.known_lost) {
                    let Some(away) = away_from(granted, blade.blade, now) else { continue };
                    let bytes = u64::from(away.superpages) * SUPERPAGE_BYTES;
                    assert!(granted.bytes >= bytes, "a blade lent a part of its grant");
                    granted.bytes -= bytes;
                    self.shared.far.granted_bytes.fetch_sub(bytes, Ordering::Relaxed);
                    self.away.push(away);
                }
                if lost.len() > granted.known_lost {
                    let is_all = lost.len() == granted.named.len();
                    if is_all { &mut gone } else { &mut partly }.push(*grant);
                }
            }
            granted.known_lost = granted.known_lost.max(lost.len());
        }
        self.carry_out(orders);
        gone.into_iter().for_each(|grant| self.give_up(grant));
        for grant in partly {
            self.tell_shards(|| FarOrder::DropLost { grant });
        }
    }
}

/// What a lost blade is to be asked for again: what it lent to this grant.
fn away_from(granted: &Granted, blade: BladeIndex, now: Duration) -> Option<Away> {
    let superpages = u32::try_from(granted.pool.superpages_on(blade)).ok()?;
    let address = granted.named.get(usize::from(blade.0))?.clone();
    (superpages > 0).then(|| Away::new(address, superpages, now))
}

/// Superpages to take from named blades, over all shards; each shard gets the same number.
fn whole_superpages(settings: &FarSettings, shards: usize) -> Result<u32, FarError> {
    let each = settings.bytes / SUPERPAGE_BYTES / shards as u64;
    if each == 0 {
        let least = SUPERPAGE_BYTES * shards as u64;
        return Err(FarError::TooSmall { bytes: settings.bytes, shards, least });
    }
    u32::try_from(each * shards as u64).map_err(|_| FarError::TooLarge { bytes: settings.bytes })
}
