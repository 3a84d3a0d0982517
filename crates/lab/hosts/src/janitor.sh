# Waits for the end of its standard input, which is the end of the process that started it or of the hosts, then
# ends every process in the namespaces given before `--` and removes the control groups given after it.
trap '' INT TERM HUP
cat >/dev/null
namespaces=' '
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    namespaces="$namespaces$1 "
    shift
done
[ $# -gt 0 ] && shift
inside() {
    # The last word of each line is what the link points to. The shell itself is in none of the namespaces.
    ls -l /proc/[0-9]*/ns/net 2>/dev/null | while read -r line; do
        case $namespaces in *" ${line##* } "*)
            process=${line#*/proc/}
            echo "${process%%/*}"
            ;;
        esac
    done
    for group in "$@"; do
        cat "$group/cgroup.procs" 2>/dev/null
    done
}
# A process may start others while it is being ended: look again until none is left, about ten seconds at most.
tries=100
while [ $tries -gt 0 ]; do
    found=$(inside "$@")
    [ -z "$found" ] && break
    kill -KILL $found 2>/dev/null
    tries=$((tries - 1))
    sleep 0.1
done
for group in "$@"; do
    [ -d "$group" ] && rmdir "$group"
done
exit 0
