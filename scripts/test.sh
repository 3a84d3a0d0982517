#!/usr/bin/env bash
# Runs every test and ends with one line: N passed, N failed, N skipped.
#
# A test that cannot run here prints one line `SKIPPED: reason` and returns; it counts as skipped.
# With --fast only unit and property tests run. Other arguments go to `cargo test`, as in:
# scripts/test.sh -p farpool-wire
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$HOME/.cargo/bin:/usr/sbin:/sbin"

target=${CARGO_TARGET_DIR:-$PWD/target}

# The tests start the real binary and preload the real library: both must exist and be current.
# All tests are built along with them: some crates have more features with the dependencies of
# tests, and would be built twice.
targets=(--lib --bins --tests --examples)
[[ " $* " == *" -p "* ]] && targets=()
cargo build --workspace "${targets[@]}"

schemathesis=$target/schemathesis/bin/schemathesis
[ -x "$schemathesis" ] && export SCHEMATHESIS="$schemathesis"

libcachesim=$target/libcachesim/bin/python
[ -x "$libcachesim" ] && export LIBCACHESIM_PYTHON="$libcachesim"

kv_clients=$target/kv-clients/bin/python
[ -x "$kv_clients" ] && export KV_CLIENTS_PYTHON="$kv_clients"

# crates/lab/testrun decides which test programs run beside each other.
exec "$target/debug/farpool-testrun" --logs "$target/test" "$@"
