//! Checks the clocks of this machine and of the nodes against that of the API server.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;

use super::super::finding::{Finding, Group, listed};
use super::super::node::is_ready;
use super::super::pages;
use super::super::snapshot::{Server, Snapshot};
use crate::text::duration;

/// Differences up to this are of no account, in seconds.
const ALLOWED: i64 = 5;

/// For how long the Lease of a node is valid unless the kubelet's `nodeLeaseDurationSeconds` says otherwise.
const LEASE_SECONDS: i32 = 40;

/// A kubelet renews its Lease so many times while it is valid.
const RENEWALS: i64 = 4;

/// Until this long after a renewal, in seconds, only the network or a busy kubelet is slow.
const SLOW: i64 = 15;

pub(super) fn check(snapshot: &Snapshot) -> Vec<Finding> {
    let server = &snapshot.server;
    let Some(date) = server.date else {
        let advice = "check again at the API server itself: what stands before it leaves the header out";
        return vec![Group::Clocks.skipped("this machine", "the API server's answer has no header Date", advice)];
    };
    let mut findings = vec![own(server, date)];
    // The header is of when the server answered. The Leases were read after it.
    let nodes = snapshot.nodes.as_deref().unwrap_or_default();
    findings.extend(Group::Clocks.of("nodes", &snapshot.node_leases, |leases| vec![of_nodes(leases, nodes, date)]));
    findings
}

/// The header is in whole seconds, and was written between question and answer.
fn own(server: &Server, date: Timestamp) -> Finding {
    let seconds = |from: Timestamp, to: Timestamp| to.duration_since(from).as_secs();
    let (least, most) = (seconds(server.answered, date), seconds(server.asked, date) + 1);
    let (behind, ahead) = (least.max(0), (-most).max(0));
    let off = behind.max(ahead);
    if off <= ALLOWED {
        return Group::Clocks.ok("this machine", format!("as the API server's, within {ALLOWED} s"));
    }
    let side = if behind > 0 { "behind" } else { "ahead of" };
    let found = format!("this machine is {} {side} the API server", duration(off.unsigned_abs()));
    let advice = format!("synchronize both with NTP, or take the ages shown here with care: {}", pages::CLOCKS);
    Group::Clocks.warning("this machine", found, advice)
}

fn of_nodes(leases: &[Lease], nodes: &[Node], date: Timestamp) -> Finding {
    let off: Vec<String> = leases.iter().filter_map(|lease| differs(lease, nodes, date)).collect();
    if off.is_empty() {
        let found = match leases.len() {
            0 => "no node has a Lease to compare".to_owned(),
            1 => "the clock of 1 node is as the API server's, as far as its Lease says".to_owned(),
            nodes => format!("the clocks of {nodes} nodes are as the API server's, as far as their Leases say"),
        };
        return Group::Clocks.ok("nodes", found);
    }
    let advice = format!("synchronize these nodes with NTP: {}", pages::CLOCKS);
    Group::Clocks.warning("nodes", listed(&off), advice)
}

/// Says how a node's clock differs. `None`: it does not, as far as its Lease says.
fn differs(lease: &Lease, nodes: &[Node], date: Timestamp) -> Option<String> {
    let spec = lease.spec.as_ref()?;
    let renewed = spec.renew_time.as_ref()?.0;
    let renewal = renewal(spec);
    let name = lease.name_any();
    let age = date.duration_since(renewed).as_secs();
    // The Leases may have been renewed between both answers.
    if age < -ALLOWED - SLOW {
        return Some(format!("{name} is about {} ahead", duration(age.unsigned_abs())));
    }
    // A node that is away renews nothing.
    let is_ready = nodes.iter().find(|node| node.name_any() == name).is_some_and(is_ready);
    (is_ready && age > renewal + SLOW)
        .then(|| format!("{name} may be {} behind", duration((age - renewal).unsigned_abs())))
}

/// How long after the last renewal the next one comes, in seconds.
fn renewal(spec: &LeaseSpec) -> i64 {
    i64::from(spec.lease_duration_seconds.filter(|seconds| *seconds > 0).unwrap_or(LEASE_SECONDS)) / RENEWALS
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::super::super::finding::State;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    /// The snapshot where the API server's header differs from the local clock by so many seconds.
    fn header(seconds: i64) -> Snapshot {
        let mut snapshot = samples::snapshot();
        snapshot.server.date = Some(samples::now() + SignedDuration::from_secs(seconds));
        snapshot
    }

    #[test]
    fn a_clock_within_five_seconds_is_good() {
        for seconds in [-6, -1, 0, 1, 5] {
            assert_eq!(check(&header(seconds))[0].state, State::Ok, "{seconds}");
        }
    }

    #[test]
    fn a_clock_that_is_behind_or_ahead_is_warned_of() {
        for (seconds, says) in [
            (91, "this machine is 1m30s behind the API server"),
            (-91, "this machine is 1m30s ahead of the API server"),
        ] {
            let found = check(&header(seconds)).remove(0);
            assert_eq!((found.state, found.message.as_str()), (State::Warning, says));
        }
    }

    #[test]
    fn a_node_whose_lease_does_not_fit_is_named() {
        for (seconds, says) in [(60, "node-1 is about 1m ahead"), (-40, "node-1 may be 30s behind")] {
            let mut snapshot = samples::snapshot();
            let lease = snapshot.node_leases.as_mut().unwrap()[0].spec.as_mut().unwrap();
            lease.renew_time.as_mut().unwrap().0 = samples::now() + SignedDuration::from_secs(seconds);
            let found = check(&snapshot).remove(1);
            assert_eq!((found.state, found.message.as_str()), (State::Warning, says));
        }
        assert_eq!(check(&samples::snapshot())[1].state, State::Ok);
    }

    #[test]
    fn a_lease_is_renewed_each_quarter_of_its_duration() {
        for (duration, age, expected) in [
            (None, 26, State::Warning),
            (Some(0), 26, State::Warning),
            (Some(40), 25, State::Ok),
            (Some(40), 26, State::Warning),
            (Some(400), 115, State::Ok),
            (Some(400), 116, State::Warning),
        ] {
            let mut snapshot = samples::snapshot();
            let lease = snapshot.node_leases.as_mut().unwrap()[0].spec.as_mut().unwrap();
            lease.lease_duration_seconds = duration;
            lease.renew_time.as_mut().unwrap().0 = samples::now() - SignedDuration::from_secs(age);
            assert_eq!(check(&snapshot)[1].state, expected, "{duration:?} {age}");
        }
    }

    #[test]
    fn without_header_or_right_clocks_are_skipped() {
        let mut snapshot = samples::snapshot();
        snapshot.node_leases = Err(Unanswered::Forbidden { right: "list leases".to_owned() });
        assert_eq!(check(&snapshot)[1].state, State::Skipped);
        snapshot.server.date = None;
        assert_eq!(check(&snapshot)[0].state, State::Skipped);
    }
}
