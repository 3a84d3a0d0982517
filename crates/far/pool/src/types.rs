//! The plain data that passes between the pager and the pool.

use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{Address, ClientId, ClientLimits, Grant, Opener};
use farpool_kernel::{Time, fill_random};
use farpool_units::{PAGES_PER_SUPERPAGE, exactly};

use farpool_wire::{FailureDomain, SegmentToken, SharingGroup};

use crate::{BladeIndex, COPIES_LIMIT, PageError, PoolError, Redundancy};

/// Pages of a superpage (16 MiB), the unit of allocation.
pub const SUPERPAGE_PAGES: u32 = PAGES_PER_SUPERPAGE;
/// Most live segments in one process: the frozen layers of its ancestors and the current one.
/// Beyond it [`PoolError::TooManySegments`](crate::PoolError::TooManySegments).
pub const MAX_SEGMENTS: usize = 16;
/// Blades of one pool; keeps [`FrozenToken`] small. Beyond it the configuration is refused.
pub const MAX_BLADES: usize = 8;
/// Parts that one segment may have on one blade. There is more than one only where frozen memory
/// moved to a blade that had some of the same segment; when all are taken it moves to another
/// blade, or not at all.
pub(crate) const PARTS_PER_BLADE: usize = 4;
/// Parts of one copy in a [`FrozenToken`]; those of the first copy come first.
pub const COPY_PARTS: usize = MAX_BLADES * PARTS_PER_BLADE;
/// Parts of a [`FrozenToken`].
pub const TOKEN_PARTS: usize = COPY_PARTS * COPIES_LIMIT;

/// One blade of a pool: its address, and how the client connects to it.
#[derive(Clone, Debug)]
pub struct BladeSpec {
    /// Its address.
    pub address: Address,
    /// The failure domain that it is in besides that of its address, if its rack names one.
    pub domain: Option<FailureDomain>,
    /// Whether the client itself serves it, so that it is lost only with the client. It is used
    /// last, is never given up early, and counts as apart from everything where there is parity.
    pub is_of_client: bool,
    /// The grant to show, where the blade requires one.
    pub grant: Option<Grant>,
    /// Limits on the request rate, over stream transports; shared by all lanes.
    pub limits: Option<Arc<ClientLimits>>,
    /// Whether the blade is known to be there because this process's parent uses it: then a network
    /// that refuses to reach it is tried again, as by who has reached it before.
    pub is_met: bool,
}

impl From<Address> for BladeSpec {
    /// A blade without grant and limits.
    fn from(address: Address) -> Self {
        BladeSpec {
            address,
            domain: None,
            is_of_client: false,
            grant: None,
            limits: None,
            is_met: false,
        }
    }
}

/// The configuration of a pool.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// The blades to spread over, at most [`MAX_BLADES`].
    pub blades: Vec<BladeSpec>,
    /// The name of this client on every blade.
    pub client: ClientId,
    /// The client name that the blades display, for example `redis-server:4711`.
    pub client_name: String,
    /// The most this client may use, in bytes, over all blades together.
    pub quota_bytes: u64,
    /// Whose pages blades that pack may share with this client's.
    pub sharing_group: Option<SharingGroup>,
    /// A request older than this means that its blade is lost.
    pub deadline: Duration,
    /// Permits TCP to other hosts without certificates, where nothing but pages is encrypted.
    pub allow_remote_tcp: bool,
    /// TCP is used only with certificates: `asks` gives connections whose handshake is complete.
    pub secures_tcp: bool,
    /// What is stored beside each superpage. Pages must be sealed if anything is: their seals tell
    /// what is right from what is not.
    pub redundancy: Redundancy,
    /// Seals pages: no blade can read them, or return anything else in their stead.
    pub seals_pages: bool,
    /// Opens the connections in this process's stead, if set.
    pub asks: Option<Arc<dyn Opener>>,
    /// The time that deadlines and pauses are of.
    pub time: Time,
}

/// What a segment is made of inside.
pub(crate) trait Strands {
    /// Segments inside that a segment is made of.
    fn strands(self) -> usize;

    /// Those of them that have the pages themselves.
    fn copies(self) -> usize;
}

impl Strands for Redundancy {
    fn strands(self) -> usize {
        match self {
            Redundancy::Copies(copies) => copies.into(),
            Redundancy::Parity => 2,
        }
    }

    fn copies(self) -> usize {
        match self {
            Redundancy::Copies(copies) => copies.into(),
            Redundancy::Parity => 1,
        }
    }
}

/// A unique client id: 128 random bits from the kernel.
///
/// # Errors
/// The kernel has no random numbers yet, which ends at the latest with its start.
pub fn fresh_client() -> Result<ClientId, PoolError> {
    let mut bits = [0; 16];
    fill_random(&mut bits).map_err(|_| PoolError::NoRandom)?;
    Ok(ClientId(u128::from_le_bytes(bits)))
}

/// A segment of this process's pool: 4 KiB pages addressed from 0, spread over the blades.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentHandle(pub(crate) u8);

impl SegmentHandle {
    /// The handle's number, below [`MAX_SEGMENTS`]; it is used again after `detach`.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The handle of this number, if it is below [`MAX_SEGMENTS`]; it need not be live.
    pub fn from_index(index: usize) -> Option<SegmentHandle> {
        u8::try_from(index).ok().filter(|_| index < MAX_SEGMENTS).map(SegmentHandle)
    }
}

/// One page of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentPage {
    /// The segment.
    pub segment: SegmentHandle,
    /// The page's number in the segment (its SMA / 4096).
    pub page: u32,
}

