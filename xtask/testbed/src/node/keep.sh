# Keeps a node: makes its folder and its cgroups, starts its first process, and ends everything when standard input does.
#
# $1 is the folder to make the node's in, $2 the script of its first process, and the rest is for that. The name of the node says who keeps it:
# process and start time. So a later run can tell a node that is kept from one that is left.
set -u
name=ctrlmesh-node-$$-$(start_of $$)
folder=$1/$name
init=$2
shift 2
# Whoever started this may be gone before it hears of the folder.
trap : PIPE
trap exit INT TERM
trap 'teardown "$folder"' EXIT
mkdir -m 700 "$folder" || exit
echo "$folder"
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

# The shell enters the cgroups before it makes the namespaces, so that they are the roots of what the node sees.
exec 3<&0
(
sh -c '
for top in $0; do echo $$ >"$top/cgroup.procs" || exit; done
exec env -i PATH="$PATH" unshare --cgroup --net --mount --uts --pid --fork --kill-child --propagation private sh "$1/init.sh" "$@"
' "$tops" "$folder" "$@" <&3 >"$folder/node.log" 2>&1 4</proc/self/ns/net
touch "$folder/ended"
) &
exec 3<&-
while read -r _; do :; done
