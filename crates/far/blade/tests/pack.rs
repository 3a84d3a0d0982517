//! A blade that packs what is cold: it holds more than its memory, and whoever reads finds what was
//! written last.

mod common;

use common::flash::{BATCH, content as noise};
use common::*;
use farpool_blade::{BackingKind, BladeConfig, PackConfig, PackStat};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::num::NonZeroU64;
use std::time::Duration;

/// The least memory, in superpages.
const MEMORY: u64 = 8;
/// What the blade lends, in superpages: twice as much.
const LENT: u32 = 16;
/// Requests that fill all that is lent.
const BATCHES: u32 = LENT * 4096 / BATCH;

fn config() -> BladeConfig {
    let lent_bytes = u64::from(LENT) * SUPERPAGE_BYTES;
    let pack = PackConfig { lent_bytes, cold: Duration::from_millis(50) };
    BladeConfig { pack: Some(pack), ..config_of(MEMORY) }
}

impl TestBlade {
    fn pack(&self) -> PackStat {
        self.serving.blade().pack_stat().unwrap()
    }

    /// Waits until all that is cold is packed.
    fn wait_until_packed(&self, pages: u64) {
        wait_until("all is packed", || {
            let stat = self.pack();
            stat.pages_in_frames + stat.pages_filled == pages
        });
    }
}

/// Pages that compress to a quarter, and are what was written for the `round`-th time.
fn text(batch: u32, round: u64) -> Vec<u8> {
    let mut bytes = noise(batch, round);
    for page in bytes.chunks_mut(PAGE_BYTES) {
        let (random, rest) = page.split_at_mut(PAGE_BYTES / 4);
        rest.iter_mut().zip(random.iter().cycle()).for_each(|(to, from)| *to = *from);
    }
    bytes
}

#[test]
fn more_than_memory_holds_comes_back_as_it_was_written() {
    let blade = TestBlade::start(config());
    let mut client = blade.client(1);
    let (segment, _) = client.segment(LENT);
    for batch in 0..BATCHES {
        client.write(segment, batch * BATCH, &text(batch, 0)).done();
        assert!(blade.pack().memory_used_bytes <= MEMORY * SUPERPAGE_BYTES);
    }
    for page in (0..LENT * 4096).step_by(997) {
        let found = client.read(segment, page, 1);
        let (batch, index) = (page / BATCH, (page % BATCH) as usize);
        assert!(found.pages == text(batch, 0)[index * PAGE_BYTES..][..PAGE_BYTES], "page {page}");
    }
    for round in 1..2 {
        for batch in (0..BATCHES).step_by(3) {
            client.write(segment, batch * BATCH, &text(batch, round)).done();
        }
        for batch in 0..BATCHES {
            let round = if batch % 3 == 0 { round } else { 0 };
            let found = client.read(segment, batch * BATCH, BATCH);
            assert!(found.pages == text(batch, round), "batch {batch}");
        }
    }
    let stat = blade.pack();
    assert!(stat.memory_used_bytes <= MEMORY * SUPERPAGE_BYTES, "{stat:?}");
    assert!(stat.pages_unpacked > 0 && stat.pages_failed == 0, "{stat:?}");
    client.ask(&Request::Goodbye).done();
    wait_until("its memory is free", || {
        let stat = blade.pack();
        stat.frames == 0 && stat.pages_in_frames == 0 && stat.memory_used_bytes < SUPERPAGE_BYTES
    });
    // Nobody finds what another left.
    let mut other = blade.client(3);
    let (segment, _) = other.segment(LENT);
    for page in (0..LENT * 4096).step_by(509) {
        let found = other.read(segment, page, 1);
        assert!(found.pages.iter().all(|byte| *byte == 0), "page {page} is not zero");
    }
}

