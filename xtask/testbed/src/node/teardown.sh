# Functions that end what is left of a node. Everything that they touch is known to be the node's: a process by its start
# time and by its cgroup, a network device by its index, cgroups and the folder by the name, which is never used twice.

# When the process $1 was started, in ticks since boot; nothing where there is none.
start_of() {
    sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20
}

# The node's cgroups, the inner ones first.
cgroups_of() {
    find /sys/fs/cgroup -mindepth 1 -maxdepth 2 -type d -name "$1" -prune 2>/dev/null | while read -r top; do
        find "$top" -depth -type d 2>/dev/null
    done
}

# Ends the node whose folder is $1: its first process, and the kernel ends all others; its end of the wire; cgroups; files.
# What is being killed may still be there for a moment, so this is tried for 20 s.
teardown() {
    name=${1##*/}
    if read -r pid start 2>/dev/null <"$1/init" && [ "$(start_of "$pid")" = "$start" ] &&
        grep -q "/$name" "/proc/$pid/cgroup" 2>/dev/null; then
        kill -KILL "$pid" 2>/dev/null
    fi
    tries=200
    while [ "$tries" -gt 0 ]; do
        if read -r device index 2>/dev/null <"$1/device" &&
            [ "$(cat "/sys/class/net/$device/ifindex" 2>/dev/null)" = "$index" ]; then
            ip link delete "$device" 2>/dev/null
        fi
        left=$(cgroups_of "$name")
        [ -z "$left" ] || echo "$left" | xargs rmdir 2>/dev/null
        left=$(cgroups_of "$name")
        if [ -z "$left" ]; then
            rm -rf "$1" 2>/dev/null
            [ -e "$1" ] || return 0
        fi
        sleep 0.1
        tries=$((tries - 1))
    done
    echo "left of $name: $left" >&2
    return 1
}
