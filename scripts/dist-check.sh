#!/usr/bin/env bash
# Installs the package of `make dist` on a bare system and tries it there.
#
# Argument: the folder with the package. The bare system is of this machine's own release, from the
# mirror in its apt sources, in a folder that is removed at the end. Root, debootstrap and about 300
# MiB in TMPDIR are needed.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$#" -ne 1 ]; then
    sed -n '2,6s/^# \?//p' "$0" >&2
    exit 2
fi
# All mounts are in a namespace of this script: the kernel removes them when it ends, however it
# ends.
if [ "${FARPOOL_DIST_CHECK:-}" != inside ]; then
    [ "$(id -u)" = 0 ] || { echo "dist-check: needs root" >&2; exit 1; }
    FARPOOL_DIST_CHECK=inside exec unshare --mount --propagation private "$0" "$@"
fi

give_up() {
    echo "dist-check: $1" >&2
    exit 1
}

command -v debootstrap >/dev/null || give_up "debootstrap is missing: apt-get install debootstrap"
package=$(find "$1" -maxdepth 1 -name 'farpool_*.deb')
[ -f "$package" ] || give_up "$1 holds no package, or several: make dist"
version=$(dpkg-deb --field "$package" Version)

# The first index that apt lists for this release is the release's own.
. /etc/os-release
mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' \
    'Created-By: Packages' | sed -n "s/^$VERSION_CODENAME main //p" | head -1)
[ -n "$mirror" ] || give_up "apt knows no mirror of $VERSION_CODENAME: apt-get update"

work=$(mktemp -d)
root=$work/root
clean_up() {
    umount --recursive --lazy "$root/proc" "$root/sys" "$root/dev" 2>/dev/null || true
    rm -rf --one-file-system "$work"
}
trap clean_up EXIT

bare() { # bare COMMAND...: in the bare system, with its environment
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C chroot "$root" "$@"
}

checks=0
holds() { # holds SENTENCE COMMAND...: the command must succeed
    local sentence=$1
    shift
    "$@" >"$work/said" 2>&1 || { cat "$work/said" >&2; give_up "does not hold: $sentence"; }
    checks=$((checks + 1))
    echo "ok: $sentence"
}

echo "dist-check: a bare $VERSION_CODENAME for $package"
debootstrap --variant=minbase "$VERSION_CODENAME" "$root" "$mirror" >"$work/said" 2>&1 ||
    { tail -5 "$work/said" >&2; give_up "debootstrap failed"; }
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --bind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
cp "$package" "$root/farpool.deb"

# Writes and reads a string of 64 MiB; perl is part of every Debian.
trial='my $text = "far " x (16 << 20); $text =~ tr/f/c/; my $ok = substr($text, -4) eq "car ";
    open my $status, "<", "/proc/self/status"; my ($peak) = map { /^VmHWM:\s+(\d+)/ } <$status>;
    print length($text) >> 20, " MiB held, ", $peak >> 10, " MiB local at most\n";
    exit !($ok && $peak < 48 << 10)'
run_trial() { # run_trial DOOR
    bare farpool run --door "$1" --local 16MiB -- perl -e "$trial"
}
names_its_version() {
    bare farpool --version | tee "$work/version" | head -1 | grep -q "^farpool $version"
}
lists() { # lists PATH...: the package has them
    local path
    for path in "$@"; do [ -e "$root$path" ] || { echo "$path is missing"; return 1; }; done
}
unit_starts_what_is_there() {
    bare test -x "$(sed -n 's/^ExecStart=\([^ ]*\).*/\1/p' "$root$unit")"
}
leaves_nothing() {
    bare dpkg --purge farpool
    # Folders that existed before stay, but none of our files does.
    [ -z "$(find "$root/usr" "$root/etc" -name '*farpool*' -print)" ]
}

unit=/usr/lib/systemd/system/farpool-kv.service
share=/usr/share
holds "its dependencies are all there" bare dpkg --install /farpool.deb
holds "farpool --version says $version" names_its_version
cat "$work/version"
holds "farpool doctor finds what farpool run needs" bare farpool doctor
cat "$work/said"
holds "the first trial runs with a sidecar" run_trial sidecar
cat "$work/said"
holds "the first trial runs with the preload library" run_trial preload
cat "$work/said"
holds "pages, completions and the unit are there" lists "$unit" \
    $share/man/man1/farpool{,-run,-kv,-doctor}.1 $share/bash-completion/completions/farpool \
    $share/zsh/site-functions/_farpool $share/fish/vendor_completions.d/farpool.fish
holds "the unit starts a program that is there" unit_starts_what_is_there
holds "bash reads its completions" bare bash -n $share/bash-completion/completions/farpool
holds "purging it leaves nothing" leaves_nothing
echo "dist-check: all $checks checks passed"
