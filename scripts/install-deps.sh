#!/usr/bin/env bash
# Installs the missing packages that building and testing Farpool needs, and nothing else.
#
# Quiet and quick if nothing is missing. It starts and enables no service, and leaves none enabled.
# With the argument `build` it checks only what `make build` needs; with `test` also what only tests
# need.
set -euo pipefail
cd "$(dirname "$0")/.."

PURPOSE=${1:-all}
RUST_MIN=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
PATH="$PATH:$HOME/.cargo/bin:/usr/sbin:/sbin"

missing=()
need() { # need PACKAGE COMMAND: the package is missing when the command is
    command -v "$2" >/dev/null 2>&1 || missing+=("$1")
}

at_least() { # at_least HAVE WANT: versions compared number by number
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]
}

cargo_is_enough() {
    local have
    have=$(cargo --version 2>/dev/null | cut -d' ' -f2) || return 1
    [ -n "$have" ] && at_least "$have" "$RUST_MIN"
}

# rustup uses the toolchain that rust-toolchain.toml names. If it cannot be installed, the stable
# toolchain is used if it is the same release: a symbolic link gives it the name, as `rustup
# toolchain link` refuses that.
pin_toolchain() {
    command -v rustup >/dev/null 2>&1 || return 0
    local channel host stable
    channel=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
    rustup toolchain list | grep -q "^$channel-" && return
    rustup toolchain install "$channel" --profile minimal -c rustfmt -c clippy && return
    [ "$(rustup run stable rustc --version | cut -d' ' -f2)" = "$channel" ] || return 0
    host=$(rustup run stable rustc -vV | sed -n 's/^host: //p')
    stable=$(rustup run stable rustc --print sysroot)
    ln -s "$stable" "$(rustup show home)/toolchains/$channel-$host"
}

find_missing() {
    need build-essential cc
    need build-essential make
    [ "$PURPOSE" = build ] && return
    need redis-server redis-server
    need redis-tools redis-cli
    need memcached memcached
    need libmemcached-tools memccapable
    need sqlite3 sqlite3
    need python3 python3
    python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
    need etcd-server etcd
    need default-jdk-headless javac # with the compiler: the tests' Java programs come as source
    need iproute2 ip
    need util-linux mkswap
    need mount losetup
    need e2fsprogs mkfs.ext4
    need faketime faketime
    need procps ps
    need libcap2-bin setcap # a user's farpool gets the right that a sidecar needs
    need gdb gdb # reads the cores that farpool writes
    need qemu-user "qemu-$(uname -m)" # farpool trace runs programs under it
    compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null \
        || command -v postgres >/dev/null 2>&1 || missing+=(postgresql)
}

# Programs that single tests run with far memory. If one is missing, its test is reported as
# skipped.
find_wanted() {
    wanted=()
    want() { command -v "$2" >/dev/null 2>&1 || wanted+=("$1"); }
    want_php() { php -m 2>/dev/null | grep -qx "$1" || wanted+=("$2"); }
    want_ruby() { ruby -e "require '$1'" 2>/dev/null || wanted+=("$2"); }
    want_library() { [ -e "$(cc -print-file-name="$2")" ] || wanted+=("$1"); }
    want php-cli php
    want_php memcached php-memcached
    want ruby ruby
    want_ruby dalli ruby-dalli
    want nodejs node
    want prometheus prometheus
    want chromium chromium
    want musl-tools musl-gcc
    [ "$(uname -m)" != x86_64 ] || want qemu-system-x86 qemu-system-x86_64
    want_library libjemalloc-dev libjemalloc.a
    want_library google-perftools libtcmalloc.so.4
}

give_up() {
    echo "install-deps: $1" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_install() {
    command -v apt-get >/dev/null 2>&1 || give_up "this machine has no apt-get; install by hand: $*"
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null \
        || give_up "root is needed; run: sudo apt-get install $*"
}

apt_updated=
apt() {
    if [ -z "$apt_updated" ]; then
        as_root apt-get -qq update
        apt_updated=1
    fi
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends install "$@" >/dev/null
}

# Package scripts ask policy-rc.d before they start a service; 101 means "not allowed".
forbid_services() {
    [ -e /usr/sbin/policy-rc.d ] && return
    trap 'as_root rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' | as_root tee /usr/sbin/policy-rc.d >/dev/null
    as_root chmod 755 /usr/sbin/policy-rc.d
}

# Only the programs are needed, not a database cluster on disk and services at the next boot.
install_postgresql() {
    local conf=/etc/postgresql-common/createcluster.conf
    if [ ! -e "$conf" ]; then
        apt postgresql-common
        as_root sed -ri 's/^#?create_main_cluster.*/create_main_cluster = false/' "$conf"
    fi
    apt postgresql
}

disable_service() {
    command -v systemctl >/dev/null 2>&1 && as_root systemctl disable "$1" >/dev/null 2>&1 || true
}

install_packages() {
    local package
    can_install "${missing[@]}"
    forbid_services
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
    echo "install-deps: installing ${missing[*]}"
    for package in "${missing[@]}"; do
        case $package in
        postgresql) install_postgresql && disable_service postgresql ;;
        redis-server) apt redis-server && disable_service redis-server ;;
        memcached) apt memcached && disable_service memcached ;;
        etcd-server) apt etcd-server && disable_service etcd ;;
        *) apt "$package" ;;
        esac
    done
}

install_wanted() {
    local package
    can_install "${wanted[@]}"
    forbid_services
    echo "install-deps: installing ${wanted[*]}"
    for package in "${wanted[@]}"; do
        apt "$package" \
            || echo "install-deps: $package could not be installed; its tests will be skipped" >&2
    done
    disable_service prometheus
    disable_service phpsessionclean.timer
}

