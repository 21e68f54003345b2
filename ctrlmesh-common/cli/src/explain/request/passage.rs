//! Follows a request through the proxy of a pod, up to the API server.
//!
//! Pure. The proxy's own code decides and rewrites. What only the proxy itself knows is not guessed.

use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::policy::Policy;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::rules::shared::each;
use ctrlmesh_request::decide::{self, Decision, LockPlan, Plan};
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite;
use ctrlmesh_request::rewrite::status::Status;
use jiff::Timestamp;
use serde::Serialize;

use super::breakers::{self, BreakerRule};
use super::classified::Classified;
use super::faults::{self, KnownRequest, MatchingFault};
use super::policy::{PolicyState, policy};
use super::world::NamespaceWorld;
use crate::cluster::resource_name;
use crate::explain::fencing::{self, Answer};
use crate::explain::target::{Asked, Written};
use crate::status::shards::LimitOverview;

/// What stands for all resources, as in RBAC rules.
const EVERY_RESOURCE: &str = "*";

/// What is asked about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking<'a> {
    pub(super) asked: Asked<'a>,
    /// Labels of the namespace of what is written, or of an object of cluster scope its own. `None`: not known.
    pub(super) labels: Option<&'a Labels>,
    pub(super) now: Timestamp,
}

/// What becomes of a request.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RequestExplanation {
    /// `NAMESPACE/NAME`.
    pub(super) pod: String,
    pub(super) method: String,
    /// Path and query, as the pod sends them.
    pub(super) target: String,
    /// Absent: the answer is 400 because of the target alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) classified: Option<Classified>,
    pub(super) policy: PolicyState,
    /// Limits of the policy on the resource. All hold at once.
    pub(super) limits: Vec<LimitOverview>,
    pub(super) outcome: Outcome,
    /// Path and query, as the proxy sends them. Absent: the proxy answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sent: Option<String>,
    /// Whether the member cluster that the request is for is the pod's. Absent: it is for the API server itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) member: Option<MemberShare>,
    /// What is added to the selector of the request. Absent: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) selector: Option<String>,
    /// Absent: the request cannot touch the leader-election lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lock: Option<RenamedLock>,
    /// Whether it becomes a dry run, as the pod is a shadow.
    pub(super) dry_run: bool,
    /// Whether it passes only while the manager confirms the policy. Else the answer is 503.
    pub(super) needs_confirmation: bool,
    pub(super) faults: Vec<MatchingFault>,
    pub(super) breakers: Vec<BreakerRule>,
    /// The proxy's. Absent: the API server answers, as far as is known here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) answer: Option<ProxyAnswer>,
    /// What the fence in the API server says of the write, also past the proxy. Absent: it is no write, or the pod is
    /// of no root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) api_server: Option<Answer>,
    /// What cannot be known, and why.
    pub(super) not_known: Vec<String>,
}

/// What the proxy does to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Outcome {
    /// It passes unchanged.
    Passes,
    Rewritten,
    /// The policy refuses it.
    Refused,
    /// A fault or a breaker answers it.
    Answered,
    /// The policy is not known.
    NotKnown,
}

/// Whose a member cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum MemberShare {
    /// The pod's.
    Owned,
    /// Another pod's, or nobody's.
    NotOwned,
    /// Every pod's: members are not divided.
    NotDivided,
}

/// How the leader-election lock is renamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RenamedLock {
    /// As the pod knows it.
    pub(super) name: String,
    pub(super) on_server: String,
    pub(super) in_path: bool,
    pub(super) in_field_selector: bool,
    /// Whether the body may name it, too. One in CBOR or YAML is answered 415.
    pub(super) in_body: bool,
    /// What the answer is where the body does not hold the lock. Absent: it passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unless_in_body: Option<String>,
}

