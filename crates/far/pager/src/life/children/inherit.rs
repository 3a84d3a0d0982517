//! The pager of a child takes over from its parent's: it learns where the pages are that the child
//! lacks ([`super::handover`]), and the child's userfaultfd is its own from now on.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;

use farpool_pool::{Pool, Seals};

use super::handover::{HandedLayer, Handover};
use crate::core::Core;
use crate::error::StartError;
use crate::space::page::Phase;
use crate::space::{Page, Space};

/// Reads a handover.
pub fn read(memory: &OwnedFd) -> Result<Handover, StartError> {
    let (mut file, mut bytes) = (File::from(memory.try_clone()?), Vec::new());
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(Handover::from_bytes(&bytes).ok_or_else(unreadable)?)
}

fn unreadable() -> std::io::Error {
    std::io::Error::other("what a parent's pager hands over cannot be read")
}

/// Makes the far pages known that a child inherits, and shares the layers that they lie in. No
/// thread may serve faults yet. After an error nothing is shared.
pub fn take_over(core: &Core, pool: &Pool, handover: &Handover) -> Result<(), StartError> {
    for (number, layer) in handover.layers.iter().enumerate() {
        let Some(HandedLayer { token, seals }) = layer else { continue };
        let seals = seals.as_ref().map(|it| Seals::import(it).ok_or_else(unreadable));
        core.layers.set(number, Some(pool.attach(token, seals.transpose()?)?));
    }
    fill(core.space, handover)
}

/// Gives superpages the numbers that they have in the parent's pager, because those are their
/// places in every segment.
fn fill(space: &Space, handover: &Handover) -> Result<(), StartError> {
    for (number, (base, pages)) in handover.superpages.iter().enumerate() {
        let found = space.page_or_new(*base).map(|page| page.superpage);
        let superpage = found.filter(|superpage| superpage.id() as usize == number);
        let Some(superpage) = superpage else {
            return Err(
                std::io::Error::other("a parent's superpages have no such numbers here").into()
            );
        };
        let (mut far_pages, mut allocated) = (0, 0);
        for (index, state) in pages.iter().flatten().enumerate() {
            Page { superpage, index }.cell().store(*state);
            if state.phase() == Phase::Far {
                far_pages += 1;
                allocated |= 1 << state.layer();
            }
        }
        superpage.far_pages.store(far_pages, SeqCst);
        superpage.allocated.store(allocated, SeqCst);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::life::children::remains::Remains;
    use crate::space::page::{MAX_LAYERS, PageState};
    use crate::space::units::SUPERPAGE_BYTES;

    #[test]
    fn a_childs_superpages_have_their_parents_numbers() {
        let bases = [9 * SUPERPAGE_BYTES, 2 * SUPERPAGE_BYTES, 5 * SUPERPAGE_BYTES];
        let far = |layer| PageState::UNTOUCHED.with_layer(layer).with_phase(Phase::Far);
        let mut remains = Remains::default();
        remains.add(bases[1], [far(1), PageState::UNTOUCHED, far(4)].into_iter());
        let handover = Handover::new(&remains, bases.into_iter(), [const { None }; MAX_LAYERS]);
        let space = Space::new().expect("space");
        fill(&space, &handover).expect("it is new");
        for (number, base) in bases.iter().enumerate() {
            let superpage = space.by_id(number).expect("known");
            assert_eq!(superpage.base(), *base);
            let count = superpage.far_pages.load(SeqCst);
            assert_eq!((number, count), (number, if number == 1 { 2 } else { 0 }));
        }
        let superpage = space.by_id(1).expect("known");
        assert_eq!(superpage.allocated.load(SeqCst), 1 << 1 | 1 << 4);
        assert_eq!(superpage.pages[2].load(), far(4));
    }

    #[test]
    fn a_table_that_is_in_use_takes_no_handover() {
        let space = Space::new().expect("space");
        space.page_or_new(SUPERPAGE_BYTES).expect("page");
        let bases = [2 * SUPERPAGE_BYTES].into_iter();
        let handover = Handover::new(&Remains::default(), bases, [const { None }; MAX_LAYERS]);
        assert!(fill(&space, &handover).is_err());
    }
}
