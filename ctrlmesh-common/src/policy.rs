//! The policy that a proxy enforces for one pod.
//!
//! A policy limits what the pod sees of some resources, and renames its leader-election lock. It travels as JSON; a
//! selector travels in its string form.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::names::{self, LOCK_SEPARATOR, MAX_SUBDOMAIN_BYTES};
use crate::resource::ResourceMatch;
use crate::selector::Selector;

pub mod egress;
pub mod fault;
pub mod fence;
pub mod guard;
pub mod members;
pub mod webhook;
mod error;
mod pod_policy;

pub use egress::Egress;
pub use error::PolicyError;
pub use fault::Fault;
use fault::{FaultError, MAX_REGEXES};
pub use fence::Fence;
pub use guard::Guard;
use guard::GuardError;
pub use members::Members;
pub use pod_policy::PodPolicy;
pub use webhook::Webhook;

/// The resources that leader election can lock on, by API group.
pub const LOCK_RESOURCES: [(&str, &str); 3] =
    [("coordination.k8s.io", "leases"), ("", "configmaps"), ("", "endpoints")];

/// Longest selector of one resource in a URL, in bytes. A request target has room for 64 KiB, the client's own query
/// included.
pub const MAX_SELECTOR_BYTES: usize = 48 << 10;

/// The bounds between which first writes after changes are counted, in seconds.
pub const FIRST_WRITE_BOUNDS: [u64; 7] = [1, 2, 4, 8, 16, 32, 60];

/// The policy of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own, and a field of the JSON")]
pub struct Policy {
    /// Grows with every change of a policy of the operator. Epochs of two operators do not compare; 0 if nobody counts.
    #[serde(default)]
    pub epoch: u64,
    /// Whether limits, lock, fence, guards, faults and egress rules are applied at all.
    #[serde(default)]
    pub mode: Mode,
    /// Which resources the pod sees only in part. All limits that cover a resource hold at once.
    #[serde(default)]
    pub limits: Vec<Limit>,
    /// The leader-election lock that each shard has for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<Lock>,
    /// Which objects of the limited kinds the pod may write. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    /// The member clusters that the pod reaches behind paths. Absent: such paths are like any others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<Members>,
    /// How often the pod may ask for something. A request that several of them match must pass them all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guards: Vec<Guard>,
    /// What the pod's requests meet on purpose, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
    /// What the pod may talk to beside the API server. Absent: anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Whether the pod has a forward proxy, at port 15002 of its loopback addresses.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forward_proxy: bool,
    /// The admission webhook that the pod serves. Absent: its proxy takes no calls to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub webhook: Option<Webhook>,
    /// Whether the pod's containers are ended before a policy comes into force that takes objects away. Only the node's
    /// proxy can do that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restart_on_loss: bool,
    /// Whether the pod may ask the API server to proxy requests to pods, services and nodes. Without limits and fence
    /// it may in any case.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_proxy: bool,
    /// Whether the pod's proxy reports what the pod's requests to the API server come to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub report_traffic: bool,
    /// Whether the pod's writes become dry runs, whoever owns the objects. Its fence does not hold then: nothing is
    /// stored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shadow: bool,
    /// The proxy that takes the pod's connections.
    #[serde(default, skip_serializing_if = "Redirect::is_to_node")]
    pub redirect: Redirect,
    /// Whether the pod's connections pass, rather than fail, while no proxy takes them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fail_open: bool,
    /// The runtime's ID of the proxy's container inside the pod, once known. Connections of that container pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// Where the kernel of a node sends a pod's connections to the API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Redirect {
    /// To the node's proxy.
    #[default]
    Node,
    /// To the proxy inside the pod.
    Sidecar,
    /// Nowhere: the pod's containers dial the proxy inside it by themselves.
    Nowhere,
}

impl Redirect {
    /// Whether the node's proxy takes the calls to the pod's webhook. It has the kernel do so, which a sidecar cannot.
    pub fn takes_calls(self) -> bool {
        self != Self::Nowhere
    }
}

/// Whether a policy is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// Limits, lock, fence, guards, faults and egress rules hold.
    #[default]
    Enforce,
    /// Every request passes as it is.
    Pass,
}

/// Limits some resources to the objects that a selector matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limit {
    /// The resources; none at all means every resource.
    #[serde(default)]
    pub relate_resources: Vec<ResourceMatch>,
    /// A selector without a requirement limits nothing; then only `changed_at` counts.
    #[serde(serialize_with = "print_selector", deserialize_with = "parse_selector")]
    pub selector: Selector,
    /// The API server's resourceVersion at which this limit last changed, if known. A watch or a continue token from
    /// before it cannot go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_at: Option<u64>,
}

