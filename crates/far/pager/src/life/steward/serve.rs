//! Answers the program's requests.

use std::cell::Cell;
use std::time::Duration;

use farpool_units::exactly;

use crate::abort::panic_if_asked;
use crate::life::activation::register;
use crate::life::requests::{Answer, Kind, Request};
use crate::life::steward::carry::Carry;
use crate::life::steward::forgetting::advise;
use crate::life::steward::state::Steward;
use crate::space::registry::Region;

/// The longest wait between two rounds: when active there is nothing to watch, and requests ring
/// the bell.
const ACTIVE_STEP: Duration = Duration::from_secs(1);

impl Steward {
    /// Serves requests until the process ends.
    pub fn serve(mut self) -> ! {
        let pager = self.pager;
        loop {
            let bell = pager.requests.bell();
            // Between the two ends of a fork only its own thread may change anything.
            let forking = Cell::new(self.core.gate.is_shut());
            pager.requests.serve(
                |kind| !forking.get() || kind == Kind::FinishFork,
                |request| {
                    let result = self.handle(request);
                    forking.set(self.core.gate.is_shut());
                    result
                },
            );
            pager.requests.wait(bell, ACTIVE_STEP);
            self.keep_lease();
            self.free_empty();
            self.thaw_guest();
        }
    }

    fn handle(&mut self, request: Request) -> Result<Answer, i32> {
        panic_if_asked();
        let pager = self.pager;
        match request.kind {
            Kind::PrepareFork => self.prepare_fork(exactly(request.start))?,
            Kind::FinishFork => {
                self.core.gate.open(&self.core.uffd);
                // Requests that were posted meanwhile have already rung.
                pager.requests.ring();
            }
            Kind::MayFork => self.may_fork()?,
            Kind::GiveGuest => self.give_guest()?,
            Kind::BindGuest => self.bind_guest()?,
            Kind::FindFar => {
                let registry = pager.registry.lock().map_err(|_| libc::EDEADLK)?;
                return Ok(registry.first_in(request.start, request.end).unwrap_or_default());
            }
            _ => self.change(request)?,
        }
        Ok(Answer::default())
    }

    /// Changes which memory can be far.
    pub(super) fn change(&mut self, request: Request) -> Result<(), i32> {
        let pager = self.pager;
        let (start, end) = (request.start, request.end);
        let mut registry = pager.registry.lock().map_err(|_| libc::EDEADLK)?;
        match request.kind {
            Kind::Add => {
                registry.remove(start, end);
                self.forget(start, end);
                registry.add(start, end);
                let unshared =
                    request.extra != 0 && registry.is_unshared(request.extra - 1, request.extra);
                registry.set_unshared(start, end, unshared);
                let region = Region { start, end, unshared, ..Region::default() };
                register(self.core, &mut registry, region);
            }
            Kind::Remove => {
                if !registry.remove(start, end).is_empty() {
                    self.forget(start, end);
                }
            }
            Kind::Discard if request.extra == libc::MADV_FREE as usize => {
                return self.free(&registry, start, end);
            }
            Kind::Discard => {
                for part in registry.overlapping(start, end) {
                    self.forget(part.start, part.end);
                }
                return advise(start, end, exactly(request.extra));
            }
            Kind::Pin => registry.pin(start, end, true),
            Kind::Unpin => registry.pin(start, end, false),
            Kind::Unshare => registry.set_unshared(start, end, request.extra != 0),
            Kind::Retire => self.core.retire(start, end),
            Kind::Carry => return self.carry(&mut registry, &Carry::new(&request)),
            Kind::PrepareFork
            | Kind::FinishFork
            | Kind::FindFar
            | Kind::MayFork
            | Kind::GiveGuest
            | Kind::BindGuest => {}
        }
        Ok(())
    }
}
