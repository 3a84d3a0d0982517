#!/usr/bin/env bash
# One blade on a unix socket, two programs that share it, and what the blade says of them.
set -euo pipefail
cd "$(dirname "$0")/.."
farpool=${FARPOOL:-target/release/farpool}
directory=$(mktemp -d)
socket="unix://$directory/blade.sock"

"$farpool" blade --memory 2GiB --listen "$socket" &
blade=$!
trap 'kill $blade; wait $blade 2>/dev/null || true; rm -rf "$directory"' EXIT
until [ -S "$directory/blade.sock" ]; do sleep 0.1; done

job='import sys; data = [bytes([i % 256]) * 4096 for i in range(40_000)]; print(sum(b[7] for b in data))'
"$farpool" run --local 48MiB --blade "$socket" -- python3 -c "$job" &
first=$!
"$farpool" run --local 48MiB --blade "shm://$directory/blade.sock" -- python3 -c "$job" &
second=$!
sleep 2
"$farpool" stat --blade "$socket"
wait "$first" "$second"
