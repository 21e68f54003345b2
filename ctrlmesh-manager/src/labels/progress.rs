//! Tracks which kinds are not completely labelled.
//!
//! A kind is unfinished until its first pass ends: before that, shards miss some of their objects. A kind that cannot
//! be watched or labelled, and an unreadable list of kinds, are reported, too.
//!
//! A migration waits until every kind is finished and new objects are labelled at admission. A root is covered when the
//! kinds that it names are finished.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use ctrlmesh_common::api::{Root, ShardingConfig};
use ctrlmesh_runtime::sync::lock;
use prometheus_client::metrics::gauge::Gauge;

use super::named::{NamedResources, RootKinds, named_resources};
use crate::rules::label_coverage::{self, LabelCoverage, LabelCoverages, LabelGap, MissingRule};
use crate::rules::label_scheme::Scheme;
use crate::rules::object_name::full_name;
use crate::rules::shared::Shared;

/// The scheme and progress of the current labeller. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct CurrentProgress(Arc<Mutex<Option<Run>>>);

type Run = (Arc<Scheme>, Progress);

/// Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    kinds: BTreeMap<String, Pass>,
    /// Why the list of kinds is incomplete.
    list: Option<String>,
    /// Whether labelling at admission works; none before the first try.
    at_once: Option<Result<(), String>>,
    /// Number of passes that have begun.
    begun: u64,
    repaired: u64,
    /// Kinds whose last pass has ended, each with its number.
    finished: BTreeMap<String, u64>,
    /// What roots name; none before the first look, or while it is not known what the API server serves.
    named: Option<Named>,
    /// By root, the resources of which every object was labelled once.
    established: BTreeMap<String, NamedResources>,
}

/// What roots name, and what of all kinds may not be labelled.
#[derive(Debug, Default)]
pub(super) struct Named {
    /// By `NAMESPACE/NAME`.
    pub(super) roots: BTreeMap<String, NamedRoot>,
    /// Kinds that roots name and the list does not.
    pub(super) only: BTreeSet<String>,
    pub(super) missing: BTreeMap<String, MissingRule>,
}

#[derive(Debug, Default)]
pub(super) struct NamedRoot {
    /// From which `kinds` was found.
    pub(super) resources: NamedResources,
    pub(super) kinds: RootKinds,
}

/// The state of an unfinished kind.
#[derive(Clone, Debug, Default)]
struct Pass {
    /// Number of the pass. Reports of an older pass are ignored.
    by: u64,
    /// Whether an object without an owner was labelled.
    labelled: bool,
    /// Why an object could not be labelled.
    failed: Option<String>,
    unseen: Option<String>,
}

/// Reports problems with the list of kinds. Initially there are none.
#[derive(Debug)]
pub(super) struct ListProgress {
    gauge: Gauge,
    progress: Progress,
}

/// Reports the progress of one kind. Initially it is unfinished.
#[derive(Debug)]
pub(super) struct KindProgress {
    gauge: Gauge,
    progress: Progress,
    kind: String,
    by: u64,
    is_set: bool,
}

impl CurrentProgress {
    /// Starts a new progress for `scheme`; none: this replica does not label.
    pub fn set(&self, scheme: Option<Arc<Scheme>>) -> Progress {
        let progress = Progress::default();
        let current = scheme.map(|scheme| (scheme, progress.clone()));
        *lock(&self.0) = current;
        progress
    }

    /// None where another scheme is in progress.
    pub fn of(&self, scheme: &Scheme) -> Option<Progress> {
        let current = lock(&self.0).clone();
        current.filter(|(current, _)| **current == *scheme).map(|(_, progress)| progress)
    }

    /// Why some objects may have no owner; none where all have one.
    pub fn left(&self) -> Option<String> {
        let current = lock(&self.0).clone();
        current.and_then(|(_, progress)| progress.left())
    }

    /// How far the kinds of each root among `configs` are labelled.
    pub fn coverages(&self, configs: &[Shared<ShardingConfig>]) -> LabelCoverages {
        let current = lock(&self.0).clone();
        let progress = current.map(|(_, progress)| progress).unwrap_or_default();
        let roots = configs.iter().filter_map(|config| Some((config, config.spec.root.as_ref()?)));
        roots.map(|(config, root)| (full_name(&config.metadata), progress.coverage(config, root))).collect()
    }
}

