//! A process becomes active: its far-eligible memory is registered with userfaultfd, and from then
//! on faults are served and pages are moved out. This happens once, in this order:
//! 1. the pager's threads are started, and wait for a pool ([`start_threads`]);
//! 2. memory is registered: threads that touch new pages wait, so memory no longer grows
//!    ([`activate`]);
//! 3. the pool is connected ([`crate::shared::late_pool`]), and the threads begin their work.
//!
//! Starting a thread takes locks of the C library, and the new thread first reads the program's
//! memory: once memory is registered, a thread of the program may hold those locks, or that memory
//! may be far. So 1 comes before 2.

use farpool_board::{Counter, ProcessState};
use farpool_uffd::{PageRange, category, register_mode};

use crate::abort::fail_closed;
use crate::core::Core;
use crate::error::StartError;
use crate::evict::Evictor;
use crate::fault::FaultThread;
use crate::life::blades::Follower;
use crate::life::process::Pager;
use crate::space::page::Phase;
use crate::space::registry::{Region, Registry};
use crate::space::units::SUPERPAGE_BYTES;
use crate::space::{Page, known_pages};
use crate::sys;

/// Starts the fault threads, one for each CPU (or as many as the settings say), the evictor and the
/// follower of the blades. Returns when all are past the C library's start of a thread.
pub fn start_threads(pager: &'static Pager, core: &'static Core) -> Result<(), StartError> {
    let cpus = core.crew.cpus();
    let wanted = core.settings.pager_threads as usize;
    let count = if wanted == 0 { cpus.len() } else { wanted };
    core.crew.set_members(count);
    let mut begun = Vec::with_capacity(count + 2);
    for index in 0..count {
        let cpu = cpus[index % cpus.len()];
        let body = move || {
            let thread = or_fail(make_fault_thread(core));
            if index == 0 { thread.run_first(cpu) } else { thread.follow(cpu, index == 1) }
        };
        begun.push(sys::spawn(c"farpool-fault", false, Box::new(body))?);
    }
    let evict = move || or_fail(make_evictor(core)).run();
    begun.push(sys::spawn(c"farpool-evict", false, Box::new(evict))?);
    let follow = move || {
        sys::stand_back();
        Follower::new(pager, core).run()
    };
    begun.push(sys::spawn(c"farpool-blades", false, Box::new(follow))?);
    begun.iter().for_each(|begun| begun.wait());
    Ok(())
}

fn make_fault_thread(core: &'static Core) -> Result<FaultThread, StartError> {
    sys::be_prompt(false);
    sys::stand_back();
    let lane = core.pool.wait().lane()?;
    Ok(FaultThread::new(core, lane)?)
}

fn make_evictor(core: &'static Core) -> Result<Evictor, StartError> {
    sys::be_prompt(false);
    let lane = core.pool.wait().lane()?;
    // Pages moved out of unregistered memory would read as zeros.
    core.registered.wait();
    let victims = core.settings.victim_policy.parse().unwrap_or_default();
    Ok(Evictor::new(core, lane, victims)?)
}

fn or_fail<T>(made: Result<T, StartError>) -> T {
    made.unwrap_or_else(|error| {
        fail_closed(&format!("the pager's threads cannot be started: {error}"))
    })
}

/// Registers all memory that can be far. The threads must have been started.
pub fn activate(pager: &'static Pager, core: &'static Core) {
    // From here on no thread of the program takes the registry's lock.
    let doors = (!pager.is_active()).then(|| pager.lock_doors());
    let mut registry = pager.lock_registry();
    let regions: Vec<Region> = registry.iter().collect();
    for region in regions {
        register(core, &mut registry, region);
    }
    pager.set_active();
    drop((registry, doors));
    begin_to_move(core);
}

/// Lets pages be moved out, now that memory is registered.
pub fn begin_to_move(core: &Core) {
    core.slot.set_state(ProcessState::Active);
    core.registered.open();
}

/// Registers a range with userfaultfd and makes its resident superpages known to the evictor.
/// False: it stays local, and none of it was moved out; a caller that holds pages of it must end
/// the process.
pub fn register(core: &Core, registry: &mut Registry, region: Region) -> bool {
    let mode = register_mode::MISSING | register_mode::WP;
    if let Err(error) = core.uffd.register(region.start, region.bytes(), mode) {
        // The program has changed it behind our back (a raw system call), or has a userfaultfd of
        // its own there: it stays local.
        core.count(Counter::Refused, 1);
        registry.remove(region.start, region.end);
        // EBUSY: it is registered with another userfaultfd, the program's own or one through which
        // a child still gets its pages. Unregistering would end that registration, too.
        if error.raw_os_error() != Some(libc::EBUSY) {
            let _ = core.uffd.unregister(region.start, region.bytes());
        }
        if known_pages(core.space, region.start, region.end).any(is_elsewhere) {
            fail_unregistered(region.start);
        }
        return false;
    }
    learn(core, region);
    true
}

/// Makes the resident superpages of a region known to the evictor.
pub fn learn(core: &Core, region: Region) {
    let mut ranges = [PageRange::default(); 64];
    let mut from = region.start;
    while from < region.end {
        let found = core.pagemap.scan(from, region.end, category::OCCUPIED, &mut ranges);
        let Ok((found, walked)) = found else { return };
        for range in found {
            let (mut at, end) = (range.first(), range.last());
            while at < end {
                let _ = core.space.page_or_new(at);
                at = (at & !(SUPERPAGE_BYTES - 1)) + SUPERPAGE_BYTES;
            }
        }
        if walked <= from {
            return;
        }
        from = walked;
    }
}

/// Whether the program could not see a page's contents without the pager.
fn is_elsewhere(page: Page) -> bool {
    matches!(page.cell().load().phase(), Phase::Far | Phase::Victim | Phase::Lost)
}

/// Ends the process: the program would read zeros where its pages are far.
pub fn fail_unregistered(start: usize) -> ! {
    fail_closed(&format!(
        "memory at {start:#x} that was moved out cannot be registered with userfaultfd again"
    ));
}
