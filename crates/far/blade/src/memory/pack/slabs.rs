//! Places of many sizes in one mapping: slabs of 64 KiB, each cut into slots of one size.
//!
//! Each slot knows its owner, a number that means nothing here, so that a thin slab can be emptied
//! into others ([`Slabs::evacuate`]): the caller is told each owner's new place.
//!
//! Invariants: a slab without used slots has no memory. Those of a class with free slots are in the
//! class's list `partial`, and no others are.

use crate::memory::to_usize;
use crate::sys::{Mapping, Slice};
use farpool_units::{PAGE_BYTES, exactly};
use std::io;

/// A slab is large enough that few are partly used (one of each class), and small enough to be
/// emptied in some 20 µs.
pub(super) const SLAB_BYTES: usize = 64 << 10;
/// Sizes differ by this: a slot wastes half of it on average.
const CLASS_STEP_BYTES: usize = 128;
const CLASSES: usize = PAGE_BYTES / CLASS_STEP_BYTES;
/// Slots of a slab at most.
const SLOTS_LIMIT: u32 = 512;
const _: () = assert!(SLOTS_LIMIT as usize == SLAB_BYTES / CLASS_STEP_BYTES);
/// Slabs at most: 512 GiB. With as many in use it is full.
const SLABS_LIMIT: usize = 1 << 23;
/// Of a list of thin slabs so many are looked at for the thinnest.
const LOOKED_AT: usize = 64;
/// Marks a free slot in `owners`; the rest of the number is the next free one.
const FREE: u32 = 1 << 31;
const NO_SLOT: u32 = FREE - 1;
const NOT_PARTIAL: u32 = u32::MAX;

const _: () = assert!(SLABS_LIMIT * SLOTS_LIMIT as usize == 1 << 32);

/// A slot: the number of its slab, and its own in that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Place(u32);

impl Place {
    fn new(slab: u32, slot: u32) -> Place {
        Place(slab * SLOTS_LIMIT + slot)
    }

    fn slab(self) -> u32 {
        self.0 / SLOTS_LIMIT
    }

    fn slot(self) -> u32 {
        self.0 % SLOTS_LIMIT
    }
}

/// Which slabs are worth being emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Thin {
    /// At most half of their slots are used: as much is moved as becomes free.
    HalfEmpty,
    /// Any that the others have room for: memory is short.
    Any,
}

/// Slots of one size, in as many slabs as are needed.
#[derive(Debug)]
struct Slab {
    class: u8,
    used: u32,
    first_free: u32,
    /// Its place in its class's `partial`.
    at: u32,
    /// Who has each slot; [`FREE`] and the next free one for those that nobody has.
    owners: Box<[u32]>,
}

#[derive(Clone, Debug, Default)]
struct Class {
    partial: Vec<u32>,
    free_slots: usize,
    /// Where the search for a thin slab goes on.
    looked_at: usize,
}

/// All slabs.
#[derive(Debug)]
pub(super) struct Slabs {
    mapping: Mapping,
    /// None: it has no memory.
    slabs: Vec<Option<Slab>>,
    free_slabs: Vec<u32>,
    classes: Vec<Class>,
    in_use: usize,
    /// Bytes of the lists of owners.
    owners_bytes: usize,
}

fn slot_bytes(class: usize) -> usize {
    (class + 1) * CLASS_STEP_BYTES
}

fn slots_of(class: usize) -> usize {
    SLAB_BYTES / slot_bytes(class)
}