/// A Status that the proxy answers with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ProxyAnswer {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// Follows a request of `pod`.
pub(super) fn passage(world: &NamespaceWorld, pod: &Member, asking: &Asking<'_>) -> RequestExplanation {
    let (state, compiled) = policy(world, pod);
    let (method, target) = (asking.asked.verb.method(), asking.asked.target());
    let mut explanation = RequestExplanation {
        pod: pod.name.to_string(),
        method: method.to_owned(),
        target: target.clone(),
        classified: None,
        outcome: if pod.enrolled() { Outcome::NotKnown } else { Outcome::Passes },
        policy: state,
        limits: Vec::new(),
        sent: (!pod.enrolled()).then(|| target.clone()),
        selector: None,
        lock: None,
        dry_run: false,
        needs_confirmation: false,
        faults: Vec::new(),
        breakers: Vec::new(),
        member: None,
        answer: None,
        api_server: None,
        not_known: Vec::new(),
    };
    let paths = compiled.as_ref().map_or(&[][..], |compiled| compiled.policy.member_paths());
    let info = match RequestInfo::parse(method, &target).and_then(|info| info.behind(paths)) {
        Ok(info) => info,
        Err(error) if compiled.is_some() => {
            explanation.outcome = Outcome::Refused;
            explanation.answer = Some(ProxyAnswer::from(&Status::from(error)));
            return explanation;
        }
        Err(_) => return explanation,
    };
    explanation.classified = Some(Classified::from(&info));
    explanation.api_server = api_server(world, pod, asking, &info, explanation.policy.operator.as_deref());
    let Some(compiled) = compiled else { return explanation };
    explanation.member = MemberShare::of(&compiled.policy, &info);
    explanation.decided(&compiled.policy, &info);
    if explanation.outcome != Outcome::Refused {
        explanation.met(&compiled.policy, &info, (world, pod), asking.now);
    }
    explanation
}

impl RequestExplanation {
    /// What the policy decides.
    fn decided(&mut self, policy: &Policy, info: &RequestInfo<'_>) {
        self.limits = limits(policy, info);
        self.needs_confirmation = decide::lapses(policy, info);
        match decide::decide(policy, info) {
            Decision::Pass => {
                self.outcome = Outcome::Passes;
                self.sent = Some(self.target.clone());
            }
            Decision::Refuse(refusal) => {
                self.outcome = Outcome::Refused;
                self.answer = Some(ProxyAnswer::from(&Status::from(&refusal)));
            }
            Decision::Rewrite(plan) => self.rewritten(&plan, info),
        }
        let is_for_lock = self.lock.as_ref().is_some_and(|lock| lock.in_path || lock.in_field_selector);
        self.dry_run = self.answer.is_none() && policy.is_shadow() && decide::becomes_dry_run(info) && !is_for_lock;
        if self.dry_run && self.api_server.is_some() {
            let message = "the fence lets dry runs pass".to_owned();
            self.api_server = Some(Answer { outcome: fencing::Outcome::NotFenced, message });
        }
    }

    fn rewritten(&mut self, plan: &Plan, info: &RequestInfo<'_>) {
        let sent = rewrite::target(info, plan);
        let has_changed = sent != self.target || plan.lock.as_ref().is_some_and(|lock| lock.in_body);
        self.outcome = if has_changed { Outcome::Rewritten } else { Outcome::Passes };
        self.sent = Some(sent);
        self.selector = plan.selector.as_ref().map(ToString::to_string);
        self.lock = plan.lock.as_ref().map(RenamedLock::from);
    }

    /// What faults and breakers do, in the order in which the proxy asks them.
    fn met(
        &mut self,
        policy: &Policy,
        info: &RequestInfo<'_>,
        (world, pod): (&NamespaceWorld, &Member),
        now: Timestamp,
    ) {
        let is_for_lock = self.lock.as_ref().is_some_and(|lock| lock.in_path || lock.in_field_selector);
        let path = self.target.split('?').next().unwrap_or_default().to_owned();
        let request = KnownRequest { info, method: &self.method, path: &path, is_for_lock };
        self.faults = faults::matching(policy.faults(), request, now);
        if !is_for_lock {
            let of_pod = (pod.name.name.as_str(), world.breakers.as_slice());
            self.breakers = breakers::rules(policy.guards(), info, of_pod, now);
        }
        // Where only the body tells whether it is for the lock, nothing is certain.
        let may_be_lock = self.lock.as_ref().is_some_and(|lock| lock.in_body && !is_for_lock);
        if may_be_lock {
            return;
        }
        let status = faults::answer(policy.faults(), request, now).or_else(|| breakers::answer(&self.breakers));
        if let Some(status) = status {
            self.outcome = Outcome::Answered;
            self.sent = None;
            self.answer = Some(ProxyAnswer::from(&status));
        }
    }
}

