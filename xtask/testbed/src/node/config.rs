//! The configuration files of a node's programs.

use std::path::Path;

use crate::pki::Pair;

/// The network of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    /// The node's address.
    pub(crate) address: std::net::Ipv4Addr,
    /// The range that its pods have addresses of.
    pub(crate) pods: String,
}

impl Network {
    /// Reads what the node's first process wrote.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (address, pods) = text.trim_end().split_once(' ')?;
        Some(Self { address: address.parse().ok()?, pods: pods.to_owned() })
    }
}

/// containerd's. It may neither lower its own chance of being killed nor that of pods: that takes a capability that
/// root has not everywhere.
pub(crate) fn containerd(folder: &Path, pause: &str) -> String {
    let folder = folder.display();
    format!(
        r#"version = 2
root = "{folder}/containerd"
state = "/run/containerd/state"
oom_score = 0

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
disable_apparmor = true
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"#
    )
}

/// The pods' network: a wire to each pod, routed, so that Services work between two pods of the node without a bridge.
pub(crate) fn cni(pods: &str) -> String {
    format!(
        r#"{{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [
    {{
      "type": "ptp",
      "ipam": {{"type": "host-local", "subnet": "{pods}", "dataDir": "/var/lib/cni/networks", "routes": [{{"dst": "0.0.0.0/0"}}]}}
    }},
    {{"type": "portmap", "capabilities": {{"portMappings": true}}}}
  ]
}}
"#
    )
}

/// kubelet's. The machine is not the node's alone, so pods are evicted only when it is nearly full, and containerd is
/// given longer than two minutes for a container: one that is late is not begun twice.
pub(crate) fn kubelet(ca: &Path, serving: &Pair) -> String {
    let (ca, certificate, key) = (ca.display(), serving.certificate.display(), serving.key.display());
    format!(
        r#"apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: true}}
  x509: {{clientCAFile: "{ca}"}}
authorization: {{mode: Webhook}}
tlsCertFile: "{certificate}"
tlsPrivateKeyFile: "{key}"
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
runtimeRequestTimeout: 15m
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
oomScoreAdj: 0
resolvConf: ""
clusterDomain: cluster.local
clusterDNS: [10.96.0.10]
evictionHard: {{memory.available: 50Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
registryPullQPS: 0
"#
    )
}

/// kube-proxy's. The table of connections belongs to the machine, so its size is left as it is.
pub(crate) fn kube_proxy(folder: &Path, node: &str, pods: &str) -> String {
    let folder = folder.display();
    format!(
        r#"apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
hostnameOverride: {node}
clusterCIDR: "{pods}"
clientConnection: {{kubeconfig: "{folder}/kube-proxy.kubeconfig"}}
conntrack: {{maxPerCore: 0, min: 0}}
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_is_read_and_half_of_it_is_not() {
        let network = Network::parse("10.213.0.6 10.214.1.0/24\n").unwrap();
        assert_eq!(network.address, std::net::Ipv4Addr::new(10, 213, 0, 6));
        assert_eq!(network.pods, "10.214.1.0/24");
        assert_eq!(Network::parse("10.213.0.6"), None);
    }
}
