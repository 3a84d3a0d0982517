#!/usr/bin/env bash
# Installs a program or library without its debug symbols, and the symbols apart, where gdb finds them.
#
# Arguments: the built file, where it goes, and the folder for its symbols (.debug beside the file).
set -euo pipefail

if [ "$#" -ne 3 ]; then
    sed -n '2,4s/^# \?//p' "$0" >&2
    exit 2
fi
built=$1 target=$2 symbols=$3/$(basename "$1").debug

install -d "$(dirname "$target")" "$3"
objcopy --only-keep-debug "$built" "$symbols"
chmod 644 "$symbols"
# The link holds the file's name and checksum; gdb looks beside the program and in .debug there.
objcopy --strip-unneeded --add-gnu-debuglink="$symbols" "$built" "$target.new"
chmod 755 "$target.new"
mv "$target.new" "$target"
