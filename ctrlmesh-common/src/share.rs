//! Compiles the policy of one ShardingConfig, and says which objects a root divides.

use crate::api::{self, Clusters, LabelSelector, Root, ShardingConfig};
use crate::member_path::PathTemplateError;
use crate::policy::{Limit, Lock, Members, Policy};
use crate::resource::ResourceMatch;
use crate::selector::{RequirementError, Selector};
use crate::slots::ParseSlotError;

/// A `ShardingConfig` from which no policy follows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// The selector of a limit is malformed.
    #[error("spec.limits[{limit}].selector")]
    Selector {
        /// Which limit.
        limit: usize,
        /// What is wrong with it.
        source: RequirementError,
    },
    /// A limit has no selector.
    #[error("spec.limits[{limit}].selector is missing")]
    NoSelector {
        /// Which limit.
        limit: usize,
    },
    /// A limit lets every object pass.
    #[error("spec.limits[{limit}].selector has no requirement, so every shard would see all objects")]
    Everything {
        /// Which limit.
        limit: usize,
    },
    /// A limit says twice what it is about, and not the same.
    #[error(
        "spec.limits[{limit}].objectSelector takes the place of relateResources and selector: allowed is one of the two spellings"
    )]
    Twice {
        /// Which limit.
        limit: usize,
    },
    /// A path is no template.
    #[error("spec.clusters[{at}].path")]
    Path {
        /// Which entry.
        at: usize,
        /// What is wrong with it.
        source: PathTemplateError,
    },
    /// A text is no hash.
    #[error("spec.clusterHashes[{at}]")]
    Hash {
        /// Which entry.
        at: usize,
        /// What is wrong with it.
        source: ParseSlotError,
    },
    /// It has no limits: its shard would see everything.
    #[error("spec.limits is empty, so it selects nothing to share")]
    Unlimited,
}

/// The policy, in epoch 0, of the pods of the shard `config` in `namespace`.
///
/// # Errors
/// The first limit that is wrong, or that there is none.
pub fn policy(config: &ShardingConfig, namespace: &str) -> Result<Policy, ShareError> {
    if config.spec.limits.is_empty() {
        return Err(ShareError::Unlimited);
    }
    let lock = config.spec.controller.as_ref().map(|controller| Lock {
        namespace: namespace.to_owned(),
        name: controller.leader_election_name.clone(),
        shard: config.metadata.name.clone().unwrap_or_default(),
    });
    let limits = config.spec.limits.iter().enumerate().map(|(at, limit)| compiled(at, limit));
    let allow_proxy = config.spec.allow_proxy == Some(true);
    let (limits, members) = (limits.collect::<Result<_, _>>()?, members(config)?);
    Ok(Policy { limits, lock, members, allow_proxy, ..Policy::default() })
}

/// The members of a shard, and which of them it sees.
fn members(config: &ShardingConfig) -> Result<Option<Members>, ShareError> {
    let slot = |(at, text): (usize, &String)| text.parse().map_err(|source| ShareError::Hash { at, source });
    let hashes = config.spec.cluster_hashes.as_ref();
    let sees = hashes.map(|all| all.iter().enumerate().map(slot).collect::<Result<_, _>>()).transpose()?;
    let path = |(at, one): (usize, &Clusters)| one.path.parse().map_err(|source| ShareError::Path { at, source });
    let paths = config.spec.clusters.iter().enumerate().map(path).collect::<Result<Vec<_>, _>>()?;
    Ok((!paths.is_empty()).then(|| Members { paths, sees, ..Members::default() }))
}

/// Which objects of a resource a root divides: those that all its selectors for the resource match. `None`: none of
/// them names it. A selector that cannot be read selects nothing.
pub fn divided(root: &Root, group: &str, plural: &str) -> Option<Selector> {
    if root.resource_selector.is_empty() {
        return Some(Selector::everything());
    }
    let covering = root.resource_selector.iter().filter(|one| {
        let mut resources = one.relate_resources.iter().map(ResourceMatch::from);
        one.relate_resources.is_empty() || resources.any(|one| one.covers(group, plural))
    });
    let selector = |objects: &LabelSelector| Selector::try_from(objects).unwrap_or_else(|_| Selector::nothing());
    let selectors = covering.map(|one| one.selector.as_ref().map_or_else(Selector::everything, selector));
    selectors.reduce(|all, one| all.and(&one))
}

