//! Names of labels, annotations, ports and well-known objects.
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
    /// On objects and namespaces: the slot, as the predecessors' program writes it (their documents say
    /// [`SHARDING_HASH`]); a cluster that they labelled is taken over with the manager's `--label-sharding-hash`.
    pub const SHARD_HASH: &str = "ctrlmesh.kusionstack.io/shard-hash";
    /// On objects: the name of their namespace, so that a selector can pin it.
    pub const NAMESPACE: &str = "ctrlmesh.kusionstack.io/namespace";
    /// On objects: `"true"` where ctrlmesh decides who owns them.
    pub const CONTROL: &str = "ctrlmesh.kusionstack.io/control";
    /// What the keys of labels begin with that objects carry only while the hash function is changed under a key that
    /// stays: a key has one value, and so they are needed beside it.
    pub const SPARE: &str = "ctrlmesh.kusionstack.io/next-";
    /// On pods: `"true"` enrols them.
    pub const ENABLE_PROXY: &str = "ctrlmesh.kusionstack.io/enable-proxy";
    /// On pods: the name of the `ShardingConfig` that they were admitted under.
    pub const SHARDING_CONFIG_INJECTED: &str = "ctrlmesh.kusionstack.io/sharding-config-injected";
    /// On nodes: whether a node proxy is there whose kernel redirects connections, `"true"` or `"false"`; set by it.
    pub const EBPF: &str = "ctrlmesh.kusionstack.io/ebpf";
    /// On a `ShardingConfig`: the root that made them.
    pub const AUTO_SHARDING_ROOT: &str = "ctrlmesh.kusionstack.io/auto-sharding-root";
    /// On the objects of a fence in the API server: the namespace of its root.
    pub const FENCE_NAMESPACE: &str = "ctrlmesh.kusionstack.io/fence-namespace";
    /// On the objects of a fence in the API server: the name of its root.
    pub const FENCE_ROOT: &str = "ctrlmesh.kusionstack.io/fence-root";
    /// On any resource of ours: `"true"` skips the admission webhook.
    pub const IGNORE_VALIDATE: &str = "ctrlmesh.kusionstack.io/ignore-validate";
    /// On pods: `"true"` leaves the arguments of their containers alone where a kubeconfig is given to them.
    pub const DISABLE_FAKE_KUBECONFIG_ARG: &str = "ctrlmesh.kusionstack.io/disable-fake-kubeconfig-arg";
    /// On pods: `"true"` leaves the variable `KUBECONFIG` alone where a kubeconfig is given to them.
    pub const DISABLE_FAKE_KUBECONFIG_ENV: &str = "ctrlmesh.kusionstack.io/disable-fake-kubeconfig-env";
    /// On a `CircuitBreaker`: `"true"` switches it off.
    pub const DISABLE_CIRCUIT_BREAKER: &str = "circuitbreaker.ctrlmesh.kusionstack.io/disable";
    /// On a `FaultInjection`: `"true"` switches it off.
    pub const DISABLE_FAULT_INJECTION: &str = "faultinjection.ctrlmesh.kusionstack.io/disable";
    /// On a `ClusterRole`: `"true"` gives its rights to the manager, which labels the kinds that they name.
    pub const AGGREGATE_TO_LABELS: &str = "ctrlmesh.kusionstack.io/aggregate-to-labels";
    /// On pods of a Deployment, set by Kubernetes: which revision of its template they have.
    pub const POD_TEMPLATE_HASH: &str = "pod-template-hash";
    /// On pods of a StatefulSet, set by Kubernetes: their own name.
    pub const STATEFULSET_POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
    /// Kubernetes' own: the name of the revision that a pod of a `StatefulSet` was made from.
    pub const CONTROLLER_REVISION_HASH: &str = "controller-revision-hash";
}