#[test]
fn what_is_cold_takes_less() {
    let blade = TestBlade::start(config());
    let mut client = blade.client(1);
    let (segment, _) = client.segment(LENT);
    const EACH: u64 = BATCH as u64;
    client.write(segment, 0, &vec![0; BATCH as usize * PAGE_BYTES]).done();
    client.write(segment, BATCH, &vec![0xcc; BATCH as usize * PAGE_BYTES]).done();
    client.write(segment, 2 * BATCH, &text(2, 0)).done();
    // The same again.
    client.write(segment, 3 * BATCH, &text(2, 0)).done();
    client.write(segment, 4 * BATCH, &noise(4, 0)).done();
    blade.wait_until_packed(3 * EACH);
    let stat = blade.pack();
    assert_eq!((stat.pages_filled, stat.frames), (EACH, EACH), "{stat:?}");
    wait_until("zero pages are found", || blade.pack().zero_pages_found == EACH);
    let (noise_bytes, text_bytes) = (EACH * PAGE_BYTES as u64, EACH * PAGE_BYTES as u64);
    let used_bytes = blade.pack().memory_used_bytes;
    assert!(used_bytes > noise_bytes && used_bytes < noise_bytes + text_bytes * 3 / 4, "{stat:?}");
    for (at, bytes) in [
        (0, vec![0; BATCH as usize * PAGE_BYTES]),
        (1, vec![0xcc; BATCH as usize * PAGE_BYTES]),
        (2, text(2, 0)),
        (3, text(2, 0)),
        (4, noise(4, 0)),
    ] {
        assert!(client.read(segment, at * BATCH, BATCH).pages == bytes, "batch {at}");
    }
    // One of two equal ones is written; the other stays.
    client.write(segment, 3 * BATCH, &text(3, 1)).done();
    blade.wait_until_packed(3 * EACH);
    assert_eq!(blade.pack().frames, 2 * EACH);
    assert!(client.read(segment, 2 * BATCH, BATCH).pages == text(2, 0));
    assert!(client.read(segment, 3 * BATCH, BATCH).pages == text(3, 1));
    // Discarded pages have nothing any more.
    let extents = [Extent::new(PageNumber(BATCH), 2 * BATCH)];
    client.ask(&Request::Discard { segment, extents: &extents }).done();
    let stat = blade.pack();
    assert_eq!((stat.pages_filled, stat.pages_in_frames, stat.frames), (0, EACH, EACH));
    assert!(client.read(segment, BATCH, 2 * BATCH).pages.iter().all(|byte| *byte == 0));
}

#[test]
fn clients_of_a_group_share_what_is_equal() {
    let blade = TestBlade::start(config());
    let mut peers = [(1, 7), (2, 7), (3, 8)].map(|(id, group)| {
        let sharing_group = NonZeroU64::new(group).map(SharingGroup);
        Peer::hello_with(blade.unix(), &Hello { sharing_group, ..hello(id) }).0
    });
    let segments = peers.each_mut().map(|peer| peer.segment(1).0);
    for (peer, segment) in peers.iter_mut().zip(segments) {
        peer.write(segment, 0, &text(0, 0)).done();
        // Pages that do not compress are shared, too.
        peer.write(segment, BATCH, &noise(0, 0)).done();
    }
    blade.wait_until_packed(6 * u64::from(BATCH));
    assert_eq!(blade.pack().frames, 4 * u64::from(BATCH), "the third is of another group");
    peers[0].write(segments[0], 0, &text(1, 1)).done();
    assert!(peers[1].read(segments[1], 0, BATCH).pages == text(0, 0));
    peers[1].ask(&Request::Goodbye).done();
    blade.wait_until_packed(4 * u64::from(BATCH));
    assert!(peers[0].read(segments[0], BATCH, BATCH).pages == noise(0, 0));
    assert!(peers[0].read(segments[0], 0, BATCH).pages == text(1, 1));
}

#[test]
fn clients_share_nothing() {
    let blade = TestBlade::start(config());
    let mut peers = [blade.client(1), blade.client(2)];
    let segments = peers.each_mut().map(|peer| peer.segment(1).0);
    for (peer, segment) in peers.iter_mut().zip(segments) {
        peer.write(segment, 0, &text(0, 0)).done();
    }
    blade.wait_until_packed(2 * u64::from(BATCH));
    assert_eq!(blade.pack().frames, 2 * u64::from(BATCH));
}

#[test]
fn a_blade_that_lends_what_it_has_takes_whatever_is_written() {
    let pack = PackConfig::of_memory(MEMORY * SUPERPAGE_BYTES);
    let lent = pack.lent_bytes / SUPERPAGE_BYTES;
    assert_eq!(lent, MEMORY - 1);
    let blade = TestBlade::start(BladeConfig { pack: Some(pack), ..config_of(MEMORY) });
    let mut client = blade.client(1);
    let count: u32 = lent.try_into().unwrap();
    let (segment, _) = client.segment(count);
    let batches = count * 4096 / BATCH;
    // What packs is written first, so that what does not has to take its place.
    for batch in 0..batches {
        client.write(segment, batch * BATCH, &text(batch, 0)).done();
    }
    for batch in 0..batches {
        client.write(segment, batch * BATCH, &noise(batch, 1)).done();
    }
    for batch in 0..batches {
        assert!(client.read(segment, batch * BATCH, BATCH).pages == noise(batch, 1), "{batch}");
    }
}

