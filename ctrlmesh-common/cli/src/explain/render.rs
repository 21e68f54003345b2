//! Says for people to whom an object belongs and who may write it, step by step.
//!
//! Pure.

use ctrlmesh_common::ownership::UNSHARDED;
use jiff::Timestamp;

use super::fencing::{Answer, Outcome, PodAnswers};
use super::object::{DividedBy, Explanation, LockHolder, RootExplanation};
use super::since::{Since, Source};
use super::steps::{self, Step};
use super::writes::LastWrite;
use crate::cluster::resource_name;
use crate::owner::alone::LoneShard;
use crate::owner::owners::Rule;
use crate::status::shards::PodOverview;
use crate::text::{cut, dash, since, table};

/// Of a selector, in characters. One may name thousands of namespaces.
const SELECTOR_WIDTH: usize = 100;

/// One screen about an object.
pub(super) fn screen(explanation: &Explanation, now: Timestamp) -> String {
    format!("Object: {}\n{}", title(explanation), steps::print(&all_steps(explanation, now)))
}

/// Names the object.
pub(super) fn title(explanation: &Explanation) -> String {
    let object = &explanation.object;
    let path = object.namespace.as_ref().map_or_else(String::new, |namespace| format!("{namespace}/"));
    format!("{} {path}{}", resource_name(&object.group, &object.resource), object.name)
}

pub(super) fn all_steps(explanation: &Explanation, now: Timestamp) -> Vec<Step> {
    let mut all = vec![slot(explanation)];
    for root in &explanation.roots {
        all.push(owner(root, explanation, now));
        all.push(writers(root));
    }
    all.extend(explanation.shards.iter().map(|shard| alone(shard, now)));
    all.push(last_writes(&explanation.last_writes, now));
    if !explanation.not_known.is_empty() {
        all.push(Step { title: "What could not be read".to_owned(), lines: explanation.not_known.clone() });
    }
    all
}

fn slot(explanation: &Explanation) -> Step {
    let mut step = Step::new("Slot");
    step.say(explanation.hashing.sentence());
    if explanation.roots.is_empty() && explanation.shards.is_empty() {
        step.say("No root divides the object, and no shard by hand limits it: every pod sees it, and may write it.");
        return step;
    }
    let is_labelled = explanation.roots.iter().any(|root| root.owner.rule != Rule::Unlabelled);
    if is_labelled && explanation.missing_labels.is_empty() {
        step.say("The object has the labels by which shards see it.");
    } else if is_labelled {
        let missing = explanation.missing_labels.join(" and ");
        let labels = if explanation.missing_labels.len() == 1 { "label" } else { "labels" };
        step.say(format!("No shard sees the object before it has the {labels} {missing}."));
    }
    step
}

fn owner(root: &RootExplanation, explanation: &Explanation, now: Timestamp) -> Step {
    let of = &root.owner;
    let mut step = Step::new(format!("Owner by root {}/{}, {}", of.namespace, of.name, of.workload));
    root.divided_by.iter().for_each(|entry| step.say(divided_by(entry)));
    if !of.selected {
        step.say("The selector leaves the object out, so no shard of the root sees it.");
    }
    step.say(ownership(root, explanation));
    if of.shard.is_some() {
        step.say(since_when(root.since.as_ref(), now));
    }
    step.say(match &root.moving {
        Some(message) => format!("Something of the root is on its way: {message}."),
        None => "Nothing of the root is known to be on its way.".to_owned(),
    });
    if of.shard.as_ref().is_some_and(|shard| shard != UNSHARDED) {
        serving(&mut step, &of.pods, of.epoch, now);
    }
    if let Some(lock) = &root.lock {
        step.say(lock_sentence(lock, now));
    }
    step
}

fn divided_by(DividedBy { entry, limit }: &DividedBy) -> String {
    let from = entry.map_or_else(
        || "The root has no resourceSelector, and so".to_owned(),
        |entry| format!("spec.root.resourceSelector[{entry}]"),
    );
    let resources = limit.resources.join(", ");
    if limit.selector.is_empty() {
        return format!("{from} divides every object of {resources}.");
    }
    format!("{from} divides the objects of {resources} that match {:?}.", cut(&limit.selector, SELECTOR_WIDTH))
}

/// To whom the object belongs, and by which rule.
fn ownership(root: &RootExplanation, explanation: &Explanation) -> String {
    let of = &root.owner;
    let epoch = of.epoch.map_or_else(|| "before the first epoch".to_owned(), |epoch| format!("of epoch {epoch}"));
    let what = match of.rule {
        Rule::Disabled => {
            return "The root is switched off: no slot counts, and each of its shards goes by its own limits."
                .to_owned();
        }
        Rule::Unlabelled => {
            return "`*` in the root does not stand for this resource, so nobody labels it. Lists and watches of the \
                    shards leave it out, and every pod gets it by its name."
                .to_owned();
        }
        Rule::Namespace => format!("namespace {}, which the root names,", explanation.hashing.name),
        Rule::Slot => format!("slot {}", explanation.slot),
    };
    let table = format!("By the ownership table {epoch}, {what}");
    match (of.shard.as_deref(), of.taken_from.as_deref()) {
        (Some(UNSHARDED), _) => format!("{table} belongs to the pods that are not enrolled."),
        (Some(shard), _) => format!("{table} belongs to shard {shard}."),
        (None, Some("")) => format!("{table} belongs to nobody now: it is being taken from whoever had it."),
        (None, Some(former)) => format!("{table} belongs to nobody now: it is being taken from {former}."),
        (None, None) => format!("{table} belongs to nobody."),
    }
}

