#!/usr/bin/env bash
# Runs every test there is and ends with one line: N passed, N failed, N skipped.
#
# A test that cannot run here prints one line `SKIPPED: reason` and returns; it counts as skipped.
# Arguments go to `cargo test`, as in: scripts/test.sh -p farpool-wire
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$HOME/.cargo/bin:/usr/sbin:/sbin"

scope=("$@")
[ "${#scope[@]}" = 0 ] && scope=(--workspace)
log=${CARGO_TARGET_DIR:-target}/test.log
mkdir -p "$(dirname "$log")"

# The tests start the real binary and preload the real library: both must be there and current.
cargo build --workspace

schemathesis=${CARGO_TARGET_DIR:-$PWD/target}/schemathesis/bin/schemathesis
[ -x "$schemathesis" ] && export SCHEMATHESIS="$schemathesis"

libcachesim=${CARGO_TARGET_DIR:-$PWD/target}/libcachesim/bin/python
[ -x "$libcachesim" ] && export LIBCACHESIM_PYTHON="$libcachesim"

kv_clients=${CARGO_TARGET_DIR:-$PWD/target}/kv-clients/bin/python
[ -x "$kv_clients" ] && export KV_CLIENTS_PYTHON="$kv_clients"

status=0
cargo test "${scope[@]}" --no-fail-fast -- --show-output 2>&1 | tee "$log" || status=$?

# What failed stands at the end once more, where it is looked for; of a test binary that died, its last lines.
awk -v kept=40 '
    function tell_death() {
        if (!has_died) return
        print "\ndied in" room ":"
        for (i = lines > kept ? lines - kept : 0; i < lines; i++) print tail[i % kept]
    }
    /^ +Running |^ +Doc-tests / { tell_death(); room = $0; has_result = has_died = lines = 0 }
    /^test result: / { has_result = 1 }
    /^error: test failed/ && !has_result { has_died = 1 }
    { tail[lines++ % kept] = substr($0, 1, 300) }
    /^failures:$/ { if (!told[room]++) print "\nfailed in" room ":"; is_failure = 1; next }
    /^(test result: |successes:)/ { is_failure = 0 }
    is_failure { print }
    END { tell_death() }' "$log"

awk -v status="$status" '
    /^test result: / {
        for (i = 1; i < NF; i++) {
            if ($(i + 1) ~ /^passed/) passed += $i
            if ($(i + 1) ~ /^failed/) failed += $i
            if ($(i + 1) ~ /^ignored/) skipped += $i
        }
    }
    /^SKIPPED: / { reasons[++noted] = substr($0, 10) }
    END {
        # A test binary that died has no result line: it must not look like success.
        if (status != 0 && failed == 0) failed = 1
        passed -= noted; skipped += noted
        if (noted) print "\nskipped:"
        for (i = 1; i <= noted; i++) print "  " reasons[i]
        printf "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed != 0
    }' "$log"
