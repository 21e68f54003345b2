//! Turns what was read of a cluster into results, in the order in which they are printed.
//!
//! Pure.

mod api_server;
mod nodes;
mod node_proxies;
mod definitions;
mod managers;
mod webhooks;
mod roles;
mod rights;
mod roots;
mod versions;
mod authorities;
mod clocks;

use std::collections::BTreeSet;

use super::cgroups::{self, Cgroups};
use super::finding::{Finding, Group};
use super::pages;
use super::snapshot::{Installed, Snapshot};
pub(super) use webhooks::asks_about;

/// The checks of a cluster that has no ctrlmesh yet.
pub(super) fn before(snapshot: &Snapshot, cgroups: &Cgroups) -> Vec<Finding> {
    let mut findings = api_server::check(snapshot);
    findings.extend(Group::Nodes.of("nodes", &snapshot.nodes, |nodes| nodes::check(nodes, &BTreeSet::new())));
    findings.extend(Group::Nodes.of(cgroups::CHECK, &snapshot.nodes, |_nodes| vec![cgroups::check(cgroups)]));
    findings.extend(rights::check(snapshot));
    findings.extend(clocks::check(snapshot));
    findings
}

/// The checks of an installation.
pub(super) fn after(snapshot: &Snapshot, installed: &Installed) -> Vec<Finding> {
    let served = node_proxies::served(installed);
    let mut findings = api_server::check(snapshot);
    findings.extend(Group::Nodes.of("nodes", &snapshot.nodes, |nodes| nodes::check(nodes, &served)));
    findings.extend(rights::check(snapshot));
    findings.extend(clocks::check(snapshot));
    if is_absent(installed) {
        let advice = format!("check with `--pre`, and install it, `kubectl apply -k deploy/`: {}", pages::INSTALL);
        findings.push(Group::Installation.failed("ctrlmesh", "it is not installed", advice));
        return findings;
    }
    findings.extend(node_proxies::check(snapshot, installed));
    findings.extend(definitions::check(installed, versions::is_own(installed)));
    findings.extend(managers::check(snapshot, installed));
    findings.extend(roles::check(&installed.roles));
    findings.extend(webhooks::check(installed));
    findings.extend(roots::check(snapshot, installed));
    findings.extend(versions::check(installed));
    findings.extend(authorities::check(snapshot, installed));
    findings
}

/// Whether there is nothing of an installation.
fn is_absent(installed: &Installed) -> bool {
    let no_kinds = installed.definitions.values().all(|answer| matches!(answer, Ok(None)));
    no_kinds && matches!(installed.deployment, Ok(None)) && matches!(installed.daemon_set, Ok(None))
}
