//! The thread that serves the program's children.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use farpool_pool::PageError;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::MemfdFlags;

use super::child::{Child, RUN_PAGES, Source};
use super::elsewhere;
use super::handover::{self, HandedLayer, HandedLayers, Handover};
use super::remains::Lacking;
use crate::core::Core;
use crate::error::StartError;
use crate::life::children::orders::{Children, Keeper, Order, SETTLED};
use crate::life::fetcher::Fetcher;
use crate::life::process::Pager;
use crate::space::Page;
use crate::space::page::{MAX_LAYERS, PageState, Phase};
use crate::sys;

/// The most children that are served at a time: each is a descriptor to poll. A further child gets
/// all its pages at once.
const MAX_CHILDREN: usize = 1024;
/// How often children are checked for having ended, which nothing reports.
const LOOK_STEP: Duration = Duration::from_millis(100);

/// Pages given to a child cannot be moved out before it has a sidecar of its own. While memory is
/// short it gets one within this time, if ever; until then its faults are answered with one page
/// each, and with pauses: some MB/s, where it would otherwise exceed the limit by what it reads.
const MODEST_TIME: Duration = Duration::from_secs(2);
const MODEST_PAUSE: Duration = Duration::from_millis(1);

/// See the module's description.
#[derive(Debug)]
pub struct Server {
    pager: &'static Pager,
    core: &'static Core,
    orders: &'static Children,
    keeper: Keeper,
    fetcher: Fetcher,
    served: Vec<Child>,
    /// Children whose own pager has not reported yet that it serves them.
    ceded: Vec<Ceded>,
    must_finish: bool,
}

/// A child that was ceded, and its handover.
#[derive(Debug)]
struct Ceded {
    child: Child,
    memory: OwnedFd,
}

/// The blades as the source of pages.
#[derive(Debug)]
pub struct Blades<'a> {
    pub core: &'static Core,
    pub fetcher: &'a mut Fetcher,
}

impl Source for Blades<'_> {
    fn fetch(&mut self, pages: &[Lacking]) -> u64 {
        let core = self.core;
        self.fetcher.fetch(pages.iter().map(|lacking| {
            let page = core.space.page(lacking.source)?;
            core.place(page, lacking.state.layer())
        }))
    }

    fn failure(&self) -> Option<PageError> {
        self.fetcher.failure
    }

    fn address(&self, number: usize) -> usize {
        self.fetcher.address(number)
    }
}

impl Server {
    pub fn new(
        pager: &'static Pager,
        core: &'static Core,
        orders: &'static Children,
        keeper: Keeper,
    ) -> Result<Server, StartError> {
        Ok(Server {
            pager,
            core,
            orders,
            keeper,
            fetcher: Fetcher::new(core.pool.lane()?)?,
            served: Vec::new(),
            ceded: Vec::new(),
            must_finish: false,
        })
    }

    /// Serves until the process ends.
    pub fn run(mut self) -> ! {
        let mut looked = Instant::now();
        loop {
            self.wait();
            self.orders.hear();
            while let Some(order) = self.orders.next_order() {
                self.obey(order);
            }
            let is_time = looked.elapsed() >= LOOK_STEP;
            if is_time {
                looked = Instant::now();
                self.forget_ceded();
            }
            for child in std::mem::take(&mut self.served) {
                self.attend(child, is_time);
            }
        }
    }

