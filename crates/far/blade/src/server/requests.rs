//! Carries out every request but read and write, which the connection does itself.

use crate::blade::Blade;
use crate::blade::Visible;
use crate::table::{
    Access, ClientCounters, ClientNumber, Connected, GrantPass, GrantTraffic, Origin, Refused, Run,
};
use farpool_units::at_most;
use farpool_wire::{
    Attached, BladeTotals, ClientUsage, ErrorCode, Extent, Hello, HelloOk, META_LIMIT_BYTES,
    Purpose, Request, Response, SegmentId, SegmentToken, SuperpagePair,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Most superpages in one attach or list answer: META_LIMIT_BYTES less the fixed fields.
const LIST_LIMIT: usize = (META_LIMIT_BYTES - 20) / 8;
/// Most clients in one stat answer.
const STAT_CLIENTS_LIMIT: usize =
    (META_LIMIT_BYTES - size_of::<BladeTotals>()) / size_of::<ClientUsage>();

/// What a connection belongs to.
#[derive(Debug)]
pub(super) enum Session {
    /// No hello as yet.
    Fresh,
    /// A connection of a client.
    Client {
        number: ClientNumber,
        counters: Arc<ClientCounters>,
        /// May only ping, stat and say goodbye.
        is_keeper: bool,
        /// The grant that it was admitted under.
        grant: Option<GrantPass>,
    },
    /// May only ping and stat.
    Monitor { grant: Option<GrantPass> },
}

/// Lists reused from request to request.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) runs: Vec<Run>,
    pairs: Vec<SuperpagePair>,
}

/// What a hello makes of a connection.
pub(super) struct Greeting {
    pub(super) session: Session,
    pub(super) ok: HelloOk,
}

impl Session {
    /// The client, if this connection may touch its segments.
    pub(super) fn client(&self) -> Result<(ClientNumber, &Arc<ClientCounters>), Refused> {
        match self {
            Session::Client { number, counters, is_keeper: false, .. } => Ok((*number, counters)),
            Session::Fresh => Err(Refused::new(ErrorCode::HelloExpected, 0)),
            _ => Err(Refused::new(ErrorCode::NotPermitted, 0)),
        }
    }

    pub(super) fn number(&self) -> Option<ClientNumber> {
        match self {
            Session::Client { number, .. } => Some(*number),
            _ => None,
        }
    }

    /// The client's counters and bucket, also of a keeper.
    pub(super) fn counters(&self) -> Option<&ClientCounters> {
        match self {
            Session::Client { counters, .. } => Some(counters),
            _ => None,
        }
    }

    pub(super) fn grant(&self) -> Option<&GrantPass> {
        match self {
            Session::Fresh => None,
            Session::Client { grant, .. } | Session::Monitor { grant } => grant.as_ref(),
        }
    }

    /// The meters and counters of its grant.
    pub(super) fn traffic(&self) -> Option<&GrantTraffic> {
        self.grant().map(|pass| &*pass.traffic)
    }

    /// A connection under a grant sees what is under it; where grants are needed, others see no
    /// clients.
    fn visible(&self, blade: &Blade) -> Visible {
        match self.grant() {
            Some(pass) => Visible::Of(pass.id),
            None if blade.config().require_grants => Visible::None,
            None => Visible::All,
        }
    }

    fn has_greeted(&self) -> Result<(), Refused> {
        match self {
            Session::Fresh => Err(Refused::new(ErrorCode::HelloExpected, 0)),
            _ => Ok(()),
        }
    }
}

/// Makes the session that `hello` asks for.
pub(super) fn greet(blade: &Blade, hello: &Hello<'_>, origin: Origin) -> Result<Greeting, Refused> {
    let (session, quota_bytes) = match hello.purpose {
        Purpose::Monitor => (Session::Monitor { grant: blade.admit_monitor(hello.grant)? }, 0),
        purpose => {
            let Connected { number, quota_bytes, counters, grant } =
                blade.connect(hello, origin)?;
            let is_keeper = purpose == Purpose::Keeper;
            (Session::Client { number, counters, is_keeper, grant }, quota_bytes)
        }
    };
    let lease_ms = crate::blade::millis(blade.config().lease);
    let ok = HelloOk {
        blade_id: blade.id(),
        capacity_bytes: blade.capacity_bytes(),
        quota_bytes,
        lease_ms: at_most(lease_ms),
        pages_per_request_limit: blade.config().pages_per_request,
        outlives_process: blade.config().persist.is_some(),
    };
    Ok(Greeting { session, ok })
}