impl Progress {
    /// Why some objects may have no owner; none where all have one.
    pub fn left(&self) -> Option<String> {
        let state = lock(&self.0);
        if let Some(why) = &state.list {
            return Some(format!("not all that is listed can be labelled: {why}"));
        }
        // Without a count, so that the status is not written for every object.
        // What only roots name is in their own conditions.
        let is_listed = |kind: &String| state.named.as_ref().is_none_or(|named| !named.only.contains(kind));
        let mut missing = state.named.iter().flat_map(|named| &named.missing);
        if let Some((_, rule)) = missing.find(|(kind, _)| is_listed(kind)) {
            return Some(format!("the manager may not {}", rule.text()));
        }
        let listed: Vec<_> = state.kinds.iter().filter(|(kind, _)| is_listed(kind)).collect();
        if let Some(why) = listed.iter().find_map(|(kind, pass)| pass.why(kind)) {
            return Some(why);
        }
        let begun = listed.iter().any(|(_, pass)| pass.labelled);
        let names: Vec<&str> = listed.iter().map(|(kind, _)| kind.as_str()).collect();
        let left = begun.then(|| unlabelled(&names));
        drop(state);
        left
    }

    /// How far the kinds of a root are labelled.
    fn coverage(&self, config: &ShardingConfig, root: &Root) -> LabelCoverage {
        let (name, resources) = (full_name(&config.metadata), named_resources(root));
        let mut state = lock(&self.0);
        let was_established =
            label_coverage::was_established(config) || state.established.get(&name) == Some(&resources);
        let named = state.named.as_ref().and_then(|named| named.roots.get(&name));
        let Some(named) = named.filter(|named| named.resources == resources) else {
            let gap = (!was_established).then(|| LabelGap::InProgress("labelling has only begun".to_owned()));
            return LabelCoverage { established: was_established, gap, needed: Vec::new() };
        };
        let needed = named.kinds.values().flatten().cloned().collect();
        let gap = state.gap(&named.kinds, was_established);
        let established = was_established || gap.is_none();
        if established {
            state.established.insert(name, resources);
        }
        drop(state);
        LabelCoverage { established, gap, needed }
    }

    /// Publishes what roots name.
    pub(super) fn name(&self, named: Named) {
        let mut state = lock(&self.0);
        state.established.retain(|root, _| named.roots.contains_key(root));
        state.named = Some(named);
    }

    /// Kinds of which something cannot be seen or labelled.
    pub(super) fn failing(&self) -> BTreeSet<String> {
        let state = lock(&self.0);
        let failing = state.kinds.iter().filter(|(kind, pass)| pass.why(kind).is_some());
        let failing = failing.map(|(kind, _)| kind.clone()).collect();
        drop(state);
        failing
    }

    /// Whether only roots name the kind.
    pub(super) fn is_only_named(&self, kind: &str) -> bool {
        lock(&self.0).named.as_ref().is_some_and(|named| named.only.contains(kind))
    }

    /// Why some objects may lack a label; none where all have all.
    pub fn unfinished(&self) -> Option<String> {
        lock(&self.0).unfinished()
    }

    /// Number of labelled objects. While it grows, objects are still written without labels.
    pub fn repaired(&self) -> u64 {
        lock(&self.0).repaired
    }

    pub(super) fn repair(&self) {
        lock(&self.0).repaired += 1;
    }

    /// Reports whether labelling at admission works.
    pub(super) fn at_once(&self, set_up: Result<(), String>) {
        lock(&self.0).at_once = Some(set_up);
    }

    fn update(&self, kind: &str, by: u64, change: impl FnOnce(&mut Pass)) {
        let mut state = lock(&self.0);
        if let Some(pass) = state.kinds.get_mut(kind).filter(|pass| pass.by == by) {
            change(pass);
        }
    }
}

impl State {
    fn unfinished(&self) -> Option<String> {
        let wrong = match (&self.list, &self.at_once) {
            (Some(why), _) => Some(format!("not all that is listed can be labelled: {why}")),
            (None, Some(Err(why))) => Some(format!("what is written is not labelled at once: {why}")),
            (None, None) => Some("it has only begun".to_owned()),
            (None, Some(Ok(()))) => None,
        };
        let mut missing = self.named.iter().flat_map(|named| named.missing.values());
        let wrong = wrong.or_else(|| Some(format!("the manager may not {}", missing.next()?.text())));
        let names = || self.kinds.keys().cloned().collect::<Vec<_>>().join(", ");
        let left = || (!self.kinds.is_empty()).then(|| format!("not gone through yet: {}", names()));
        wrong.or_else(|| self.kinds.iter().find_map(|(kind, pass)| pass.why(kind))).or_else(left)
    }

    /// Why objects of these kinds may lack labels. Where all had them once, a kind that is gone through again counts as
    /// labelled until an object is found that lacks one.
    fn gap(&self, kinds: &RootKinds, was_established: bool) -> Option<LabelGap> {
        let missing = self.named.iter().flat_map(|named| &named.missing);
        let missing: Vec<MissingRule> =
            missing.filter(|(kind, _)| kinds.contains_key(*kind)).map(|(_, rule)| rule.clone()).collect();
        if !missing.is_empty() {
            return Some(LabelGap::Forbidden(missing));
        }
        let pass = |kind: &String| self.kinds.get(kind);
        if let Some(why) = kinds.keys().find_map(|kind| pass(kind)?.why(kind)) {
            return Some(LabelGap::Failed(why));
        }
        let open: Vec<&str> =
            kinds.keys().filter(|kind| !self.finished.contains_key(*kind)).map(String::as_str).collect();
        let is_missed = !was_established || kinds.keys().filter_map(pass).any(|pass| pass.labelled);
        (!open.is_empty() && is_missed).then(|| LabelGap::InProgress(unlabelled(&open)))
    }
}