fn since_when(since_when: Option<&Since>, now: Timestamp) -> String {
    match since_when {
        Some(Since { time, source: Source::GrantedEvent }) => {
            format!("That is so since {time}, {} ago, by an event Granted.", since(*time, now))
        }
        Some(Since { time, source: Source::SettledCondition }) => {
            format!("That is so since {time}, {} ago, or longer, by condition Settled.", since(*time, now))
        }
        None => "Since when is not known: neither an event Granted nor condition Settled tells it.".to_owned(),
    }
}

fn serving(step: &mut Step, pods: &[PodOverview], epoch: Option<i64>, now: Timestamp) {
    if pods.iter().all(|pod| pod.stands_by) {
        step.say("No pod serves that shard.");
    }
    for pod in pods {
        let node = pod.node.as_ref().map_or_else(|| "no node yet".to_owned(), |node| format!("node {node}"));
        let newest = epoch.map_or_else(dash, |epoch| epoch.to_string());
        let said = match pod.epoch {
            Some(epoch) if pod.current => format!("has acknowledged epoch {epoch}, the newest"),
            Some(epoch) => format!("has acknowledged epoch {epoch}, and not {newest} yet"),
            None => format!("has acknowledged no epoch yet; the newest is {newest}"),
        };
        let contact = pod.last_contact.map(|contact| format!(" It was in touch {} ago.", since(contact, now)));
        let contact = contact.unwrap_or_default();
        let serves = if pod.stands_by { "stands by for" } else { "serves" };
        step.say(format!("Pod {} on {node} {serves} that shard. Its proxy {said}.{contact}", pod.name));
    }
}

fn lock_sentence(lock: &LockHolder, now: Timestamp) -> String {
    let renewed = lock.renewed.map(|renewed| format!(", who renewed it {} ago", since(renewed, now)));
    let holder = lock.holder.as_ref().map_or_else(|| "nobody".to_owned(), |holder| format!("{holder:?}"));
    format!("The lock of the shard, Lease {}, is held by {holder}{}.", lock.lease, renewed.unwrap_or_default())
}

/// Who may write the object.
fn writers(root: &RootExplanation) -> Step {
    let mut step = Step::new(format!("Writes by pods of root {}/{}", root.owner.namespace, root.owner.name));
    step.say(root.fencing.sentence());
    if root.answers.is_empty() {
        step.say("No enrolled pod of the workload is known.");
        return step;
    }
    let mut rows = vec![["POD", "WRITES FOR", "PROXY", "API SERVER"].map(str::to_owned).to_vec()];
    rows.extend(root.answers.iter().map(|one| {
        let writes_for = one.writes_for.clone().unwrap_or_else(dash);
        vec![one.pod.clone(), writes_for, outcome(&one.proxy), outcome(&one.api_server)]
    }));
    step.say(table(&rows, ""));
    step.lines.extend(root.answers.iter().flat_map(reasons));
    step
}

fn outcome(answer: &Answer) -> String {
    answer.outcome.text().to_owned()
}

/// Why an answer is not just that the write is allowed.
fn reasons(answers: &PodAnswers) -> Vec<String> {
    let of = |side: &str, answer: &Answer| {
        let is_said = answer.outcome != Outcome::Allowed && !answer.message.is_empty();
        is_said.then(|| format!("{}, {side}: {}", answers.pod, answer.message))
    };
    [of("proxy", &answers.proxy), of("API server", &answers.api_server)].into_iter().flatten().collect()
}

/// A shard that goes by its own limits.
fn alone(shard: &LoneShard, now: Timestamp) -> Step {
    let by = shard.root.as_ref().map_or_else(|| "by hand".to_owned(), |root| format!("of root {root}, switched off"));
    let mut step = Step::new(format!("Shard {}/{}, {by}", shard.namespace, shard.name));
    for limit in &shard.limits {
        let (resources, selector) = (limit.resources.join(", "), cut(&limit.selector, SELECTOR_WIDTH));
        step.say(format!("It limits {resources} to objects that match {selector:?}."));
    }
    if !shard.selected {
        step.say("That leaves the object out: the shard does not see it.");
        return step;
    }
    step.say("That selects the object. Since when is not known: the object's labels decide, and have no times.");
    serving(&mut step, &shard.pods, shard.epoch, now);
    step.say("Nobody refuses writes of it: only roots have a fence.");
    step
}

fn last_writes(writes: &[LastWrite], now: Timestamp) -> Step {
    let mut step = Step::new("Last writes");
    if writes.is_empty() {
        step.say("Not known: the object has no managedFields.");
        return step;
    }
    let head = ["FIELD MANAGER", "OPERATION", "SUBRESOURCE", "AGE", "WRITER"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(writes.iter().map(|write| {
        let age = write.time.map_or_else(dash, |time| since(time, now));
        let subresource = write.subresource.clone().unwrap_or_else(dash);
        vec![write.manager.clone(), write.operation.clone(), subresource, age, write.writer.text()]
    }));
    step.say(table(&rows, ""));
    step.say("A field manager is a name that a writer gives itself. It names no pod, so a shard is only a guess.");
    step
}
