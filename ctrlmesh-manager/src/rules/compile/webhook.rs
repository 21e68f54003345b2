//! Compiles what a pod's proxy is told of the operator's webhook: where the other shards serve it, and what they own.
//!
//! It changes nothing that a pod sees or owns. So it comes after epochs and ownership, and both stay as they are. Where
//! an operator gets no new policies, its pods keep the webhook of their last policies, with new addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use ctrlmesh_common::api;
use ctrlmesh_common::policy::webhook::{OnUnowned, Peer, Webhook};
use ctrlmesh_common::policy::{Limit, Policy};
use ctrlmesh_common::wire::MAX_POLICY_BYTES;

use super::policy::ShardPolicies;
use super::{CompiledPolicy, MemberPolicy, Operator, Trouble};
use crate::rules::object_name::namespace;

/// Most addresses of one shard. A proxy tries a few of them at most. Without a bound, each pod that becomes ready in a
/// shard of thousands would change the policies of all pods of the other shards.
const MAX_ADDRESSES: usize = 32;

/// The most that the webhook may take of a policy, in bytes of JSON. It leaves room for guards and faults.
const MAX_BYTES: usize = 512 << 10;

/// What a [`Trouble`] begins with that is of a shard whose policies have no room for the others.
const NO_ROOM: &str = "spec.webhook: the proxies of shard ";

/// The webhooks of operators, and the policies with them.
#[derive(Debug)]
pub(super) struct Webhooks<'a> {
    /// Of operators that get new policies, by `NAMESPACE/NAME`.
    operators: BTreeMap<String, OperatorWebhook<'a>>,
    shards: ShardsByOperator<'a>,
    /// By the address of the policy as it was given.
    policies: HashMap<usize, Arc<CompiledPolicy>>,
    troubles: Vec<Trouble>,
}

/// The webhook of an operator that gets new policies.
#[derive(Debug)]
struct OperatorWebhook<'a> {
    /// `None`: it has none.
    webhook: Option<&'a api::Webhook>,
    /// The names of all shards whose pods serve it, in order.
    shards: Vec<&'a str>,
}

/// `NAMESPACE/NAME` of the operator, and name of the shard.
type ShardKey<'a> = (&'a str, &'a str);

/// By `NAMESPACE/NAME` of the operator, and name of the shard.
type ShardsByOperator<'a> = BTreeMap<&'a str, BTreeMap<&'a str, ShardFacts<'a>>>;

#[derive(Debug, Default)]
struct ShardFacts<'a> {
    /// Empty where a fence says what the shard owns.
    limits: &'a [Limit],
    addresses: BTreeSet<IpAddr>,
}

impl<'a> Webhooks<'a> {
    /// `shard_policies` are those of operators that get new policies, `pods` the pods with what they see and own.
    pub(super) fn new(
        operators: &'a [Operator<'a>],
        shard_policies: &[&'a ShardPolicies<'a>],
        pods: &'a [MemberPolicy<'a>],
    ) -> Self {
        let mut shards = ShardsByOperator::new();
        for policies in shard_policies {
            let of_operator = shards.entry(policies.operator()).or_default();
            for (shard, policy) in policies.shards() {
                of_operator.entry(shard).or_default().limits = unfenced_limits(policy);
            }
        }
        for (pod, policy) in pods {
            let Some((operator, shard)) = shard_key(policy) else { continue };
            let shard = shards.entry(operator).or_default().entry(shard).or_default();
            if shard.limits.is_empty() {
                shard.limits = unfenced_limits(&policy.policy);
            }
            // One that dials its proxy by itself is called past it.
            if pod.serves() && pod.redirect.takes_calls() && works_for_shard(policy) {
                shard.addresses.extend(pod.ip.as_ref().and_then(|ip| ip.parse::<IpAddr>().ok()));
            }
        }
        let renewed: BTreeSet<&str> = shard_policies.iter().map(|policies| policies.operator()).collect();
        let mut operators = operator_webhooks(operators);
        operators.retain(|operator, _| renewed.contains(operator.as_str()));
        Self { operators, shards, policies: HashMap::new(), troubles: Vec::new() }
    }

    /// The policy with its webhook. Pods that share the one share the other.
    pub(super) fn add(&mut self, policy: &'a Arc<CompiledPolicy>) -> Arc<CompiledPolicy> {
        let address = Arc::as_ptr(policy).addr();
        if let Some(known) = self.policies.get(&address) {
            return known.clone();
        }
        let added = self.bounded(policy, self.of(policy));
        self.policies.insert(address, added.clone());
        added
    }

    pub(super) fn into_troubles(self) -> impl Iterator<Item = Trouble> {
        self.troubles.into_iter()
    }

    /// A webhook that has no room goes without peers.
    fn bounded(&mut self, policy: &Arc<CompiledPolicy>, webhook: Option<Webhook>) -> Arc<CompiledPolicy> {
        // Strings, lists and numbers always serialise.
        let bytes = webhook.as_ref().map_or(0, |webhook| serde_json::to_vec(webhook).unwrap_or_default().len());
        let without_peers = webhook.clone().map(|webhook| Webhook { peers: Vec::new(), ..webhook });
        let fits = |added: &Arc<CompiledPolicy>| added.json().len() <= MAX_POLICY_BYTES;
        let added = (bytes <= MAX_BYTES).then(|| policy.with_webhook(webhook)).filter(fits);
        added.unwrap_or_else(|| {
            self.troubles.extend(shard_key(policy).map(|key| no_room(key, bytes)));
            let added = policy.with_webhook(without_peers);
            if fits(&added) { added } else { policy.with_webhook(None) }
        })
    }

    /// `None` where no node proxy takes the pod's calls: no other does.
    fn of(&self, policy: &CompiledPolicy) -> Option<Webhook> {
        if !policy.policy.redirect.takes_calls() {
            return None;
        }
        let (operator, shard) = shard_key(policy)?;
        let Some(found) = self.operators.get(operator) else { return self.kept(policy) };
        let webhook = found.webhook?;
        // One that does not work for its shard knows no more of that than of others.
        let peers = found.shards.iter().filter(|peer| **peer != shard || !works_for_shard(policy));
        Some(Webhook {
            port: port(webhook)?,
            certificate: webhook.certificate(),
            key: webhook.key(),
            on_unowned: match webhook.on_unowned {
                None | Some(api::OnUnowned::Local) => OnUnowned::Local,
                Some(api::OnUnowned::Fail) => OnUnowned::Fail,
            },
            peers: peers.map(|peer| self.peer(policy, (operator, shard), peer)).collect(),
        })
    }

    /// The webhook of a last policy, with new addresses.
    fn kept(&self, policy: &CompiledPolicy) -> Option<Webhook> {
        let key = shard_key(policy)?;
        let mut webhook = policy.policy.webhook.clone()?;
        for peer in &mut webhook.peers {
            peer.addresses = self.shard(key, &peer.shard).map(ShardFacts::first_addresses).unwrap_or_default();
        }
        Some(webhook)
    }

    fn peer(&self, policy: &CompiledPolicy, own: ShardKey<'_>, peer: &str) -> Peer {
        let shard = self.shard(own, peer);
        let limits = shard.filter(|_| policy.policy.fence.is_none()).map_or(&[][..], |shard| shard.limits);
        Peer {
            shard: peer.to_owned(),
            addresses: shard.map(ShardFacts::first_addresses).unwrap_or_default(),
            limits: limits.iter().map(|limit| Limit { changed_at: None, ..limit.clone() }).collect(),
        }
    }

    /// What is known of a peer. The shards of a root are of one operator; each shard by hand is an operator of its own.
    fn shard(&self, (operator, own): ShardKey<'_>, peer: &str) -> Option<&ShardFacts<'a>> {
        let namespace = operator.strip_suffix(own).filter(|rest| rest.ends_with('/'));
        let of_peer = namespace.map_or_else(|| operator.to_owned(), |namespace| format!("{namespace}{peer}"));
        self.shards.get(of_peer.as_str())?.get(peer)
    }
}

