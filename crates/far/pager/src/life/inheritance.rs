//! What a child of fork needs from its parent.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicPtr, AtomicU32};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_pool::{FrozenToken, Pool, Seals};

use crate::core::Core;
use crate::error::StartError;
use crate::space::page::MAX_LAYERS;
use crate::sys;

/// How long a parent waits for a child to attach its layers before it may drop one of them: the
/// child died before, or there was none, because fork failed. A blade keeps the layers of a parent
/// that died about as long.
const CHILD_WAIT: Duration = Duration::from_secs(10);

/// What opens a frozen layer: its memory, and its pages.
#[derive(Clone, Debug)]
pub struct Layer {
    pub token: FrozenToken,
    /// None if its pages are stored as they are.
    pub seals: Option<Arc<Seals>>,
}

/// What a child needs from its parent, kept where the child finds its copy of it.
#[derive(Debug, Default)]
pub struct Inheritance {
    layers: Mutex<[Option<Layer>; MAX_LAYERS]>,
    /// Counts children that have not attached their layers yet, in memory that the children share;
    /// null before the first.
    expected: AtomicPtr<AtomicU32>,
}

impl Inheritance {
    /// Expects one more child to attach layers.
    pub fn expect_child(&self) -> Result<(), std::io::Error> {
        let expected = match self.expected() {
            Some(expected) => expected,
            None => {
                let counter = sys::map_shared_counter()?;
                self.expected.store(std::ptr::from_ref(counter).cast_mut(), SeqCst);
                counter
            }
        };
        expected.fetch_add(1, SeqCst);
        Ok(())
    }

    /// Whether all children have attached their layers: until then no layer may be dropped.
    pub fn is_settled(&self) -> bool {
        self.expected().is_none_or(|expected| expected.load(SeqCst) == 0)
    }

    /// Waits until all children have attached their layers.
    pub fn settle(&self) {
        let until = Instant::now() + CHILD_WAIT;
        while !self.is_settled() && Instant::now() < until {
            sys::pause();
        }
        if let Some(expected) = self.expected() {
            expected.store(0, SeqCst);
        }
    }

    /// Expects a child of a child: the layers will be attached once more.
    pub fn expects_another(&self) {
        if let Some(expected) = self.expected() {
            expected.fetch_add(1, SeqCst);
        }
    }

    /// Notes that an expected child has attached its layers, or needs none any more.
    pub fn has_arrived(&self) {
        if let Some(expected) = self.expected() {
            // The parent may have given up waiting.
            let _ = expected.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
        }
    }

    /// Notes that the calling process, a child, has attached its layers. Its own children are not
    /// its parent's.
    fn arrive(&self) {
        self.has_arrived();
        self.expected.store(std::ptr::null_mut(), SeqCst);
    }

    fn expected(&self) -> Option<&'static AtomicU32> {
        // SAFETY: null, or a counter that is never unmapped.
        unsafe { self.expected.load(SeqCst).as_ref() }
    }

    pub fn set(&self, layers: [Option<Layer>; MAX_LAYERS]) {
        if let Ok(mut kept) = self.layers.lock() {
            *kept = layers;
        }
    }

    /// The tokens of the parent's layers.
    pub fn tokens(&self) -> Vec<FrozenToken> {
        lock(&self.layers).iter().flatten().map(|layer| layer.token).collect()
    }

    /// Attaches the parent's layers under the numbers they had there.
    pub fn attach(&self, core: &Core, pool: &Pool) -> Result<(), StartError> {
        let Ok(layers) = self.layers.lock() else {
            return Ok(());
        };
        for (number, layer) in layers.iter().enumerate() {
            if let Some(Layer { token, seals }) = layer {
                core.layers
                    .set(number, Some(pool.attach(token, seals.as_deref().map(Seals::inherit))?));
            }
        }
        self.arrive();
        Ok(())
    }
}
