//! The engine against times calculated by hand, and against properties that every design must have.

use farpool_policy::CacheKind;
use farpool_sim::load::{Reference, References};
use farpool_sim::{Design, Experiment, LocalSize, Outcome, Preset, Program, experiment, simulate};
use farpool_trace::{Access, Clock, TraceInfo};
use farpool_units::PAGE_BYTES_U64;
use proptest::prelude::*;

const NS: u64 = 1000;

fn trace(references: Vec<Reference>) -> References {
    let pages = references.iter().map(|reference| reference.page + 1).max().unwrap_or(0);
    let info = TraceInfo::new("test", 64, Clock::Nanoseconds);
    References::new(references, (0..pages).map(u64::from).collect(), PAGE_BYTES_U64, info)
}

fn read(page: u32, line: u8) -> Reference {
    Reference { ticks: 10, page, thread: 0, line, access: Access::Read }
}

fn run(design: &Design, trace: &References, local_pages: usize) -> Outcome {
    run_by(design, trace, local_pages, CacheKind::Lru)
}

fn run_by(design: &Design, trace: &References, local_pages: usize, policy: CacheKind) -> Outcome {
    let program =
        Program { references: trace, local_pages, tick_ps: NS, overlap: 1, policy, seed: 1 };
    simulate(design, &[program]).unwrap().swap_remove(0)
}

#[test]
fn page_swapping_takes_the_times_of_the_table() {
    // Room for one page, no reserve: every change of page waits for the other one to be written.
    let trace = trace(vec![read(0, 0), read(0, 1), read(1, 0), read(0, 0)]);
    let outcome = run(&Preset::Ps.design(), &trace, 1);
    // Third reference: page 0 leaves, 4,096 ns on the link. Fourth: page 1 leaves while page 0
    // comes back.
    let evict = 4096 * NS;
    let fetch = Preset::Ps.design().idle_fetch_ps(PAGE_BYTES_U64);
    assert_eq!(outcome.frame_ps, 2 * evict);
    assert_eq!(outcome.far_ps, fetch);
    assert_eq!(outcome.time_ps, 4 * (10 + 60) * NS + 2 * evict + fetch);
    assert_eq!((outcome.far_references, outcome.evicted_pages, outcome.written_pages), (1, 2, 2));
    assert_eq!((outcome.fetched_bytes, outcome.sent_bytes), (PAGE_BYTES_U64, 2 * PAGE_BYTES_U64));
}

#[test]
fn fine_grained_access_pays_for_every_line() {
    // There is room for page 0; page 1 is far from its first line on.
    let trace = trace(vec![read(0, 0), read(1, 0), read(0, 0), read(0, 1), read(1, 1)]);
    let outcome = run(&Preset::Fgra.design(), &trace, 1);
    assert_eq!((outcome.far_references, outcome.far_ps), (2, 2 * 381 * NS));
    assert_eq!((outcome.evicted_pages, outcome.far_pages_peak), (0, 1));
    assert_eq!(outcome.time_ps, (5 * 10 + 3 * 60 + 2 * 381) * NS);
}

#[test]
fn fine_grained_access_may_send_pages_away_for_new_ones() {
    // Page 0 is evicted when page 1 is first touched; its lines are far from then on.
    let trace = trace(vec![read(0, 0), read(1, 0), read(0, 0), read(0, 1), read(1, 1)]);
    let outcome = run(&Preset::FgraEvict.design(), &trace, 1);
    // The link towards the program is idle each time: 381 ns a line.
    assert_eq!(outcome.far_ps, 2 * 381 * NS);
    assert_eq!(outcome.far_references, 2);
    assert_eq!(outcome.time_ps, (5 * 10 + 3 * 60 + 2 * 381) * NS);
}

#[test]
fn critical_block_first_waits_for_the_line_alone() {
    let design = Preset::PsCbfWaits.design();
    let mut references = vec![read(0, 0), read(1, 0), read(0, 7), read(0, 8)];
    // Time enough for page 0 to leave before it is needed again.
    references[2].ticks = 10_000;
    let outcome = run(&design, &trace(references), 1);
    // 750 ns for line 7; 70 ns later line 8 has arrived, which takes 64 ns.
    assert_eq!(outcome.far_ps, 750 * NS);
    let far_line =
        vec![read(0, 0), Reference { ticks: 10_000, ..read(1, 0) }, read(0, 7), read(0, 6)];
    let outcome = run(&design, &trace(far_line.clone()), 1);
    // Line 6 is the last of 64 to arrive, 64 ns each, less the time the program used in between.
    assert_eq!(outcome.far_ps, (750 + 63 * 64 - 70) * NS);
    // As the thesis counts, no reference waits for it.
    let outcome = run(&Preset::PsCbf.design(), &trace(far_line), 1);
    assert_eq!(outcome.far_ps, 750 * NS);
}

