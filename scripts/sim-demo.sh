#!/usr/bin/env bash
# Captures a real program, shows its miss-ratio curves, and simulates it with several designs of far
# memory.
#
# Arguments: the farpool binary and an output folder. The pages stay there and are not opened.
set -euo pipefail

farpool=$1
folder=$2
lines=500000

mkdir -p "$folder"
echo "sim-demo: $lines lines, sorted under capture"
awk -v n="$lines" 'BEGIN { srand(1); for (i = 0; i < n; i++) printf "%013d%013d\n", rand() * 1e13, rand() * 1e13 }' >"$folder/lines.txt"
time "$farpool" trace --out "$folder/sort.parquet" -- sort --parallel=1 "$folder/lines.txt" >/dev/null
"$farpool" trace info "$folder/sort.parquet"
echo
"$farpool" sim mrc "$folder/sort.parquet" --policy lru,clock,sieve,belady --report "$folder/curves.html"
echo
"$farpool" sim run "$folder/sort.parquet" --report "$folder/report.html"
echo
echo "sim-demo: the same with plots in $folder/report.html and $folder/curves.html"
