#!/usr/bin/env bash
# Installs a program or library without its debug symbols, and the symbols in .debug beside it,
# where gdb looks for them.
#
# Arguments: the built file, and the folder that it is installed in.
set -euo pipefail

if [ "$#" -ne 2 ]; then
    sed -n '2,5s/^# \?//p' "$0" >&2
    exit 2
fi
built=$1 target=$2/$(basename "$1") symbols=$2/.debug/$(basename "$1").debug

install -d "$(dirname "$symbols")"
objcopy --only-keep-debug "$built" "$symbols"
chmod 644 "$symbols"
# The link holds the name of the symbol file, and its checksum.
objcopy --strip-unneeded --add-gnu-debuglink="$symbols" "$built" "$target.new"
chmod 755 "$target.new"
mv "$target.new" "$target"