/// How many times as much as the mean the shard with the most has. `None`: there is nothing to have.
pub fn imbalance(counts: impl IntoIterator<Item = u64>) -> Option<f64> {
    let counts: Vec<u64> = counts.into_iter().collect();
    let all: u64 = counts.iter().sum();
    let most = counts.iter().max().filter(|_| all > 0)?;
    #[expect(clippy::cast_precision_loss, reason = "a ratio of counts far below 2^52")]
    let ratio = *most as f64 * counts.len() as f64 / all as f64;
    Some(ratio)
}

fn compiled(at: usize, limit: &api::Limit) -> Result<Limit, ShareError> {
    if limit.is_in_both_spellings() {
        return Err(ShareError::Twice { limit: at });
    }
    let objects = limit.objects().ok_or(ShareError::NoSelector { limit: at })?;
    let selector = Selector::try_from(objects).map_err(|source| ShareError::Selector { limit: at, source })?;
    if selector.is_empty() {
        return Err(ShareError::Everything { limit: at });
    }
    let relate_resources = limit.resources().iter().map(ResourceMatch::from).collect();
    Ok(Limit { relate_resources, selector, changed_at: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(limits: &str) -> ShardingConfig {
        let text = format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: one}}\n\
             spec:\n  controller: {{leaderElectionName: op}}\n  limits: {limits}\n"
        );
        api::read_sharding_configs(&text).unwrap().remove(0)
    }

    #[test]
    fn both_spellings_of_a_limit_give_the_same_policy() {
        let ours = "[{relateResources: [{apiGroups: [''], resources: [pods]}], selector: {matchLabels: {team: a}}}]";
        let nested = format!("[{{objectSelector: {}}}]", &ours[1..ours.len() - 1]);
        let policy = policy(&config(ours), "ns").unwrap();
        assert_eq!(policy, super::policy(&config(&nested), "ns").unwrap());
        assert_eq!(policy.selector_for("", "pods").unwrap().to_string(), "team=a");
        assert_eq!(policy.lock.unwrap().per_shard(), "op---one");
    }

    #[test]
    fn a_limit_that_says_nothing_is_an_error_by_field() {
        let missing = policy(&config("[{relateResources: []}]"), "ns").unwrap_err();
        assert_eq!(missing, ShareError::NoSelector { limit: 0 });
        let malformed = policy(&config("[{selector: {matchLabels: {'a b': c}}}]"), "ns");
        assert!(malformed.unwrap_err().to_string().starts_with("spec.limits[0].selector"));
        assert_eq!(policy(&config("[]"), "ns"), Err(ShareError::Unlimited));
        for everything in ["[{selector: {}}]", "[{objectSelector: {selector: {matchLabels: {}}}}]"] {
            let error = policy(&config(everything), "ns").unwrap_err();
            assert_eq!(error, ShareError::Everything { limit: 0 });
        }
        for beside in ["selector: {matchLabels: {team: a}}", "relateResources: [{apiGroups: [''], resources: [pods]}]"]
        {
            let both = format!("[{{{beside}, objectSelector: {{selector: {{matchLabels: {{team: b}}}}}}}}]");
            assert_eq!(policy(&config(&both), "ns"), Err(ShareError::Twice { limit: 0 }));
        }
    }

    #[test]
    fn a_root_divides_what_all_its_selectors_for_a_resource_match() {
        let root = |selectors: &str| -> Root {
            serde_saphyr::from_str(&format!("{{prefix: a, resourceSelector: [{selectors}]}}")).unwrap()
        };
        let sites = "relateResources: [{apiGroups: [web.example.com], resources: [sites]}]";
        let team = |team: &str| format!("{{{sites}, selector: {{matchLabels: {{team: {team}}}}}}}");
        let divided = |root: &Root, plural| divided(root, "web.example.com", plural).map(|one| one.to_string());
        assert_eq!(divided(&root(""), "sites").as_deref(), Some(""));
        assert_eq!(divided(&root("{}"), "sites").as_deref(), Some(""));
        let both = root(&format!("{}, {{selector: {{matchLabels: {{tier: x}}}}}}", team("a")));
        assert_eq!(divided(&both, "sites").as_deref(), Some("team=a,tier=x"));
        assert_eq!(divided(&both, "pages").as_deref(), Some("tier=x"));
        assert_eq!(divided(&root(&team("a")), "pages"), None);
        assert_eq!(super::divided(&root(&team("'a b'")), "web.example.com", "sites"), Some(Selector::nothing()));
    }
}