candidate() { # the version apt would install, empty when it knows none
    apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: \([0-9.]*\).*/\1/p'
}

# The distribution's newest Rust first (Debian 12 carries one as rustc-web), rustup's otherwise.
install_rust() {
    local have
    have=$(cargo --version 2>/dev/null | cut -d' ' -f2 || true)
    echo "install-deps: Rust $RUST_MIN or newer is needed, found ${have:-none}"
    can_install cargo
    as_root apt-get -qq update
    apt_updated=1
    if at_least "$(candidate rustc)" "$RUST_MIN"; then
        apt rustc cargo rustfmt rust-clippy
    elif at_least "$(candidate rustc-web)" "$RUST_MIN"; then
        apt rustc-web cargo-web rustfmt-web rust-web-clippy
    elif command -v rustup >/dev/null 2>&1 || { [ -n "$(candidate rustup)" ] && apt rustup; }; then
        pin_toolchain
    fi
    hash -r
    cargo_is_enough || give_up "no Rust $RUST_MIN or newer could be installed; \
install it from https://rustup.rs, then run this again"
}

# The controller's interface is fuzzed from its own document. The tool comes from PyPI, into the
# build's folder. Without it that test is reported as skipped.
install_schemathesis() {
    local venv=${CARGO_TARGET_DIR:-target}/schemathesis
    command -v schemathesis >/dev/null 2>&1 && return
    [ -x "$venv/bin/schemathesis" ] && return
    echo "install-deps: installing schemathesis into $venv"
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" -q install 'schemathesis>=4,<5'; }; then
        echo "install-deps: schemathesis could not be installed; its test will be skipped" >&2
        rm -rf "$venv"
    fi
}

# The simulator's miss counts are compared with those of libCacheSim, of exactly this version, as
# its policies change. Without it that test is reported as skipped.
install_libcachesim() {
    local venv=${CARGO_TARGET_DIR:-target}/libcachesim
    "$venv/bin/python" -c 'import libcachesim' 2>/dev/null && return
    echo "install-deps: installing libcachesim into $venv"
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" -q install 'libcachesim==0.3.5'; }; then
        echo "install-deps: libcachesim could not be installed; its test will be skipped" >&2
        rm -rf "$venv"
    fi
}

# memcached's client libraries talk to the key-value server. Without them that test is reported as
# skipped.
install_kv_clients() {
    local venv=${CARGO_TARGET_DIR:-target}/kv-clients
    "$venv/bin/python" -c 'import pymemcache, bmemcached' 2>/dev/null && return
    echo "install-deps: installing memcached's client libraries into $venv"
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" -q install pymemcache python-memcached python-binary-memcached emcache meta-memcache; }; then
        echo "install-deps: memcached's client libraries could not be installed; their test will be skipped" >&2
        rm -rf "$venv"
        return
    fi
    # These two need libmemcached's headers if there is no wheel. Each is skipped if it fails to
    # install.
    "$venv/bin/pip" -q install pylibmc || true
    "$venv/bin/pip" -q install libmc || true
}

# The tests' guests boot a stock kernel. It is taken out of its package, which is not installed, so
# that nothing about how this machine boots changes. Without it their tests are reported as skipped.
GUEST_KERNEL=/var/lib/farpool-tests
GUEST_MODULES="virtio/virtio_ring virtio/virtio virtio/virtio_pci_legacy_dev
    virtio/virtio_pci_modern_dev virtio/virtio_pci block/virtio_blk virtio/virtio_balloon"

kernel_package() { # the package that the distribution's newest kernel for guests is in
    apt-cache depends linux-image-cloud-amd64 2>/dev/null \
        | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n1
}

unpack_guest_kernel() { # unpack_guest_kernel FOLDER: downloads and unpacks the package there
    local package module from number=0
    package=$(kernel_package)
    [ -n "$package" ] || { as_root apt-get -qq update && package=$(kernel_package); }
    [ -n "$package" ] || return 1
    (cd "$1" && apt-get -qq download "$package" 2>/dev/null) || return 1
    dpkg-deb -x "$1"/*.deb "$1/package" && mkdir "$1/guest" "$1/guest/modules" || return 1
    cp "$1"/package/boot/vmlinuz-* "$1/guest/vmlinuz" || return 1
    for module in $GUEST_MODULES; do # in the order in which they are loaded
        from=$(compgen -G "$1/package/lib/modules/*/kernel/drivers/$module.ko*") || return 1
        case $from in
        *.xz) xz -dc "$from" ;;
        *) cat "$from" ;;
        esac >"$1/guest/modules/$number" || return 1
        number=$((number + 1))
    done
}

install_guest_kernel() {
    local folder
    [ "$(uname -m)" = x86_64 ] && [ ! -e "$GUEST_KERNEL/vmlinuz" ] || return 0
    echo "install-deps: fetching a kernel for guests into $GUEST_KERNEL"
    folder=$(mktemp -d)
    if ! { unpack_guest_kernel "$folder" && as_root rm -rf "$GUEST_KERNEL" \
        && as_root cp -r --no-preserve=mode "$folder/guest" "$GUEST_KERNEL"; }; then
        echo "install-deps: no kernel for guests could be fetched; its tests will be skipped" >&2
    fi
    rm -rf "$folder"
}

find_missing
[ "${#missing[@]}" = 0 ] || install_packages
pin_toolchain
cargo_is_enough || install_rust
if [ "$PURPOSE" = test ]; then
    find_wanted
    [ "${#wanted[@]}" = 0 ] || install_wanted
    install_schemathesis
    install_libcachesim
    install_kv_clients
    install_guest_kernel
fi