/// A page to fetch.
#[derive(Clone, Copy, Debug)]
pub struct PageRead {
    /// What to fetch.
    pub at: SegmentPage,
    /// 4096 writable bytes, aligned to 4096, local, untouched by others until the completion.
    pub into: *mut u8,
    /// Returned in the [`Completion`].
    pub token: u64,
}

/// A page to store.
#[derive(Clone, Copy, Debug)]
pub struct PageWrite {
    /// Where to store it.
    pub at: SegmentPage,
    /// 4096 readable bytes, aligned to 4096, local, unchanged until the completion.
    pub from: *const u8,
    /// Returned in the [`Completion`].
    pub token: u64,
}

// SAFETY: only a pointer to staging memory that the submitter lends to the lane; no thread is tied.
unsafe impl Send for PageRead {}
// SAFETY: as above.
unsafe impl Send for PageWrite {}

/// The end of one [`PageRead`] or [`PageWrite`]. After an error the bytes of `into` are undefined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token of the request.
    pub token: u64,
    /// Ok if the page was read (and verified) or stored (and acknowledged).
    pub result: Result<(), PageError>,
}

/// What a child needs to attach its parent's frozen segment. Plain data that fork copies. It opens
/// the segment as long as the segment has a user: the parent must not detach before the child has
/// attached.
#[derive(Clone, Copy, Debug)]
pub struct FrozenToken {
    pub(crate) copies: [[[Option<BladeToken>; PARTS_PER_BLADE]; MAX_BLADES]; COPIES_LIMIT],
}

impl FrozenToken {
    pub(crate) const NONE: FrozenToken =
        FrozenToken { copies: [[[None; PARTS_PER_BLADE]; MAX_BLADES]; COPIES_LIMIT] };

    /// The blade's id and the part's token, for each part that there is.
    pub fn parts(&self) -> [Option<(u64, u128)>; TOKEN_PARTS] {
        let all = self.copies.as_flattened().as_flattened();
        std::array::from_fn(|at| all[at].map(|part| (part.blade_id, part.token.0)))
    }

    /// The token that has these parts.
    pub fn from_parts(parts: &[Option<(u64, u128)>; TOKEN_PARTS]) -> Self {
        let mut token = FrozenToken::NONE;
        let all = token.copies.as_flattened_mut().as_flattened_mut();
        for (into, part) in all.iter_mut().zip(parts) {
            *into =
                part.map(|(blade_id, token)| BladeToken { blade_id, token: SegmentToken(token) });
        }
        token
    }

    /// The parts of the first copy, or of a copy that is passed on by itself.
    pub fn parts_of_copy(&self) -> [Option<(u64, u128)>; COPY_PARTS] {
        let all = self.parts();
        std::array::from_fn(|at| all[at])
    }

    /// The inverse of [`FrozenToken::parts_of_copy`].
    pub fn of_copy(parts: &[Option<(u64, u128)>; COPY_PARTS]) -> Self {
        FrozenToken::from_parts(&std::array::from_fn(|at| parts.get(at).copied().flatten()))
    }

    /// Whether something of it lies on the blade.
    pub fn is_on(&self, blade: BladeIndex) -> bool {
        self.iter().any(|(part, _)| part.blade == blade)
    }

    /// Each part that there is, and which it is.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TokenPart, BladeToken)> + '_ {
        self.copies.iter().enumerate().flat_map(|(nth, blades)| {
            let blades = (0_u8..).map(BladeIndex).zip(blades);
            blades.flat_map(move |(blade, parts)| {
                (0_u8..).zip(parts).filter_map(move |(which, part)| {
                    Some((TokenPart { nth, blade, which }, (*part)?))
                })
            })
        })
    }
}

/// A part of a [`FrozenToken`]: its copy, its blade, and its number there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenPart {
    pub(crate) nth: usize,
    pub(crate) blade: BladeIndex,
    pub(crate) which: u8,
}

/// Where all users of frozen memory agree on which of them copies it to another blade.
pub trait CopyDesk {
    /// What this process is to do about a frozen part on a blade; `original` opens that part.
    fn ask(&self, from: BladeIndex, original: u128) -> Errand;
    /// Announces that this process's copy is complete.
    fn announce(&self, original: u128, copy: &FrozenToken);
    /// Withdraws a copy that was announced and is gone.
    fn forget(&self, original: u128);
}

/// The answer of a [`CopyDesk`].
#[derive(Clone, Debug)]
pub enum Errand {
    /// Copy it and announce the copy.
    Copy,
    /// Another process is copying it.
    Wait,
    /// Attach this copy.
    Attach(Box<FrozenToken>),
}

/// A desk for a process that shares no frozen memory, or copies anyway.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl CopyDesk for Alone {
    fn ask(&self, _from: BladeIndex, _original: u128) -> Errand {
        Errand::Copy
    }

    fn announce(&self, _original: u128, _copy: &FrozenToken) {}

    fn forget(&self, _original: u128) {}
}

/// The token of a frozen segment's part on one blade.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BladeToken {
    pub(crate) blade_id: u64,
    pub(crate) token: SegmentToken,
}

/// A blade that is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostBlade {
    /// Which one.
    pub blade: BladeIndex,
    /// Its address.
    pub address: String,
    /// The reason.
    pub reason: String,
}

pub(crate) fn blade_index(number: usize) -> BladeIndex {
    BladeIndex(exactly(number))
}

/// The control connection's slot on each blade; lanes have the following ones.
pub(crate) const CONTROL_SLOT: u32 = 0;

/// The reason given for a blade that forgot us.
pub(crate) const LAPSED: &str = "this client's lease ran out there and its memory was freed";

/// Whether a page is looked up to be read or to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}