/// Checks an access to pages; `scratch.runs` then holds their places.
pub(super) fn access(
    blade: &Blade,
    session: &Session,
    segment: SegmentId,
    extents: &[Extent],
    access: Access,
    scratch: &mut Scratch,
) -> Result<crate::table::Permit<Arc<crate::memory::SegmentMemory>>, Refused> {
    let (number, _) = session.client()?;
    let limit = u64::from(blade.config().pages_per_request);
    if farpool_wire::pages_in(extents) > limit {
        return Err(Refused::new(ErrorCode::TooLarge, limit));
    }
    scratch.runs.clear();
    blade.access(number, segment, extents, access, &mut scratch.runs)
}

/// Carries out a control request and passes the answer to `reply`, with the descriptor that goes
/// with it.
pub(super) fn control<R>(
    blade: &Blade,
    session: &Session,
    request: &Request<'_>,
    scratch: &mut Scratch,
    now: Duration,
    reply: impl FnOnce(&Response<'_>, Option<OwnedFd>) -> R,
) -> Result<R, Refused> {
    session.has_greeted()?;
    match *request {
        Request::Ping => return Ok(reply(&Response::Done, None)),
        Request::Stat { skip_clients } => {
            let skip = at_most(skip_clients);
            let stat = blade.stat_page(session.visible(blade), skip, STAT_CLIENTS_LIMIT, now);
            let response = Response::Stat { totals: &stat.totals, clients: &stat.clients };
            return Ok(reply(&response, None));
        }
        Request::Goodbye => {
            if let Some(number) = session.number() {
                blade.goodbye(number)?;
            }
            return Ok(reply(&Response::Done, None));
        }
        _ => {}
    }
    let (client, counters) = session.client()?;
    scratch.pairs.clear();
    let pairs = &mut scratch.pairs;
    match *request {
        Request::CreateSegment { span_superpages } => {
            let (segment, token) = blade.create_segment(client, span_superpages)?;
            return Ok(reply(&Response::SegmentCreated { segment, token }, None));
        }
        Request::AllocateSuperpages { segment, first, count } => {
            blade.allocate(client, segment, first, count, pairs)?;
            return Ok(reply(&Response::Allocated { superpages: pairs }, None));
        }
        Request::Attach { token } => {
            let attached = attach(blade, client, token, pairs)?;
            return Ok(reply(&Response::Attached(attached), None));
        }
        Request::ListSuperpages { segment, skip } => {
            let attached = list(blade, client, segment, skip, pairs)?;
            return Ok(reply(&Response::Attached(attached), None));
        }
        // Memory under a grant can be taken back at any time; a descriptor would hold it.
        Request::ShmMap { .. } if session.grant().is_some() => {
            return Err(Refused::new(ErrorCode::Unsupported, 0));
        }
        Request::ShmMap { segment } => {
            let (descriptor, bytes, writable) = blade.share(client, segment)?;
            return Ok(reply(&Response::ShmMapped { bytes, writable }, Some(descriptor)));
        }
        Request::FreeSuperpages { segment, first, count } => {
            blade.free(client, segment, first, count)?;
        }
        Request::Freeze { segment } => blade.freeze(client, segment)?,
        Request::Thaw { segment } => blade.thaw(client, segment)?,
        Request::Detach { segment } => blade.detach(client, segment)?,
        Request::Report { pages_read, pages_written } => {
            blade.count_reported(counters.report(pages_read, pages_written))
        }
        Request::Discard { segment, extents } => {
            scratch.runs.clear();
            blade.discard(client, segment, extents, &mut scratch.runs)?;
        }
        // Hello, read and write are handled elsewhere.
        _ => return Err(Refused::new(ErrorCode::HelloExpected, 0)),
    }
    Ok(reply(&Response::Done, None))
}

fn attach<'a>(
    blade: &Blade,
    client: ClientNumber,
    token: SegmentToken,
    pairs: &'a mut Vec<SuperpagePair>,
) -> Result<Attached<'a>, Refused> {
    let view = blade.attach(client, token)?;
    list(blade, client, view.segment, 0, pairs)
}

fn list<'a>(
    blade: &Blade,
    client: ClientNumber,
    segment: SegmentId,
    skip: u32,
    pairs: &'a mut Vec<SuperpagePair>,
) -> Result<Attached<'a>, Refused> {
    let skip = at_most(skip);
    let view = blade.list(client, segment, skip, LIST_LIMIT, pairs)?;
    Ok(Attached {
        segment,
        span_superpages: view.span_superpages,
        allocated_superpages: view.allocated_superpages,
        state: view.state,
        superpages: pairs,
    })
}