#[test]
fn a_full_blade_refuses_pages_and_takes_them_when_some_are_freed() {
    let blade = TestBlade::start(config());
    let mut client = blade.client(1);
    let (segment, _) = client.segment(LENT);
    let mut taken = 0;
    let code = loop {
        match client.write(segment, taken * BATCH, &noise(taken, 0)).refused() {
            None => taken += 1,
            code => break code,
        }
    };
    assert_eq!(code, Some(ErrorCode::BladeFull));
    assert!(u64::from(taken) * u64::from(BATCH) >= MEMORY * 4096 * 15 / 16, "{taken} batches");
    for batch in 0..taken {
        assert!(client.read(segment, batch * BATCH, BATCH).pages == noise(batch, 0), "{batch}");
    }
    let extents = [Extent::new(PageNumber(0), 16 * BATCH)];
    client.ask(&Request::Discard { segment, extents: &extents }).done();
    wait_until("the blade takes pages again", || {
        client.write(segment, taken * BATCH, &noise(taken, 0)).refused().is_none()
    });
    assert!(client.read(segment, taken * BATCH, BATCH).pages == noise(taken, 0));
}

/// The packer has a superpage in its hands when its client frees it.
#[test]
fn what_is_freed_while_it_is_packed_is_lent_again_at_once() {
    let mut config = config();
    config.pack.as_mut().unwrap().lent_bytes = 4 * SUPERPAGE_BYTES;
    let blade = TestBlade::start(config);
    let mut client = blade.client(1);
    let (segment, _) = client.segment(4);
    for round in 0..40 {
        let before = blade.pack().pages_packed;
        for batch in 0..4 * 4096 / BATCH {
            client.write(segment, batch * BATCH, &text(batch, 0)).done();
        }
        wait_until("the packer is at work", || blade.pack().pages_packed > before);
        client.free(segment, 0, 4).done();
        let answer = client.allocate(segment, 0, 4);
        assert_eq!(answer.refused(), None, "round {round}");
    }
}

#[test]
fn many_clients_write_and_read_while_all_is_packed() {
    let blade = TestBlade::start(config());
    std::thread::scope(|scope| {
        for id in 1..=4_u32 {
            let blade = &blade;
            scope.spawn(move || {
                let mut client = blade.client(id.into());
                let (segment, _) = client.segment(LENT / 4);
                let batches = LENT / 4 * 4096 / BATCH;
                let mut rounds = vec![None; batches as usize];
                let mut at = id;
                for step in 0..300_u64 {
                    at = at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let batch = (at >> 8) % batches;
                    let name = batch + id * 1000;
                    if at >> 30 == 0 {
                        client.write(segment, batch * BATCH, &text(name, step)).done();
                        rounds[batch as usize] = Some(step);
                    }
                    let found = client.read(segment, batch * BATCH, BATCH).pages;
                    match rounds[batch as usize] {
                        Some(round) => assert!(found == text(name, round), "{id}: {batch}"),
                        None => assert!(found.iter().all(|byte| *byte == 0), "{id}: {batch}"),
                    }
                }
            });
        }
    });
    assert_eq!(blade.pack().pages_failed, 0);
}

#[test]
fn what_does_not_go_together_is_refused() {
    let with = |change: fn(&mut BladeConfig)| {
        let mut config = config();
        change(&mut config);
        refusal(config)
    };
    assert!(with(|it| it.backing = BackingKind::Memfd).contains("no other kind of backing"));
    assert!(with(|it| it.require_grants = true).contains("packing is for a blade"));
    let too_little = with(|it| it.memory_bytes -= SUPERPAGE_BYTES);
    assert!(too_little.contains("128 MiB"), "{too_little}");
    let too_much = with(|it| it.pack.as_mut().unwrap().lent_bytes *= 100);
    assert!(too_much.contains("lend less"), "{too_much}");
}
