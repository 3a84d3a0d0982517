//! What can go wrong between a client and its blades, for people ([`PoolError`]) and for one page
//! ([`PageError`]).

use farpool_fabric::{CallError, ConnectError};
use farpool_wire::ErrorCode;

use crate::SegmentHandle;

/// A blade's slot in the pool. At first in the order of
/// [`PoolConfig::blades`](crate::PoolConfig::blades); a slot is used again after
/// [`remove_blade`](crate::Pool::remove_blade).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BladeIndex(pub u8);

/// Why one page could not be read or written. Small and `Copy`: it travels on the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// The blade no longer answers and could not be reached again within the deadline.
    #[error("blade number {} is lost", .0.0)]
    BladeLost(BladeIndex),
    /// The blade says its copy of the page no longer has the bytes that were written.
    #[error("the blade's copy of the page is corrupt")]
    Corrupt,
    /// What the blade returned is not what was stored there, or nothing was.
    #[error("the page is not what was stored on the blade: its seal does not fit")]
    Forged,
    /// The page was sealed as often as one key allows.
    #[error("the page was written too often to be sealed once more")]
    WornOut,
    /// The blade refused the request; the number is the wire's error code.
    #[error("{}", refusal(*.0))]
    Refused(u16),
    /// The page's superpage was never allocated, or the segment is not attached.
    #[error("the page is not allocated on any blade")]
    NotAllocated,
    /// A write to a frozen segment.
    #[error("the segment is frozen")]
    Frozen,
    /// No answer within the deadline, though the blade may still be there.
    #[error("no answer within the deadline")]
    Deadline,
}

/// A refusal in words. A segment of ours that the blade no longer knows has gone with our lease: no
/// other client can free it.
fn refusal(number: u16) -> String {
    match ErrorCode::from_number(number) {
        Some(ErrorCode::UnknownSegment) => {
            "the lease ended while the blade could not be reached, and the blade freed the \
             memory; a longer one (farpool blade --lease) outlasts longer cuts"
                .to_owned()
        }
        Some(code) => format!("the blade refused the request: {code}"),
        None => format!("the blade refused the request (code {number})"),
    }
}