/// A leader-election lock that is renamed, so that each shard has its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Lock {
    /// Namespace of the operator, in which the lock lives.
    pub namespace: String,
    /// The name under which the operator knows it.
    pub name: String,
    /// The shard's name, which makes the name on the server.
    pub shard: String,
}

impl Policy {
    /// The policy of a pod that is enrolled and belongs to no shard: it sees no object. The default, without limits,
    /// would let everything pass.
    pub fn nothing() -> Self {
        let limit = Limit { selector: Selector::nothing(), ..Limit::default() };
        Self { limits: vec![limit], ..Self::default() }
    }

    /// The shard that the pod belongs to. `None` if there is neither fence nor lock: nothing else names it.
    pub fn shard(&self) -> Option<&str> {
        let owner = self.fence.as_ref().and_then(|fence| fence.owner.as_deref());
        owner.or(self.lock.as_ref().map(|lock| lock.shard.as_str()))
    }

    /// Whether no request to the API server is changed or refused.
    pub fn passes_everything(&self) -> bool {
        let is_empty = self.limits.is_empty() && self.lock.is_none() && self.fence.is_none() && !self.shadow;
        let is_empty = is_empty && self.members.is_none();
        self.mode == Mode::Pass || is_empty && self.guards.is_empty() && self.faults.is_empty()
    }

    /// The selectors of all limits that cover `resource` of the API group `group`, joined; `None` if none does.
    pub fn selector_for(&self, group: &str, resource: &str) -> Option<Selector> {
        let selector =
            self.covering(group, resource).fold(Selector::everything(), |all, limit| all.and(&limit.selector));
        (!selector.is_empty()).then_some(selector)
    }

    /// Whether a limit is on `resource` of the API group `group`.
    pub fn is_limited(&self, group: &str, resource: &str) -> bool {
        self.covering(group, resource).next().is_some()
    }

    /// The lock to rename, if locks can be of `resource` in the API group `group`.
    pub fn lock_for(&self, group: &str, resource: &str) -> Option<&Lock> {
        let enforced = self.mode == Mode::Enforce && LOCK_RESOURCES.contains(&(group, resource));
        self.lock.as_ref().filter(|_| enforced)
    }

    /// The fence, where it holds.
    pub fn fence(&self) -> Option<&Fence> {
        self.fence.as_ref().filter(|_| self.mode == Mode::Enforce && !self.shadow)
    }

    /// Whether the pod's writes are dry runs.
    pub fn is_shadow(&self) -> bool {
        self.mode == Mode::Enforce && self.shadow
    }

    /// Whether requests that the API server proxies elsewhere are refused: nobody applies the policy there.
    pub fn forbids_proxy(&self) -> bool {
        let is_restricted = !self.limits.is_empty() || self.fence.is_some();
        self.mode == Mode::Enforce && is_restricted && !self.allow_proxy
    }

    /// The guards, where they hold.
    pub fn guards(&self) -> &[Guard] {
        if self.mode == Mode::Enforce { &self.guards } else { &[] }
    }

    /// The faults, where they are done.
    pub fn faults(&self) -> &[Fault] {
        if self.mode == Mode::Enforce { &self.faults } else { &[] }
    }

    /// The egress rules, where they hold.
    pub fn egress(&self) -> Option<&Egress> {
        self.egress.as_ref().filter(|_| self.mode == Mode::Enforce)
    }

    /// Whether clients read the same under `other`: limits, lock and members are the same. Epoch, `changed_at`, the
    /// fence, `shadow`, guards, faults and egress rules do not count: they do not change what an answer of the API
    /// server holds.
    pub fn means_the_same(&self, other: &Self) -> bool {
        self.mode == other.mode
            && self.lock == other.lock
            && self.members == other.members
            && self.limits.len() == other.limits.len()
            && self.limits.iter().zip(&other.limits).all(|(one, other)| one.means_the_same(other))
    }

    /// The newest known `changed_at` of the limits on `resource`.
    pub fn changed_at(&self, group: &str, resource: &str) -> Option<u64> {
        self.covering(group, resource).filter_map(|limit| limit.changed_at).max()
    }

