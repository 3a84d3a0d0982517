//! A program's account, and a grant that a program has.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use farpool_acms::{Class, GrantId, GrantKey};
use farpool_api::{ClientId, ClientSpec, SegmentId};

use super::effect::Effect;
use super::{GRANTS_HELD_MAX, GRANTS_IN_USE_MAX};

/// What is known about a program besides its grants.
#[derive(Clone, Debug)]
pub(super) struct Account {
    pub(super) spec: ClientSpec,
    pub(super) heard_at: Duration,
    pub(super) sequence: u64,
    /// The version of its answers.
    pub(super) version: u64,
    pub(super) wanted_bytes: u64,
    /// Its last wishes: id and bytes.
    pub(super) wishes: VecDeque<(SegmentId, u64)>,
    /// Since when memory is missing and none came.
    pub(super) short_since: Option<Duration>,
}

impl Account {
    pub(super) fn new(spec: ClientSpec, now: Duration) -> Self {
        Self {
            spec,
            heard_at: now,
            sequence: 0,
            version: 1,
            wanted_bytes: 0,
            wishes: VecDeque::new(),
            short_since: None,
        }
    }
}

/// Where a grant lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The other node's blade. None for this node's own.
    pub blade: Option<SocketAddr>,
    /// The key that opens it.
    pub key: GrantKey,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The state of a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HoldingState {
    /// It may be used.
    Ready,
    /// It is being left, by a deadline if its server has set one.
    Moving {
        /// When the memory is gone in any case.
        deadline: Option<Duration>,
    },
    /// Its memory is gone.
    Lost,
}

/// A grant that a program has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    /// The program that has it.
    pub client: ClientId,
    /// The other node's blade. None for this node's own.
    pub blade: Option<SocketAddr>,
    /// The key that opens it.
    pub key: GrantKey,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes that hold data, as the program reports.
    pub used_bytes: u64,
    /// Its state.
    pub state: HoldingState,
}

impl Holding {
    pub(super) fn new(client: ClientId, placement: Placement) -> Self {
        let Placement { blade, key, bytes } = placement;
        Self { client, blade, key, bytes, used_bytes: 0, state: HoldingState::Ready }
    }

    /// Whether it lies on this node's own blade.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.blade.is_none()
    }

    pub(super) fn is_ready(&self) -> bool {
        self.state == HoldingState::Ready
    }

    pub(super) fn is_moving(&self) -> bool {
        matches!(self.state, HoldingState::Moving { .. })
    }

    /// Returns the action that gives the grant back.
    pub(super) fn given_back(&self, grant: GrantId) -> Effect {
        if self.is_here() { Effect::EndHere(grant) } else { Effect::Evacuated(grant) }
    }
}

/// A program's grants, summed up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Program {
    /// Bytes of ready grants on other nodes.
    pub(super) others_bytes: u64,
    /// Bytes of ready grants here.
    pub(super) here_bytes: u64,
    ready_count: usize,
    moving_count: usize,
}

impl Program {
    pub(super) fn of<'a>(holdings: impl Iterator<Item = &'a Holding>) -> Self {
        let mut program = Self::default();
        for holding in holdings {
            match holding.state {
                HoldingState::Ready if holding.is_here() => program.here_bytes += holding.bytes,
                HoldingState::Ready => program.others_bytes += holding.bytes,
                HoldingState::Moving { .. } => program.moving_count += 1,
                HoldingState::Lost => {}
            }
            program.ready_count += usize::from(holding.is_ready());
        }
        program
    }

    pub(super) fn ready_bytes(&self) -> u64 {
        self.others_bytes.saturating_add(self.here_bytes)
    }

    /// Whether it can take no further grant.
    pub(super) fn is_full(&self) -> bool {
        self.ready_count >= GRANTS_IN_USE_MAX
            || self.ready_count + self.moving_count >= GRANTS_HELD_MAX
    }

    /// Returns the bytes that others should lend it. A node of class client has no memory of its
    /// own to give, so grants here are wanted from others, too.
    pub(super) fn missing_from_others(&self, wanted_bytes: u64, class: Class) -> u64 {
        let here = if class == Class::Client { 0 } else { self.here_bytes };
        let missing = wanted_bytes.saturating_sub(self.others_bytes.saturating_add(here));
        if self.is_full() { 0 } else { missing }
    }
}
