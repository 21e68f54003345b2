//! Describes a pod to attach, and its entry in the kernel's tables.

use std::path::PathBuf;
use std::time::Duration;

use ctrlmesh_common::kernel::{
    CHECK_HEARTBEAT, CHECK_LISTENER, CHECK_PORT, FAIL_OPEN, GENERATIONS, NATIVE_IPV6, Pod, REPORT,
};

use crate::pins::{self, Slot};
use crate::programs::object::Limits;
use crate::target::Targets;

/// How to open an interceptor.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder of the pins.
    pub pins: PathBuf,
    /// Whose attachments these are; nobody touches another's.
    pub owner: String,
    /// Sizes of tables.
    pub limits: Limits,
}

/// A pod or a container to be attached.
#[derive(Clone, Debug)]
pub struct Attach {
    /// Its cgroup.
    pub cgroup: PathBuf,
    /// Cgroups below it whose connections pass: the proxy's own container.
    pub except: Vec<PathBuf>,
    /// What is redirected.
    pub targets: Targets,
    /// The proxy's port.
    pub port: u16,
    /// Connections that the proxy cannot take pass, rather than fail.
    pub fail_open: bool,
    /// How to know that the proxy listens.
    pub listener: ListenerCheck,
    /// How to know that the proxy does not hang.
    pub heartbeat: Option<Heartbeat>,
    /// Report connections as events.
    pub report: bool,
}

/// How to know that the proxy listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerCheck {
    /// By its socket, given with `Interceptor::listen`: the quickest and surest.
    Held,
    /// By asking the client's network namespace who listens on the port: for a proxy that is somebody else's. Its
    /// socket must be bound to the wildcard address and to no device.
    Port,
    /// Not at all: the client's SYN finds out.
    None,
}

/// How to know that the proxy does not hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// The number of the heartbeat; the slot, if none is given.
    pub number: Option<u32>,
    /// Age at which the last heartbeat no longer counts.
    pub max_age: Duration,
}

impl Options {
    /// At the usual place, with the usual sizes.
    pub fn new(owner: &str) -> Self {
        Self { pins: pins::default_pins(), owner: owner.to_owned(), limits: Limits::default() }
    }
}

impl Attach {
    /// What the kernel's programs read about the pod, with a table in the place of the one before.
    pub(crate) fn entry(&self, slot: Slot, before: &Pod, table: u16) -> Pod {
        let max_age = self.heartbeat.map_or(Duration::ZERO, |beat| beat.max_age);
        Pod {
            max_age_ns: u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX),
            flags: self.flags() | (before.flags & NATIVE_IPV6),
            heartbeat: self.heartbeat.and_then(|beat| beat.number).unwrap_or(slot.index()),
            port: self.port.to_be(),
            ..with_table(before, table)
        }
    }

    fn flags(&self) -> u32 {
        let listener = match self.listener {
            ListenerCheck::Held => CHECK_LISTENER,
            ListenerCheck::Port => CHECK_PORT,
            ListenerCheck::None => 0,
        };
        let set = |flag, on| if on { flag } else { 0 };
        listener
            | set(FAIL_OPEN, self.fail_open)
            | set(CHECK_HEARTBEAT, self.heartbeat.is_some())
            | set(REPORT, self.report)
    }
}

/// The same pod with another table. Connections of the generation before are still explained by its table, older ones
/// by none.
pub(crate) fn with_table(before: &Pod, table: u16) -> Pod {
    let mut pod = *before;
    let former = before.table(before.generation);
    if former == Some(table) {
        return pod;
    }
    pod.tables = Default::default();
    if let Some(former) = former {
        pod.generation = next_generation(before.generation);
        set_table(&mut pod, before.generation, former);
    }
    let generation = pod.generation;
    set_table(&mut pod, generation, table);
    pod
}

/// What is left of a pod whose slot is free: where the generations go on.
pub(crate) fn vacated(before: &Pod) -> Pod {
    Pod { generation: next_generation(before.generation), ..Pod::default() }
}

fn next_generation(generation: u16) -> u16 {
    (generation + 1) % GENERATIONS
}

fn set_table(pod: &mut Pod, generation: u16, table: u16) {
    if let Some(entry) = pod.tables.get_mut(usize::from(generation)) {
        *entry = table;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_without_a_table_gets_one_in_its_own_generation() {
        let pod = with_table(&Pod { generation: 5, ..Pod::default() }, 3);
        assert_eq!((pod.generation, pod.table(5)), (5, Some(3)));
    }

    #[test]
    fn the_same_table_changes_nothing() {
        let pod = with_table(&Pod::default(), 3);
        assert_eq!(with_table(&pod, 3), pod);
    }

    #[test]
    fn a_new_table_begins_a_generation_the_old_is_explained() {
        let pod = with_table(&with_table(&Pod::default(), 3), 4);
        assert_eq!((pod.generation, pod.table(0), pod.table(1)), (1, Some(3), Some(4)));
        let pod = with_table(&pod, 3);
        assert_eq!((pod.table(0), pod.table(1), pod.table(2)), (None, Some(4), Some(3)));
    }

    #[test]
    fn a_reused_slot_explains_nothing_of_the_former_pod() {
        let mut pod = with_table(&Pod::default(), 3);
        for round in 1..40 {
            let generation = pod.generation;
            pod = with_table(&vacated(&pod), 3);
            assert_eq!(pod.generation, round % GENERATIONS);
            assert_eq!(pod.table(generation), None);
        }
    }
}
