//! What a scenario is made of: pods, goals, a fence, and a bug.

use ctrlmesh_common::handover::Desired;
use ctrlmesh_common::ownership::UNSHARDED;
use ctrlmesh_common::slots::Slot;

/// The owners. A number stands for one in all that is hashed.
pub(crate) const OWNERS: [&str; 3] = ["op-a", "op-b", UNSHARDED];

/// Slot and namespace. The second is the one that can be pinned: the first two are of one slot.
pub(crate) const OBJECTS: [(i64, Option<&str>); 3] = [(9, Some("ctrlmesh")), (9, Some("shop")), (16, None)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    /// The API server and the proxies.
    Server,
    /// The proxies alone.
    Proxy,
}

/// A mistake that is made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    None,
    /// What is revoked is granted whatever is shown.
    GrantBeforeProof,
    /// A proxy acknowledges while a write is in flight.
    AcknowledgeBeforeDrain,
    /// An acknowledgement or probe of any epoch counts.
    OlderProof,
    /// One of the API servers is not asked.
    OneServer,
    /// A pod has its new owner before its move is proved.
    PodBeforeProof,
    /// A pin is entered without being revoked.
    PinBeforeProof,
    /// A proxy that is not heard of counts as lapsed at once.
    SilenceIsLapse,
    /// A proxy forgets its epoch when it restarts.
    ForgetfulProxy,
    /// A manager that begins to lead confirms policies although it has not read the table.
    StaleConfirmation,
    /// A manager confirms policies although another leads.
    FollowerConfirms,
    /// The leader confirms any policy of a pod that it counts as lapsed.
    LapsedConfirmation,
    /// A table is written whatever the version is by then.
    AnyVersion,
    /// A proxy takes an older policy for a newer one.
    OlderPolicy,
}

/// A pod of the operator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pod {
    pub(crate) uid: &'static str,
    /// Whether its requests go through a proxy. A pod with a shard that has none has slipped past it.
    pub(crate) has_proxy: bool,
}

/// What the managers want at a time.
#[derive(Clone, Debug)]
pub(crate) struct Goal {
    /// The owners of the slots 9 and 16.
    pub(crate) slots: [&'static str; 2],
    /// The owner of the namespace `shop`, if it is pinned.
    pub(crate) pin: Option<&'static str>,
    /// The owner of each pod, if it is to have one.
    pub(crate) pods: &'static [Option<&'static str>],
}

#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) fence: Fence,
    pub(crate) bug: Bug,
    pub(crate) pods: &'static [Pod],
    /// The first is reached when the model starts.
    pub(crate) goals: Vec<Goal>,
    /// The objects that pods write.
    pub(crate) written: &'static [usize],
    /// No further table is written.
    pub(crate) tables: u8,
}

impl Setup {
    pub(crate) fn with(&self, bug: Bug) -> Self {
        Self { bug, ..self.clone() }
    }

    /// What a manager wants that knows which pods have ended.
    pub(crate) fn desired(&self, goal: u8, ended: &[bool], epoch: u64) -> Desired {
        let Goal { slots, pin, pods } = &self.goals[usize::from(goal)];
        let numbers = [9, 16].map(|number| Slot::try_from(number).expect("a slot"));
        let live = self.pods.iter().zip(*pods).zip(ended).filter(|(_, ended)| !**ended);
        Desired {
            slots: numbers.into_iter().zip(slots.map(str::to_owned)).collect(),
            namespaces: pin.iter().map(|owner| ("shop".to_owned(), (*owner).to_owned())).collect(),
            pods: [].into(),
            pod_uids: live.filter_map(|((pod, owner), _)| Some((pod.uid.to_owned(), (*owner)?.to_owned()))).collect(),
            epoch,
            taken_up: false,
        }
    }
}
