"""The sections of docs/researchers/measurements.md that are measured, and their commands.

A command is what a person types in the repository's folder; `farpool` is the release build, and
`target` the folder of the build, wherever CARGO_TARGET_DIR puts it. `cargo bench` runs in the
folder of the package, so that paths for it begin with $PWD.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Callable, Sequence

import measurements_tables as tables
from measurements_tables import Result


@dataclass(frozen=True)
class Step:
    """Commands whose results stand together; `server` runs beside them."""

    commands: tuple[str, ...]
    lines: Callable[[Sequence[Result]], list[str]] = tables.text_lines
    server: str = ""


@dataclass(frozen=True)
class Section:
    """A section with a block on the page, and what it needs of the machine."""

    name: str
    # About, on a machine with two processors, without what cargo builds first.
    minutes: float
    steps: tuple[Step, ...]
    needs_root: bool = False
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


COSTS = "farpool bench --json --door {} {}"
MACHINES = "crates/study/plan/data/utilisation/google-2011-1600-vms-24h-5min.parquet"
PLUGIN = "target/release/libfarpool_capture_qemu.so"
ORACLE = "target/libcachesim/bin/python"
QEMU = f"qemu-{platform.machine()}"
CACHE = "taskset -c 0 farpool kv -p 21211 -t 1 -m 1024 --keyvault unix://$PWD/target/kv.sock"
SPEED = "taskset -c 1 cargo bench -p farpool-kv-server --bench keyvault_speed --"
ADDRESSES = (
    "text:127.0.0.1:21211",
    "tcp:127.0.0.1:21212",
    "unix:$PWD/target/kv.sock",
    "shared:$PWD/target/kv.sock",
)
VALUE_BYTES = (64, 1024, 65_536, 1_000_000)


def bench(rows: str, door: str = "sidecar") -> Step:
    """Rows of `farpool bench`."""
    return Step((COSTS.format(door, rows),), tables.bench_lines)


def keyvault() -> tuple[Step, ...]:
    """KeyVault beside the text protocol: one connection, and eight."""
    server = f"{CACHE} --keyvault tcp://127.0.0.1:21212"
    speeds = tuple(f"{SPEED} {address} {depth}" for depth in (1, 32) for address in ADDRESSES)
    load = "farpool kv bench --json --closed --client-cpu 1 --connections 8 --depth 32 --protocol "
    text, vault = "text --server 127.0.0.1:21211", "keyvault --server 127.0.0.1:21212"
    return (
        Step(speeds, server=server),
        Step((load + text, load + vault), tables.kv_lines, server),
    )


def leases() -> tuple[Step, ...]:
    """Values that are copied, and those that are read where they lie."""
    commands = tuple(
        f"{SPEED} {way}:$PWD/target/kv.sock {depth} 1 any {size}"
        for depth in (1, 32)
        for size in VALUE_BYTES
        for way in ("shared", "lease")
    )
    return (Step(commands, server=f"{CACHE} -I 2m --keyvault-leases"),)


def simulator() -> tuple[Step, ...]:
    """The simulator's times on the trace of a sort, and its speed beside libCacheSim."""
    trace = "target/sim-demo/sort.parquet"
    runs = (
        f"farpool sim run {trace}",
        f"farpool sim mrc {trace} --policy lru,clock,sieve,s3-fifo,belady",
    )
    sweep = f"cargo bench -p farpool-sim --bench sweep_speed -- --rounds 1 $PWD/{ORACLE}"
    return (
        Step(("scripts/sim-demo.sh target/release/farpool target/sim-demo",), tables.no_lines),
        Step(runs, tables.took_lines),
        Step((sweep,)),
    )


def controller() -> tuple[Step, ...]:
    """The controller's creates, its state, and the placement in a rack."""
    state = "cargo bench -p farpool-control --bench state_speed -- 1000"
    place = "cargo bench -p farpool-placement --bench rack_speed --"
    return (
        Step(("cargo bench -p farpool-control --bench create_latency",)),
        Step((f"{state} 10000",)),
        Step((f"{state} 100000",)),
        Step((f"{place} 100000 Packet", f"{place} 50000 Mixed")),
    )