fn unlabelled(kinds: &[&str]) -> String {
    format!("not all objects of these kinds are labelled yet: {}", kinds.join(", "))
}

impl Pass {
    /// Why objects of `kind` cannot be labelled.
    fn why(&self, kind: &str) -> Option<String> {
        let unseen = self.unseen.as_ref().map(|why| format!("cannot be seen: {why}"));
        let why = unseen
            .or_else(|| Some(format!("cannot all be labelled, and are tried again: {}", self.failed.as_ref()?)))?;
        Some(format!("the objects of {kind} {why}"))
    }
}

impl ListProgress {
    pub(super) fn new(gauge: &Gauge, progress: &Progress) -> Self {
        Self { gauge: gauge.clone(), progress: progress.clone() }
    }

    /// Reports a problem, or none. Returns whether it is a new one.
    pub(super) fn report(&self, why: Option<String>) -> bool {
        let mut state = lock(&self.progress.0);
        match (&state.list, &why) {
            (None, Some(_)) => drop(self.gauge.inc()),
            (Some(_), None) => drop(self.gauge.dec()),
            _ => {}
        }
        let new = why.is_some() && state.list != why;
        state.list = why;
        new
    }
}

impl Drop for ListProgress {
    fn drop(&mut self) {
        self.report(None);
    }
}

impl KindProgress {
    pub(super) fn new(gauge: &Gauge, progress: &Progress, kind: &str) -> Self {
        let (gauge, progress, kind) = (gauge.clone(), progress.clone(), kind.to_owned());
        let by = {
            let mut state = lock(&progress.0);
            state.begun += 1;
            state.finished.remove(&kind);
            state.begun
        };
        let mut this = Self { gauge, progress, kind, by, is_set: false };
        this.set(true);
        this
    }

    /// Returns whether that changed.
    pub(super) fn set(&mut self, unfinished: bool) -> bool {
        if unfinished == self.is_set {
            return false;
        }
        self.is_set = unfinished;
        let mut state = lock(&self.progress.0);
        if unfinished {
            self.gauge.inc();
            // A newer pass replaces an older one that still runs.
            if state.kinds.get(&self.kind).is_none_or(|pass| pass.by < self.by) {
                let pass = Pass { by: self.by, ..Pass::default() };
                state.kinds.insert(self.kind.clone(), pass);
            }
            if state.finished.get(&self.kind) == Some(&self.by) {
                state.finished.remove(&self.kind);
            }
        } else {
            self.gauge.dec();
            if state.kinds.get(&self.kind).is_some_and(|pass| pass.by == self.by) {
                state.kinds.remove(&self.kind);
                state.finished.insert(self.kind.clone(), self.by);
            }
        }
        true
    }

    /// An object without an owner was labelled.
    pub(super) fn labelled(&self) {
        self.progress.update(&self.kind, self.by, |pass| pass.labelled = true);
    }

    /// An object could not be labelled. The first reason is kept.
    pub(super) fn failed(&mut self, why: &str) {
        self.set(true);
        self.progress.update(&self.kind, self.by, |pass| {
            pass.failed.get_or_insert_with(|| why.to_owned());
        });
    }

    /// The kind cannot be watched, or can be again. The first reason is kept.
    pub(super) fn unseen(&mut self, why: Option<&str>) {
        if why.is_some() {
            self.set(true);
        }
        self.progress.update(&self.kind, self.by, |pass| match why {
            Some(why) => drop(pass.unseen.get_or_insert_with(|| why.to_owned())),
            None => pass.unseen = None,
        });
    }

    /// Why objects of this kind cannot be labelled.
    pub(super) fn why(&self) -> Option<String> {
        let state = lock(&self.progress.0);
        state.kinds.get(&self.kind)?.why(&self.kind)
    }
}

impl Drop for KindProgress {
    /// The kind is neither unfinished nor finished any more.
    fn drop(&mut self) {
        if self.is_set {
            self.gauge.dec();
        }
        let mut state = lock(&self.progress.0);
        if state.kinds.get(&self.kind).is_some_and(|pass| pass.by == self.by) {
            state.kinds.remove(&self.kind);
        }
        if state.finished.get(&self.kind) == Some(&self.by) {
            state.finished.remove(&self.kind);
        }
    }
}

#[cfg(test)]
mod tests;
