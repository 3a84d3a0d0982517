//! Frozen layers and the current one.

use std::sync::Mutex;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;

use farpool_pool::{Pool, PoolError, SegmentHandle};
use farpool_units::exactly;

use crate::space::page::MAX_LAYERS;

/// Frozen layers and the current one, by their number in page states.
#[derive(Debug)]
pub struct Layers {
    /// Segment handle + 1; 0 = none.
    handles: [AtomicU8; MAX_LAYERS],
    /// Layer that takes evictions; `MAX_LAYERS` = none yet.
    current: AtomicU8,
    /// Held while a layer begins, gets memory, or is frozen. The holder must check the gate.
    pub changing: Mutex<()>,
}

impl Default for Layers {
    fn default() -> Layers {
        let current = AtomicU8::new(NO_LAYER);
        Layers { handles: Default::default(), current, changing: Mutex::new(()) }
    }
}

impl Layers {
    pub fn segment(&self, layer: usize) -> Option<SegmentHandle> {
        let handle = self.handles.get(layer)?.load(SeqCst);
        SegmentHandle::from_index(usize::from(handle.checked_sub(1)?))
    }

    /// The layer that takes evictions; `MAX_LAYERS` if there is none.
    pub fn current(&self) -> usize {
        usize::from(self.current.load(SeqCst))
    }

    /// Numbers of the live layers.
    pub fn live(&self) -> impl Iterator<Item = usize> + '_ {
        (0..MAX_LAYERS).filter(|layer| self.segment(*layer).is_some())
    }

    pub fn set(&self, layer: usize, segment: Option<SegmentHandle>) {
        let handle = segment.map_or(0, |segment| exactly(segment.index() + 1));
        self.handles[layer].store(handle, SeqCst);
    }

    /// `MAX_LAYERS` = there is none.
    pub fn set_current(&self, layer: usize) {
        assert!(layer <= MAX_LAYERS, "layer {layer} is none");
        self.current.store(exactly(layer), SeqCst);
    }

    /// The current layer, made if there is none.
    pub fn current_or_new(&self, pool: &Pool) -> Result<usize, PoolError> {
        let current = self.current();
        if current < MAX_LAYERS {
            return Ok(current);
        }
        let segment = pool.create_segment()?;
        // Fork keeps one layer free, so there always is a number left. With the number of another
        // layer its pages would be taken for those of this segment.
        let free = (0..MAX_LAYERS).find(|layer| self.segment(*layer).is_none());
        let free = free.expect("a layer is free");
        self.set(free, Some(segment));
        self.set_current(free);
        Ok(free)
    }
}

/// The number that stands for no layer.
#[allow(clippy::cast_possible_truncation)] // MAX_LAYERS is 8.
const NO_LAYER: u8 = MAX_LAYERS as u8;
