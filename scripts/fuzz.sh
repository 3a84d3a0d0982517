#!/usr/bin/env bash
# Fuzzes every decoder for some seconds, guided by libFuzzer's coverage, with the stable compiler.
#
# Usage: scripts/fuzz.sh [SECONDS [TARGET...]]; the default is 20 s and all targets. As many targets
# run at a time as there are processors. An input that fails is kept in target/fuzz/TARGET, and
# `scripts/fuzz.sh 1 TARGET FILE` runs it again.
set -euo pipefail

seconds=${1:-20}
shift $(($# > 0 ? 1 : 0))
if [ "$#" -eq 2 ] && [ -e "$2" ]; then
    set -- "$1" "$(realpath "$2")"
fi
cd "$(dirname "$0")/../fuzz"
triple=$(rustc -vV | sed -n 's/^host: //p')
target=${CARGO_TARGET_DIR:-$PWD/../target}/fuzz

# The flags that cargo-fuzz passes, without the sanitizers, which the stable compiler does not have.
coverage=(-Cpasses=sancov-module)
for pass in level=4 inline-8bit-counters pc-table trace-compares; do
    coverage+=("-Cllvm-args=-sanitizer-coverage-$pass")
done
# With a triple, build scripts and macros are built without these flags.
RUSTFLAGS="--cfg fuzzing ${coverage[*]}" \
    cargo build --release --bins --target "$triple" --target-dir "$target"
programs=$target/$triple/release

# Fuzzes a target. Arguments: target, and files to run instead of fuzzing.
fuzz() {
    local name=$1 kept=$target/$1
    shift
    mkdir -p "$kept"
    local limits=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048)
    if ! "$programs/$name" "${limits[@]}" -artifact_prefix="$kept/" "$@" >"$kept/log" 2>&1; then
        echo "FAILED  $name; the input is in $kept:"
        tail -n 40 "$kept/log"
        return 1
    fi
    echo "ok      $name: $(grep '^Done' "$kept/log" || echo 'the file passes')"
}

if [ "$#" -eq 2 ] && [ -e "$2" ]; then
    fuzz "$@"
    exit
fi
names=("$@")
if [ "$#" -eq 0 ]; then
    for file in fuzz_targets/*.rs; do
        names+=("$(basename "$file" .rs)")
    done
fi
export seconds target programs
export -f fuzz
printf '%s\n' "${names[@]}" | xargs -P "$(nproc)" -I{} bash -c 'fuzz {}'
