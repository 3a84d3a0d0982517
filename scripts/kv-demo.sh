#!/usr/bin/env bash
# farpool kv beside Debian's memcached and redis: the same client, the same keys, the server on one processor and the client on another.
# Usage: scripts/kv-demo.sh [SECONDS per figure, default 3; a rate of a sweep is tried for one, up to five times]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-3}
farpool=${CARGO_TARGET_DIR:-target}/release/farpool
for tool in "$farpool" memcached redis-server python3 taskset; do
    command -v "$tool" >/dev/null || { echo "kv-demo needs $tool: make build, scripts/install-deps.sh test" >&2; exit 2; }
done
folder=$(mktemp -d)
server=
stop() { [ -z "$server" ] || { kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; server=; }; }
trap 'stop; rm -rf "$folder"' EXIT
last=$(($(nproc) - 1))
port=$((20000 + RANDOM % 10000))
memory=1024

start() {
    port=$((port + 1))
    case $1 in
        farpool) taskset -c 0 "$farpool" kv -p $port -t 1 -m $memory >"$folder/log" 2>&1 & ;;
        memcached) taskset -c 0 memcached -u root -l 127.0.0.1 -p $port -t 1 -m $memory >"$folder/log" 2>&1 & ;;
        redis) taskset -c 0 redis-server --port $port --save '' --appendonly no --maxmemory ${memory}mb --maxmemory-policy allkeys-lru --dir "$folder" >"$folder/log" 2>&1 & ;;
    esac
    server=$!
    for _ in $(seq 500); do
        (exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null && return
        kill -0 "$server" 2>/dev/null || { cat "$folder/log" >&2; exit 1; }
        read -rt 0.02 <> <(:) || true
    done
    echo "$1 does not listen" >&2; exit 1
}
bench() { # SERVER NAME flags: one JSON file
    local name=$1; shift
    "$farpool" kv bench --json --client-cpu "$last" --duration "${each:-$seconds}s" --warm-up 500ms "$@" >"$folder/$name.json" || true
}
resident_kib() { awk '/^VmRSS:/ { print $2 }' "/proc/$server/status"; }

for row in "get-1-1 --connections 1 --depth 1" "get-16-1 --connections 16 --depth 1" "get-8-32 --connections 8 --depth 32"; do
    set -- $row; name=$1; shift
    bench "echo.$name" --echo --server-cpu 0 --closed "$@"
done
for name in farpool memcached redis; do
    start $name
    protocol=text; [ $name = redis ] && protocol=redis
    at=(--server 127.0.0.1:$port --protocol $protocol)
    before=$(resident_kib)
    bench "$name.get-1-1" "${at[@]}" --keys 1000000 --closed --connections 1 --depth 1
    echo "$(( $(resident_kib) - before ))" >"$folder/$name.kib"
    bench "$name.get-16-1" "${at[@]}" --no-fill --closed --connections 16 --depth 1
    bench "$name.get-8-32" "${at[@]}" --no-fill --closed --connections 8 --depth 32
    bench "$name.set-8-32" "${at[@]}" --no-fill --closed --connections 8 --depth 32 --operation set
    bench "$name.multi-8" "${at[@]}" --no-fill --closed --connections 8 --depth 1 --multi-get 100
    bench "$name.kib-8-32" "${at[@]}" --key-bytes 16 --value-bytes 1024 --closed --connections 8 --depth 32
    for workload in microblog friendfeed; do
        each=1 bench "$name.$workload" "${at[@]}" --workload $workload --keys 200000 --connections 16 --sweep --tries 3 --slo p95=10ms
        each=1 bench "$name.$workload-p99" "${at[@]}" --workload $workload --keys 200000 --no-fill --connections 16 --sweep --tries 5 --slo p99=1ms
    done
    stop
done
python3 - "$folder" <<'PY'
import json, os, sys
folder = sys.argv[1]
def read(name):
    try: return json.load(open(os.path.join(folder, name + ".json")))
    except (OSError, ValueError): return None
names = ["farpool", "memcached", "redis"]
def row(title, figure, key, unit):
    cells = []
    for name in ["echo"] + names:
        found = read(f"{name}.{figure}")
        cells.append("-" if found is None else key(found))
    print(f"{title:34}" + "".join(f"{cell:>14}" for cell in cells) + f"  {unit}")
print(f"{'':34}" + "".join(f"{name:>14}" for name in ["echo (floor)", "farpool kv", "memcached", "redis"]))
rate = lambda f: f"{f['requests_per_s']:,.0f}"
for figure, title in [("get-1-1", "GET 64 B, 1 connection")]:
    row(title + ", p50", figure, lambda f: f"{f['latency_us']['p50']:.1f}", "us")
    row(title + ", p99", figure, lambda f: f"{f['latency_us']['p99']:.1f}", "us")
row("GET 64 B, 16 connections", "get-16-1", rate, "requests/s")
row("GET 64 B, 8 connections x 32", "get-8-32", rate, "requests/s")
row("SET 64 B, 8 connections x 32", "set-8-32", rate, "requests/s")
row("GET 1 KiB, 8 connections x 32", "kib-8-32", rate, "requests/s")
row("multi-get of 100, 8 connections", "multi-8", lambda f: f"{f['keys_per_s']:,.0f}", "keys/s")
for workload in ["microblog", "friendfeed"]:
    row(f"{workload}, p95 <= 10 ms", workload, rate, "requests/s, the highest that keeps it")
    row(f"{workload}, p99 <= 1 ms", workload + "-p99", rate, "requests/s, the highest that keeps it")
kib = {name: int(open(os.path.join(folder, name + ".kib")).read()) for name in names}
print(f"{'memory per item (12 B + 64 B)':34}{'':>14}" + "".join(f"{kib[n] * 1024 / 1e6:>14.0f}" for n in names) + "  bytes, of 1,000,000 items")
hits = {n: read(f"{n}.get-1-1") for n in names}
print(f"{'hit ratio':34}{'':>14}" + "".join(f"{hits[n]['hits'] / max(1, hits[n]['keys']):>14.3f}" for n in names))
PY
