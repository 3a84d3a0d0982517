//! The topology reader, writer and generator: every mistake is named with its line.

use farpool_placement::topology::{NetworkKind, RackSpec, draw, generate, read, write};
use farpool_placement::{
    Allocator, ComputeId, PlacementPolicy, PowerState, RateLimits, Request, RequestId, SwitchKind,
};
use proptest::prelude::*;

const SOUND: &str = r#"[[rack]]
name = "r0"
[[tray]]
name = "t0"
rack = "r0"
[[switch]]
name = "s0"
kind = "circuit"
ports = 4
[[compute]]
name = "c0"
tray = "t0"
ports = 2
[[memory]]
name = "m0"
tray = "t0"
domain = "feed-a"
ports = 2
capacity = "1GiB"
read_bandwidth = "2GiB/s"
write_bandwidth = "1.5GiB/s"
power = "off"
[[link]]
from = "c0:0"
to = "s0:0"
bandwidth = "1GiB/s"
[[link]]
from = "m0:0"
to = "s0:1"
bandwidth = "1GiB/s"
latency_ns = 7
"#;

#[test]
fn a_sound_topology_is_read() {
    let topology = read(SOUND).unwrap();
    let graph = &topology.graph;
    assert_eq!(topology.warnings, []);
    let memory = &graph.memories()[0];
    assert_eq!((memory.capacity_bytes, memory.power), (1 << 30, PowerState::Off));
    assert_eq!(memory.write_limit_bytes_per_s, 3 << 29);
    assert_eq!(graph.domains()[memory.domain.index()], "feed-a");
    assert_eq!(graph.domains()[graph.computes()[0].domain.index()], "t0");
    assert_eq!(graph.switches()[0].kind, SwitchKind::Circuit);
    assert_eq!((graph.links().len(), graph.links()[1].latency_ns), (2, 7));
}

/// `SOUND` with one piece replaced, the line of the mistake and words of the reason.
const MISTAKES: &[(&str, &str, usize, &str)] = &[
    ("rack = \"r0\"", "rack = \"r9\"", 5, "there is no rack \"r9\""),
    ("name = \"c0\"\ntray = \"t0\"", "name = \"c0\"\ntray = \"t9\"", 12, "no tray \"t9\""),
    ("from = \"c0:0\"", "from = \"c9:0\"", 24, "no brick or switch \"c9\""),
    ("from = \"c0:0\"", "from = \"c0:2\"", 24, "there is no port 2"),
    ("from = \"c0:0\"", "from = \"c0\"", 24, "write it as name:number"),
    ("from = \"c0:0\"", "from = \"c0:-1\"", 24, "write it as name:number"),
    ("name = \"m0\"", "name = \"c0\"", 15, "\"c0\" is there already"),
    ("name = \"m0\"", "name = \"s0\"", 15, "\"s0\" is there already"),
    ("name = \"m0\"", "name = \"m 0\"", 15, "is no name"),
    ("[[tray]]", "[[rack]]\nname = \"r0\"\n[[tray]]", 4, "rack \"r0\" is there already"),
    ("to = \"s0:1\"", "to = \"s0:0\"", 29, "port s0:0 has a link already"),
    ("from = \"m0:0\"", "from = \"c0:0\"", 28, "port c0:0 has a link already"),
    ("from = \"m0:0\"\nto = \"s0:1\"", "from = \"m0:0\"\nto = \"c0:1\"", 28, "a link joins"),
    ("from = \"m0:0\"", "from = \"s0:2\"", 28, "a link joins"),
    ("capacity = \"1GiB\"", "capacity = \"0\"", 19, "capacity of \"m0\" is zero"),
    ("capacity = \"1GiB\"", "capacity = \"17MiB\"", 19, "whole number of superpages"),
    ("capacity = \"1GiB\"", "capacity = \"much\"", 19, "\"much\" is no size"),
    ("capacity = \"1GiB\"", "capacity = \"-1GiB\"", 19, "is no size"),
    ("capacity = \"1GiB\"", "capacity = \"1048576PiB\"", 19, "is no size"),
    ("capacity = \"1GiB\"", "capacity = \"1000PiB\"", 15, "superpages of one brick are too many"),
    ("capacity = \"1GiB\"", "capacity = 1", 19, "expected a string"),
    ("capacity = \"1GiB\"\n", "", 14, "missing field `capacity`"),
    ("\"2GiB/s\"", "\"0GiB/s\"", 20, "read bandwidth of \"m0\" is zero"),
    ("\"1.5GiB/s\"", "\"0\"", 21, "write bandwidth of \"m0\" is zero"),
    ("\"1.5GiB/s\"", "\"fast\"", 21, "\"fast\" is no bandwidth"),
    ("ports = 2\ncapacity", "ports = 0\ncapacity", 18, "\"m0\" has no port"),
    ("ports = 4", "ports = 0", 9, "\"s0\" has no port"),
    ("ports = 4", "ports = 4000000000", 9, "too many"),
    ("ports = 4", "ports = \"4\"", 9, "invalid type"),
    ("ports = 4", "ports = -4", 9, "invalid value"),
    ("ports = 4", "port = 4", 9, "unknown field `port`"),
    ("kind = \"circuit\"", "kind = \"magic\"", 8, "unknown variant `magic`"),
    ("power = \"off\"", "power = \"maybe\"", 22, "unknown variant"),
    ("power = \"off\"", "load_permille = 1001", 22, "at most 1000"),
    ("bandwidth = \"1GiB/s\"\n[[link]]", "bandwidth = \"0\"\n[[link]]", 26, "is zero"),
    ("[[rack]]", "[[wreck]]", 1, "unknown field `wreck`"),
    ("[[rack]]", "[[rack]", 1, ""),
    ("name = \"t0\"", "name = \"t0", 4, ""),
];