impl ShardFacts<'_> {
    fn first_addresses(&self) -> Vec<IpAddr> {
        self.addresses.iter().copied().take(MAX_ADDRESSES).collect()
    }
}

/// By `NAMESPACE/NAME`.
fn operator_webhooks<'a>(operators: &'a [Operator<'a>]) -> BTreeMap<String, OperatorWebhook<'a>> {
    let mut by_hand: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    for one in operators {
        if let Some(key) = by_hand_key(one) {
            by_hand.entry(key).or_default().extend(one.shard_names());
        }
    }
    let webhook = |operator: &'a Operator<'a>| {
        let together = by_hand_key(operator).and_then(|key| by_hand.get(&key)).cloned();
        let mut shards = together.unwrap_or_else(|| operator.shard_names());
        shards.sort_unstable();
        OperatorWebhook { webhook: operator.config().spec.webhook.as_ref(), shards }
    };
    operators.iter().map(|operator| (operator.full_name(), webhook(operator))).collect()
}

/// What shards by hand have in common that are of one operator and serve one webhook: namespace, lock and port.
fn by_hand_key<'a>(operator: &'a Operator<'a>) -> Option<(&'a str, &'a str, i32)> {
    let config = operator.config();
    let (lock, webhook) = (&config.spec.controller.as_ref()?.leader_election_name, config.spec.webhook.as_ref()?);
    operator.is_alone().then(|| (namespace(&config.metadata), lock.as_str(), webhook.port))
}

fn port(webhook: &api::Webhook) -> Option<NonZeroU16> {
    NonZeroU16::new(u16::try_from(webhook.port).ok()?)
}

fn shard_key(policy: &CompiledPolicy) -> Option<ShardKey<'_>> {
    policy.operator.as_deref().zip(policy.shard.as_deref())
}

fn unfenced_limits(policy: &Policy) -> &[Limit] {
    if policy.fence.is_some() { &[] } else { &policy.limits }
}

/// A pod whose ownership is on its way works for another shard, or for none.
fn works_for_shard(policy: &CompiledPolicy) -> bool {
    policy.policy.fence.as_ref().is_none_or(|fence| fence.owner == policy.shard)
}

/// What says that policies have no room for what proxies need to route reviews: of `operator`, as `NAMESPACE/NAME`, and
/// of one of its shards, or of any.
pub fn without_room<'a>(troubles: &'a [Trouble], operator: &str, shard: Option<&str>) -> Option<&'a Trouble> {
    troubles.iter().find(|trouble| {
        let of_shard = trouble.message.strip_prefix(NO_ROOM);
        let is_it = |rest: &str| shard.is_none_or(|shard| rest.starts_with(&format!("{shard:?} ")));
        trouble.configs.iter().any(|config| config == operator) && of_shard.is_some_and(is_it)
    })
}

fn no_room((operator, shard): ShardKey<'_>, bytes: usize) -> Trouble {
    Trouble {
        object: format!("ShardingConfig {operator}"),
        configs: vec![operator.to_owned()],
        message: format!(
            "{NO_ROOM}{shard:?} do not know the other shards: that takes {bytes} bytes, and at most {MAX_BYTES} are allowed, or {MAX_POLICY_BYTES} together with the rest of the policy; list fewer namespaces, values or resources"
        ),
    }
}

#[cfg(test)]
mod tests;
