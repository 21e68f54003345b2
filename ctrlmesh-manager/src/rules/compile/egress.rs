//! Compiles what CircuitBreakers and FaultInjections say of other servers than the API server into the egress rules and
//! faults of a pod.

use std::collections::BTreeSet;

use ctrlmesh_common::policy::egress::MAX_PORTS;
use ctrlmesh_common::policy::fault::MAX_REGEXES;
use ctrlmesh_common::policy::{Egress, Fault};

use super::Trouble;
use crate::rules::breaker::{Access, Breaker};
use crate::rules::injection::Injection;
use crate::rules::pod::Member;
use crate::rules::pod_selection::PodSelection;

/// What a pod's breakers and injections say of other servers, as much as has room.
#[derive(Debug, Default)]
pub(super) struct PodAccess<'a> {
    of_breakers: Vec<&'a Access>,
    injections: Vec<(&'a Injection, FaultScope)>,
    ports: BTreeSet<u16>,
    left_out: Vec<LeftOut<'a>>,
}

/// Which requests meet the faults of an injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultScope {
    All,
    /// Only those to the API server.
    ApiServer,
}

/// Rules that do not hold for the pod.
#[derive(Debug)]
struct LeftOut<'a> {
    of: &'a PodSelection,
    rules: &'static str,
    limit: String,
}

impl<'a> PodAccess<'a> {
    /// Takes the breakers of a pod by name, and then its injections. Where the proxy sees nothing that goes to other
    /// servers, there is no such rule.
    pub(super) fn choose(
        breakers: impl Iterator<Item = &'a Breaker>,
        injections: impl Iterator<Item = &'a Injection>,
        sees_other_servers: bool,
    ) -> Self {
        let mut of_pod = Self::default();
        of_pod.take_breakers(breakers.filter(|one| sees_other_servers && !one.access.ports.is_empty()));
        for injection in injections {
            let scope = if sees_other_servers { of_pod.take_ports(injection) } else { FaultScope::ApiServer };
            of_pod.injections.push((injection, scope));
        }
        of_pod
    }

    fn take_breakers(&mut self, breakers: impl Iterator<Item = &'a Breaker>) {
        let mut regexes = 0;
        for Breaker { selection, access, .. } in breakers {
            let mut leave_out = |limit| {
                self.left_out.push(LeftOut { of: selection, rules: "trafficInterceptRules and restRules", limit });
            };
            let ports = &self.ports | &access.ports;
            if ports.len() > MAX_PORTS {
                leave_out(port_limit());
            } else if regexes + access.regexes > MAX_REGEXES {
                leave_out(format!("all CircuitBreakers of a pod may have {MAX_REGEXES} regular expressions"));
            } else {
                self.ports = ports;
                regexes += access.regexes;
                self.of_breakers.push(access);
            }
        }
    }

    fn take_ports(&mut self, injection: &'a Injection) -> FaultScope {
        let ports = &self.ports | &injection.ports;
        if ports.len() > MAX_PORTS {
            let rules = "faults of requests to other servers";
            self.left_out.push(LeftOut { of: &injection.selection, rules, limit: port_limit() });
            return FaultScope::ApiServer;
        }
        self.ports = ports;
        FaultScope::All
    }

    /// `None` where nothing of other servers is looked at.
    pub(super) fn egress(&self) -> Option<Egress> {
        let access = self.of_breakers.iter().flat_map(|access| &access.rules).cloned().collect();
        (!self.ports.is_empty()).then(|| Egress { ports: self.ports.iter().copied().collect(), access })
    }

    /// The faults of the injections.
    pub(super) fn faults(&self) -> Vec<Fault> {
        let of = |(injection, scope): &(&'a Injection, FaultScope)| {
            let (faults, scope) = (&injection.faults, *scope);
            faults.iter().filter_map(move |fault| match scope {
                FaultScope::All => Some(fault.clone()),
                FaultScope::ApiServer => fault.on_api_server(),
            })
        };
        self.injections.iter().flat_map(of).collect()
    }

    /// What has no room.
    pub(super) fn troubles(&self, pod: &Member) -> impl Iterator<Item = Trouble> {
        self.left_out.iter().map(|LeftOut { of, rules, limit }| Trouble {
            object: of.object(),
            configs: Vec::new(),
            message: format!("its {rules} do not hold for Pod {}: {limit}", pod.name),
        })
    }
}

fn port_limit() -> String {
    format!("all CircuitBreakers and FaultInjections of a pod may name {MAX_PORTS} ports")
}

#[cfg(test)]
mod tests;