impl Slabs {
    /// Room for `bytes` in slabs; no memory is taken yet.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new(bytes: u64) -> io::Result<Slabs> {
        let count = to_usize(bytes).div_ceil(SLAB_BYTES).min(SLABS_LIMIT);
        Ok(Slabs {
            mapping: Mapping::of_small_pages(count * SLAB_BYTES)?,
            slabs: Vec::new(),
            free_slabs: Vec::new(),
            classes: vec![Class::default(); CLASSES],
            in_use: 0,
            owners_bytes: 0,
        })
    }

    /// Memory that slabs take up, their tables included.
    pub(super) fn bytes(&self) -> usize {
        self.in_use * SLAB_BYTES + self.owners_bytes
    }

    /// Takes a slot for `bytes`, at most a page. None if there are no slabs left.
    pub(super) fn take(&mut self, bytes: usize, owner: u32) -> Option<Place> {
        assert!(bytes > 0 && bytes <= PAGE_BYTES, "{bytes} bytes are no packed page");
        assert!(owner < FREE, "owner {owner} is out of range");
        let class = (bytes - 1) / CLASS_STEP_BYTES;
        let number = match self.classes[class].partial.last() {
            Some(number) => *number,
            None => self.add(class)?,
        };
        Some(self.take_in(number, owner))
    }

    /// The slot's bytes, of which the first `bytes` are used.
    pub(super) fn slice(&self, place: Place, bytes: usize) -> Slice {
        let slab = self.slab(place.slab());
        let slot_bytes = slot_bytes(usize::from(slab.class));
        assert!(bytes <= slot_bytes, "{bytes} bytes do not fit into {slot_bytes}");
        let in_slab = to_usize(u64::from(place.slot())) * slot_bytes;
        self.mapping.slice(to_usize(u64::from(place.slab())) * SLAB_BYTES + in_slab, bytes)
    }

    /// Gives a slot back.
    pub(super) fn give_back(&mut self, place: Place) {
        let number = place.slab();
        let slot = place.slot();
        let slab = self.slab_mut(number);
        let owner = &mut slab.owners[slot as usize];
        assert!(*owner & FREE == 0, "slot {slot} of slab {number} is free already");
        *owner = FREE | slab.first_free;
        slab.first_free = slot;
        slab.used -= 1;
        let (class, used, was_full) = (usize::from(slab.class), slab.used, slab.at == NOT_PARTIAL);
        self.classes[class].free_slots += 1;
        if was_full {
            self.list(number, class);
        }
        if used == 0 {
            self.remove(number, class);
        }
    }

    /// Empties a thin slab of a class into others of it, and gives its memory back; `moved` is told
    /// each owner's new place. False if there is none as `thin` as that, or the others have no room
    /// for it.
    pub(super) fn evacuate(
        &mut self,
        class: usize,
        thin: Thin,
        mut moved: impl FnMut(u32, Place),
    ) -> bool {
        let slots = slots_of(class);
        if self.classes[class].free_slots < slots {
            return false;
        }
        let Some(number) = self.thinnest(class) else { return false };
        let used = self.slab(number).used as usize;
        if thin == Thin::HalfEmpty && used > slots / 2 {
            return false;
        }
        // What is moved must not land in the slab itself.
        self.unlist(number, class);
        let owners: Vec<(u32, u32)> = (0..)
            .zip(&self.slab(number).owners)
            .filter(|(_, owner)| **owner & FREE == 0)
            .map(|(slot, owner)| (slot, *owner))
            .collect();
        for (slot, owner) in owners {
            let from = self.slice(Place::new(number, slot), slot_bytes(class));
            let target = *self.classes[class].partial.last().expect("the others have room");
            let to = self.take_in(target, owner);
            let target = self.slice(to, slot_bytes(class));
            from.read(|bytes| target.fill(bytes));
            moved(owner, to);
        }
        self.classes[class].free_slots -= slots - used;
        self.drop_slab(number);
        true
    }

    /// How many classes there are.
    pub(super) fn classes() -> usize {
        CLASSES
    }

    fn slab(&self, number: u32) -> &Slab {
        self.slabs[number as usize].as_ref().expect("a slab in use has memory")
    }

    fn slab_mut(&mut self, number: u32) -> &mut Slab {
        self.slabs[number as usize].as_mut().expect("a slab in use has memory")
    }

    /// A new slab for a class.
    fn add(&mut self, class: usize) -> Option<u32> {
        let number = match self.free_slabs.pop() {
            Some(number) => number,
            None if self.slabs.len() * SLAB_BYTES < self.mapping.bytes() => {
                self.slabs.push(None);
                exactly(self.slabs.len() - 1)
            }
            None => return None,
        };
        let slots = slots_of(class);
        let last = exactly::<u32, _>(slots) - 1;
        let next = |slot: u32| FREE | if slot == last { NO_SLOT } else { slot + 1 };
        let owners: Box<[u32]> = (0..=last).map(next).collect();
        self.owners_bytes += size_of_val(&*owners);
        self.slabs[number as usize] =
            Some(Slab { class: exactly(class), used: 0, first_free: 0, at: NOT_PARTIAL, owners });
        self.in_use += 1;
        self.classes[class].free_slots += slots;
        self.list(number, class);
        Some(number)
    }

    fn take_in(&mut self, number: u32, owner: u32) -> Place {
        let slab = self.slab_mut(number);
        let slot = slab.first_free;
        let entry = &mut slab.owners[slot as usize];
        slab.first_free = *entry & !FREE;
        *entry = owner;
        slab.used += 1;
        let (class, is_full) = (usize::from(slab.class), slab.first_free == NO_SLOT);
        self.classes[class].free_slots -= 1;
        if is_full {
            self.unlist(number, class);
        }
        Place::new(number, slot)
    }

    fn list(&mut self, number: u32, class: usize) {
        let at = exactly(self.classes[class].partial.len());
        self.classes[class].partial.push(number);
        self.slab_mut(number).at = at;
    }

    fn unlist(&mut self, number: u32, class: usize) {
        let at = std::mem::replace(&mut self.slab_mut(number).at, NOT_PARTIAL);
        let partial = &mut self.classes[class].partial;
        partial.swap_remove(at as usize);
        if let Some(moved) = partial.get(at as usize).copied() {
            self.slab_mut(moved).at = at;
        }
    }

    fn remove(&mut self, number: u32, class: usize) {
        self.unlist(number, class);
        self.classes[class].free_slots -= slots_of(class);
        self.drop_slab(number);
    }

    /// Gives a slab's memory back.
    fn drop_slab(&mut self, number: u32) {
        let slab = self.slabs[number as usize].take().expect("a slab in use has memory");
        self.owners_bytes -= size_of_val(&*slab.owners);
        let offset = to_usize(u64::from(number)) * SLAB_BYTES;
        match self.mapping.drop_content(offset, SLAB_BYTES) {
            Ok(()) => {
                self.in_use -= 1;
                self.free_slabs.push(number);
            }
            // It counts as in use for ever, as its memory is.
            Err(error) => tracing::error!(%error, "memory of packed pages cannot be given back"),
        }
    }

    fn thinnest(&mut self, class: usize) -> Option<u32> {
        let Class { partial, looked_at, .. } = &mut self.classes[class];
        let (count, begin) = (partial.len(), *looked_at);
        *looked_at = if count == 0 { 0 } else { (begin + LOOKED_AT) % count };
        let looked = (begin..begin + LOOKED_AT.min(count)).map(|at| partial[at % count]);
        let looked: Vec<u32> = looked.collect();
        looked.into_iter().min_by_key(|number| self.slab(*number).used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Step {
        Take(usize),
        GiveBack(prop::sample::Index),
        Evacuate(usize),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        // Few sizes, so that slabs fill up.
        let size = prop::sample::select(vec![1, 128, 129, 1024, 3000, 4000, 4096]);
        prop_oneof![
            4 => size.prop_map(Step::Take),
            3 => any::<prop::sample::Index>().prop_map(Step::GiveBack),
            1 => prop::sample::select(vec![0, 1, 7, 23, 31]).prop_map(Step::Evacuate),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Whoever has a slot finds its bytes there, whoever comes, goes and moves meanwhile.
        #[test]
        fn slots_keep_their_bytes(steps in prop::collection::vec(any_step(), 1..3000)) {
            let mut slabs = Slabs::new(8 << 20).unwrap();
            let mut model: BTreeMap<u32, (Place, usize)> = BTreeMap::new();
            for (owner, step) in (0..).zip(steps) {
                match step {
                    Step::Take(bytes) => {
                        let place = slabs.take(bytes, owner).unwrap();
                        slabs.slice(place, bytes).fill(&content(owner, bytes));
                        model.insert(owner, (place, bytes));
                    }
                    Step::GiveBack(index) if !model.is_empty() => {
                        let owner = *model.keys().nth(index.index(model.len())).unwrap();
                        slabs.give_back(model.remove(&owner).unwrap().0);
                    }
                    Step::GiveBack(_) => {}
                    Step::Evacuate(class) => {
                        let before = slabs.bytes();
                        let moved = |owner: u32, to| model.get_mut(&owner).unwrap().0 = to;
                        if slabs.evacuate(class, Thin::Any, moved) {
                            prop_assert!(slabs.bytes() < before);
                        }
                    }
                }
            }
            for (owner, (place, bytes)) in &model {
                let is_right = slabs.slice(*place, *bytes).read(|it| it == content(*owner, *bytes));
                prop_assert!(is_right, "what {owner} has is not right");
            }
            for (_, (place, _)) in model {
                slabs.give_back(place);
            }
            prop_assert_eq!(slabs.bytes(), 0);
        }
    }

    fn content(owner: u32, bytes: usize) -> Vec<u8> {
        owner.to_le_bytes().into_iter().cycle().take(bytes).collect()
    }

    #[test]
    fn thin_slabs_are_emptied_until_the_rest_is_needed() {
        const COUNT: u32 = 640; // 10 slabs of slots of 1 KiB
        let mut slabs = Slabs::new(1 << 20).unwrap();
        let mut places: BTreeMap<u32, Place> =
            (0..COUNT).map(|owner| (owner, slabs.take(1024, owner).unwrap())).collect();
        for owner in (0..COUNT).filter(|owner| owner % 4 > 0) {
            slabs.give_back(places.remove(&owner).unwrap());
        }
        let mut rounds = 0;
        while slabs.evacuate(7, Thin::HalfEmpty, |owner, to| *places.get_mut(&owner).unwrap() = to)
        {
            rounds += 1;
        }
        assert_eq!(rounds, 7, "160 slots need 3 slabs of 64");
    }

    #[test]
    fn it_is_full_when_all_slabs_are_in_use() {
        let mut slabs = Slabs::new(SLAB_BYTES as u64).unwrap();
        assert!(slabs.take(4096, 0).is_some());
        assert!(slabs.take(1024, 1).is_none(), "the only slab has slots of another size");
    }
}
