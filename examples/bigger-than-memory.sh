#!/usr/bin/env bash
# A Python program holds a million records; 64 MiB of them stay local, the rest is far.
set -euo pipefail
cd "$(dirname "$0")/.."
farpool=${FARPOOL:-target/release/farpool}

"$farpool" run --local 64MiB --stats /dev/stderr -- python3 - <<'PYTHON'
import resource
records = {number: (f"name-{number}", [number, number + 1]) for number in range(1_000_000)}
total = sum(numbers[1] for _, numbers in records.values())
print("sum", total, "as expected" if total == sum(range(1, 1_000_001)) else "WRONG")
print("largest resident set", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MiB")
PYTHON
