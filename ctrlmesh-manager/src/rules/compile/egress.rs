//! Compiles what CircuitBreakers say of other servers than the API server into the egress rules of a pod.

use std::collections::BTreeSet;

use ctrlmesh_common::policy::egress::MAX_PORTS;
use ctrlmesh_common::policy::fault::MAX_REGEXES;
use ctrlmesh_common::policy::{Egress, Redirect};

use super::Trouble;
use crate::rules::breaker::{Access, Breaker};
use crate::rules::pod::Member;

/// The rules of a pod's breakers, as many as have room.
#[derive(Debug, Default)]
pub(super) struct PodAccess<'a> {
    of_breakers: Vec<&'a Access>,
    ports: BTreeSet<u16>,
    left_out: Vec<(&'a Breaker, String)>,
}

impl<'a> PodAccess<'a> {
    /// Takes the breakers of a pod by name. Nothing sends connections beside those to the API server to a proxy inside
    /// the pod, so there is no rule for such pods.
    pub(super) fn choose(breakers: impl Iterator<Item = &'a Breaker>, redirect: Redirect) -> Self {
        let mut of_pod = Self::default();
        let mut regexes = 0;
        for breaker in breakers.filter(|one| redirect == Redirect::Node && !one.access.ports.is_empty()) {
            let access = &breaker.access;
            let ports = &of_pod.ports | &access.ports;
            if ports.len() > MAX_PORTS {
                of_pod.left_out.push((breaker, format!("name {MAX_PORTS} ports")));
            } else if regexes + access.regexes > MAX_REGEXES {
                of_pod.left_out.push((breaker, format!("have {MAX_REGEXES} regular expressions")));
            } else {
                of_pod.ports = ports;
                regexes += access.regexes;
                of_pod.of_breakers.push(access);
            }
        }
        of_pod
    }

    /// `None` where no rule holds for the pod.
    pub(super) fn egress(&self) -> Option<Egress> {
        let access = self.of_breakers.iter().flat_map(|access| &access.rules).cloned().collect();
        (!self.of_breakers.is_empty()).then(|| Egress { ports: self.ports.iter().copied().collect(), access })
    }

    /// What has no room.
    pub(super) fn troubles(&self, pod: &Member) -> impl Iterator<Item = Trouble> {
        self.left_out.iter().map(|(breaker, limit)| Trouble {
            object: breaker.selection.object(),
            configs: Vec::new(),
            message: format!(
                "its trafficInterceptRules and restRules do not hold for Pod {}: those of all CircuitBreakers of a pod may {limit}",
                pod.name
            ),
        })
    }
}

#[cfg(test)]
mod tests;
