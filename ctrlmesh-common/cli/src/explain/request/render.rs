//! Says for people what becomes of a request, step by step.
//!
//! Pure.

use ctrlmesh_proxy::trace::readable;

use super::passage::{MemberShare, Outcome, RenamedLock, RequestExplanation};
use crate::explain::fencing::{self, Answer};
use crate::explain::steps::{self, Step};
use crate::text::cut;

/// Of a selector, in characters. One may name thousands of namespaces.
const SELECTOR_WIDTH: usize = 300;

/// One screen about a request.
pub(crate) fn screen(explanation: &RequestExplanation) -> String {
    let title = format!("Request: {} {}\nPod:     {}\n", explanation.method, explanation.target, explanation.pod);
    let mut all = vec![classified(explanation), policy(explanation)];
    if explanation.outcome != Outcome::NotKnown && explanation.classified.is_some() {
        all.extend([decision(explanation), faults(explanation), breakers(explanation), answer(explanation)]);
    } else if explanation.api_server.is_some() || explanation.answer.is_some() {
        all.push(answer(explanation));
    }
    if !explanation.not_known.is_empty() {
        all.push(Step { title: "What could not be read".to_owned(), lines: explanation.not_known.clone() });
    }
    title + &steps::print(&all)
}

fn classified(explanation: &RequestExplanation) -> Step {
    let mut step = Step::new("Request");
    step.say(explanation.classified.as_ref().map_or_else(
        || "The target cannot be read, and the answer is 400.".to_owned(),
        super::classified::Classified::sentence,
    ));
    step
}

fn policy(explanation: &RequestExplanation) -> Step {
    Step { title: "Policy of the pod".to_owned(), lines: explanation.policy.sentences() }
}

fn decision(explanation: &RequestExplanation) -> Step {
    let mut step = Step::new("What the policy decides");
    for limit in &explanation.limits {
        let (resources, selector) = (limit.resources.join(", "), cut(&limit.selector, SELECTOR_WIDTH));
        step.say(format!("A limit holds on {resources}: the pod sees what matches {selector:?}."));
    }
    if let Some(share) = explanation.member {
        step.say(match share {
            MemberShare::Owned => "The pod owns the member cluster: it sees and writes all of it.",
            MemberShare::NotOwned => "The pod does not own the member cluster: lists and watches show nothing of it.",
            MemberShare::NotDivided => "Member clusters are not divided: every pod sees and writes all of each.",
        });
    } else if explanation.limits.is_empty() {
        step.say("No limit holds on this resource.");
    }
    if let Some(selector) = &explanation.selector {
        step.say(format!("The proxy puts this before the request's own selector: {}", cut(selector, SELECTOR_WIDTH)));
    }
    if let Some(lock) = &explanation.lock {
        step.lines.extend(renamed(lock));
    }
    if explanation.needs_confirmation {
        step.say(
            "The write passes only while the manager confirms the policy. Without that for 15 s, the answer is 503, and \
             the client may come again after 1 s.",
        );
    }
    if explanation.dry_run {
        step.say("The pod is a shadow: the proxy makes a dry run of the write.");
    }
    step.say(match explanation.outcome {
        Outcome::Refused => "The policy refuses the request: it does not reach the API server.",
        _ if explanation.selector.is_some() || explanation.lock.is_some() => {
            "The policy lets the rewritten request pass."
        }
        _ => "The policy lets the request pass.",
    });
    step
}

fn renamed(lock: &RenamedLock) -> Vec<String> {
    let RenamedLock { name, on_server, in_path, in_field_selector, in_body, unless_in_body } = lock;
    let places = [(*in_path, "path"), (*in_field_selector, "field selector"), (*in_body, "body")];
    let places: Vec<&str> = places.into_iter().filter(|(is_there, _)| *is_there).map(|(_, place)| place).collect();
    let mut said = vec![if places.is_empty() {
        format!(
            "The answer may hold the lock {name:?}: there the proxy names it so again, in the place of {on_server:?}."
        )
    } else {
        let places = places.join(" and ");
        format!(
            "The lock {name:?} is {on_server:?} on the API server. It is renamed in the {places}, and back in the answer."
        )
    }];
    if *in_body {
        said.push("A body in CBOR or YAML is answered 415, one that is too large 413.".to_owned());
    }
    said.extend(
        unless_in_body
            .iter()
            .map(|refused| format!("If the body does not hold the lock, the answer is 403: {refused}")),
    );
    said
}

fn faults(explanation: &RequestExplanation) -> Step {
    let mut step = Step::new("Faults of FaultInjections");
    step.lines.extend(explanation.faults.iter().map(super::faults::MatchingFault::sentence));
    if step.lines.is_empty() {
        step.say("None matches now.");
    }
    step
}

fn breakers(explanation: &RequestExplanation) -> Step {
    let mut step = Step::new("Rules of CircuitBreakers");
    step.lines.extend(explanation.breakers.iter().map(super::breakers::BreakerRule::sentence));
    if step.lines.is_empty() {
        step.say("None matches.");
    }
    step
}

fn answer(explanation: &RequestExplanation) -> Step {
    let mut step = Step::new("Answer");
    if let Some(answer) = &explanation.answer {
        step.say(format!("The proxy answers {} {}: {}", answer.code, answer.reason, answer.message));
    }
    match &explanation.sent {
        Some(sent) if *sent == explanation.target && explanation.outcome == Outcome::Passes => {
            step.say("The request reaches the API server unchanged.");
        }
        Some(sent) => step.say(format!("The API server gets: {} {}", explanation.method, readable(sent))),
        None => {}
    }
    if let Some(answer) = explanation.api_server.as_ref() {
        step.say(api_server(answer));
    }
    step
}

/// What the fence in the API server says.
fn api_server(answer: &Answer) -> String {
    let message = &answer.message;
    match answer.outcome {
        fencing::Outcome::Allowed => "The fence in the API server allows the write.".to_owned(),
        fencing::Outcome::Refused => {
            format!("The fence in the API server refuses the write, also past the proxy: {message}")
        }
        fencing::Outcome::NotFenced => format!("The API server does not fence the write: {message}."),
        fencing::Outcome::NotProved => {
            format!("The API server is not known to enforce its fence. Where it does, it refuses the write: {message}")
        }
        fencing::Outcome::NotKnown => format!("What the fence in the API server says is not known: {message}."),
    }
}
