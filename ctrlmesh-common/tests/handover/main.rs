//! Checks the protocol of handover as a model: every order of events within a bound, and mistakes made on purpose.
#![allow(clippy::expect_used, reason = "a test that cannot go on panics")]

mod invariants;
mod liveness;
mod model;
mod setup;
mod tables;

use ctrlmesh_common::ownership::UNSHARDED;
use stateright::{Checker as _, HasDiscoveries, Model as _};

use model::Handover;
use setup::{Bug, Fence, Goal, Pod, Setup};

const A: &str = "op-a";
const B: &str = "op-b";

const A_AND_BYPASS: &[Pod] = &[Pod { uid: "pa", has_proxy: true }, Pod { uid: "pb", has_proxy: false }];
const TWO_PROXIES: &[Pod] = &[Pod { uid: "pa", has_proxy: true }, Pod { uid: "pb", has_proxy: true }];
const OLD_AND_NEW: &[Pod] = &[Pod { uid: "old", has_proxy: false }, Pod { uid: "pa", has_proxy: true }];

const OWN: &[Option<&str>] = &[Some(A), Some(B)];

fn goal(slots: [&'static str; 2], pin: Option<&'static str>, pods: &'static [Option<&'static str>]) -> Goal {
    Goal { slots, pin, pods }
}

fn setup(fence: Fence, written: &'static [usize], goals: impl IntoIterator<Item = Goal>) -> Setup {
    // With two proxies and a clock there is more to check for each table.
    let (pods, tables) = if fence == Fence::Server { (A_AND_BYPASS, 5) } else { (TWO_PROXIES, 4) };
    Setup { fence, bug: Bug::None, pods, goals: goals.into_iter().collect(), written, tables }
}

/// Slot 9 goes from a to b, and back.
fn a_slot_moves(fence: Fence) -> Setup {
    setup(fence, &[0], [goal([A, B], None, OWN), goal([B, B], None, OWN), goal([A, B], None, OWN)])
}

/// A namespace of slot 9 is pinned to b, and is not any more.
fn a_pin_comes_and_goes(fence: Fence) -> Setup {
    setup(fence, &[1], [goal([A, B], None, OWN), goal([A, B], Some(B), OWN), goal([A, B], None, OWN)])
}

/// The pod of a becomes one of b, and slot 9 goes to b.
fn a_pod_moves(fence: Fence) -> Setup {
    setup(fence, &[0, 2], [goal([A, B], None, OWN), goal([B, B], None, &[Some(B), Some(B)])])
}

/// The pod of a is replaced by a new one, and slot 9 goes to b.
fn a_pod_is_replaced(fence: Fence) -> Setup {
    let goals = [goal([A, B], None, &[Some(A), None]), goal([A, B], None, &[Some(A), Some(A)])];
    let goals = goals.into_iter().chain([goal([B, B], None, &[Some(A), Some(A)])]);
    Setup { pods: TWO_PROXIES, ..setup(fence, &[0], goals) }
}

/// The workload is not sharded any more. Its old pod, which has no proxy, runs.
fn an_operator_leaves(fence: Fence) -> Setup {
    let before = goal([A, A], None, &[Some(UNSHARDED), Some(A)]);
    let goals = [before, goal([UNSHARDED, UNSHARDED], None, &[Some(UNSHARDED), Some(A)])];
    Setup { pods: OLD_AND_NEW, ..setup(fence, &[0], goals) }
}

/// The workload is enrolled while its old pod runs.
fn an_operator_is_enrolled(fence: Fence) -> Setup {
    let before = goal([UNSHARDED, UNSHARDED], None, &[Some(UNSHARDED), None]);
    let goals = [before, goal([A, A], None, &[Some(UNSHARDED), Some(A)])];
    Setup { pods: OLD_AND_NEW, ..setup(fence, &[0], goals) }
}

#[expect(clippy::print_stdout, reason = "says how much was checked")]
fn check(setup: Setup) {
    let checker = Handover::new(setup).checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_properties();
}

fn finds(setup: &Setup, bug: Bug) {
    let checker = Handover::new(setup.with(bug)).checker().finish_when(HasDiscoveries::AnyFailures);
    let found = checker.spawn_bfs().join().discoveries();
    assert!(found.keys().any(|name| *name != invariants::REACHED), "{bug:?} is not found by {:?}", setup.fence);
}