    /// Whether a proxy can apply it.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), PolicyError> {
        for (limit, resources) in self.limits.iter().map(|limit| &limit.relate_resources).enumerate() {
            for (at, resources) in resources.iter().enumerate() {
                resources.check().map_err(|source| PolicyError::Resources { limit, at, source })?;
            }
        }
        for (at, resources) in self.fence.iter().flat_map(|fence| fence.resources.iter().enumerate()) {
            resources.check().map_err(|source| PolicyError::FencedResources { at, source })?;
        }
        self.check_length()?;
        self.check_guards()?;
        self.check_faults()?;
        self.members.as_ref().map_or(Ok(()), Members::check).map_err(|source| PolicyError::Members { source })?;
        self.egress.as_ref().map_or(Ok(()), Egress::check).map_err(|source| PolicyError::Egress { source })?;
        self.lock.as_ref().map_or(Ok(()), Lock::check)
    }

    /// Whether selectors fit into a request. An upper bound: counts all limits that overlap with one limit together.
    fn check_length(&self) -> Result<(), PolicyError> {
        let lengths: Vec<usize> = self.limits.iter().map(Limit::escaped_bytes).collect();
        if lengths.iter().sum::<usize>() <= MAX_SELECTOR_BYTES {
            return Ok(());
        }
        for (limit, one) in self.limits.iter().enumerate() {
            let others = self.limits.iter().zip(&lengths);
            let bytes = others.filter(|(other, _)| one.overlaps(other)).map(|(_, bytes)| bytes).sum();
            if bytes > MAX_SELECTOR_BYTES {
                return Err(PolicyError::SelectorTooLong { limit, bytes });
            }
        }
        Ok(())
    }

    fn check_guards(&self) -> Result<(), PolicyError> {
        for (at, guard) in self.guards.iter().enumerate() {
            let is_repeated = self.guards[..at].iter().any(|other| other.is_rule(&guard.breaker, &guard.rule));
            let (breaker, rule) = (guard.breaker.clone(), guard.rule.clone());
            let repeated = if is_repeated { Err(GuardError::Repeated { breaker, rule }) } else { Ok(()) };
            guard.check().and(repeated).map_err(|source| PolicyError::Guard { at, source })?;
        }
        Ok(())
    }

    fn check_faults(&self) -> Result<(), PolicyError> {
        let mut regexes = 0;
        for (at, fault) in self.faults.iter().enumerate() {
            regexes += fault.regexes().count();
            let few = if regexes > MAX_REGEXES { Err(FaultError::Regexes) } else { Ok(()) };
            let checked = fault.check().and(few);
            let checked = checked.and_then(|()| fault.regexes().try_for_each(|one| fault::whole_match(one).map(drop)));
            checked.map_err(|source| PolicyError::Fault { at, source })?;
        }
        Ok(())
    }

    fn covering(&self, group: &str, resource: &str) -> impl Iterator<Item = &Limit> {
        let enforced = self.mode == Mode::Enforce;
        self.limits.iter().filter(move |limit| enforced && limit.covers(group, resource))
    }
}

impl Redirect {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    fn is_to_node(&self) -> bool {
        *self == Self::Node
    }
}

impl Limit {
    /// Whether the limit is on `resource` of the API group `group`.
    pub fn covers(&self, group: &str, resource: &str) -> bool {
        self.relate_resources.is_empty() || self.relate_resources.iter().any(|one| one.covers_objects(group, resource))
    }

    /// Whether some resource is limited by both.
    fn overlaps(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.relate_resources, &other.relate_resources);
        ours.is_empty() || theirs.is_empty() || ours.iter().any(|one| theirs.iter().any(|other| one.overlaps(other)))
    }

    /// The length of the selector in a URL, with a comma behind it.
    fn escaped_bytes(&self) -> usize {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
        self.selector.to_string().bytes().map(|byte| if plain(byte) { 1 } else { 3 }).sum::<usize>() + 3
    }

    /// Whether `other` is the same limit; `changed_at` does not count.
    pub fn means_the_same(&self, other: &Self) -> bool {
        self.relate_resources == other.relate_resources && self.selector == other.selector
    }
}

impl Lock {
    /// The name on the server.
    pub fn per_shard(&self) -> String {
        names::lock(&self.name, &self.shard)
    }

    /// Whether `name` is the name of a shard's lock on the server, this shard's or another's.
    pub fn reserves(&self, name: &str) -> bool {
        name.strip_prefix(self.name.as_str()).is_some_and(|rest| rest.starts_with(LOCK_SEPARATOR))
    }

    fn check(&self) -> Result<(), PolicyError> {
        for (field, value) in [("namespace", &self.namespace), ("name", &self.name), ("shard", &self.shard)] {
            if !is_object_name(value) {
                return Err(PolicyError::LockName { field, value: value.clone() });
            }
        }
        let name = self.per_shard();
        if name.len() > MAX_SUBDOMAIN_BYTES { Err(PolicyError::LockTooLong { name }) } else { Ok(()) }
    }
}

fn is_object_name(name: &str) -> bool {
    let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    bytes.len() <= MAX_SUBDOMAIN_BYTES
        && bytes.iter().all(|byte| inner(byte) || matches!(byte, b'-' | b'.'))
        && bytes.first().is_some_and(inner)
        && bytes.last().is_some_and(inner)
}

fn print_selector<S: Serializer>(selector: &Selector, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(selector)
}

fn parse_selector<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Selector, D::Error> {
    let text = String::deserialize(deserializer)?;
    Selector::parse(&text).map_err(|error| de::Error::custom(format_args!("selector {text:?}: {error}")))
}

#[cfg(test)]
mod tests;
