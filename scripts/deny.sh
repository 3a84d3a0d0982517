#!/usr/bin/env bash
# Checks dependencies against deny.toml: licences, bans, sources and known vulnerabilities.
#
# Checks that cannot be made here are reported as skipped, with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! cargo deny --version >/dev/null 2>&1; then
    echo "SKIPPED: cargo-deny is missing; install it: cargo install cargo-deny --locked"
    exit 0
fi
cargo deny check licenses bans sources
if ! said=$(cargo deny fetch db 2>&1); then
    echo "SKIPPED: advisories, for their database cannot be fetched: $(tail -1 <<<"$said")"
    exit 0
fi
cargo deny check --disable-fetch advisories
