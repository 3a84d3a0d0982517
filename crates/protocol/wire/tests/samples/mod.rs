//! One or more frames of every kind, for the vectors and as seeds of mutation.

use farpool_units::PAGE_BYTES;
use farpool_wire::*;
use std::num::NonZeroU64;

/// A frame to encode.
pub(crate) enum Sample<'a> {
    Request(Request<'a>),
    InBackground(Request<'a>),
    Response(Opcode, Response<'a>),
}

/// Returns a page whose bytes count up, and start over at a prime.
pub(crate) fn page() -> Vec<u8> {
    (0..PAGE_BYTES).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

/// Calls `visit` with each sample's name, the sample, and the pages that go with it.
pub(crate) fn visit(mut visit: impl FnMut(&str, &Sample<'_>, &[u8])) {
    requests(&mut visit);
    responses(&mut visit);
}

const SEGMENT: SegmentId = SegmentId(0x0102_0304_0506_0708);
const TOKEN: SegmentToken = SegmentToken(0x1112_1314_1516_1718_191a_1b1c_1d1e_1f20);

fn requests(visit: &mut impl FnMut(&str, &Sample<'_>, &[u8])) {
    let segment = SEGMENT;
    let (first, count) = (SuperpageNumber(3), 5);
    let one = [Extent::page(PageNumber(7))];
    let many = [Extent::new(PageNumber(0), 8), Extent::page(PageNumber(u32::MAX)), one[0]];
    let hello = Hello {
        client: ClientId(0x2122_2324_2526_2728_292a_2b2c_2d2e_2f30),
        grant: None,
        purpose: Purpose::Client,
        pid: 4711,
        slot: 2,
        generation: 1,
        quota_wanted_bytes: 1 << 30,
        sharing_group: NonZeroU64::new(0x7172_7374_7576_7778).map(SharingGroup),
        name: "redis-server",
    };
    let key = GrantKey(0x5152_5354_5556_5758_595a_5b5c_5d5e_5f60);
    let granted = Hello { grant: Some(Grant { key, epoch: 0x6162_6364 }), ..hello };
    let keeper = Hello { purpose: Purpose::Keeper, name: "", ..hello };
    let monitor =
        Hello { purpose: Purpose::Monitor, quota_wanted_bytes: 0, sharing_group: None, ..hello };
    for (name, request, pages) in [
        ("hello", Request::Hello(hello), 0),
        ("hello-granted", Request::Hello(granted), 0),
        ("hello-keeper", Request::Hello(keeper), 0),
        ("hello-monitor", Request::Hello(monitor), 0),
        ("create-segment", Request::CreateSegment { span_superpages: 64 }, 0),
        ("allocate", Request::AllocateSuperpages { segment, first, count }, 0),
        ("free", Request::FreeSuperpages { segment, first, count }, 0),
        ("freeze", Request::Freeze { segment }, 0),
        ("thaw", Request::Thaw { segment }, 0),
        ("attach", Request::Attach { token: TOKEN }, 0),
        ("detach", Request::Detach { segment }, 0),
        ("list", Request::ListSuperpages { segment, skip: 4000 }, 0),
        ("discard", Request::Discard { segment, extents: &many }, 0),
        ("read-page", Request::Read { segment, extents: &one }, 0),
        ("read-scattered", Request::Read { segment, extents: &many }, 0),
        ("write-page", Request::Write { segment, extents: &one }, 1),
        ("shm-map", Request::ShmMap { segment }, 0),
        ("stat", Request::Stat { skip_clients: 370 }, 0),
        ("ping", Request::Ping, 0),
        ("goodbye", Request::Goodbye, 0),
        ("report", Request::Report { pages_read: 0x0a0b, pages_written: 0x0c0d_0e0f }, 0),
    ] {
        let pages = page().repeat(pages);
        visit(&format!("request-{name}"), &Sample::Request(request), &pages);
    }
    let read = Request::Read { segment, extents: &many };
    visit("request-read-in-background", &Sample::InBackground(read), &[]);
    let write = Request::Write { segment, extents: &one };
    visit("request-write-in-background", &Sample::InBackground(write), &page());
}

fn totals(ok: &HelloOk) -> BladeTotals {
    BladeTotals {
        blade_id: ok.blade_id.into(),
        capacity_bytes: ok.capacity_bytes.into(),
        used_bytes: (48 << 20).into(),
        uptime_ms: 60_000.into(),
        pages_read: 1001.into(),
        pages_written: 1002.into(),
        requests: 1003.into(),
        requests_refused: 4.into(),
        bad_frames: 5.into(),
        leases_expired: 6.into(),
        superpages_scrubbed: 7.into(),
        control_throttled_ns: 9_000_000_001.into(),
        flash_bytes: (16u64 << 30).into(),
        flash_memory_used_bytes: (2u64 << 30).into(),
        flash_pages_fetched: 10.into(),
        flash_pages_written: 11.into(),
        flash_pages_failed: 12.into(),
        flash_writes_failed: 13.into(),
        pack_memory_bytes: (2u64 << 30).into(),
        pack_memory_used_bytes: (1u64 << 30).into(),
        pack_frames_bytes: (1u64 << 29).into(),
        pack_pages_filled: 14.into(),
        pack_pages_in_frames: 15.into(),
        pack_frames: 16.into(),
        pack_zero_pages_found: 17.into(),
        pack_pages_packed: 18.into(),
        pack_pages_unpacked: 19.into(),
        pack_pages_failed: 20.into(),
        clients: 1.into(),
        connections: 2.into(),
        segments: 1.into(),
        superpages_held: 0.into(),
    }
}

fn responses(visit: &mut impl FnMut(&str, &Sample<'_>, &[u8])) {
    let pair = |sma, rmma| SuperpagePair::new(SuperpageNumber(sma), SuperpageNumber(rmma));
    let superpages = &[pair(3, 0), pair(4, 1), pair(9, 12)];
    let ok = HelloOk {
        blade_id: 0x3132_3334_3536_3738,
        capacity_bytes: 8 << 30,
        quota_bytes: 1 << 30,
        lease_ms: 10_000,
        pages_per_request_limit: 256,
        outlives_process: true,
    };
    let state = SegmentState::Frozen;
    let (span_superpages, allocated_superpages) = (64, 3);
    let segment = SEGMENT;
    let attached = Attached { segment, span_superpages, allocated_superpages, state, superpages };
    let totals = totals(&ok);
    let mut usage = ClientUsage {
        number: 1.into(),
        quota_bytes: ok.quota_bytes.into(),
        used_bytes: (48 << 20).into(),
        pid: 4711.into(),
        connections: 2.into(),
        segments: 1.into(),
        ..Default::default()
    };
    usage.set_name("redis-server");
    let clients = [usage];
    let mut say = |name: &str, opcode, response, pages: &[u8]| {
        visit(&format!("response-{name}"), &Sample::Response(opcode, response), pages);
    };
    say("hello", Opcode::Hello, Response::HelloOk(ok), &[]);
    let created = Response::SegmentCreated { segment: SEGMENT, token: TOKEN };
    say("create-segment", Opcode::CreateSegment, created, &[]);
    say("allocate", Opcode::AllocateSuperpages, Response::Allocated { superpages }, &[]);
    say("attach", Opcode::Attach, Response::Attached(attached), &[]);
    say("list", Opcode::ListSuperpages, Response::Attached(attached), &[]);
    say("read-page", Opcode::Read, Response::Pages { page_count: 1 }, &page());
    let mapped = Response::ShmMapped { bytes: 1 << 30, writable: true };
    say("shm-map", Opcode::ShmMap, mapped, &[]);
    say("stat", Opcode::Stat, Response::Stat { totals: &totals, clients: &clients }, &[]);
    say("write", Opcode::Write, Response::Done, &[]);
    let code = ErrorCode::QuotaExceeded;
    let error = Response::Error { code, detail: ok.quota_bytes };
    say("error", Opcode::AllocateSuperpages, error, &[]);
}

/// Encodes the sample's frame: head and pages.
pub(crate) fn encode(sample: &Sample<'_>, pages: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let (id, checksum) = (RequestId(0x4142_4344_4546_4748), PagesChecksum::of(pages));
    match sample {
        Sample::Request(request) => request.encode(id, checksum, &mut frame),
        Sample::InBackground(request) => request.encode_in_background(id, checksum, &mut frame),
        Sample::Response(opcode, response) => {
            response.encode(*opcode, id, 256, checksum, &mut frame)
        }
    }
    .unwrap();
    frame.extend_from_slice(pages);
    frame
}
