//! A thousand nodes: all clients served within three broadcast periods, nothing flaps, and
//! messages per node do not grow with the cluster.

use std::time::Duration;

use farpool_acms::sim::{Report, Scale, run_scale, seeds};

const PERIODS_MAX: f64 = 3.0;

fn run(nodes: usize, clients_percent: usize, servers_percent: usize) -> Report {
    let (loss_permille, steady, seed) = (0, Duration::from_secs(20), seeds(1, 1)[0]);
    println!("FARPOOL_SEED={seed}");
    let report =
        run_scale(&Scale { nodes, clients_percent, servers_percent, loss_permille, steady, seed });
    println!("{report:?}");
    assert_eq!(report.served, report.clients);
    assert!(report.clients > 0);
    assert_eq!((report.class_changes, report.side_changes), (0, 0));
    report
}

#[test]
fn a_thousand_nodes_with_few_clients() {
    let report = run(1_000, 20, 60);
    assert!(report.wait(100) <= PERIODS_MAX, "{}", report.wait(100));
}

#[test]
fn a_thousand_nodes_with_few_servers() {
    let report = run(1_000, 45, 25);
    assert!(report.wait(100) <= PERIODS_MAX, "{}", report.wait(100));
}

#[test]
fn messages_per_node_are_flat() {
    for (clients, servers) in [(20, 60), (45, 25)] {
        let (small, large) = (run(100, clients, servers), run(500, clients, servers));
        let grows = large.steady_messages / small.steady_messages;
        assert!(grows < 1.2, "{} -> {}", small.steady_messages, large.steady_messages);
    }
}
