#!/usr/bin/env bash
# Runs tests repeatedly while the kernel compacts the machine's memory every 20 ms (root).
# The last line of output is the number of test runs that passed, failed and were skipped.
#
# Arguments: the number of rounds, and the arguments of `cargo test`, as in:
#   scripts/under-compaction.sh 5 -p farpool-e2e --test sidecar_programs --test sidecar_allocators
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$HOME/.cargo/bin:/usr/sbin:/sbin"

compact_memory=/proc/sys/vm/compact_memory
pause_s=0.02

if [ "$#" -lt 2 ] || ! [ "$1" -gt 0 ] 2>/dev/null; then
    sed -n '2,7s/^# \?//p' "$0" >&2
    exit 2
fi
if ! [ -w "$compact_memory" ]; then
    echo "$compact_memory cannot be written to: run this as root, on a kernel with CONFIG_COMPACTION" >&2
    exit 1
fi
rounds=$1
shift
log=${CARGO_TARGET_DIR:-target}/under-compaction.log

cargo build --workspace
cargo test "$@" --no-run

while sleep "$pause_s"; do echo 1 >"$compact_memory"; done &
compaction=$!
trap 'kill "$compaction"' EXIT

: >"$log"
for round in $(seq "$rounds"); do
    echo "round $round of $rounds"
    # Failures are in the log, and are counted below.
    cargo test "$@" --no-fail-fast -- --show-output >>"$log" 2>&1 || echo "failed, see $log"
done

# A test binary that died has no result line: it counts as one failure.
awk '
    /^ +Running / { died += is_running; is_running = 1 }
    /^test result: / {
        is_running = 0
        for (i = 1; i < NF; i++) {
            if ($(i + 1) ~ /^passed/) passed += $i
            if ($(i + 1) ~ /^failed/) failed += $i
        }
    }
    /^SKIPPED: / { skipped++ }
    END {
        failed += died + is_running
        printf "%d passed, %d failed, %d skipped\n", passed - skipped, failed, skipped
        exit failed != 0
    }' "$log"