#[test]
fn a_slot_has_one_writer_where_the_server_fences() {
    check(a_slot_moves(Fence::Server));
}

#[test]
fn a_slot_has_one_writer_where_proxies_fence() {
    check(a_slot_moves(Fence::Proxy));
}

#[test]
fn a_pin_has_one_writer_where_the_server_fences() {
    check(a_pin_comes_and_goes(Fence::Server));
}

#[test]
fn a_pin_has_one_writer_where_proxies_fence() {
    check(a_pin_comes_and_goes(Fence::Proxy));
}

#[test]
fn a_pod_writes_for_one_owner_where_the_server_fences() {
    check(a_pod_moves(Fence::Server));
}

#[test]
fn a_pod_writes_for_one_owner_where_proxies_fence() {
    check(a_pod_moves(Fence::Proxy));
}

#[test]
fn an_enrolment_has_one_writer_where_the_server_fences() {
    check(an_operator_is_enrolled(Fence::Server));
}

#[test]
fn an_enrolment_has_one_writer_where_proxies_fence() {
    check(an_operator_is_enrolled(Fence::Proxy));
}

#[test]
fn leaving_has_one_writer_where_the_server_fences() {
    check(an_operator_leaves(Fence::Server));
}

#[test]
fn a_replaced_pod_has_one_owner_where_the_server_fences() {
    check(a_pod_is_replaced(Fence::Server));
}

#[test]
fn a_replaced_pod_has_one_owner_where_proxies_fence() {
    check(a_pod_is_replaced(Fence::Proxy));
}

#[test]
fn a_grant_before_its_proof_is_found() {
    finds(&a_slot_moves(Fence::Server), Bug::GrantBeforeProof);
    finds(&a_slot_moves(Fence::Proxy), Bug::GrantBeforeProof);
    finds(&an_operator_is_enrolled(Fence::Proxy), Bug::GrantBeforeProof);
}

#[test]
fn an_acknowledgement_before_the_drain_is_found() {
    finds(&a_slot_moves(Fence::Server), Bug::AcknowledgeBeforeDrain);
    finds(&a_slot_moves(Fence::Proxy), Bug::AcknowledgeBeforeDrain);
}

#[test]
fn a_proof_of_an_older_epoch_is_found() {
    finds(&a_slot_moves(Fence::Server), Bug::OlderProof);
    finds(&a_slot_moves(Fence::Proxy), Bug::OlderProof);
}

#[test]
fn an_api_server_that_is_not_asked_is_found() {
    finds(&a_slot_moves(Fence::Server), Bug::OneServer);
}

#[test]
fn a_pod_that_moves_before_its_proof_is_found() {
    finds(&a_pod_moves(Fence::Server), Bug::PodBeforeProof);
    finds(&a_pod_moves(Fence::Proxy), Bug::PodBeforeProof);
}

#[test]
fn a_pin_that_is_not_revoked_first_is_found() {
    finds(&a_pin_comes_and_goes(Fence::Server), Bug::PinBeforeProof);
    finds(&a_pin_comes_and_goes(Fence::Proxy), Bug::PinBeforeProof);
}

#[test]
fn silence_that_counts_as_a_lapse_is_found() {
    finds(&a_slot_moves(Fence::Proxy), Bug::SilenceIsLapse);
}

#[test]
fn a_proxy_that_forgets_its_epoch_is_found() {
    finds(&a_slot_moves(Fence::Proxy), Bug::ForgetfulProxy);
}

#[test]
fn a_manager_that_confirms_what_is_stale_is_found() {
    finds(&a_slot_moves(Fence::Proxy), Bug::StaleConfirmation);
}

#[test]
fn a_manager_that_confirms_while_another_leads_is_found() {
    finds(&a_slot_moves(Fence::Proxy), Bug::FollowerConfirms);
}

#[test]
fn a_leader_that_confirms_what_has_lapsed_is_found() {
    finds(&a_slot_moves(Fence::Proxy), Bug::LapsedConfirmation);
}

#[test]
fn a_write_over_a_newer_table_is_found() {
    finds(&a_slot_moves(Fence::Server), Bug::AnyVersion);
}

#[test]
fn an_older_policy_that_replaces_a_newer_one_is_found() {
    finds(&a_slot_moves(Fence::Proxy), Bug::OlderPolicy);
}
