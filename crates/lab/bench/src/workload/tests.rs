use super::*;

fn args(name: WorkloadName) -> WorkloadArgs {
    WorkloadArgs {
        name,
        bytes: 4 << 20,
        seed: 1,
        ops: None,
        threads: None,
        passes: None,
        step_bytes: 64,
        write_percent: None,
    }
}

const ALL: [WorkloadName; 9] = [
    WorkloadName::Mstress,
    WorkloadName::Faults,
    WorkloadName::Scan,
    WorkloadName::Sort,
    WorkloadName::Pagerank,
    WorkloadName::Bfs,
    WorkloadName::Checker,
    WorkloadName::Alloc,
    WorkloadName::Touch,
];

#[test]
fn every_workload_repeats_its_checksum_and_the_seed_changes_it() {
    for name in ALL {
        let first = run(&args(name)).expect("the workload runs");
        let again = run(&args(name)).expect("the workload runs");
        assert_eq!((&first.checksum, first.ops), (&again.checksum, again.ops), "{name:?}");
        let other = run(&WorkloadArgs { seed: 2, ..args(name) }).expect("the workload runs");
        // What alloc writes does not depend on the seed, but which sizes it takes does.
        assert_ne!(first.checksum, other.checksum, "{name:?}");
        assert!(first.ops > 0 && first.seconds > 0.0, "{name:?}");
    }
}

#[test]
fn a_report_reads_back_from_its_line_of_json() {
    let report = run(&args(WorkloadName::Faults)).expect("the workload runs");
    let line = serde_json::to_string(&report).expect("it is plain data");
    assert_eq!(serde_json::from_str::<WorkloadReport>(&line).expect("it was just written"), report);
    assert!(report.p50_ns.is_some() && !line.contains('\n'));
}

#[test]
fn a_shuffle_visits_each_once_and_keeps_no_stride() {
    for count in [1, 2, 3, 10, 1000, 4096, 5000] {
        let order = Shuffle::new(count, 9);
        let mut seen: Vec<_> = (0..count).map(|i| order.at(i)).collect();
        let strides: Vec<_> = seen.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..count), "{count}");
        if count >= 1000 {
            let mut unique = strides.clone();
            unique.sort_unstable();
            unique.dedup();
            assert!(unique.len() > strides.len() / 4, "{count}: {} strides", unique.len());
        }
    }
}

#[test]
fn impossible_arguments_are_refused() {
    let odd = WorkloadArgs { step_bytes: 12, ..args(WorkloadName::Scan) };
    assert!(matches!(run(&odd), Err(BenchError::Arguments(_))));
    let crowded = WorkloadArgs { bytes: 4096, threads: Some(1000), ..args(WorkloadName::Checker) };
    assert!(matches!(run(&crowded), Err(BenchError::Arguments(_))));
}
