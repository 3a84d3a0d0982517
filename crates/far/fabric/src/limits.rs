//! Limits on a client's request rate, kept by the client itself: requests over the limit wait here,
//! where demand reads can overtake writes, and not in a blade's sockets.
//!
//! The buckets may lie in memory that the processes of one tree share: they then keep to the limit
//! together. Zeroed memory there means that there is no limit.

use farpool_kernel::monotonic_ns;
use farpool_policy::{Meter, Meters, RateLimit};

/// The limits that the links of a session keep to.
#[derive(Debug)]
pub struct ClientLimits(Place);

#[derive(Debug)]
enum Place {
    Own(Meters),
    Shared(&'static Meters),
}

impl ClientLimits {
    /// Limits for the users of this value.
    pub fn new(read: RateLimit, write: RateLimit) -> Self {
        ClientLimits(Place::Own(Meters { read: Meter::new(read), write: Meter::new(write) }))
    }

    /// Limits for all that share this memory, processes included: their clock is the system's
    /// monotonic one.
    pub fn shared(meters: &'static Meters) -> Self {
        ClientLimits(Place::Shared(meters))
    }

    /// The buckets.
    pub fn meters(&self) -> &Meters {
        match &self.0 {
            Place::Own(meters) => meters,
            Place::Shared(meters) => meters,
        }
    }

    /// Changes the limits from now on; what has been sent still counts.
    pub fn set(&self, read: RateLimit, write: RateLimit) {
        let (meters, now_ns) = (self.meters(), monotonic_ns());
        meters.read.set_limit(now_ns, read);
        meters.write.set_limit(now_ns, write);
    }
}
