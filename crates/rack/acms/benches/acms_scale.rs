//! The figures of docs/researchers/measurements.md: clusters of growing size in the simulation.
//!
//!     cargo bench -p farpool-acms --bench acms_scale [-- NODES...]
//!
//! `FARPOOL_SEED` chooses another seed.

use std::time::{Duration, Instant};

use farpool_acms::sim::{Scale, run_scale, seeds};

/// Names and shares of clients and servers, percent; which side broadcasts differs.
const MIXES: [(&str, usize, usize); 3] = [
    ("few clients (clients broadcast)", 20, 60),
    ("few servers (servers broadcast)", 45, 25),
    ("as many of both", 30, 30),
];

fn main() {
    let sizes: Vec<usize> =
        farpool_benchargs::arguments().filter_map(|size| size.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![100, 300, 1_000, 3_000] } else { sizes };
    let seed = seeds(1, 1)[0];
    println!("seed {seed}; messages are datagrams sent per node and broadcast period (1 s)");
    for (name, clients_percent, servers_percent) in MIXES {
        println!("\n{name}: {clients_percent} % clients, {servers_percent} % servers");
        println!(
            "| nodes | clients | served | wait p50 | p99 | max | msgs rush | msgs steady | most | \
             bytes/s | class flaps | side flaps | run |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
        for nodes in &sizes {
            let started = Instant::now();
            let nodes = *nodes;
            let (loss_permille, steady) = (0, Duration::from_secs(60));
            let scale =
                Scale { nodes, clients_percent, servers_percent, loss_permille, steady, seed };
            let report = run_scale(&scale);
            println!(
                "| {nodes} | {} | {} | {:.2} | {:.2} | {:.2} | {:.1} | {:.1} | {:.1} | {:.0} | {} \
                 | {} | {:.0} s |",
                report.clients,
                report.served,
                report.wait(50),
                report.wait(99),
                report.wait(100),
                report.rush_messages,
                report.steady_messages,
                report.steady_messages_max,
                report.steady_bytes,
                report.class_changes,
                report.side_changes,
                started.elapsed().as_secs_f64(),
            );
            if std::env::var_os("KINDS").is_some() {
                println!("  by kind: {:.2?}", report.kinds);
            }
        }
    }
}
