//! An operator whose ownership moves, step by step.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::handover::{Evidence, PodEvidence, Server};
use ctrlmesh_common::names::label;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_common::slots::Slot;

use super::ROOT;
use crate::rules::balance::RootLoads;
use crate::rules::compile::tests::{pod, root, status};
use crate::rules::compile::{Compiled, Record, World, compile};
use crate::rules::evidence::{self, RootEvidence};
use crate::rules::manifest::Manifests;
use crate::rules::pod::{Admitted, Member};
use crate::rules::shard::Labelling;
use crate::rules::shared::shared;

/// An operator, and a manager.
pub(super) struct Bed {
    pub(super) root: String,
    /// As the leader wrote it last.
    pub(super) status: String,
    /// `status.rollout`, as JSON; empty: there is none.
    pub(super) rollout: String,
    pub(super) enrolled: Vec<Member>,
    pub(super) unenrolled: Vec<Member>,
    pub(super) evidence: Evidence,
    /// Which epoch `evidence` is about; `None`: of the present table.
    pub(super) about: Option<u64>,
    pub(super) before: Compiled,
    pub(super) table: Ownership,
    /// Whether the manager leads.
    pub(super) leads: bool,
    /// UIDs of pods that have come back only just.
    pub(super) held_back: BTreeSet<String>,
    pub(super) waiting: BTreeSet<String>,
    /// Of the root, if it is divided by load.
    pub(super) loads: RootLoads,
}

impl Bed {
    pub(super) fn new(rule: &str) -> Self {
        Self {
            root: root(rule),
            status: String::new(),
            rollout: String::new(),
            enrolled: Vec::new(),
            unenrolled: Vec::new(),
            evidence: evidence::nothing(),
            about: None,
            before: Compiled::default(),
            table: Ownership::default(),
            leads: true,
            held_back: BTreeSet::new(),
            waiting: BTreeSet::new(),
            loads: RootLoads::new(),
        }
    }

    /// What follows from the present state.
    pub(super) fn compiled(&self) -> Compiled {
        let mut manifests = Manifests::default();
        let status = match (self.status.as_str(), self.rollout.as_str()) {
            (status, "") => status.to_owned(),
            ("", rollout) => format!("status: {{rollout: {rollout}}}\n"),
            (status, rollout) => status.replacen("status: {", &format!("status: {{rollout: {rollout}, "), 1),
        };
        manifests.read(&(self.root.clone() + &status)).unwrap();
        let revoked_epoch = self.table.revoked.as_ref().map_or(0, |revoked| revoked.epoch);
        let revoked_epoch = self.about.unwrap_or(revoked_epoch);
        let proved = RootEvidence { revoked_epoch, evidence: self.evidence.clone(), ..RootEvidence::default() };
        let world = World {
            configs: &manifests.configs,
            breakers: &manifests.breakers,
            injections: &manifests.injections,
            members: &shared(&self.enrolled),
            namespaces: &["shop".to_owned(), "pay".to_owned()].into(),
            first_ordinals: &BTreeMap::new(),
            labelling: &Labelling::default(),
            unenrolled: &[("ops".to_owned(), shared(&self.unenrolled))].into(),
            evidence: &[(ROOT.to_owned(), proved)].into(),
            leads: self.leads,
            held_back: &self.held_back,
            waiting: &self.waiting,
            loads: &self.loads,
        };
        compile(world, &self.before.policies)
    }

    /// The leader writes what follows, once.
    pub(super) fn step(&mut self) -> Record {
        let compiled = self.compiled();
        let record = compiled.operators[ROOT].clone();
        self.status = status(&compiled, ROOT);
        self.table = record.ownership.clone().unwrap();
        self.before = compiled;
        record
    }

    /// The leader writes until nothing follows.
    pub(super) fn settle(&mut self) -> Record {
        self.settle_with(Self::proves)
    }

    /// The same where the API server does not fence, and these pods have ended.
    pub(super) fn settle_by_proxies(&mut self, ended: &[&str]) -> Record {
        self.settle_with(|bed| {
            bed.proves();
            bed.evidence.server = Server::None;
            let gone = PodEvidence { gone: true, ..PodEvidence::default() };
            bed.evidence.pods.extend(ended.iter().map(|uid| ((*uid).to_owned(), gone)));
        })
    }

    pub(super) fn settle_with(&mut self, prove: impl Fn(&mut Self)) -> Record {
        for _ in 0..20 {
            prove(self);
            let before = self.table.clone();
            let record = self.step();
            if self.table == before {
                return record;
            }
        }
        panic!("it never ends: {:?}", self.table);
    }

    /// Everything is shown for the present table, but that pods are gone.
    pub(super) fn proves(&mut self) {
        let epoch = self.table.epoch;
        let pods = evidence::uids(&self.table);
        let acknowledged = PodEvidence { acknowledged: Some(epoch), ..PodEvidence::default() };
        let pods = pods.map(|uid| (uid.clone(), acknowledged)).collect();
        self.evidence = Evidence { server: Server::Enforces(epoch), pods };
    }

    pub(super) fn owners(&self) -> BTreeSet<&str> {
        self.table.slots.values().map(String::as_str).collect()
    }

    /// The pods that see the objects of `slot`, by the written policies.
    pub(super) fn see(&self, slot: u8, namespace: &str) -> Vec<String> {
        let labels: Labels =
            [(label::SHARDING_HASH.to_owned(), slot.to_string()), (label::NAMESPACE.to_owned(), namespace.to_owned())]
                .into();
        let sees = |policy: &ctrlmesh_common::policy::Policy| policy.limits[0].selector.matches(&labels);
        let told = self.before.policies.iter().filter(|(_, told)| sees(&told.policy));
        told.map(|(pod, _)| pod.name.clone()).collect()
    }
}

pub(super) fn enrolled(name: &str) -> Member {
    Member { uid: format!("uid-{name}"), node: Some("n".to_owned()), ready: true, ..pod(name, &[]) }
}

pub(super) fn plain(name: &str) -> Member {
    let mut pod = Member { uid: format!("plain-{name}"), admitted: Admitted::Bypassed, ..enrolled(name) };
    pod.labels.remove(label::ENABLE_PROXY);
    pod
}

pub(super) fn slot(number: i64) -> Slot {
    number.try_into().unwrap()
}