    /// Waits for an order or a message, or until it is time to check which children have ended.
    fn wait(&self) {
        let mut fds = vec![PollFd::new(self.orders, PollFlags::IN)];
        fds.extend(
            self.served.iter().map(|child| PollFd::from_borrowed_fd(child.as_fd(), PollFlags::IN)),
        );
        let step =
            if self.served.iter().any(Child::is_waiting) { Duration::ZERO } else { LOOK_STEP };
        let is_idle = self.served.is_empty() && self.ceded.is_empty();
        let timeout = (!is_idle).then(|| step.try_into().ok()).flatten();
        // An error is a wake-up like any other.
        let _ = poll(&mut fds, timeout.as_ref());
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Serve(child) => self.served.push(*child),
            Order::Cede { number, answer } => {
                let ceded = self.cede(number);
                // The asking thread may have given up waiting, and then has ordered the child back.
                let _ = answer.send(ceded);
            }
            Order::Taken(number) => {
                for ceded in take_ceded(&mut self.ceded, number) {
                    self.let_go(ceded.child);
                }
            }
            Order::Returned(number) => {
                let returned = take_ceded(&mut self.ceded, number);
                returned.into_iter().for_each(|ceded| self.serve_again(ceded.child));
            }
            Order::FinishAll => self.must_finish = true,
            Order::Reclaim => self.reclaim(),
        }
    }

    /// Serves a child, and keeps it if it still lacks pages.
    fn attend(&mut self, mut child: Child, looks: bool) {
        let mut source = Blades { core: self.core, fetcher: &mut self.fetcher };
        if self.must_finish || self.served.len() >= MAX_CHILDREN {
            child.finish(&mut source);
        } else if self.core.budget.allowance() <= 0 && child.age() < MODEST_TIME {
            if child.serve(1, &mut source) > 0 {
                std::thread::sleep(MODEST_PAUSE);
            }
        } else {
            child.serve(RUN_PAGES, &mut source);
        }
        self.adopt_born(&mut child);
        if child.is_settled() || (looks && child.look_whether_gone()) {
            self.let_go(child);
        } else {
            self.served.push(child);
        }
    }

    /// Drops ceded children that ended before their own pager served them, which nothing reports.
    fn forget_ceded(&mut self) {
        let is_gone = |ceded: &mut Ceded| ceded.child.look_whether_gone();
        let gone: Vec<Ceded> = self.ceded.extract_if(.., is_gone).collect();
        gone.into_iter().for_each(|ceded| self.let_go(ceded.child));
    }

    /// Takes ceded children back because the process that would report on them has ended: those
    /// whose own pagers have not begun are served here again.
    fn reclaim(&mut self) {
        for Ceded { child, memory } in std::mem::take(&mut self.ceded) {
            if handover::claim(&memory) {
                self.serve_again(child);
            } else {
                self.let_go(child);
            }
        }
    }

    fn serve_again(&mut self, child: Child) {
        elsewhere::remove(child.as_fd().as_raw_fd());
        self.served.push(child);
    }

    fn adopt_born(&mut self, parent: &mut Child) {
        for (number, uffd, inherited) in parent.take_born() {
            self.core.layout.expects_child();
            self.pager.inheritance.expects_another();
            self.served.push(Child::new(number, uffd, inherited));
        }
    }

    fn let_go(&mut self, child: Child) {
        let number = child.number;
        let mut descriptor = child.into_descriptor();
        let known = descriptor.as_raw_fd();
        if elsewhere::contains(known) {
            // Its userfaultfd must never have this number without the mark, nor may another
            // descriptor be taken for it.
            let _ = rustix::io::dup3(self.orders, &mut descriptor, rustix::io::DupFlags::CLOEXEC);
            elsewhere::remove(known);
        }
        drop(descriptor);
        self.orders.unsettled().note_settled(number);
        self.pager.inheritance.has_arrived();
        (self.keeper.settled)(number);
        self.core.layout.has_settled_child();
    }

    /// Prepares a child for its own pager: all its messages are handled, and the places of its
    /// pages are written down.
    fn cede(&mut self, number: u64) -> Result<OwnedFd, String> {
        if self.must_finish {
            return Err("it is given all its pages".into());
        }
        let Some(mut child) = take(&mut self.served, number).pop() else {
            let is_known = self.orders.unsettled().contains(number);
            return Err(if is_known { "it is not served yet" } else { SETTLED }.into());
        };
        let mut source = Blades { core: self.core, fetcher: &mut self.fetcher };
        child.serve(RUN_PAGES, &mut source);
        while !child.is_settled() && !child.is_ready_to_leave() {
            child.settle_special(&mut source);
            child.serve(RUN_PAGES, &mut source);
        }
        self.adopt_born(&mut child);
        if child.is_settled() {
            self.let_go(child);
            return Err(SETTLED.into());
        }
        let written = self.write_handover(&child).and_then(|memory| {
            let duplicate = memory.try_clone().map_err(|error| error.to_string())?;
            let is_marked = elsewhere::add(child.as_fd().as_raw_fd());
            let too_many = || "too many are handed over at a time".to_owned();
            is_marked.then_some((memory, duplicate)).ok_or_else(too_many)
        });
        match written {
            Ok((memory, duplicate)) => {
                self.ceded.push(Ceded { child, memory });
                Ok(duplicate)
            }
            Err(reason) => {
                self.served.push(child);
                Err(reason)
            }
        }
    }

    /// The pages that the child lacks of a layer, by their numbers in its segment.
    fn lacking<'a>(&'a self, child: &'a Child, layer: usize) -> impl Iterator<Item = u32> + 'a {
        let space = self.core.space;
        let superpages = (0..space.count()).filter_map(move |id| space.by_id(id));
        superpages.flat_map(move |superpage| {
            let states = child.remains().superpage(superpage.base()).into_iter().flatten();
            let of_layer =
                move |state: &PageState| state.phase() == Phase::Far && state.layer() == layer;
            let wanted = states.enumerate().filter(move |(_, state)| of_layer(state));
            wanted.map(move |(index, _)| Page { superpage, index }.segment_page())
        })
    }

    fn write_handover(&self, child: &Child) -> Result<OwnedFd, String> {
        let (core, wanted) = (self.core, child.remains().layers());
        let mut layers: HandedLayers = [const { None }; MAX_LAYERS];
        let still = core.pool.hold_still();
        for layer in core.layers.live().filter(|layer| wanted & (1 << layer) != 0) {
            if let Some(segment) = core.layers.segment(layer) {
                let token = core.pool.freeze_still(&still, segment);
                let token = Box::new(token.map_err(|error| error.to_string())?);
                let seals = core.pool.export_seals(segment, self.lacking(child, layer));
                layers[layer] = Some(HandedLayer { token, seals });
            }
        }
        let bases = (0..core.space.count()).filter_map(|id| Some(core.space.by_id(id)?.base()));
        let bytes = Handover::new(child.remains(), bases, layers).to_bytes();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let write = || -> Result<OwnedFd, std::io::Error> {
            let memory = rustix::fs::memfd_create("farpool-child", flags)?;
            let mut file = File::from(memory);
            file.write_all(&bytes)?;
            Ok(file.into())
        };
        write().map_err(|error| format!("its handover cannot be written: {error}"))
    }
}

