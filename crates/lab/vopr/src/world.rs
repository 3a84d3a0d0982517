//! The hosts and the network of this thread's trial, and what happens while the product's code
//! waits: bytes arrive, blades answer, faults strike.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use farpool_acms::Rng;
use farpool_blade::{BackingKind, BladeConfig, Persist, SteppedServer};
use farpool_kernel::{Time, send_with_descriptors};
use farpool_pool::Address;
use farpool_units::at_most;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketType};
use tempfile::TempDir;

use crate::clock;
use crate::liar::Liar;
use crate::network::{BITE_BYTES, Flow, Sky, Twist, Weather, pair};

/// How often a blade looks at its leases.
const TICK_NS: u64 = 250_000_000;
/// A wait for nothing takes this long: code that asks again and again moves the time.
const GLANCE_NS: u64 = 1_000;
/// A wait takes this long at least while nothing happens.
const OVERSLEEP_NS: u64 = 2_000_000;
/// Waits of one trial; more mean that something asks for ever.
const WAITS_MAX: u64 = 400_000;
/// Memory that outlives a blade's process is a file here.
const IN_MEMORY: &str = "/dev/shm";
/// Where all blades of a trial listen, each at an address of its own.
const PORT: u16 = 7070;

/// What may strike a host or its flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// All flows are closed.
    Cut(usize),
    /// What passes on the open flows is swallowed, upwards, downwards or both.
    Deaden(usize, bool, bool),
    /// New flows are refused.
    Refuse(usize),
    /// They are accepted again.
    Accept(usize),
    /// The blade does nothing.
    Pause(usize),
    /// It goes on.
    Resume(usize),
    /// The blade ends with all that it holds, and another one is there at once.
    Restart(usize),
    /// The blade's process ends, and another one with the same memory is there at once.
    Reopen(usize),
    /// The blade answers every write that it is full.
    Fill(usize),
    /// It takes writes again.
    Empty(usize),
    /// It returns other pages than those that it has.
    Lie(usize),
    /// It is honest again.
    BeHonest(usize),
}

/// A host with a blade.
#[derive(Debug)]
struct Host {
    /// None only while one process follows the other.
    blade: Option<SteppedServer>,
    config: BladeConfig,
    /// Where the memory and its table are, if they outlive the blade's process.
    folder: Option<TempDir>,
    is_refusing: bool,
    is_paused: bool,
    /// Writes that were refused because it is full, or None while it is not.
    refused: Option<Refused>,
    /// None if it never lies in this trial.
    liar: Option<Liar>,
    ticked_ns: u64,
}

/// Requests that a full blade refused.
#[derive(Clone, Copy, Debug, Default)]
struct Refused {
    since_ns: u64,
    requests: u64,
}