#[test]
fn a_page_that_went_before_it_had_come_is_waited_for_when_it_comes_again() {
    // Page 0 is fetched twice and evicted in between, before the rest of it is used.
    let later = |reference| Reference { ticks: 20_000, ..reference };
    let references = vec![
        read(0, 0),
        later(read(1, 0)),
        later(read(0, 7)),
        read(1, 0),
        later(read(0, 7)),
        read(0, 6),
    ];
    let outcome = run(&Preset::PsCbfWaits.design(), &trace(references), 1);
    let whole = run(
        &Preset::PsCbf.design(),
        &trace(vec![
            read(0, 0),
            later(read(1, 0)),
            later(read(0, 7)),
            read(1, 0),
            later(read(0, 7)),
        ]),
        1,
    );
    // Line 6 is the last of the second arrival's.
    assert_eq!(outcome.far_ps, whole.far_ps + (63 * 64 - 70) * NS);
}

#[test]
fn threads_wait_for_themselves_and_keep_the_traces_order() {
    let on = |thread, ticks| Reference {
        ticks,
        page: u32::from(thread),
        thread,
        line: 0,
        access: Access::Read,
    };
    // Thread 1 first appears after 500 ns of thread 0: it began no earlier.
    let outcome = run(&Preset::Local.design(), &trace(vec![on(0, 500), on(1, 1), on(0, 100)]), 2);
    assert_eq!(outcome.time_ps, (500 + 60 + 100 + 60) * NS);
    assert_eq!(outcome.compute_ps, 601 * NS);
    // A long stall of thread 0 does not delay thread 1.
    let trace = trace(vec![on(0, 10), on(1, 10), on(0, 10), on(1, 10), on(1, 10)]);
    let alone = run(&Preset::Local.design(), &trace, 2);
    assert_eq!(alone.time_ps, (20 + 120 + 10) * NS + 60 * NS);
}

#[test]
fn pages_that_did_not_change_are_not_written_where_copies_are_kept() {
    let references = (0..40).map(|step| read(step % 4, 0)).collect();
    let trace = trace(references);
    let design = Design { keeps_copies: true, ..Preset::Ps.design() };
    let outcome = run(&design, &trace, 2);
    assert_eq!((outcome.evicted_pages, outcome.written_pages), (38, 4));
    assert_eq!(run(&Preset::Ps.design(), &trace, 2).written_pages, 38);
}

#[test]
fn what_overflows_the_blade_comes_from_the_tier_below() {
    // 8 pages in a cycle, 2 local, 4 on the blade: the next page is always the oldest, and below.
    let trace = trace((0..80).map(|step| read(step % 8, 0)).collect());
    let outcome = run(&Preset::PsFlash.design(), &trace, 2);
    assert_eq!(outcome.far_references, 0);
    assert_eq!(outcome.overflow_references, 72);
    // With room for all of them none is below.
    let mut design = Preset::PsFlash.design();
    design.overflow.as_mut().unwrap().far_permille = 1000;
    let outcome = run(&design, &trace, 2);
    assert_eq!((outcome.far_references, outcome.overflow_references), (72, 0));
}

#[test]
fn compressed_memory_takes_its_room_from_the_resident_pages() {
    let trace = trace((0..90).map(|step| read(step % 90, 0)).collect());
    // r + (90 - r) / 3 = 60: 45 pages uncompressed, of which 2 frames are kept free.
    assert_eq!(run(&Preset::Zram.design(), &trace, 60).resident_pages, 43);
    let program = Program {
        references: &trace,
        local_pages: 30,
        tick_ps: NS,
        overlap: 1,
        policy: CacheKind::Lru,
        seed: 1,
    };
    let refusal = simulate(&Preset::Zram.design(), &[program]).unwrap_err().to_string();
    assert_eq!(
        refusal,
        "design zram: 90 pages compressed by 3.000 take 30 pages; local memory has 30"
    );
}

#[test]
fn migration_brings_what_is_used_and_prefetch_what_will_be() {
    // Page 2 finds no local frame and is used often: at most 30,000 times in an epoch.
    let mut references = vec![read(0, 0), read(1, 0), read(2, 0)];
    references.extend((0..99_999).map(|_| read(2, 0)));
    let trace = trace(references);
    let still = run(&Preset::Fgra.design(), &trace, 2);
    let moved = run(&Preset::FgraMigration.design(), &trace, 2);
    assert_eq!(still.far_references, 100_000);
    assert_eq!(moved.migrated_pages, 1);
    assert!(moved.far_references < 30_000, "{moved:?}");
    let scan = scan_twice(2000);
    let plain = run(&Design { prefetch: None, ..Preset::Tcp.design() }, &scan, 1000);
    let ahead = run(&Preset::Tcp.design(), &scan, 1000);
    assert!(ahead.far_references * 8 < plain.far_references, "{ahead:?}");
    assert!(ahead.time_ps < plain.time_ps);
}

fn scan_twice(pages: u32) -> References {
    trace((0..pages).chain(0..pages).map(|page| read(page, 0)).collect())
}

