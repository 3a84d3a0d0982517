#!/usr/bin/env python3
"""The tiers below memory: far memory beside the floor of its parts, flash beside memcached's extstore.

Usage: scripts/kv-tiers.py [far] [flash] [--seconds N] [--folder FOLDER]     (as root; flash needs memcached and memory cgroups)

Far: one GET at a time, most of them from a blade over TCP loopback; the floor is a GET from memory plus a bare
round trip of that size. Flash: 1 KiB values, ten times the memory. Both servers run in a cgroup whose limit leaves
little room for the page cache, as extstore reads through it and farpool kv does not. Server on processor 0, client on
the last.
"""

import argparse, os, pathlib, shutil, sys, tempfile

from kvbench import CLIENT_CPU, FARPOOL, ROOT, bench, free_port, server, stats

MEMORY_MIB = 256
# Beside the servers' own memory: what the kernel may cache of files.
CGROUP_BYTES = (MEMORY_MIB + 256) << 20
FLASH_KEYS = 2_500_000
FLASH_GIB = 5
FAR_KEYS = 3_000_000


def far(seconds, blade_cpu):
    print("far memory, one GET at a time, p50 in us; 64 B and 1 KiB")
    for value_bytes in (64, 1024):
        keys = FAR_KEYS if value_bytes == 64 else FAR_KEYS // 4
        blade_port, port = free_port(), free_port()
        blade = [FARPOOL, "blade", "--listen", f"tcp://127.0.0.1:{blade_port}", "--memory", "2GiB", "--threads", "1"]
        kv = [FARPOOL, "kv", "-p", str(port), "-t", "1", "-m", "64", "--far", "1500MiB", "--blade", f"tcp://127.0.0.1:{blade_port}"]
        rows = []
        with server(blade, blade_port, blade_cpu), server(kv, port):
            at = ["--server", f"127.0.0.1:{port}", "--value-bytes", value_bytes]
            bench(1, *at, "--keys", keys)
            for seed in range(2, 5):
                floor = bench(seconds, "--echo", "--server-cpu", 0, "--echo-bytes", value_bytes + 60)
                before = int(stats(port)["far_reads"])
                below = bench(seconds, *at, "--keys", keys, "--no-fill", "--seed", seed)
                share = (int(stats(port)["far_reads"]) - before) / below["requests"]
                # Stored anew, so that all of them are in memory.
                bench(1, *at, "--keys", 1000)
                memory = bench(seconds, *at, "--keys", 1000, "--no-fill")
                rows.append((below, share, memory, floor))
        for below, share, memory, floor in rows:
            p50 = [it["latency_us"]["p50"] for it in (below, memory, floor)]
            print(f"  {value_bytes:5} B: far {p50[0]:6.1f} ({share:.0%} from the blade, {below['hits'] / below['keys']:.1%} hits)"
                  f"  memory {p50[1]:6.1f}  round trip {p50[2]:6.1f}  ratio {p50[0] / (p50[1] + p50[2]):.2f}")


def flash(seconds, folder):
    if not shutil.which("memcached"):
        sys.exit("memcached is not installed: scripts/install-deps.sh test")
    cgroups = pathlib.Path("/sys/fs/cgroup")
    unified = (cgroups / "cgroup.controllers").exists()
    group = (cgroups if unified else cgroups / "memory") / f"kv-tiers-{os.getpid()}"
    group.mkdir()
    (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(CGROUP_BYTES))
    print(f"flash, {FLASH_KEYS:,} values of 1 KiB, {MEMORY_MIB} MiB of memory, requests/s (hit ratio)")
    try:
        for name in ("farpool", "extstore", "farpool", "extstore"):
            with tempfile.TemporaryDirectory(dir=folder) as inside:
                port = free_port()
                path = os.path.join(inside, "flash")
                if name == "farpool":
                    command = [FARPOOL, "kv", "-p", str(port), "-t", "1", "-m", str(MEMORY_MIB), "--flash", f"{path}:{FLASH_GIB}GiB"]
                else:
                    options = f"ext_path={path}:{FLASH_GIB}G,ext_item_age=0,ext_item_size=512,ext_recache_rate=0,ext_threads=1"
                    command = ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", str(port), "-t", "1", "-m", str(MEMORY_MIB), "-o", options]
                with server(command, port, cgroup=group):
                    at = ["--server", f"127.0.0.1:{port}", "--key-bytes", 16, "--value-bytes", 1024, "--keys", FLASH_KEYS]
                    bench(1, *at, "--depth", 1)
                    cells = []
                    for connections, depth in ((1, 1), (16, 1), (8, 32)):
                        it = bench(seconds, *at, "--no-fill", "--connections", connections, "--depth", depth)
                        cells.append(f"{connections} x {depth}: {it['requests_per_s']:9,.0f} ({it['hits'] / it['keys']:.3f})")
                print(f"  {name:9} " + "   ".join(cells))
    finally:
        group.rmdir()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", choices=["far", "flash", []], help="which; both if none is named")
    parser.add_argument("--seconds", type=int, default=3, help="of each figure")
    parser.add_argument("--blade-cpu", default=CLIENT_CPU, help="processor of the blade")
    parser.add_argument("--folder", default=str(ROOT / "target"), help="where flash lies: on the device to be measured")
    args = parser.parse_args()
    for tier in args.tiers or ["far", "flash"]:
        if tier == "far":
            far(args.seconds, args.blade_cpu)
        else:
            flash(args.seconds, args.folder)


main()
