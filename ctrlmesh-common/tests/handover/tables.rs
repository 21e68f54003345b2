//! The tables of a model, each once, and what the model asks of them.

use std::collections::HashMap;

use ctrlmesh_common::handover::{self, Evidence};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::{NamespaceHash, Slot};

use crate::setup::{Bug, OBJECTS, OWNERS, Setup};

/// Stands for a table: a state has numbers only, so that it is hashed soon.
pub(crate) type Id = u16;

/// What a table says.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Facts {
    pub(crate) epoch: u8,
    /// Of the revocation; 0: nothing is revoked.
    pub(crate) revoked: u8,
    owners: [Option<u8>; OBJECTS.len()],
    pods: [Option<u8>; 4],
}

/// What decides a step, beside the table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Question {
    pub(crate) table: Id,
    pub(crate) goal: u8,
    pub(crate) ended: Vec<bool>,
    /// Whether all fence, and from which epoch on.
    pub(crate) server: Option<u8>,
    /// Of each pod: the epoch that is acknowledged, whether it is gone, whether it has lapsed.
    pub(crate) pods: Vec<(Option<u8>, bool, bool)>,
}

#[derive(Default)]
pub(crate) struct Tables {
    all: Vec<(Ownership, Facts)>,
    ids: HashMap<String, Id>,
    answers: HashMap<Question, Id>,
}

impl Facts {
    /// The owner for which `pod` may write `object`.
    pub(crate) fn lets(&self, pod: usize, object: usize) -> Option<u8> {
        self.owners[object].filter(|owner| self.pods[pod] == Some(*owner))
    }

    pub(crate) fn owner(&self, object: usize) -> Option<u8> {
        self.owners[object]
    }
}

impl Tables {
    pub(crate) fn facts(&self, id: Id) -> Facts {
        self.all[usize::from(id)].1
    }

    pub(crate) fn table(&self, id: Id) -> &Ownership {
        &self.all[usize::from(id)].0
    }

    /// The table that the first goal makes of none.
    pub(crate) fn first(&mut self, setup: &Setup) -> Id {
        let desired = setup.desired(0, &vec![false; setup.pods.len()], 0);
        let step = handover::next(&Ownership::default(), &desired, NamespaceHash::Fnv1a, &Evidence::default());
        self.id(step.table, setup)
    }

    pub(crate) fn next(&mut self, question: Question, setup: &Setup) -> Id {
        if let Some(known) = self.answers.get(&question) {
            return *known;
        }
        let current = self.table(question.table).clone();
        let desired = setup.desired(question.goal, &question.ended, 0);
        let evidence = evidence(&question, setup);
        let mut table = handover::next(&current, &desired, NamespaceHash::Fnv1a, &evidence).table;
        if let Some(revoked) = &mut table.revoked {
            if setup.bug == Bug::PodBeforeProof {
                let early = std::mem::take(&mut revoked.pod_uids);
                let granted = early.into_keys().filter_map(|uid| desired.pod_uids.get_key_value(&uid));
                table.pod_uids.extend(granted.map(|(uid, owner)| (uid.clone(), owner.clone())));
            }
            if setup.bug == Bug::PinBeforeProof {
                revoked.namespaces.clear();
                table.namespaces.clone_from(&desired.namespaces);
            }
        }
        let id = self.id(table, setup);
        self.answers.insert(question, id);
        id
    }

    fn id(&mut self, table: Ownership, setup: &Setup) -> Id {
        let text = format!("{table:?}");
        let next = Id::try_from(self.all.len()).expect("few tables");
        *self.ids.entry(text).or_insert_with(|| {
            let facts = facts(&table, setup);
            self.all.push((table, facts));
            next
        })
    }
}

fn facts(table: &Ownership, setup: &Setup) -> Facts {
    let number = |owner: &str| OWNERS.iter().zip(0..).find(|(one, _)| **one == owner).map(|(_, number)| number);
    let owners = OBJECTS.map(|(slot, namespace)| {
        let slot = Slot::try_from(slot).expect("a slot");
        table.owner(slot, namespace).and_then(number)
    });
    let mut pods = [None; 4];
    for (pod, owner) in setup.pods.iter().zip(&mut pods) {
        *owner = table.pod_uids.get(pod.uid).and_then(|owner| number(owner));
    }
    let small = |epoch| u8::try_from(epoch).expect("few epochs");
    let revoked = table.revoked.as_ref().map_or(0, |revoked| revoked.epoch);
    Facts { epoch: small(table.epoch), revoked: small(revoked), owners, pods }
}

fn evidence(question: &Question, setup: &Setup) -> Evidence {
    let any = |epoch: u8| if setup.bug == Bug::OlderProof && epoch > 0 { u64::MAX } else { u64::from(epoch) };
    let all = setup.bug == Bug::GrantBeforeProof;
    let pods = setup.pods.iter().zip(&question.pods).map(|(pod, (acknowledged, gone, lapsed))| {
        let shown = handover::PodEvidence {
            acknowledged: acknowledged.map(any),
            gone: *gone || all && !pod.has_proxy,
            lapsed: *lapsed || all,
        };
        (pod.uid.to_owned(), shown)
    });
    let server = question.server.map(|epoch| if all { u64::MAX } else { any(epoch) });
    Evidence { server: server.map_or(handover::Server::None, handover::Server::Enforces), pods: pods.collect() }
}
