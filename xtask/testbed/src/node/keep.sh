# Keeps a node: makes its folder and its cgroups, starts its first process, and ends everything when standard input does.
#
# $1 is the folder to make the node's in, $2 the script that boots it, $3 that of its first process, $4 the network
# namespace that its wire leads to, and the rest is for the first process. The name of the folder says who keeps the
# node: process and start time. So a later run can tell a node that is kept from one that is left.
set -u
name=ctrlmesh-node-$$-$(start_of $$)
folder=$1/$name
boot=$2
init=$3
network=$4
shift 4
# Whoever started this may be gone before it hears of the folder.
trap : PIPE
trap exit INT TERM
trap 'teardown "$folder"' EXIT
mkdir -m 700 "$folder" || exit
echo "$folder"
printf '%s' "$boot" >"$folder/boot.sh" || exit
printf '%s' "$init" >"$folder/init.sh" || exit

# One cgroup in every hierarchy. Those of a version 1 cpuset are born without processors and memory.
tops=
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
        echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control 2>/dev/null
    done
    tops=/sys/fs/cgroup/$name
else
    for hierarchy in /sys/fs/cgroup/*/; do
        [ -L "${hierarchy%/}" ] || tops="$tops $hierarchy$name"
    done
fi
for top in $tops; do
    mkdir "$top" || exit
    for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$top/$file" ] || [ -e "$top/cgroup.controllers" ] || cat "${top%/*}/$file" >"$top/$file"
    done
done

exec 3<&0
unshare --net sh "$folder/boot.sh" "$tops" "$folder" "$@" <&3 >"$folder/node.log" 2>&1 4<"$network" &
exec 3<&-
while read -r _; do :; done
