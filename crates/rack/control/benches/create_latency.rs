//! The latency of a durable create over REST beside a bare commit of the same store on the same
//! disk, interleaved in one run:
//!
//!     cargo bench -p farpool-control --bench create_latency -- [COUNT] [FOLDER]
//!
//! Each round commits one record of a segment's size to a redb file of its own, and creates one
//! segment over a kept-open connection. Every 64th round all segments are released, unmeasured.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use farpool_api::{Client, NodeReport, NodeSpec, Policy, SegmentId, SegmentSpec};
use farpool_control::store::{RedbStore, Store, StoreOp};
use farpool_control::{ControlOptions, StoreChoice, serve};

type Anything = Result<(), Box<dyn std::error::Error>>;

/// Length of a segment's record as it is stored.
const RECORD_BYTES: usize = 560;

fn main() -> Anything {
    let mut args = farpool_benchargs::arguments();
    let count: u32 = args.next().map_or(Ok(2_000), |text| text.parse())?;
    let folder = match args.next() {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let (ready, address) = channel();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let store = StoreChoice::Redb(folder.path().join("control"));
    let options = ControlOptions::new(SocketAddr::from(([127, 0, 0, 1], 0)), store);
    let server = std::thread::spawn(move || -> Result<(), String> {
        let runtime = tokio::runtime::Runtime::new().map_err(|error| error.to_string())?;
        let on_ready = move |addresses: &[SocketAddr]| {
            let _ = ready.send(addresses[0]);
        };
        let served = serve(options, on_ready, async move { drop(ended.await) });
        runtime.block_on(served).map_err(|error| error.to_string())
    });
    let client = Client::new(&format!("http://{}", address.recv()?), None)?;
    measure(&client, folder.path(), count)?;
    drop(end);
    server.join().map_err(|_| "the server panicked")??;
    Ok(())
}

fn measure(client: &Client, folder: &Path, count: u32) -> Anything {
    let spec = NodeSpec::new(vec!["tcp://127.0.0.1:1".to_owned()], 64 << 30, 1, 1);
    client.put_node("n0", &spec)?;
    let mut bare = RedbStore::open(&folder.join("bare"))?;
    let (mut commits, mut creates, mut nothings) = (Vec::new(), Vec::new(), Vec::new());
    let mut sequence = 0;
    for round in 0..count {
        let id = SegmentId::from_u128(u128::from(round) + 1);
        let value = vec![b'x'; RECORD_BYTES];
        let start = Instant::now();
        bare.commit(&[StoreOp::Put(format!("segment/{id}"), value)])?;
        commits.push(start.elapsed());
        let spec = SegmentSpec {
            client: None,
            host: Some("n0".to_owned()),
            bytes: 16 << 20,
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
            policy: Policy::LeastLoaded,
            avoid: Vec::new(),
            may_split: false,
            apart: false,
        };
        let start = Instant::now();
        client.put_segment(id, &spec)?;
        creates.push(start.elapsed());
        let start = Instant::now();
        client.health()?;
        nothings.push(start.elapsed());
        if round % 64 == 63 {
            release_all(client, &mut sequence)?;
        }
    }
    let p50 = |all: &mut Vec<Duration>| {
        all.sort_unstable();
        all[all.len() / 2]
    };
    let p99 = |all: &[Duration]| all[all.len() * 99 / 100];
    let (bare, rest, http) = (p50(&mut commits), p50(&mut creates), p50(&mut nothings));
    println!("rounds                    {count}");
    println!("bare redb commit          p50 {bare:?}  p99 {:?}", p99(&commits));
    println!("REST create, durable      p50 {rest:?}  p99 {:?}", p99(&creates));
    println!("REST request, no change   p50 {http:?}  p99 {:?}", p99(&nothings));
    println!("create / commit, p50      {:.2}", rest.as_secs_f64() / bare.as_secs_f64());
    Ok(())
}

/// Releases all segments, and has the node report that it let go.
fn release_all(client: &Client, sequence: &mut u64) -> Anything {
    let page = client.segments(&farpool_api::SegmentFilter::default())?;
    for segment in page.segments {
        client.delete_segment(segment.id, None)?;
    }
    let mut known_version = 0;
    for _ in 0..2 {
        *sequence += 1;
        let report = NodeReport {
            incarnation: 1,
            sequence: *sequence,
            blade_id: 1,
            capacity_bytes: 64 << 30,
            lendable_bytes: 64 << 30,
            known_version,
            ..NodeReport::default()
        };
        known_version = client.report_node("n0", &report)?.version;
    }
    Ok(())
}
