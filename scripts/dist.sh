#!/usr/bin/env bash
# Makes a tarball and a Debian package of what `make install` installs, and their checksums.
#
# Arguments: the output folder, and the release build's folder. CARGO_TARGET_DIR works as in cargo.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$#" -ne 2 ]; then
    sed -n '2,4s/^# \?//p' "$0" >&2
    exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd)
farpool=$2/farpool
version=$("$farpool" -V | cut -d' ' -f2)
architecture=$(dpkg --print-architecture)
name=farpool-$version-linux-$architecture

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

make --no-print-directory install-files DESTDIR="$stage/deb" PREFIX=/usr >/dev/null
# Symbols go into a separate package.
find "$stage/deb" -name .debug -type d -prune | while read -r folder; do
    target=$stage/symbols${folder#"$stage/deb"}
    mkdir -p "$(dirname "$target")"
    mv "$folder" "$target"
done
documents=$stage/deb/usr/share/doc/farpool
install -d "$documents"
install -m644 ./*.md LICENSE "$documents"
cp LICENSE "$documents/copyright"
cp -r docs examples "$documents"

# The tarball is the same tree below one folder; `cp -r farpool-*/usr/* /usr/local` installs it.
cp -r "$stage/deb" "$stage/$name"
tar -C "$stage" --owner=0 --group=0 --sort=name -czf "$out/$name.tar.gz" "$name"

# The newest symbol version that the files use is the version of the C library that they need.
glibc=$(objdump -T "$farpool" "$2"/libfarpool_{preload,capture_qemu}.so |
    grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2 | sort -V | tail -1)

# Builds a package from a folder. Arguments: package, folder, description, and the fields that name
# other packages. Its long description is read from standard input.
package() {
    install -d "$2/DEBIAN"
    cat >"$2/DEBIAN/control" <<END
Package: $1
Version: $version
Architecture: $architecture
Maintainer: Farpool's maintainers <farpool@localhost>
$4
Section: admin
Priority: optional
Installed-Size: $(du -sk "$2" | cut -f1)
Description: $3
$(sed 's/^/ /')
END
    dpkg-deb --root-owner-group --build "$2" "$out/${1}_${version}_$architecture.deb" >/dev/null
}

# farpool trace runs programs under qemu-user; gdb reads what farpool core writes.
package farpool "$stage/deb" "far memory for racks of Linux servers" \
    "Depends: libc6 (>= $glibc), libgcc-s1
Suggests: qemu-user, gdb" <<END
Runs unmodified programs with part of their memory on other machines, lends
the spare memory of a host, and matches the two in a rack. With it come a
key-value server that speaks memcached's protocol, and a simulator and a
planner that tell beforehand whether far memory pays.
END
package farpool-dbgsym "$stage/symbols" "debug symbols of farpool" \
    "Depends: farpool (= $version)" <<END
What gdb and perf need to name functions and lines of farpool.
END

(cd "$out" && sha256sum "$name.tar.gz" ./*_"${version}_$architecture".deb >SHA256SUMS)
ls -l "$out"