#[test]
fn every_mistake_is_named_with_its_line() {
    for (sound, wrong, line, reason) in MISTAKES {
        assert!(SOUND.contains(sound), "{sound}");
        let error = read(&SOUND.replacen(sound, wrong, 1)).expect_err(wrong);
        assert_eq!(error.line, *line, "{wrong}: {error}");
        assert!(error.reason.contains(reason), "{wrong}: {error}");
        assert!(error.to_string().starts_with(&format!("line {line}: ")));
    }
}

#[test]
fn memory_out_of_reach_is_a_warning() {
    let text = SOUND.replace("to = \"s0:1\"", "to = \"s1:1\"").replace(
        "[[compute]]",
        "[[switch]]\nname = \"s1\"\nkind = \"packet\"\nports = 2\n[[compute]]",
    );
    let topology = read(&text).unwrap();
    assert_eq!(topology.warnings.len(), 1);
    let warning = topology.warnings[0].to_string();
    assert!(warning.starts_with("line 19: no compute brick can reach"), "{warning}");
}

#[test]
fn an_empty_topology_is_an_empty_rack() {
    let mut rack = Allocator::new(read("").unwrap().graph);
    let rates = RateLimits { read_bytes_per_s: 1, write_bytes_per_s: 1 };
    let request = Request::new(RequestId(1), ComputeId(0), 1, rates, PlacementPolicy::FirstFit);
    assert!(rack.allocate(&request).unwrap_err().to_string().contains("no compute brick"));
}

fn specs() -> impl Strategy<Value = RackSpec> {
    let kinds = vec![NetworkKind::Packet, NetworkKind::Circuit, NetworkKind::Mixed];
    let counts = (1..4u32, 1..4u32, 0..3u32, 0..3u32, 1..4u32);
    (counts, proptest::sample::select(kinds), 1..100u64).prop_filter_map(
        "a rack with bricks",
        |((racks, trays_per_rack, compute, memory, ports_per_brick), network, superpages)| {
            (compute + memory > 0).then(|| RackSpec {
                racks,
                trays_per_rack,
                compute_per_tray: compute,
                memory_per_tray: memory,
                ports_per_brick,
                capacity_bytes: superpages << 24,
                ..RackSpec::new(network)
            })
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(spec in specs()) {
        let graph = generate(&spec).unwrap();
        let topology = read(&write(&graph)).unwrap();
        prop_assert_eq!(&topology.graph, &graph);
        let lost = if spec.compute_per_tray == 0 { graph.memories().len() } else { 0 };
        prop_assert_eq!(topology.warnings.len(), lost);
    }

    #[test]
    fn no_text_makes_the_reader_panic(
        at in 0..SOUND.len(), length in 0..40usize, put in "[ -~\n]{0,12}",
    ) {
        let end = (at + length).min(SOUND.len());
        let text = format!("{}{put}{}", &SOUND[..at], &SOUND[end..]);
        if let Err(error) = read(&text) {
            prop_assert!(error.line >= 1 && error.line <= text.split('\n').count());
        }
    }
}

#[test]
fn specifications_of_nothing_are_refused() {
    let spec = RackSpec { ports_per_brick: 0, ..RackSpec::new(NetworkKind::Packet) };
    assert!(generate(&spec).is_err());
    let spec = RackSpec { capacity_bytes: 0, ..RackSpec::new(NetworkKind::Packet) };
    assert!(generate(&spec).is_err());
    let spec = RackSpec { ports_per_brick: u32::MAX, ..RackSpec::new(NetworkKind::Packet) };
    assert!(generate(&spec).is_err());
}

#[test]
fn the_drawing_shows_places_and_use() {
    let mut rack = Allocator::new(read(SOUND).unwrap().graph);
    assert!(draw(&rack).contains("m0  memory   0 of 1GiB used, 0 segments, load 0%, off"));
    let rates = RateLimits { read_bytes_per_s: 1 << 20, write_bytes_per_s: 1 << 20 };
    let bytes = 256 << 20;
    let request = Request::new(RequestId(1), ComputeId(0), bytes, rates, PlacementPolicy::Pack);
    rack.allocate(&request).unwrap();
    assert_eq!(
        draw(&rack),
        "rack r0\n\
         `-- tray t0\n   \
         |-- c0  compute  256MiB in 1 segments\n   \
         `-- m0  memory   256MiB of 1GiB used, 1 segments, load 25%, on while used\n\
         switch s0  circuit, 1 circuits, 2 of 4 ports linked\n"
    );
}
