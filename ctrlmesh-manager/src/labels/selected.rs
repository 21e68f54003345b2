//! Finds out by which labels ShardingConfigs select objects, beside those that the manager gives.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{LabelSelector, RelatedResources, ShardingConfig};
use ctrlmesh_common::resource::ResourceMatch;

/// The labels by which one selector selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SelectedLabels {
    /// Of which resources. Empty: of every resource.
    resources: Vec<ResourceMatch>,
    pub(super) keys: BTreeSet<String>,
}

impl SelectedLabels {
    /// Of a root, and of a ShardingConfig by hand. `None` where nothing is selected by further labels.
    pub(super) fn of(config: &ShardingConfig) -> Option<Vec<Self>> {
        let of_root = config.spec.root.iter().flat_map(|root| &root.resource_selector);
        let of_root = of_root.filter_map(|one| Self::new(&one.relate_resources, one.selector.as_ref()));
        let of_shard = config.spec.limits.iter().filter(|_| config.spec.root.is_none());
        let of_shard = of_shard.filter_map(|limit| Self::new(limit.resources(), limit.objects()));
        let all: Vec<Self> = of_root.chain(of_shard).collect();
        (!all.is_empty()).then_some(all)
    }

    pub(super) fn covers(&self, group: &str, plural: &str) -> bool {
        self.resources.is_empty() || self.resources.iter().any(|one| one.covers(group, plural))
    }

    fn new(resources: &[RelatedResources], selector: Option<&LabelSelector>) -> Option<Self> {
        let selector = selector?;
        let expressions = selector.match_expressions.iter().map(|expression| &expression.key);
        let keys: BTreeSet<String> = selector.match_labels.keys().chain(expressions).cloned().collect();
        let resources = resources.iter().map(ResourceMatch::from).collect();
        (!keys.is_empty()).then_some(Self { resources, keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(config: &str, plural: &str) -> Vec<String> {
        let config: ShardingConfig = serde_saphyr::from_str(config).unwrap();
        let all = SelectedLabels::of(&config).unwrap_or_default();
        all.iter().filter(|one| one.covers("web.example.com", plural)).flat_map(|one| one.keys.clone()).collect()
    }

    #[test]
    fn a_kind_is_kept_with_the_labels_that_select_it() {
        let kind = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\n";
        let sites = "relateResources: [{apiGroups: [web.example.com], resources: [sites]}]";
        let root = format!(
            "{kind}spec: {{root: {{prefix: a, resourceSelector: [\
             {{{sites}, selector: {{matchLabels: {{team: x}}, matchExpressions: [{{key: tier, operator: Exists}}]}}}}, \
             {{relateResources: [{{apiGroups: [web.example.com], resources: [pages]}}]}}]}}}}"
        );
        assert_eq!((keys(&root, "sites"), keys(&root, "pages")), (vec!["team".into(), "tier".into()], vec![]));
        let by_hand = format!("{kind}spec: {{limits: [{{selector: {{matchLabels: {{team: x}}}}}}]}}");
        assert_eq!(keys(&by_hand, "pages"), ["team"]);
    }
}