fn take_ceded(children: &mut Vec<Ceded>, number: u64) -> Vec<Ceded> {
    children.extract_if(.., |ceded| ceded.child.number == number).collect()
}

/// Takes the child of this number out of a list.
fn take(children: &mut Vec<Child>, number: u64) -> Vec<Child> {
    children.extract_if(.., |child| child.number == number).collect()
}

impl Children {
    /// Serves a child from now on. The first child starts the thread for it.
    pub fn serve(
        &'static self,
        pager: &'static Pager,
        core: &'static Core,
        keeper: Keeper,
        child: Child,
    ) -> Result<(), StartError> {
        if !self.has_begun.swap(true, SeqCst)
            && let Err(error) = self.begin(pager, core, keeper)
        {
            // Its userfaultfd may be the last one: if it were closed, the child would read zeros.
            std::mem::forget(child);
            return Err(error);
        }
        self.order(Order::Serve(Box::new(child)));
        Ok(())
    }

    fn begin(
        &'static self,
        pager: &'static Pager,
        core: &'static Core,
        keeper: Keeper,
    ) -> Result<(), StartError> {
        let server = Server::new(pager, core, self, keeper)?;
        let serve = move || {
            sys::stand_back();
            server.run()
        };
        sys::spawn(c"farpool-children", false, Box::new(serve))?;
        Ok(())
    }
}
