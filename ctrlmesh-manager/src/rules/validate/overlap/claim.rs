//! Compares what ShardingConfigs own.
//!
//! Every named group is combined with every named resource, but selectors are compared once per combination
//! of limits. A budget bounds the steps; a config that exceeds it is refused. No config written by hand comes
//! close.

use std::collections::BTreeSet;

use ctrlmesh_common::api::{RelatedResources, ShardingConfig};
use ctrlmesh_common::resource::other_group;
use ctrlmesh_common::selector::{Condition, Selector};

use crate::rules::validate::limits::is_wildcard;

/// Stands for all groups and resources that no limit names. No API server serves such a name.
pub(super) const UNNAMED: &str = "*any other*";

/// For one ShardingConfig; they take about a second.
pub(super) const STEPS: usize = 16_000_000;

/// What a ShardingConfig, or all shards of a root, own.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    parts: Vec<Part<'a>>,
}

/// One selector and its resources; empty: all.
#[derive(Debug)]
struct Part<'a> {
    related: &'a [RelatedResources],
    resources: Vec<Resources<'a>>,
    selector: Selector,
    /// Number of values in the selector.
    values: usize,
}

/// `None`: all.
#[derive(Debug)]
struct Resources<'a> {
    groups: Option<BTreeSet<&'a str>>,
    resources: Option<BTreeSet<&'a str>>,
}

/// Group and resource.
pub(super) type Named<'a> = (&'a str, &'a str);

#[derive(Debug)]
pub(super) struct Budget {
    left: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BudgetExceeded;

impl Budget {
    pub(super) fn of(steps: usize) -> Self {
        Self { left: steps }
    }

    fn spend(&mut self, steps: usize) -> Result<(), BudgetExceeded> {
        self.left = self.left.checked_sub(steps).ok_or(BudgetExceeded)?;
        Ok(())
    }
}

impl<'a> Claim<'a> {
    /// Malformed limits are passed over.
    pub(super) fn of(config: &'a ShardingConfig) -> Self {
        let Some(root) = &config.spec.root else {
            let limits = config.spec.limits.iter();
            let parts = limits
                .filter_map(|limit| Some(Part::new(limit.resources(), Selector::try_from(limit.objects()?).ok()?)));
            return Self { parts: parts.collect() };
        };
        if root.resource_selector.is_empty() {
            return Self { parts: vec![Part::new(&[], Selector::everything())] };
        }
        let divided = root.resource_selector.iter().map(|one| {
            let selector = one.selector.as_ref().and_then(|selector| Selector::try_from(selector).ok());
            Part::new(&one.relate_resources, selector.unwrap_or_default())
        });
        Self { parts: divided.collect() }
    }