def planning() -> tuple[Step, ...]:
    """Pools with shares above 100 % kept and clipped, and a packing."""
    commands = (
        f"farpool plan pool {MACHINES} --above-100 keep --json",
        f"farpool plan pool {MACHINES} --json",
        f"farpool plan pack {MACHINES} --local 25% --json",
    )
    return tuple(Step((command,), tables.plan_lines) for command in commands)


# In the order of the page.
SECTIONS = (
    Section(
        "costs",
        10,
        (
            bench("floor fault scan.shm evict.shm attach blade.tcp calls fits pager start"),
            bench("fault scan.shm", "preload"),
        ),
        needs_root=True,
    ),
    Section("programs", 30, (bench("program"),), needs_root=True, programs=("redis-server",)),
    Section("limit", 5, (bench("limit"),), needs_root=True),
    Section(
        "demo",
        3,
        (Step(("farpool demo --json",), tables.demo_lines),),
        programs=("redis-server", "python3"),
    ),
    Section(
        "five-hosts",
        6,
        (Step(("farpool demo rack --json",), tables.rack_lines),),
        needs_root=True,
        programs=("ip",),
    ),
    Section("given-up", 1, (bench("--quick --no-swap calls"),), needs_root=True),
    Section(
        "clients-and-donors",
        2,
        (
            Step(("cargo bench -p farpool-blade --bench fair_share -- 5 256",)),
            Step(("cargo bench -p farpool-pool --bench donor_cost -- 30",)),
        ),
    ),
    Section(
        "flash",
        1,
        (Step(("cargo bench -p farpool-blade --bench flash",)),),
    ),
    Section(
        "pack",
        1,
        (Step(("cargo bench -p farpool-blade --bench pack",)),),
    ),
    Section(
        "network-faults",
        20,
        (Step(("cargo bench -p farpool-bench --bench network_faults -- 100",)),),
    ),
    Section("controller", 10, controller()),
    Section(
        "nodes",
        10,
        (
            Step(
                ("cargo test --release -p farpool-acms --test arbitration -- --nocapture",),
                tables.test_lines,
            ),
            Step(("cargo bench -p farpool-acms --bench acms_scale -- 100 300 1000",)),
        ),
    ),
    Section(
        "switch",
        2,
        (Step(("cargo bench -p farpool-switch --bench throughput -- 7",)),),
        needs_root=True,
        programs=("ip",),
    ),
    Section(
        "kv-rivals",
        8,
        (Step(("scripts/kv-demo.sh 2",)), Step(("scripts/kv-costs.py floor",))),
        programs=("memcached", "redis-server", "taskset"),
    ),
    Section(
        "kv-tiers",
        8,
        (Step(("scripts/kv-tiers.py",)),),
        needs_root=True,
        programs=("memcached", "taskset"),
    ),
    Section("kv-keyvault", 2, keyvault(), programs=("taskset",)),
    Section("kv-leases", 2, leases(), programs=("taskset",)),
    Section(
        "kv-split",
        4,
        (Step(("scripts/kv-costs.py split",)),),
        needs_root=True,
        programs=("perf", "addr2line", "taskset"),
    ),
    Section("kv-shards", 6, (Step(("scripts/kv-costs.py shards",)),), programs=("taskset",)),
    Section(
        "kv-policies", 3, (Step(("cargo bench -p farpool-kv-store --bench policy_misses",)),)
    ),
    Section(
        "capture",
        15,
        (Step((f"cargo bench -p farpool-trace --bench capture_speed -- $PWD/{PLUGIN}",)),),
        programs=(QEMU, "python3"),
        files=(PLUGIN,),
    ),
    Section("simulator", 5, simulator(), programs=(QEMU,), files=(ORACLE,)),
    Section(
        "predictions",
        8,
        (
            bench("predict"),
            Step(
                (
                    "cargo test --release -p farpool-e2e --test prediction"
                    " -- --show-output --test-threads 1",
                ),
                tables.test_lines,
            ),
        ),
        needs_root=True,
        programs=(QEMU,),
    ),
    Section("planning", 1, planning(), files=(MACHINES,)),
)