/// Everything but the clients.
#[derive(Debug)]
pub struct World {
    hosts: Vec<Host>,
    flows: Vec<Flow>,
    weather: Weather,
    random: Rng,
    flips_from_ns: u64,
    strikes: BTreeMap<(u64, u64), Strike>,
    /// Strikes planned so far: those of one time happen in this order.
    planned: u64,
    waits: u64,
    scratch: Vec<u8>,
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
    static BYSTANDER: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// The address of a host's blade.
#[must_use]
pub fn address_of(host: usize) -> Address {
    let last: u8 = at_most(host + 1);
    Address::Tcp(SocketAddr::from((Ipv4Addr::new(10, 0, 0, last), PORT)))
}

/// The time for pools and blades of this thread.
#[must_use]
pub fn time() -> Time {
    Time::simulated(clock::now, wait)
}

/// The blades of a trial.
#[derive(Clone, Copy, Debug)]
pub struct Blades {
    /// How many.
    pub hosts: usize,
    /// What each of them lends.
    pub memory_bytes: u64,
    /// How long they keep what a lost client has.
    pub lease: Duration,
    /// What they lend outlives their process.
    pub persist: bool,
}

/// Begins a trial.
///
/// # Panics
/// A blade gets no memory.
pub fn begin(seed: u64, blades: Blades, weather: Weather) {
    let Blades { hosts, memory_bytes, lease, persist } = blades;
    clock::reset();
    let config = BladeConfig {
        memory_bytes,
        backing: BackingKind::Memfd,
        persist: persist.then_some(Persist::Restart),
        lease,
        allow_remote_tcp: true,
        threads: 1,
        time: time(),
        ..BladeConfig::default()
    };
    let world = World {
        hosts: (0..hosts).map(|_| Host::new(config.clone())).collect(),
        flows: Vec::new(),
        weather,
        random: Rng::new(seed),
        flips_from_ns: 0,
        strikes: BTreeMap::new(),
        planned: 0,
        waits: 0,
        scratch: vec![0; BITE_BYTES],
    };
    WORLD.set(Some(world));
}

/// Ends the trial.
pub fn end() {
    BYSTANDER.set(None);
    WORLD.set(None);
}

/// Runs `what` in every wait from now on, until the value is dropped.
pub fn attend(what: Rc<dyn Fn()>) -> Attended {
    BYSTANDER.set(Some(what));
    Attended
}

/// See [`attend`].
#[derive(Debug)]
pub struct Attended;

impl Drop for Attended {
    fn drop(&mut self) {
        BYSTANDER.set(None);
    }
}

/// Calls `what` with the world of this thread.
///
/// # Panics
/// There is none, or it is in use.
pub fn with<T>(what: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(|world| what(world.as_mut().expect("a trial has begun")))
}

/// Opens a flow in the stead of the network; the pools' [`farpool_pool::Ask`].
///
/// # Errors
/// No descriptor is left.
pub fn ask(address: &Address) -> Result<Option<OwnedFd>, Errno> {
    let (asker, answerer) = pair(SocketType::SEQPACKET)?;
    let (client, network) = pair(SocketType::STREAM)?;
    let is_open = with(|world| world.connect(address, network))?;
    let (text, sockets) = match is_open {
        true => ("OPENED".to_owned(), vec![std::os::fd::AsFd::as_fd(&client)]),
        false => (format!("FAILED {}", Errno::CONNREFUSED.raw_os_error()), Vec::new()),
    };
    send_with_descriptors(&answerer, text.as_bytes(), &sockets, SendFlags::DONTWAIT)?;
    Ok(Some(asker))
}

/// Passes the time until a descriptor is ready or it is over.
fn wait(set: &mut [PollFd<'_>], most: Duration) -> Result<usize, Errno> {
    let begun_ns = clock::now_ns();
    let mut until_ns = begun_ns + at_most::<u64, _>(most.as_nanos()).max(GLANCE_NS);
    loop {
        with(World::settle);
        // A short wait may take longer, as on any machine, while nothing happens anyway.
        let next_ns = with(|world| world.next_ns());
        until_ns = until_ns.max(next_ns.min(begun_ns + OVERSLEEP_NS));
        let bystander = BYSTANDER.with_borrow(Clone::clone);
        if let Some(bystander) = bystander {
            bystander();
        }
        let ready = match set.is_empty() {
            true => 0,
            false => poll(set, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?,
        };
        if ready > 0 || clock::now_ns() >= until_ns {
            return Ok(ready);
        }
        clock::set(next_ns.max(clock::now_ns() + GLANCE_NS).min(until_ns));
    }
}

impl Host {
    fn new(mut config: BladeConfig) -> Host {
        let folder = config.persist.map(|_| tempfile::tempdir_in(IN_MEMORY).expect("a folder"));
        if let Some(folder) = &folder {
            config.backing = BackingKind::File(folder.path().join("memory"));
        }
        let blade = SteppedServer::new(config.clone()).expect("memory for a blade");
        let ticked_ns = clock::now_ns();
        let (blade, refused, liar) = (Some(blade), None, None);
        let (is_refusing, is_paused) = (false, false);
        Host { blade, config, folder, is_refusing, is_paused, refused, liar, ticked_ns }
    }

    /// Ends the blade's process as a signal does, and starts another one.
    fn reopen(&mut self) {
        assert!(self.folder.is_some(), "only what outlives a process can be opened again");
        self.blade = None;
        self.blade = Some(SteppedServer::new(self.config.clone()).expect("the memory is there"));
    }

    fn blade(&mut self) -> &mut SteppedServer {
        self.blade.as_mut().expect("one process follows the other at once")
    }
}

impl World {
    /// Lets something strike at a time.
    pub fn plan(&mut self, at_ns: u64, strike: Strike) {
        self.planned += 1;
        if let Strike::Lie(host) = strike {
            // It remembers what it returns before.
            self.hosts[host].liar.get_or_insert_default();
        }
        self.strikes.insert((at_ns, self.planned), strike);
    }

    /// Changes what the network does.
    pub fn set_weather(&mut self, weather: Weather) {
        self.weather = weather;
    }

    /// No more faults: what was planned is dropped, hosts go on, the network is calm. Flows that
    /// have died stay dead.
    pub fn heal(&mut self) {
        self.strikes.clear();
        self.weather.flip_one_in = 0;
        for host in &mut self.hosts {
            (host.is_refusing, host.is_paused, host.refused) = (false, false, None);
            host.set_lying(false);
        }
    }

    /// Pages that blades replaced by others.
    pub fn lies(&self) -> u64 {
        self.hosts.iter().filter_map(|host| host.liar.as_ref()).map(Liar::told).sum()
    }

    /// Of each host that is full: for how long it has been so, and the writes that it refused.
    pub fn full_hosts(&self) -> impl Iterator<Item = (Duration, u64)> {
        let now_ns = clock::now_ns();
        self.hosts.iter().filter_map(move |host| {
            let Refused { since_ns, requests } = host.refused?;
            Some((Duration::from_nanos(now_ns - since_ns), requests))
        })
    }

    fn connect(&mut self, address: &Address, network: OwnedFd) -> Result<bool, Errno> {
        let Some(number) = (0..self.hosts.len()).find(|host| address_of(*host) == *address) else {
            return Ok(false);
        };
        let is_refusing = self.hosts[number].is_refusing;
        clock::note(|| {
            format!("connect to {number}{}", if is_refusing { ": refused" } else { "" })
        });
        if is_refusing {
            return Ok(false);
        }
        let (ours, blades) = pair(SocketType::STREAM)?;
        self.hosts[number].blade().arrive(blades);
        self.flows.push(Flow::new(number, network, ours));
        Ok(true)
    }

    /// The time of the next thing that happens by itself.
    fn next_ns(&self) -> u64 {
        let flows = self.flows.iter().filter_map(Flow::next_ns);
        let ticks = self.hosts.iter().map(|host| host.ticked_ns + TICK_NS);
        let strike = self.strikes.keys().next().map(|(at_ns, _)| *at_ns);
        flows.chain(ticks).chain(strike).min().unwrap_or(u64::MAX)
    }

    /// Does all that happens at this time.
    fn settle(&mut self) {
        self.waits += 1;
        assert!(self.waits <= WAITS_MAX, "waited {WAITS_MAX} times in one trial: without an end?");
        let now_ns = clock::now_ns();
        while let Some(first) = self.strikes.first_entry()
            && first.key().0 <= now_ns
        {
            let strike = first.remove();
            self.strike(strike);
        }
        for host in &mut self.hosts {
            if now_ns >= host.ticked_ns + TICK_NS {
                host.ticked_ns = now_ns;
                host.step();
            }
        }
        loop {
            if !self.pass(now_ns) {
                return;
            }
            self.hosts.iter_mut().for_each(Host::step);
        }
    }

    /// Moves what can be moved on all flows. True if anything was.
    fn pass(&mut self, now_ns: u64) -> bool {
        let World { hosts, flows, weather, random, flips_from_ns, scratch, .. } = self;
        let mut ready: Vec<[bool; 2]> = vec![[false; 2]; flows.len()];
        let ends = flows.iter().enumerate().flat_map(|(at, flow)| {
            let ends = flow.ends().into_iter().enumerate();
            ends.filter_map(move |(side, end)| Some((at, side, end?)))
        });
        let (places, mut set): (Vec<_>, Vec<_>) = ends
            .map(|(at, side, end)| ((at, side), PollFd::from_borrowed_fd(end, PollFlags::IN)))
            .unzip();
        if !set.is_empty() {
            poll(&mut set, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("open sockets");
        }
        for ((at, side), end) in places.into_iter().zip(&set) {
            ready[at][side] = !end.revents().is_empty();
        }
        drop(set);
        let mut moved = false;
        for (flow, ready) in flows.iter_mut().zip(ready) {
            let mut sky =
                Sky { weather: *weather, random: &mut *random, flips_from_ns: &mut *flips_from_ns };
            let Host { refused, liar, .. } = &mut hosts[flow.host];
            let refused = refused.as_mut().map(|it| &mut it.requests);
            let twist = Twist { refused, liar: liar.as_mut() };
            moved |= flow.pass(ready, now_ns, &mut sky, twist, scratch);
        }
        flows.retain(|flow| !flow.is_over());
        moved
    }

    /// Lets something strike at once.
    pub fn strike(&mut self, strike: Strike) {
        clock::note(|| format!("{strike:?}"));
        match strike {
            Strike::Cut(at) => self.flows_of(at).for_each(Flow::cut),
            Strike::Deaden(at, up, down) => self.flows_of(at).for_each(|flow| flow.die(up, down)),
            Strike::Refuse(at) => self.hosts[at].is_refusing = true,
            Strike::Accept(at) => self.hosts[at].is_refusing = false,
            Strike::Pause(at) => self.hosts[at].is_paused = true,
            Strike::Resume(at) => self.hosts[at].is_paused = false,
            Strike::Fill(at) => {
                let since_ns = clock::now_ns();
                self.hosts[at].refused.get_or_insert(Refused { since_ns, requests: 0 });
            }
            Strike::Empty(at) => self.hosts[at].refused = None,
            Strike::Lie(at) => self.hosts[at].set_lying(true),
            Strike::BeHonest(at) => self.hosts[at].set_lying(false),
            Strike::Restart(at) => {
                self.flows_of(at).for_each(Flow::cut);
                let host = &mut self.hosts[at];
                let fresh = Host::new(host.config.clone());
                *host = Host { liar: host.liar.take(), ..fresh };
            }
            Strike::Reopen(at) => {
                self.flows_of(at).for_each(Flow::cut);
                self.hosts[at].reopen();
            }
        }
    }

    fn flows_of(&mut self, host: usize) -> impl Iterator<Item = &mut Flow> {
        self.flows.iter_mut().filter(move |flow| flow.host == host)
    }
}

impl Host {
    fn set_lying(&mut self, is_lying: bool) {
        self.liar.iter_mut().for_each(|liar| liar.set_lying(is_lying));
    }

    fn step(&mut self) {
        if !self.is_paused {
            self.blade().step().expect("the kernel's events");
        }
    }
}
