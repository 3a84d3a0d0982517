#!/usr/bin/env python3
"""What a request costs the key-value server: with one thread and with two, and where the time goes.

Usage: scripts/kv-costs.py [floor] [shards] [split] [--seconds N] [--rounds N]   (split needs perf: apt-get install linux-perf, and root)

floor: one request at a time beside a bare echo loop, in turn, and the same with --spin-us 50.

shards: processor time of the server for each key, one thread beside two on the same processor, the client on the last; two
threads that cost as much a key as one have twice the capacity. Beside them two servers of one thread each, with half of the
connections and keys each: what two that never talk to each other cost on one processor. Clients of KeyVault know the shards,
so nothing is passed on there but multi-gets.

split: where the server's processor time goes, by samples, as Figures 3.4 and 4.9 of Gutierrez's thesis have it: network (the kernel),
hash (of the key), cache (index and items), and the rest, which takes requests apart and makes replies.
"""

import argparse, collections, concurrent.futures, contextlib, os, pathlib, re, shutil, statistics, subprocess, sys, tempfile

from kvbench import CLIENT_CPU, FARPOOL, bench, free_port, server, stats

# With 64 clients both threads always have work; with 8 they often wait for each other.
SHAPES = {
    "GET, 64 x 32": ["--connections", 64, "--depth", 32],
    "SET, 64 x 32": ["--connections", 64, "--depth", 32, "--operation", "set"],
    "GET, 128 x 1": ["--connections", 128, "--depth", 1],
    "multi-get, 64 x 100": ["--connections", 64, "--depth", 1, "--multi-get", 100],
    "GET, 8 x 32": ["--connections", 8, "--depth", 32],
}
# Of 12 bytes with values of 64, over all servers.
KEYS = 1_000_000
# The first that one of a sample's source files matches, from the function inlined deepest on, is where the sample belongs.
PLACES = [
    ("hash", re.compile(r"/twox-hash|keyvault/src/owner\.rs")),
    ("cache", re.compile(r"crates/cache/(kv-tier/src/|kv-store/src/(?!observe/|clock))")),
]


def cpu_ns(pid):
    """Time on a processor, all threads."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def commands(port):
    figures = stats(port)
    return int(figures["cmd_get"]) + int(figures["cmd_set"])


def cost(threads, shape, seconds, protocol, servers=1):
    """Processor time for a key, ns, of one server or of several that share connections and keys."""
    shape = [it // servers if before == "--connections" else it for before, it in zip([None, *shape], shape)]
    with contextlib.ExitStack() as stack:
        asked = []
        for _ in range(servers):
            port, vault = free_port(), free_port()
            command = [FARPOOL, "kv", "-p", str(port), "-t", str(threads), "-m", "1024", "--keyvault", f"tcp://127.0.0.1:{vault}"]
            process = stack.enter_context(server(command, port))
            at = ["--protocol", protocol, "--server", f"127.0.0.1:{vault if protocol == 'keyvault' else port}", "--keys", KEYS // servers]
            bench(1, *at, "--connections", 8)
            asked.append((port, process.pid, at))
        state = lambda: [sum(it) for it in zip(*((commands(port), cpu_ns(pid)) for port, pid, _ in asked))]
        before = state()
        with concurrent.futures.ThreadPoolExecutor() as clients:
            list(clients.map(lambda it: bench(seconds, *it[2], *shape, "--no-fill"), asked))
        after = state()
    keys, spent = (b - a for a, b in zip(before, after))
    return spent / keys


def shards(seconds, rounds):
    print("processor time of the server for each key, ns; capacity in that of one thread, by the best of the rounds and by their median")
    ways = {"one": (1, 1), "two threads": (2, 1), "two servers": (1, 2)}
    for protocol in ("text", "keyvault"):
        for name, shape in SHAPES.items():
            costs = {way: [] for way in ways}
            for _ in range(rounds):
                for way, (threads, servers) in ways.items():
                    costs[way].append(cost(threads, shape, seconds, protocol, servers))
            figures = [f"one {min(costs['one']):7.0f}"]
            for way in list(ways)[1:]:
                best, median = (2 * of(costs["one"]) / of(costs[way]) for of in (min, statistics.median))
                figures.append(f"{way} {min(costs[way]):7.0f}  capacity {best:.2f} ({median:.2f})")
            print(f"  {protocol:9} {name:20} {'   '.join(figures)}", flush=True)


def floor(seconds, rounds):
    """Short rounds, because this machine's pauses last longer than what is to be seen."""
    rounds *= 8
    print(f"GET 64 B, 1 connection, in times of a bare echo loop; {rounds} rounds in turn: their median, and the middle half of them")
    port, spinning = free_port(), free_port()
    with server([FARPOOL, "kv", "-t", "1", "-m", "1024", "-p", str(port)], port), \
            server([FARPOOL, "kv", "-t", "1", "-m", "1024", "-p", str(spinning), "--spin-us", "50"], spinning):
        ways = {"--spin-us 0": ["--server", f"127.0.0.1:{port}"], "--spin-us 50": ["--server", f"127.0.0.1:{spinning}"]}
        ratios = {(way, quantile): [] for way in ways for quantile in ("p50", "p99")}
        for at in ways.values():
            bench(1, *at)
        for _ in range(rounds):
            echo = bench(seconds / 4, "--echo", "--server-cpu", 0)["latency_us"]
            for way, at in ways.items():
                found = bench(seconds / 4, *at, "--no-fill")["latency_us"]
                for quantile in ("p50", "p99"):
                    ratios[way, quantile].append(found[quantile] / echo[quantile])
    for (way, quantile), found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"  {way:13} {quantile}  {middle:.2f}  ({low:.2f} to {high:.2f})", flush=True)


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
    parser.add_argument("parts", nargs="*", choices=["floor", "shards", "split", []], help="which; all if none is named")
    parser.add_argument("--seconds", type=float, default=2, help="of each figure")
    parser.add_argument("--rounds", type=int, default=3, help="of what is compared, in turn")
    args = parser.parse_args()
    for part in args.parts or ["floor", "shards", "split"]:
        if part == "floor":
            floor(args.seconds, args.rounds)
        elif part == "shards":
            shards(args.seconds, args.rounds)
        else:
            split(args.seconds)


main()
