# In the network namespace of a node: runs its first process, and again where it is to be booted again.
#
# $1 are its cgroups, $2 its folder, and the rest is for the first process. The namespace is to be found by the process that
# the file `boot` names, which outlives the node's.
tops=$1
folder=$2
shift
echo $$ >"$folder/boot"
while :; do
    # It enters the cgroups before it makes the namespaces, so that they are the roots of what the node sees. Of the
    # environment the node has how its programs look for garbage.
    sh -c '
for top in $0; do echo $$ >"$top/cgroup.procs" || exit; done
exec env -i PATH="$PATH" GOGC="$GOGC" GOMEMLIMIT="$GOMEMLIMIT" unshare --cgroup --mount --uts --pid --fork --kill-child --propagation private sh "$@"
' "$tops" "$folder/init.sh" "$@"
    [ -e "$folder/reboot" ] || break
    rm "$folder/reboot"
done
touch "$folder/ended"