    /// A resource of which both could own an object.
    pub(super) fn common<'b>(
        &'b self,
        other: &'b Self,
        budget: &mut Budget,
    ) -> Result<Option<Named<'b>>, BudgetExceeded> {
        if self.excludes_part_by_part(other, budget)? {
            return Ok(None);
        }
        let mut compared = BTreeSet::new();
        for (group, resource) in named([self, other]) {
            let mine = self.covering(group, resource, budget)?;
            let theirs = other.covering(group, resource, budget)?;
            if mine.is_empty() && theirs.is_empty() {
                continue;
            }
            let pair = (mine, theirs);
            if compared.contains(&pair) {
                continue;
            }
            budget.spend(self.values(&pair.0) + other.values(&pair.1))?;
            if self.selector(&pair.0).overlaps(&other.selector(&pair.1)) {
                return Ok(Some((group, resource)));
            }
            compared.insert(pair);
        }
        Ok(None)
    }

    /// Whether both divide the same resources in the same way, as shards of one operator mostly do, and no
    /// two counterparts overlap. If several parts cover a resource, they only restrict it further.
    fn excludes_part_by_part(&self, other: &Self, budget: &mut Budget) -> Result<bool, BudgetExceeded> {
        let pairs = || self.parts.iter().zip(&other.parts);
        let alike =
            self.parts.len() == other.parts.len() && pairs().all(|(mine, theirs)| mine.related == theirs.related);
        if !alike {
            return Ok(false);
        }
        for (mine, theirs) in pairs() {
            budget.spend(mine.values + theirs.values)?;
            if mine.selector.overlaps(&theirs.selector) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether an object with this label value is within its limits; `None` if they do not ask for the key.
    pub(super) fn admits(
        &self,
        (group, resource): Named<'_>,
        key: &str,
        value: &str,
        budget: &mut Budget,
    ) -> Result<Option<bool>, BudgetExceeded> {
        let parts = self.covering(group, resource, budget)?;
        let requirements = parts.iter().flat_map(|at| self.parts[*at].selector.requirements());
        let requirements: Vec<_> = requirements.filter(|one| one.key() == key).collect();
        let admits = requirements.iter().all(|one| one.condition().admits(Some(value)));
        Ok((!requirements.is_empty()).then_some(admits))
    }

    /// The parts that cover a resource. Without any, all of it is owned.
    fn covering(&self, group: &str, resource: &str, budget: &mut Budget) -> Result<Vec<usize>, BudgetExceeded> {
        budget.spend(self.parts.iter().map(|part| 1 + part.resources.len()).sum())?;
        let parts = self.parts.iter().enumerate();
        Ok(parts.filter(|(_, part)| part.covers(group, resource)).map(|(at, _)| at).collect())
    }

    fn values(&self, parts: &[usize]) -> usize {
        parts.iter().map(|at| self.parts[*at].values).sum()
    }

    fn selector(&self, parts: &[usize]) -> Selector {
        let selectors = parts.iter().map(|at| &self.parts[*at].selector);
        selectors.fold(Selector::everything(), Selector::and)
    }
}

/// Every named group with every named resource, and what is not named.
pub(super) fn named<'b>(claims: impl IntoIterator<Item = &'b Claim<'b>>) -> impl Iterator<Item = Named<'b>> {
    let (mut groups, mut resources) = (BTreeSet::from([UNNAMED]), BTreeSet::from([UNNAMED]));
    for one in claims.into_iter().flat_map(|claim| &claim.parts).flat_map(|part| &part.resources) {
        groups.extend(one.groups.iter().flatten());
        resources.extend(one.resources.iter().flatten());
    }
    groups.into_iter().flat_map(move |group| {
        let resources: Vec<&str> = resources.iter().copied().collect();
        resources.into_iter().map(move |resource| (group, resource))
    })
}

impl<'a> Part<'a> {
    fn new(related: &'a [RelatedResources], selector: Selector) -> Self {
        let values = selector.requirements().iter().map(|one| match one.condition() {
            Condition::In(values) | Condition::NotIn(values) => 1 + values.len(),
            _ => 1,
        });
        let values = values.sum();
        Self { related, resources: related.iter().map(Resources::of).collect(), selector, values }
    }

    fn covers(&self, group: &str, resource: &str) -> bool {
        self.resources.is_empty() || self.resources.iter().any(|one| one.covers(group, resource))
    }
}

impl<'a> Resources<'a> {
    fn of(related: &'a RelatedResources) -> Self {
        let names = |names: &'a [String]| {
            let all = names.iter().any(|name| is_wildcard(name));
            (!all).then(|| names.iter().map(String::as_str).collect())
        };
        Self { groups: names(&related.api_groups), resources: names(&related.resources) }
    }

    fn covers(&self, group: &str, resource: &str) -> bool {
        let lists = |names: &Option<BTreeSet<&str>>, name| names.as_ref().is_none_or(|names| names.contains(name));
        let has_group =
            lists(&self.groups, group) || other_group(group, resource).is_some_and(|one| lists(&self.groups, one));
        has_group && lists(&self.resources, resource)
    }
}
