#!/usr/bin/env bash
# Measures what the far memory of equal virtual machines packs to on a blade (root).
#
# Boots guests with a stock kernel, each with a redis that holds the same JSON records, under
# `farpool vm run --share-with`, on one blade with `--pack`; waits until all is packed, and prints a
# table. Needs qemu-system-x86_64, busybox-static, redis, cpio and the kernel that
# `scripts/install-deps.sh test` installs; `make build` before.
#
#   scripts/pack-guests.sh [GUESTS, 3] [LOCAL, 72MiB]
set -euo pipefail
cd "$(dirname "$0")/.."

guests=${1:-3}
local_memory=${2:-72MiB}
farpool=$PWD/target/release/farpool
kernel=/var/lib/farpool-tests/vmlinuz
records=120000

for needed in "$farpool" "$kernel" /bin/busybox; do
    [ -e "$needed" ] || { echo "there is no $needed; see the top of $0" >&2; exit 1; }
done

folder=$(mktemp -d)
export XDG_RUNTIME_DIR=$folder
cleanup() {
    # Each ends its guest, and the blade ends last.
    kill $(jobs -p) 2>/dev/null || true
    wait || true
    rm -rf "$folder"
}
trap cleanup EXIT

root=$folder/root
mkdir -p "$root"/{bin,proc,dev}
cp /bin/busybox "$root/bin/"
for applet in sh mount ip sleep awk; do ln -s busybox "$root/bin/$applet"; done
for program in redis-server redis-cli; do
    cp -L "$(command -v "$program")" "$root/bin/"
    ldd "$(command -v "$program")" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
done
cat >"$root/init" <<END
#!/bin/sh
mount -t proc proc /proc
mount -t devtmpfs dev /dev
ip link set lo up
redis-server --save '' --daemonize yes >/dev/null
until redis-cli ping >/dev/null 2>&1; do sleep 1; done
awk 'BEGIN { srand(7)
    for (i = 1; i <= $records; i++) {
        printf "SET user:%d \047", i
        for (j = 1; j <= 5; j++)
            printf "{\"customer\": \"customer-%07d\", \"items\": %d, \"price\": %d}, ",
                rand() * 9999999, rand() * 4096, rand() * 65536
        printf "\047\r\n"
    }
}' | redis-cli --pipe
echo "GUEST filled \$(redis-cli dbsize)"
while true; do sleep 1000; done
END
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) | gzip -1 >"$folder/initramfs"

socket=unix://$folder/blade.sock
"$farpool" blade --memory "${guests}GiB" --pack --pack-after 2s --listen "$socket" \
    >"$folder/blade.out" 2>&1 &
until [ -e "$folder/blade.sock" ]; do sleep 0.1; done

# The translator's code and tables stay local (split-wx): under KVM there are none.
for number in $(seq "$guests"); do
    "$farpool" vm run --name "guest$number" --local "$local_memory" --quiet \
        --share-with guests --blade "$socket" -- \
        qemu-system-x86_64 -accel tcg,tb-size=8,split-wx=on -cpu max -m 256 -display none \
        -nodefaults -no-reboot -serial stdio -kernel "$kernel" -initrd "$folder/initramfs" \
        -append "console=ttyS0 quiet panic=-1" </dev/null >"$folder/guest$number.out" 2>&1 &
done

pack() {
    "$farpool" stat --blade "$socket" --json | python3 -c "
import json, sys
print(json.load(sys.stdin)['blades'][0]['pack']['$1'])"
}
echo "waiting until $guests guests hold $records records each ..." >&2
until [ "$(cat "$folder"/guest*.out | grep -ac 'GUEST filled')" -ge "$guests" ]; do sleep 1; done
grep -a -h 'GUEST filled' "$folder"/guest*.out >&2
before=-1
# What is packed no more than a little later is packed for good.
until [ "$(pack pages_in_frames)" = "$before" ]; do
    before=$(pack pages_in_frames)
    sleep 10
done

"$farpool" stat --blade "$socket" --json | python3 -c "
import json, sys
pack = json.load(sys.stdin)['blades'][0]['pack']
pages = pack['pages_in_frames'] + pack['pages_filled']
print('| guests | pages that are not zero, MiB | kept once | and compressed, with tables |')
print('|---|---|---|---|')
print(f\"| $guests | {pages >> 8} | {pack['frames'] / pages:.2f} \"
      f\"| {pack['frames_bytes'] / 4096 / pages:.2f} |\")"