#[test]
fn programs_that_share_a_device_wait_for_each_other() {
    let scan = scan_twice(500);
    let program = Program {
        references: &scan,
        local_pages: 100,
        tick_ps: NS,
        overlap: 1,
        policy: CacheKind::Lru,
        seed: 1,
    };
    let alone = simulate(&Preset::Ps.design(), &[program]).unwrap();
    let many = simulate(&Preset::Ps.design(), &[program; 16]).unwrap();
    // The blade's memory gives 6.4 GB/s, 16 links ask for 1 GB/s each, both ways.
    assert!(many.iter().all(|outcome| outcome.time_ps > alone[0].time_ps * 2), "{many:?}");
    assert!(many.iter().all(|outcome| outcome.far_references == alone[0].far_references));
}

fn any_trace() -> impl Strategy<Value = References> {
    let reference = (0u32..30, 0u64..200, 0u16..3, 0u8..64, 0u8..3).prop_map(
        |(page, ticks, thread, line, access)| Reference {
            ticks,
            page,
            thread,
            line,
            access: Access::from_code(access).unwrap(),
        },
    );
    proptest::collection::vec(reference, 1..400).prop_map(|references| {
        // Dense numbers come in the order of first touch, without gaps.
        let mut seen: Vec<u32> = Vec::new();
        let dense = |page: u32, seen: &mut Vec<u32>| {
            let at = seen.iter().position(|held| *held == page).unwrap_or_else(|| {
                seen.push(page);
                seen.len() - 1
            });
            u32::try_from(at).unwrap()
        };
        let references: Vec<Reference> =
            references.iter().map(|r| Reference { page: dense(r.page, &mut seen), ..*r }).collect();
        let info = TraceInfo::new("test", 64, Clock::Nanoseconds);
        References::new(references, seen.into_iter().map(u64::from).collect(), PAGE_BYTES_U64, info)
    })
}

/// Counts the misses of exact LRU after each page's first touch, with a plain list; write-backs
/// touch nothing.
fn lru_faults(trace: &References, capacity: usize) -> u64 {
    let (mut list, mut touched, mut faults) = (Vec::new(), vec![false; trace.page_count()], 0);
    for reference in trace.references.iter().filter(|r| r.access != Access::WriteBack) {
        let page = reference.page;
        if let Some(at) = list.iter().position(|held| *held == page) {
            list.remove(at);
        } else {
            faults += u64::from(touched[page as usize]);
            if list.len() == capacity {
                list.remove(0);
            }
        }
        touched[page as usize] = true;
        list.push(page);
    }
    faults
}

proptest! {
    #[test]
    fn faults_are_the_misses_of_the_policy(trace in any_trace(), local in 1usize..12) {
        let outcome = run(&Preset::Ps.design(), &trace, local);
        let capacity = if local >= trace.page_count() { local } else { local - local.min(local / 16) };
        prop_assert_eq!(outcome.far_references, lru_faults(&trace, capacity));
    }

    #[test]
    fn times_add_up_and_far_memory_is_never_quicker(trace in any_trace(), local in 1usize..40) {
        let all_local = run(&Preset::Local.design(), &trace, trace.page_count());
        prop_assert_eq!(all_local.far_ps + all_local.frame_ps + all_local.overflow_ps, 0);
        for preset in Preset::ALL {
            for policy in CacheKind::ALL {
                let design = preset.design();
                let program = Program {
                    references: &trace, local_pages: local, tick_ps: NS, overlap: 1, policy, seed: 1,
                };
                let Ok(outcomes) = simulate(&design, &[program]) else {
                    prop_assert_eq!(preset, Preset::Zram);
                    continue;
                };
                let outcome = &outcomes[0];
                prop_assert_eq!(outcome.references, all_local.references);
                prop_assert_eq!(outcome.compute_ps, all_local.compute_ps);
                prop_assert!(outcome.time_ps >= all_local.time_ps, "{} {}", preset.name(), policy);
                let waited = outcome.local_ps + outcome.far_ps + outcome.overflow_ps
                    + outcome.frame_ps + outcome.migration_ps;
                prop_assert!(outcome.time_ps <= outcome.compute_ps + waited + all_local.time_ps);
                prop_assert!(outcome.written_pages <= outcome.evicted_pages);
                if local >= trace.page_count() {
                    prop_assert_eq!(outcome.time_ps, all_local.time_ps);
                    prop_assert_eq!(outcome.evicted_pages, 0);
                }
            }
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads(trace in any_trace()) {
        let experiment = Experiment {
            designs: ["ps", "fgra", "tcp"].map(|n| n.parse::<Preset>().unwrap().design()).to_vec(),
            local: vec![LocalSize::Permille(750), LocalSize::Permille(250)],
            policies: CacheKind::ALL.to_vec(),
            overlap: 1,
            tick_ps: None,
            seed: 7,
            clients: 2,
        };
        let one = experiment::run(&experiment, &trace, 1, &|_| ()).unwrap();
        let four = experiment::run(&experiment, &trace, 4, &|_| ()).unwrap();
        prop_assert_eq!(one.1.len(), 3 * 2 * CacheKind::ALL.len());
        prop_assert_eq!(one, four);
    }
}
