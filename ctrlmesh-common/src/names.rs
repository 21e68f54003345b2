//! What are things called: labels, annotations, ports, well-known objects.
//!
//! The names are the predecessors' (KusionStack Controller Mesh, Kridge), so that their manifests keep working.

/// API group of every resource of ours.
pub const GROUP: &str = "ctrlmesh.kusionstack.io";

/// API version of every resource of ours.
pub const VERSION: &str = "v1alpha1";

/// API group of the predecessor's alias; its manifests are read by the same parser.
pub const KRIDGE_GROUP: &str = "kridge.kusionstack.io";

/// Keys of labels, on objects and on pods.
pub mod label {
    /// On objects and namespaces: the slot, `"0"` to `"31"`, that the namespace falls into.
    pub const SHARDING_HASH: &str = "ctrlmesh.kusionstack.io/sharding-hash";
    /// On objects: the name of their namespace, so that a selector can pin it.
    pub const NAMESPACE: &str = "ctrlmesh.kusionstack.io/namespace";
    /// On objects: `"true"` where ctrlmesh decides who owns them.
    pub const CONTROL: &str = "ctrlmesh.kusionstack.io/control";
    /// On pods: `"true"` enrols them.
    pub const ENABLE_PROXY: &str = "ctrlmesh.kusionstack.io/enable-proxy";
    /// On pods: the name of the `ShardingConfig` that they were admitted under.
    pub const SHARDING_CONFIG_INJECTED: &str = "ctrlmesh.kusionstack.io/sharding-config-injected";
    /// On a `ShardingConfig`: the root that made them.
    pub const AUTO_SHARDING_ROOT: &str = "ctrlmesh.kusionstack.io/auto-sharding-root";
    /// On any resource of ours: `"true"` skips the admission webhook.
    pub const IGNORE_VALIDATE: &str = "ctrlmesh.kusionstack.io/ignore-validate";
    /// On pods: `"true"` leaves the arguments of their containers alone where a kubeconfig is given to them.
    pub const DISABLE_FAKE_KUBECONFIG_ARG: &str =
        "ctrlmesh.kusionstack.io/disable-fake-kubeconfig-arg";
    /// On pods: `"true"` leaves the variable `KUBECONFIG` alone where a kubeconfig is given to them.
    pub const DISABLE_FAKE_KUBECONFIG_ENV: &str =
        "ctrlmesh.kusionstack.io/disable-fake-kubeconfig-env";
    /// On pods of a Deployment, set by Kubernetes: which revision of its template they have.
    pub const POD_TEMPLATE_HASH: &str = "pod-template-hash";
    /// On pods of a StatefulSet, set by Kubernetes: their own name.
    pub const STATEFULSET_POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
}

/// Keys of annotations on pods.
pub mod annotation {
    /// How connections reach the proxy: `ebpf`, `env` or `kubeconfig`.
    pub const INTERCEPTION: &str = "ctrlmesh.kusionstack.io/interception";
    /// `"true"` puts a proxy of its own into the pod; implied by the interceptions `env` and `kubeconfig`.
    pub const SIDECAR: &str = "ctrlmesh.kusionstack.io/sidecar";
    /// `"true"` lets the operator reach the API server directly while its proxy is away.
    pub const FAIL_OPEN: &str = "ctrlmesh.kusionstack.io/fail-open";
    /// The sidecar's resources, as the JSON of a container's `resources`.
    pub const PROXY_RESOURCE: &str = "ctrlmesh.kusionstack.io/proxy-resource";
    /// Variables for containers, as JSON: `[{"name": CONTAINER, "env": [{"key": K, "value": V}]}]`.
    pub const ENV_INJECT: &str = "ctrlmesh.kusionstack.io/env-inject";
    /// The kubeconfig that the pod's containers read; set by the manager.
    pub const KUBECONFIG: &str = "ctrlmesh.kusionstack.io/kubeconfig";
}

/// `ConfigMaps` that hold a CA, one of each in every namespace with enrolled pods, and their keys.
pub mod root_ca {
    /// The API server's own, which Kubernetes puts into every namespace.
    pub const CLUSTER: &str = "kube-root-ca.crt";
    /// The mesh's.
    pub const MESH: &str = "ctrlmesh-root-ca";
    /// Key, in both, of the CA alone.
    pub const KEY: &str = "ca.crt";
    /// Key, in the mesh's, of its CA and the API server's together: what operators that may fail open trust.
    pub const FAIL_OPEN_KEY: &str = "fail-open-ca.crt";
}

/// Who a token for the manager is made out to.
pub const TOKEN_AUDIENCE: &str = "ctrlmesh";

/// TCP ports.
pub mod port {
    /// The proxy's API listener in the modes `env` and `kubeconfig`.
    pub const PROXY_API: u16 = 5443;
    /// The proxy's listener for connections that the kernel redirected.
    pub const PROXY_REDIRECTED: u16 = 15_001;
    /// The proxy's health, readiness and metrics.
    pub const PROXY_ADMIN: u16 = 5441;
    /// The manager's gRPC, to which proxies connect.
    pub const MANAGER_GRPC: u16 = 8071;
}

/// What separates the lock's name from the shard's in a per-shard leader-election lock.
pub const LOCK_SEPARATOR: &str = "---";

/// Longest DNS subdomain, in bytes.
const MAX_SUBDOMAIN_BYTES: usize = 253;

/// Whether `name` is a lower-case DNS subdomain (RFC 1123), as most objects' names are.
pub fn is_dns_subdomain(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.iter().all(|byte| inner(*byte) || *byte == b'-')
            && bytes.first().copied().is_some_and(inner)
            && bytes.last().copied().is_some_and(inner)
    };
    name.len() <= MAX_SUBDOMAIN_BYTES && name.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subdomain_is_lower_case_labels_with_dots_between() {
        for name in ["a", "a-b.c", "0", &"a".repeat(253)] {
            assert!(is_dns_subdomain(name), "{name}");
        }
        for name in
            ["", ".", "a.", "a..b", "-a", "a-", "A", "a_b", "a/b", "\u{e4}", &"a".repeat(254)]
        {
            assert!(!is_dns_subdomain(name), "{name}");
        }
    }
}