/// Keys of annotations: on pods, the last four on roots and `CircuitBreakers`.
pub mod annotation {
    /// How connections reach the proxy: `auto`, `ebpf`, `env` or `kubeconfig`.
    pub const INTERCEPTION: &str = "ctrlmesh.kusionstack.io/interception";
    /// `"true"` puts a proxy of its own into the pod; implied by the interceptions `env` and `kubeconfig`.
    pub const SIDECAR: &str = "ctrlmesh.kusionstack.io/sidecar";
    /// `"true"` lets the operator reach the API server directly while its proxy is away.
    pub const FAIL_OPEN: &str = "ctrlmesh.kusionstack.io/fail-open";
    /// `"true"` gives the pod a forward proxy at 127.0.0.1:15002. May be changed while the pod runs.
    pub const FORWARD_PROXY: &str = "ctrlmesh.kusionstack.io/forward-proxy";
    /// The sidecar's resources, as the JSON of a container's `resources`.
    pub const PROXY_RESOURCE: &str = "ctrlmesh.kusionstack.io/proxy-resource";
    /// Variables for containers, as JSON: `[{"name": CONTAINER, "env": [{"key": K, "value": V}]}]`.
    pub const ENV_INJECT: &str = "ctrlmesh.kusionstack.io/env-inject";
    /// `"true"` on pods that were admitted with what they need; set by the manager. Without it a pod is not served,
    /// whatever its labels say: one that was labelled afterwards trusts the API server itself.
    pub const INJECTED: &str = "ctrlmesh.kusionstack.io/injected";
    /// The kubeconfig that the pod's containers read; set by the manager.
    pub const KUBECONFIG: &str = "ctrlmesh.kusionstack.io/kubeconfig";
    /// On a root that is being deleted: `"true"` lets it go at once, though what its shards own is not handed back.
    pub const SKIP_HANDBACK: &str = "ctrlmesh.kusionstack.io/skip-handback";
    /// On a root, in a dry run: the fence in the API server refuses it, and says what it enforces. Never stored.
    pub const FENCE_PROBE: &str = "ctrlmesh.kusionstack.io/fence-probe";
    /// On a root with `rollout`: what to do with a revision, as `promote REVISION`, `promote-full REVISION` or
    /// `abort REVISION`. A space and any text may follow. Each new value is carried out once.
    pub const ROLLOUT: &str = "ctrlmesh.kusionstack.io/rollout";
    /// On a `CircuitBreaker`: the name of a rule whose breaker closes and whose bucket is filled. A space and any text
    /// may follow the name. Each new value resets the rule once.
    pub const RESET_CIRCUIT_BREAKER: &str = "circuitbreaker.ctrlmesh.kusionstack.io/reset";
}

/// The condition of a pod, and its readiness gate, that says whether its version is promoted. Pods of a root with
/// `rollout` have the gate.
pub const PROMOTED: &str = "ctrlmesh.kusionstack.io/promoted";

/// The taint of nodes that no node proxy serves yet. Whoever registers nodes sets it, and the node proxy takes it away.
pub const NOT_READY_TAINT: &str = "ctrlmesh.kusionstack.io/not-ready";

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
    /// Key, in the mesh's, of the CA that vouches for the manager, to its proxies: the mesh's own may speak for the API
    /// server only.
    pub const MANAGER_KEY: &str = "manager-ca.crt";
}

/// What the API server is called inside the cluster.
pub mod api_server {
    /// By what pods know it, in every cluster.
    pub const NAMES: [&str; 7] = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
        "127.0.0.1",
        "::1",
    ];
    /// The namespace of its Service and `EndpointSlices`.
    pub const NAMESPACE: &str = "default";
    /// Its Service.
    pub const SERVICE: &str = "kubernetes";
    /// The label of `EndpointSlices` with the name of their Service.
    pub const SLICE_LABEL: &str = "kubernetes.io/service-name";
}

/// The proxy inside a pod.
pub mod sidecar {
    /// The name of its container.
    pub const CONTAINER: &str = "ctrlmesh-proxy";
    /// The name of the volume with what it is told and trusts.
    pub const VOLUME: &str = "ctrlmesh-proxy";
    /// The argument that has it take what the kernel redirects.
    pub const REDIRECTED: &str = "--redirected";
}

/// The variable of a proxy's container that names the socket at which the proxy shows its requests.
pub const TRACE_SOCKET_VARIABLE: &str = "CTRLMESH_PROXY_TRACE_SOCKET";

/// The variable of a sidecar's container that has only its first process serve.
pub const FIRST_PROCESS_VARIABLE: &str = "CTRLMESH_PROXY_FIRST_PROCESS_ONLY";