impl MemberShare {
    fn of(policy: &Policy, info: &RequestInfo<'_>) -> Option<Self> {
        let (cluster, members) = (info.cluster()?, policy.members()?);
        Some(match (members.sees.is_some(), members.sees(cluster)) {
            (false, _) => Self::NotDivided,
            (true, true) => Self::Owned,
            (true, false) => Self::NotOwned,
        })
    }
}

impl From<&Status> for ProxyAnswer {
    fn from(status: &Status) -> Self {
        Self { code: status.code, reason: status.reason, message: status.message.clone() }
    }
}

impl From<&LockPlan> for RenamedLock {
    fn from(plan: &LockPlan) -> Self {
        Self {
            name: plan.rename.lock.name.clone(),
            on_server: plan.rename.on_server.clone(),
            in_path: plan.in_path,
            in_field_selector: plan.in_fields.is_some(),
            in_body: plan.in_body,
            unless_in_body: plan.unless_lock.as_ref().map(ToString::to_string),
        }
    }
}

/// The limits on the resource.
fn limits(policy: &Policy, info: &RequestInfo<'_>) -> Vec<LimitOverview> {
    // In a member, none holds.
    let limits = policy.limits.iter().filter(|_| info.member().is_none());
    let covering = limits.filter(|limit| limit.covers(info.api_group(), info.resource()));
    let names = |groups: &[String], plurals: &[String]| {
        let of_group = |group: &String| plurals.iter().map(|plural| resource_name(group, plural)).collect::<Vec<_>>();
        groups.iter().flat_map(of_group).collect::<Vec<_>>()
    };
    let overview = |limit: &ctrlmesh_common::policy::Limit| {
        let listed = limit.relate_resources.iter().flat_map(|one| names(&one.api_groups, &one.resources));
        let resources: Vec<String> = listed.collect();
        let resources = if resources.is_empty() { vec![EVERY_RESOURCE.to_owned()] } else { resources };
        LimitOverview { resources, selector: limit.selector.to_string() }
    };
    covering.map(overview).collect()
}

/// What the fence in the API server says, where the request is a write, and the pod is of a root.
fn api_server(
    world: &NamespaceWorld,
    pod: &Member,
    asking: &Asking<'_>,
    info: &RequestInfo<'_>,
    operator: Option<&str>,
) -> Option<Answer> {
    // The fence knows a pod by its workload, also where no policy is known, or no proxy is there.
    let is_of = |config: &&ShardingConfig| config.spec.root.as_ref().is_some_and(|rule| pod.is_of_target(rule));
    let of_workload = || each(&world.snapshot.configs).find(is_of);
    // It fences what it serves itself.
    let is_fenced = decide::is_write(info) && asking.asked.behind.is_empty();
    let root = operator.and_then(|name| world.config(name)).or_else(of_workload).filter(|_| is_fenced)?;
    let rule = root.spec.root.as_ref()?;
    let written = Written {
        group: info.api_group(),
        resource: info.resource(),
        subresource: info.subresource(),
        namespace: asking.asked.namespace,
        name: asking.asked.name.unwrap_or_default(),
        labels: asking.labels,
    };
    let of_target = world.snapshot.members.iter().filter(|member| member.is_of_target(rule));
    let accounts: BTreeSet<String> = of_target.map(|member| member.account.clone()).collect();
    Some(fencing::by_api_server(root, rule, &written, pod, (&world.snapshot.scheme.in_force, &accounts)))
}

#[cfg(test)]
mod tests;