/// Why an operation on the pool failed. Each message names the blade and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The configuration names no blade, or too many.
    #[error("the pool needs between 1 and {limit} blades, but {given} were given")]
    BladeCount {
        /// The number given.
        given: usize,
        /// The most that are possible.
        limit: usize,
    },
    /// None of the blades could be connected to.
    #[error(
        "no blade can be reached; start one, or give the run another one with `farpool blades`"
    )]
    NoBlade,
    /// No blade is in this slot.
    #[error("there is no blade number {}", .0.0)]
    NoSuchBlade(BladeIndex),
    /// A blade is in this slot already.
    #[error("slot {} has a blade already", .0.0)]
    SlotInUse(BladeIndex),
    /// The blade cannot be removed while memory of ours is there.
    #[error("{superpages} superpages are still on blade {address}; move them first")]
    InUse {
        /// The blade's address.
        address: String,
        /// The number of superpages.
        superpages: u64,
    },
    /// A superpage could not be moved; it is where it was, unless its blade is lost.
    #[error(
        "superpage {superpage} of segment {segment} could not be moved from blade {from} to {to}: \
         {reason}"
    )]
    NotMoved {
        /// The superpage.
        superpage: u32,
        /// The segment's number.
        segment: usize,
        /// The address of the blade it is on.
        from: String,
        /// The address of the blade it was to go to.
        to: String,
        /// The error of the first page that failed.
        reason: PageError,
    },
    /// A superpage is just being moved; try again.
    #[error("a superpage is just being moved; try again")]
    Moving,
    /// Too many superpages lie half on one blade and half on another since blades were lost.
    #[error("{limit} superpages were left half moved by lost blades; no more is moved")]
    TooManyHalfMoved {
        /// The limit.
        limit: usize,
    },
    /// The connection to a blade could not be made, or broke and could not be made again.
    #[error("blade {address} is lost: {reason}; check that it runs and can be reached")]
    BladeLost {
        /// The blade's address.
        address: String,
        /// The reason.
        reason: String,
    },
    /// A TCP address beyond loopback without permission.
    #[error(
        "blade {address} is on another host: give a certificate (--pki), or --allow-remote-tcp if \
         the network is trusted"
    )]
    RemoteTcp {
        /// The blade's address.
        address: String,
    },
    /// No blade gives another superpage: each is full, or this client has reached its quota there.
    #[error("no blade has 16 MiB left: {blades}; another --blade adds memory")]
    Full {
        /// All blades asked, each with its reason and remedy.
        blades: String,
    },
    /// The client may not have more memory over all blades together.
    #[error(
        "this program's quota of {quota_bytes} bytes of far memory is used up; raise it with \
         --quota"
    )]
    Quota {
        /// The quota asked for at the start, in bytes.
        quota_bytes: u64,
    },
    /// Too many segments at once.
    #[error("this process uses {limit} segments already (too many generations of fork)")]
    TooManySegments {
        /// The limit, [`MAX_SEGMENTS`](crate::MAX_SEGMENTS).
        limit: usize,
    },
    /// The handle names no live segment.
    #[error("segment {segment} is not attached", segment = .0.index())]
    NoSuchSegment(SegmentHandle),
    /// The segment is frozen, so it cannot grow or change.
    #[error("segment {segment} is frozen", segment = .0.index())]
    Frozen(SegmentHandle),
    /// The superpage number is beyond what a segment can hold.
    #[error("superpage {superpage} is beyond the end of a segment")]
    BeyondSegment {
        /// The superpage asked for.
        superpage: u32,
    },
    /// A blade refused a control request.
    #[error("blade {address} refused: {reason}")]
    Refused {
        /// The blade's address.
        address: String,
        /// The blade's reason.
        reason: String,
    },
    /// Two blades report the superpage as theirs: either could be wrong.
    #[error(
        "superpage {superpage} of a shared segment is on blade {address} and on another one; \
         neither is read"
    )]
    OnTwoBlades {
        /// The superpage.
        superpage: u32,
        /// The address of the second blade.
        address: String,
    },
    /// The token names a blade process that is not in this pool, or was restarted since.
    #[error("the segment's blade {address} is not the one it was frozen on; it was restarted")]
    OtherBlade {
        /// The address of the blade in this pool at that place.
        address: String,
    },
    /// What another process shares is on a blade that is none of this pool's.
    #[error(
        "the shared memory is on a blade that this program does not use; give it the same --blade \
         addresses as the other one"
    )]
    NotOurBlade,
    /// A shared segment was written to by too many generations of children.
    #[error("the shared segment's pages are sealed under {limit} keys already; it stays frozen")]
    TooManyKeys {
        /// The limit.
        limit: usize,
    },
    /// Pages are sealed by one of two clients that share memory, and not by the other.
    #[error("the shared segment's pages are sealed there and not here, or the other way round")]
    OtherSeals,
    /// A client that shares memory has more copies of it than this one.
    #[error("the shared segment has more copies than this client makes")]
    OtherCopies,
    /// The blade's memory has no descriptor to hand out, so it cannot be shared by `shm://`.
    #[error("blade {address} cannot share its memory directly; use unix:// in place of shm://")]
    NotShareable {
        /// The blade's address.
        address: String,
    },
    /// The kernel gave no random numbers for a client id.
    #[error("the kernel gave no random numbers for a client id; try again")]
    NoRandom,
    /// The blade may be there, but this client may not, or must not, use it.
    #[error("{0}")]
    Barred(ConnectError),
    /// This process cannot hold more descriptors.
    #[error("no descriptor left for the connection to blade {address}; raise `ulimit -n`")]
    Descriptors {
        /// The blade's address.
        address: String,
    },
}

impl From<ConnectError> for PoolError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Lost { address, reason } => PoolError::BladeLost { address, reason },
            ConnectError::Refused { address, code } => {
                PoolError::Refused { address, reason: code.to_string() }
            }
            ConnectError::RemoteTcp { address } => PoolError::RemoteTcp { address },
            barred @ (ConnectError::Stranger { .. }
            | ConnectError::Forbidden { .. }
            | ConnectError::NotMeant { .. }
            | ConnectError::Untrusted { .. }) => PoolError::Barred(barred),
            ConnectError::Descriptors { address } => PoolError::Descriptors { address },
        }
    }
}

impl From<CallError> for PoolError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Connect(error) => error.into(),
            CallError::Refused { address, code, detail, .. } => {
                PoolError::Refused { address, reason: format!("{code} (detail {detail})") }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_ended_during_a_cut_is_said_to_have() {
        let text = PageError::Refused(ErrorCode::UnknownSegment.number()).to_string();
        assert!(text.contains("lease ended") && text.contains("--lease"), "{text}");
        let full = PageError::Refused(ErrorCode::BladeFull.number()).to_string();
        assert!(full.contains("memory is used up"), "{full}");
        assert!(PageError::Refused(999).to_string().contains("999"));
    }
}