/// The Secret, in the manager's namespace, that holds the key of the mesh's CA.
pub const CA_SECRET: &str = "ctrlmesh-ca";

/// The `ConfigMap`, in the manager's namespace, that lists the resources whose objects are labelled.
pub mod resource_list {
    /// Its name.
    pub const NAME: &str = "ctrlmesh-sharding-resource";
    /// Its key, with YAML of the form `groupVersionKinds: {v1: [Pod], apps/v1: ['*']}`.
    pub const KEY: &str = "resource-config";
}

/// The kubeconfig that pods with the interception `kubeconfig` are given.
pub mod fake_kubeconfig {
    /// The `ConfigMap` that holds it, in the pods' namespace.
    pub const NAME: &str = "fake-kubeconfig";
    /// The folder at which it is mounted.
    pub const FOLDER: &str = "/etc/kubernetes/kubeconfig";
}

/// The name of the one `ManagerState`, of which the managers' leader writes the status.
pub const MANAGER_STATE: &str = "ctrlmesh-manager";

/// With it the predecessors' managers keep roots, circuit breakers and fault injections until what these did is undone.
/// Ours neither sets it nor takes it away; it is named here because such objects are theirs and ours at once.
pub const FINALIZER: &str = "finalizer.ctrlmesh.kusionstack.io/protected";

/// With it the manager keeps a root that is fenced, until all that its shards own is handed back.
pub const OWNERSHIP_FINALIZER: &str = "ctrlmesh.kusionstack.io/ownership";

/// Who a token for the manager is made out to.
pub const TOKEN_AUDIENCE: &str = "ctrlmesh";

/// TCP ports.
pub mod port {
    /// The proxy's API listener in the modes `env` and `kubeconfig`.
    pub const PROXY_API: u16 = 5443;
    /// The proxy's listener for connections that the kernel redirected.
    pub const PROXY_REDIRECTED: u16 = 15_001;
    /// The forward proxy, at loopback addresses of pods that ask for it. It is the predecessor's, too.
    pub const PROXY_FORWARD: u16 = 15_002;
    /// The proxy's own webhook listener, to which the owner of an object is handed its admission reviews. Nothing
    /// listens there while proxies hand no reviews on; it is the predecessors', so it is kept free.
    pub const PROXY_WEBHOOK: u16 = 5445;
    /// The proxy's health, readiness and metrics.
    pub const PROXY_ADMIN: u16 = 5441;
    /// The manager's gRPC, to which proxies connect.
    pub const MANAGER_GRPC: u16 = 8071;
    /// The manager's metrics.
    pub const MANAGER_METRICS: u16 = 8080;
    /// The manager's health and readiness.
    pub const MANAGER_PROBES: u16 = 8081;
    /// The manager's webhooks.
    pub const MANAGER_WEBHOOK: u16 = 9443;
}

/// What separates the lock's name from the shard's in a per-shard leader-election lock.
pub const LOCK_SEPARATOR: &str = "---";

/// Longest DNS subdomain, and so the longest name of an object, in bytes.
pub const MAX_SUBDOMAIN_BYTES: usize = 253;

/// Longest name of a shard, in bytes: its pods carry it as the value of a label.
pub const MAX_SHARD_BYTES: usize = 63;

/// Longest prefix of a root, in bytes: with the longest ending, `-32-normal`, it is a shard's name.
pub const MAX_PREFIX_BYTES: usize = MAX_SHARD_BYTES - "-32-normal".len();

/// A name that is longer than a name of its kind may be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} has {} bytes, at most {max} are allowed", name.len())]
pub struct TooLong {
    /// The name that was made.
    pub name: String,
    /// The length that is allowed, in bytes.
    pub max: usize,
}

/// The name of a root's shard: of the canary where `id` is 0, of a normal one from 1.
///
/// # Errors
/// Where the name would be longer than [`MAX_SHARD_BYTES`]; never, where `prefix` has at most [`MAX_PREFIX_BYTES`] and
/// `id` is at most 32.
pub fn shard(prefix: &str, id: usize) -> Result<String, TooLong> {
    let kind = if id == 0 { "canary" } else { "normal" };
    let name = format!("{prefix}-{id}-{kind}");
    if name.len() > MAX_SHARD_BYTES { Err(TooLong { name, max: MAX_SHARD_BYTES }) } else { Ok(name) }
}

