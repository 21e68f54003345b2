# The first process of a node, in namespaces of its own: makes it look like a machine, keeps its programs running, and
# ends when standard input does; with it the kernel ends all the rest.
#
# $1 is the node's folder, $2 kubelet, $3 kube-proxy, $4 what the node is called. The addresses of its wire begin with
# $5, and those of its pods with $6. File descriptor 4 is the network namespace that the wire leads to: that of the
# machine, or of the cluster's first node.
set -eu
folder=$1
name=${folder##*/}
kubelet=$2
kube_proxy=$3
node=$4
wires=$5
pod_ranges=$6

# What the machine calls this process: /proc is still the machine's.
read -r stat </proc/self/stat
set -- $stat
echo "$1 ${22}" >"$folder/init.new"
mv "$folder/init.new" "$folder/init"

# One wire to the machine, or to the first node. The index of its end there is nobody else's, so the addresses that
# follow from it are not either.
connect() {
    device=ctrlm${name#ctrlmesh-node-}
    device=${device%-*}
    ip link set lo up
    ip link add eth0 type veth peer name "$device" netns /proc/self/fd/4
    outside() { nsenter --net=/proc/self/fd/4 -- "$@"; }
    # /sys would show the machine's devices, wherever the wire leads to.
    index=$(outside ip -oneline link show dev "$device")
    index=${index%%:*}
    echo "$device $index" >"$folder/device"
    number=$((index % 16384))
    link=$wires.$((number / 64))
    last=$((number % 64 * 4))
    pods=$pod_ranges.$((number % 256))
    taken=$(outside ip -4 -oneline route show match "$link.$((last + 1))" | grep -v '^default' || true)
    if [ -n "$taken" ]; then
        echo "the node's addresses are in use where its wire leads to: $taken"
        exit 1
    fi
    outside ip address add "$link.$((last + 1))/30" dev "$device"
    outside ip link set "$device" up
    ip address add "$link.$((last + 2))/30" dev eth0
    ip link set eth0 up
    ip route add default via "$link.$((last + 1))"
    echo "$link.$((last + 2)) $pods.0/24" >"$folder/network.new"
    mv "$folder/network.new" "$folder/network"
}
# Where the node is booted again, it has that already.
if [ ! -e "$folder/network" ]; then
    connect
fi
read -r address _ <"$folder/network"
exec 4<&-
hostname "$node"

# Mounts that only this node sees. What its programs write to usual places goes to the folder or to memory.
mkdir -p "$folder/cgroup" "$folder/lib" "$folder/log"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount --bind "/sys/fs/cgroup/$name" "$folder/cgroup"
else
    mount -t tmpfs -o mode=755 tmpfs "$folder/cgroup"
    for hierarchy in /sys/fs/cgroup/*; do
        if [ -L "$hierarchy" ]; then
            cp -P "$hierarchy" "$folder/cgroup/"
        else
            mkdir "$folder/cgroup/${hierarchy##*/}"
            mount --bind "$hierarchy/$name" "$folder/cgroup/${hierarchy##*/}"
        fi
    done
fi
# What is covered would still be listed, and be taken for the node's.
umount --recursive --lazy /sys
umount --recursive --lazy /proc
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount --rbind "$folder/cgroup" /sys/fs/cgroup
umount --recursive "$folder/cgroup"
mount -t bpf -o mode=700 bpf /sys/fs/bpf
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/netns /run/tmp
export TMPDIR=/run/tmp
mount --bind "$folder/lib" /var/lib
mount --bind "$folder/log" /var/log

# kubelet sets these for the whole machine; here it finds them as it wants them, and leaves the machine's alone.
mkdir /run/kernel
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    file=/run/kernel/$(basename "${setting%=*}")
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${setting%=*}"
done
echo 1 >/proc/sys/net/ipv4/ip_forward
# From here on, what a pod mounts can be seen by others, where its volume says so.
mount --make-rshared /

# In version 2 only cgroups without processes can have controllers.
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p /sys/fs/cgroup/machine
    echo 0 >/sys/fs/cgroup/machine/cgroup.procs
    for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
        echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
    done
fi

# Runs $1 as soon as its configuration $2 is there, and again whenever it ends, as a service manager does.
keep() {
    program=$1
    until [ -e "$2" ]; do sleep 0.1; done
    shift 2
    while :; do
        "$@" </dev/null >>"$folder/$program.log" 2>&1 3<&- &
        echo $! >"$folder/$program.pid"
        wait $! || true
        echo "ctrlmesh: $program ended" >>"$folder/$program.log"
        sleep 0.5
    done
}
exec 3<&0
keep containerd "$folder/containerd.toml" containerd --config "$folder/containerd.toml" &
keep kubelet "$folder/kubelet.yaml" "$kubelet" --config "$folder/kubelet.yaml" --kubeconfig "$folder/kubelet.kubeconfig" \
    --hostname-override "$node" --node-ip "$address" --cert-dir "$folder/kubelet" &
keep kube-proxy "$folder/kube-proxy.yaml" "$kube_proxy" --config "$folder/kube-proxy.yaml" &
(while read -r _; do :; done) <&3 &
exec 3<&-
wait $!
