//! The cost of the state without store and network, at 10,000 segments on 1,000 nodes:
//!
//!     cargo bench -p farpool-control --bench state_speed -- [NODES] [SEGMENTS]

use std::time::Instant;

use farpool_api::{NodeSpec, SegmentId, SegmentSpec};
use farpool_control::due;
use farpool_control::model::{Command, Condition, Records, State};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = farpool_benchargs::arguments();
    let nodes: u32 = args.next().map_or(Ok(1_000), |text| text.parse())?;
    let segments: u32 = args.next().map_or(Ok(10_000), |text| text.parse())?;
    let mut random = 0_u128;
    let mut next = || {
        random += 1;
        random
    };
    let (mut state, _) = State::load(None, Records::default(), 0)?;
    let start = Instant::now();
    for number in 0..nodes {
        let spec = NodeSpec::new(vec!["tcp://x:1".to_owned()], 64 << 30, 1, 1);
        state.apply(Command::PutNode { name: format!("n{number}"), spec }, 0, &mut next)?;
    }
    println!("all nodes joined              {:?}", start.elapsed());
    let start = Instant::now();
    for number in 0..segments {
        let spec = SegmentSpec {
            client: None,
            host: Some(format!("n{}", number % nodes)),
            bytes: 16 << 20,
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
            policy: farpool_api::Policy::LeastLoaded,
            avoid: Vec::new(),
            may_split: false,
            apart: false,
        };
        let id = SegmentId::from_u128(u128::from(number));
        let condition = Condition::default();
        state.apply(Command::PutSegment { id, spec, condition }, 0, &mut next)?;
    }
    println!("a create, without the store   {:?}", start.elapsed() / segments);
    let start = Instant::now();
    let found = due(&state, 1).len();
    println!("a look of the reconciler      {:?} ({found} due)", start.elapsed());
    let spec = NodeSpec::new(vec!["tcp://x:1".to_owned()], 64 << 30, 1, 1);
    let start = Instant::now();
    state.apply(Command::PutNode { name: "another".to_owned(), spec }, 0, &mut next)?;
    println!("one more node joins           {:?}", start.elapsed());
    let records = state.records();
    let start = Instant::now();
    State::load(None, records, 0)?;
    println!("a state from its records      {:?}", start.elapsed());
    Ok(())
}