/// The second name of a root's shard. Two versions of an operator never share a shard: the pods of one are of the
/// shards with the first names, and those of the next version of the shards with the second ones.
///
/// # Errors
/// As of [`shard`].
pub fn second_shard(prefix: &str, id: usize) -> Result<String, TooLong> {
    let name = format!("{prefix}-{id}-second");
    if name.len() > MAX_SHARD_BYTES { Err(TooLong { name, max: MAX_SHARD_BYTES }) } else { Ok(name) }
}

/// The name of the shard's own leader-election lock; no object is called so where it has more than
/// [`MAX_SUBDOMAIN_BYTES`].
pub fn lock(leader_election_name: &str, shard: &str) -> String {
    format!("{leader_election_name}{LOCK_SEPARATOR}{shard}")
}

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

    /// What stands in manifests and on objects already: who changes one leaves them behind.
    #[test]
    fn keys_are_those_that_users_have_written_down() {
        let keys = [
            (label::SHARDING_HASH, "sharding-hash"),
            (label::SHARD_HASH, "shard-hash"),
            (label::NAMESPACE, "namespace"),
            (label::CONTROL, "control"),
            (label::SPARE, "next-"),
            (label::ENABLE_PROXY, "enable-proxy"),
            (label::SHARDING_CONFIG_INJECTED, "sharding-config-injected"),
            (label::AUTO_SHARDING_ROOT, "auto-sharding-root"),
            (label::IGNORE_VALIDATE, "ignore-validate"),
            (label::DISABLE_FAKE_KUBECONFIG_ARG, "disable-fake-kubeconfig-arg"),
            (label::DISABLE_FAKE_KUBECONFIG_ENV, "disable-fake-kubeconfig-env"),
            (label::AGGREGATE_TO_LABELS, "aggregate-to-labels"),
            (annotation::INTERCEPTION, "interception"),
            (annotation::SIDECAR, "sidecar"),
            (annotation::FAIL_OPEN, "fail-open"),
            (annotation::FORWARD_PROXY, "forward-proxy"),
            (annotation::PROXY_RESOURCE, "proxy-resource"),
            (annotation::ENV_INJECT, "env-inject"),
            (annotation::INJECTED, "injected"),
            (annotation::KUBECONFIG, "kubeconfig"),
            (annotation::FENCE_PROBE, "fence-probe"),
            (label::FENCE_NAMESPACE, "fence-namespace"),
            (label::FENCE_ROOT, "fence-root"),
            (annotation::SKIP_HANDBACK, "skip-handback"),
        ];
        for (key, name) in keys {
            assert_eq!(key, format!("ctrlmesh.kusionstack.io/{name}"));
        }
        let disable = [label::DISABLE_CIRCUIT_BREAKER, label::DISABLE_FAULT_INJECTION];
        assert_eq!(disable[0], "circuitbreaker.ctrlmesh.kusionstack.io/disable");
        assert_eq!(disable[1], "faultinjection.ctrlmesh.kusionstack.io/disable");
        assert_eq!(FINALIZER, "finalizer.ctrlmesh.kusionstack.io/protected");
        assert_eq!(OWNERSHIP_FINALIZER, "ctrlmesh.kusionstack.io/ownership");
        // Kubernetes' own.
        assert_eq!(label::POD_TEMPLATE_HASH, "pod-template-hash");
        assert_eq!(label::STATEFULSET_POD_NAME, "statefulset.kubernetes.io/pod-name");
        assert_eq!(label::CONTROLLER_REVISION_HASH, "controller-revision-hash");
    }

    #[test]
    fn objects_are_called_as_users_know_them() {
        assert_eq!([GROUP, VERSION], ["ctrlmesh.kusionstack.io", "v1alpha1"]);
        assert_eq!(KRIDGE_GROUP, "kridge.kusionstack.io");
        assert_eq!([resource_list::NAME, resource_list::KEY], ["ctrlmesh-sharding-resource", "resource-config"]);
        assert_eq!([fake_kubeconfig::NAME, fake_kubeconfig::FOLDER], ["fake-kubeconfig", "/etc/kubernetes/kubeconfig"]);
        assert_eq!([root_ca::CLUSTER, root_ca::MESH], ["kube-root-ca.crt", "ctrlmesh-root-ca"]);
        let keys = [root_ca::KEY, root_ca::FAIL_OPEN_KEY, root_ca::MANAGER_KEY];
        assert_eq!(keys, ["ca.crt", "fail-open-ca.crt", "manager-ca.crt"]);
        assert_eq!([CA_SECRET, MANAGER_STATE, TOKEN_AUDIENCE], ["ctrlmesh-ca", "ctrlmesh-manager", "ctrlmesh"]);
        assert_eq!(LOCK_SEPARATOR, "---");
    }

    #[test]
    fn ports_are_those_that_network_policies_name() {
        let proxy = [port::PROXY_API, port::PROXY_REDIRECTED, port::PROXY_WEBHOOK, port::PROXY_ADMIN];
        assert_eq!(proxy, [5443, 15001, 5445, 5441]);
        assert_eq!(port::PROXY_FORWARD, 15_002);
        let manager = [port::MANAGER_GRPC, port::MANAGER_METRICS, port::MANAGER_PROBES, port::MANAGER_WEBHOOK];
        assert_eq!(manager, [8071, 8080, 8081, 9443]);
    }

    #[test]
    fn shards_are_called_as_the_predecessors_call_them() {
        assert_eq!(shard("op", 0).as_deref(), Ok("op-0-canary"));
        assert_eq!(shard("op", 12).as_deref(), Ok("op-12-normal"));
        assert_eq!(second_shard("op", 12).as_deref(), Ok("op-12-second"));
        assert_eq!(lock("op-lock", "op-12-normal"), "op-lock---op-12-normal");
    }

    #[test]
    fn a_name_with_the_longest_prefix_is_a_label_value() {
        let longest = "p".repeat(MAX_PREFIX_BYTES);
        assert!((0..=32).all(|id| shard(&longest, id).is_ok() && second_shard(&longest, id).is_ok()));
        let error = shard(&"p".repeat(MAX_PREFIX_BYTES + 1), 32).unwrap_err();
        assert_eq!((error.name.len(), error.max), (64, 63));
        assert!(error.to_string().ends_with("has 64 bytes, at most 63 are allowed"), "{error}");
    }

    #[test]
    fn a_subdomain_is_lower_case_labels_with_dots_between() {
        for name in ["a", "a-b.c", "0", &"a".repeat(253)] {
            assert!(is_dns_subdomain(name), "{name}");
        }
        for name in ["", ".", "a.", "a..b", "-a", "a-", "A", "a_b", "a/b", "\u{e4}", &"a".repeat(254)] {
            assert!(!is_dns_subdomain(name), "{name}");
        }
    }

    const LABELS: &str = include_str!("../../docs/reference/labels.md");
    const PORTS: &str = include_str!("../../docs/reference/ports.md");

    /// What this file calls one kind of thing, as it is written in the module `of`: names and values.
    fn written(of: &str) -> Vec<(&'static str, &'static str)> {
        let (_, module) = include_str!("names.rs").split_once(&format!("pub mod {of} {{")).unwrap();
        let (module, _) = module.split_once("\n}\n").unwrap();
        let constants = module.split("pub const ").skip(1);
        let constants = constants.filter_map(|one| one.split_once(';')?.0.split_once('='));
        constants.map(|(name, value)| (name, value.trim().trim_matches('"'))).collect()
    }

    #[test]
    fn the_docs_list_every_label_and_annotation() {
        let keys = [written("label"), written("annotation")].concat();
        let ours: Vec<_> = keys.into_iter().filter(|(_, key)| key.contains(GROUP)).collect();
        assert!(ours.len() > 18, "{ours:?}");
        for (name, key) in ours {
            assert!(LABELS.contains(key), "{name} {key} is not in docs/reference/labels.md");
        }
    }

    #[test]
    fn the_docs_list_every_port() {
        let listed = written("port");
        assert!(listed.len() > 7, "{listed:?}");
        for (name, port) in listed {
            let port = port.replace('_', "");
            let mut numbers = PORTS.split(|letter: char| !letter.is_ascii_digit());
            assert!(numbers.any(|number| number == port), "{name} {port} is not in ports.md");
        }
    }
}
