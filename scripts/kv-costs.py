#!/usr/bin/env python3
"""What a request costs the key-value server: with one thread and with two, and where the time goes.

Usage: scripts/kv-costs.py [shards] [split] [--seconds N] [--rounds N]     (split needs perf: apt-get install linux-perf, and root)

shards: processor time of the server for each key, one thread beside two on the same processor, the client on the last; two
threads that cost as much a key as one have twice the capacity. Clients of KeyVault know the shards, so nothing is passed on
there but multi-gets: what their two threads cost more is the price of two threads on one processor.

split: where the server's processor time goes, by samples, as Figures 3.4 and 4.9 of Gutierrez's thesis have it: network (the kernel),
hash (of the key), cache (index and items), and the rest, which takes requests apart and makes replies.
"""

import argparse, collections, os, pathlib, re, shutil, subprocess, sys, tempfile

from kvbench import CLIENT_CPU, FARPOOL, bench, free_port, server, stats

# With 64 clients both threads always have work; with 8 they often wait for each other.
SHAPES = {
    "GET, 64 x 32": ["--connections", 64, "--depth", 32],
    "SET, 64 x 32": ["--connections", 64, "--depth", 32, "--operation", "set"],
    "GET, 128 x 1": ["--connections", 128, "--depth", 1],
    "multi-get, 64 x 100": ["--connections", 64, "--depth", 1, "--multi-get", 100],
    "GET, 8 x 32": ["--connections", 8, "--depth", 32],
}
# The first that one of a sample's source files matches, from the function inlined deepest on, is where the sample belongs.
PLACES = [
    ("hash", re.compile(r"/twox-hash|keyvault/src/owner\.rs")),
    ("cache", re.compile(r"crates/kv/src/(store|tier)/")),
]


def cpu_ns(pid):
    """Time on a processor, all threads."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def commands(port):
    figures = stats(port)
    return int(figures["cmd_get"]) + int(figures["cmd_set"])


def cost(threads, shape, seconds, protocol):
    """Server's processor time for a key, ns."""
    port, vault = free_port(), free_port()
    command = [FARPOOL, "kv", "-p", str(port), "-t", str(threads), "-m", "1024", "--keyvault", f"tcp://127.0.0.1:{vault}"]
    with server(command, port) as process:
        at = ["--protocol", protocol, "--server", f"127.0.0.1:{vault if protocol == 'keyvault' else port}"]
        bench(1, *at, "--connections", 8)
        before = (commands(port), cpu_ns(process.pid))
        bench(seconds, *at, *shape, "--no-fill")
        after = (commands(port), cpu_ns(process.pid))
    keys, spent = (b - a for a, b in zip(before, after))
    return spent / keys


def shards(seconds, rounds):
    print("processor time of the server for each key, ns; capacity of two threads, in that of one")
    for protocol in ("text", "keyvault"):
        for name, shape in SHAPES.items():
            one, two = [], []
            for _ in range(rounds):
                one.append(cost(1, shape, seconds, protocol))
                two.append(cost(2, shape, seconds, protocol))
            ratios = sorted(2 * a / b for a, b in zip(one, two))
            print(f"  {protocol:9} {name:20} one {min(one):7.0f}  two {min(two):7.0f}  capacity {2 * min(one) / min(two):.2f}"
                  f"  (rounds {' '.join(f'{it:.2f}' for it in ratios)})", flush=True)


def place(ip, dso, inlined):
    if "[kernel" in dso or ip >= 1 << 63:
        return "network"
    for file in inlined.get(ip, []):
        for name, pattern in PLACES:
            if pattern.search(file):
                return name
    return "rest"


def files_at(addresses):
    """For each address of the binary, the source file of its function and of those that it was inlined into, innermost first."""
    tool = subprocess.run(["addr2line", "-ai", "-e", FARPOOL], input="\n".join(f"{it:#x}" for it in addresses), stdout=subprocess.PIPE, text=True)
    found, key = collections.defaultdict(list), None
    for line in tool.stdout.splitlines():
        if line.startswith("0x"):
            key = int(line, 16)
        else:
            found[key].append(line)
    return found


def sampled(pid, seconds, *flags):
    """The shares of the server's time by place, and keys per second."""
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "perf.data")
        record = subprocess.Popen(["perf", "record", "-q", "-e", "cpu-clock", "-F", "4999", "-p", str(pid), "-o", data, "sleep", str(seconds)], stderr=subprocess.DEVNULL)
        measured = bench(seconds, *flags)
        record.wait()
        script = subprocess.run(["perf", "script", "-i", data, "-F", "ip,dso"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    samples, base = [], None
    for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
        # The first mapping of the binary begins at its address 0.
        if line.endswith("/farpool") and base is None:
            base = int(line.split("-")[0], 16)
    for line in script.splitlines():
        found = re.match(r"\s*([0-9a-f]+) \((.*)\)$", line)
        if found:
            samples.append((int(found[1], 16), found[2]))
    own = {ip for ip, dso in samples if dso.endswith("/farpool")}
    inlined = {ip + base: files for ip, files in files_at({ip - base for ip in own}).items()}
    counts = collections.Counter(place(ip, dso, inlined) for ip, dso in samples)
    total = sum(counts.values()) or 1
    return {name: counts[name] / total for name in ("network", "hash", "cache", "rest")}, measured


def split(seconds):
    if not shutil.which("perf"):
        sys.exit("perf is not installed: apt-get install linux-perf")
    print("where the server's time goes, %                              network   hash  cache   rest      requests/s")
    with tempfile.TemporaryDirectory() as folder:
        port, vault, path = free_port(), free_port(), os.path.join(folder, "kv")
        command = [FARPOOL, "kv", "-p", str(port), "-t", "1", "-m", "2048", "--keyvault", f"tcp://127.0.0.1:{vault}", "--keyvault", f"unix://{path}"]
        with server(command, port) as process:
            for value_bytes, keys in ((64, 1_000_000), (1024, 500_000), (16384, 50_000)):
                for protocol, at, title in (("text", f"127.0.0.1:{port}", "text, TCP"), ("keyvault", f"127.0.0.1:{vault}", "KeyVault, TCP"), ("keyvault", f"unix:{path}", "KeyVault, unix")):
                    flags = ["--server", at, "--protocol", protocol, "--keys", keys, "--value-bytes", value_bytes, "--key-bytes", 16]
                    if protocol == "text":
                        bench(1, *flags, "--connections", 8, "--depth", 32)
                    for operation in ("get", "set"):
                        for connections, depth in ((16, 1), (8, 32)):
                            shares, measured = sampled(process.pid, seconds, *flags, "--no-fill", "--operation", operation, "--connections", connections, "--depth", depth)
                            what = f"{operation.upper()} {value_bytes:5} B, {connections} x {depth}, {title}"
                            print(f"  {what:56}" + "".join(f"{100 * share:7.1f}" for share in shares.values()) + f"  {measured['requests_per_s']:14,.0f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["shards", "split", []], help="which; both if none is named")
    parser.add_argument("--seconds", type=int, default=2, help="of each figure")
    parser.add_argument("--rounds", type=int, default=3, help="of one thread and two in turn")
    args = parser.parse_args()
    for part in args.parts or ["shards", "split"]:
        if part == "shards":
            shards(args.seconds, args.rounds)
        else:
            split(args.seconds)


main()
