//! Sends the writes of a shadow as dry runs, and says whether the objects became as it meant them.
//!
//! A dry run is checked, admitted and answered as any write, and not stored (`dryRun` of the Kubernetes API).

use serde_json::Value;

use crate::decide::{DRY_RUN, becomes_dry_run, is_dry_run, is_event};
use crate::request::{Query, RequestInfo};
use crate::rewrite::{Encoding, with_dry_run};

mod difference;

pub use difference::{Field, Intent};

/// A write that a shadow meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IntendedWrite {
    /// `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// `RESOURCE`, `RESOURCE.GROUP`, or with `/SUBRESOURCE` behind it.
    pub resource: String,
    /// Empty for an object of cluster scope.
    pub namespace: String,
    /// Empty for a collection, and for a new object, whose name is in its body.
    pub name: String,
    /// The path of what it was sent to, and what is asked for to see what became of it.
    outcome: Outcome,
}

/// How it is seen what became of a write.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The object at this path is as the dry run's answer has it.
    Object(String),
    /// The object of that name in the collection at this path is as the dry run's answer has it.
    New(String),
    /// There is no object at this path, or it is being deleted, or made anew.
    Deleted(String),
    /// Nothing is left of what is in this collection now.
    Emptied(String),
    /// Not at all.
    Unseen,
}

/// A write whose body cannot be read, so that it cannot become a dry run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the options of the deletion are in no encoding that a shadow can make a dry run of: send JSON or protobuf")]
pub struct UnreadableOptions;

impl IntendedWrite {
    /// That of a request that is sent to `target`. `None`: it writes nothing, is a dry run anyway, or only tells of an
    /// event.
    pub fn of(info: &RequestInfo<'_>, target: &str) -> Option<Self> {
        if !becomes_dry_run(info) || is_dry_run(info) || is_event(info) {
            return None;
        }
        let dot = if info.api_group().is_empty() { "" } else { "." };
        let slash = if info.subresource().is_empty() { "" } else { "/" };
        Some(Self {
            verb: info.verb().to_owned(),
            resource: format!("{}{dot}{}{slash}{}", info.resource(), info.api_group(), info.subresource()),
            namespace: info.namespace().to_owned(),
            name: info.name_in_path().to_owned(),
            outcome: outcome(info, target),
        })
    }

    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Gives a new object the name that the answer says. `None` where the API server made it up: then nobody else's
    /// object has it.
    #[must_use]
    pub fn named(mut self, answer: &Value) -> Option<Self> {
        let Outcome::New(collection) = &self.outcome else { return Some(self) };
        let metadata = &answer["metadata"];
        let name = metadata["name"].as_str().filter(|name| !name.is_empty())?;
        if metadata["generateName"].as_str().is_some_and(|prefix| !prefix.is_empty() && name.starts_with(prefix)) {
            return None;
        }
        self.outcome = Outcome::Object(format!("{collection}/{name}"));
        name.clone_into(&mut self.name);
        Some(self)
    }

    /// Whether its values are secret as a whole.
    pub fn is_secret(&self) -> bool {
        self.resource == "secrets"
    }
}

/// The target with the query that makes a dry run; `None` where the server would read none of such a long one.
pub fn target(target: &str) -> Option<String> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let others = Query::new(query.as_bytes()).pairs().filter(|pair| !query.is_empty() && !pair.is(DRY_RUN));
    let mut all = format!("{path}?{DRY_RUN}=All").into_bytes();
    for pair in others {
        all.push(b'&');
        all.extend(pair.raw);
    }
    let query = all.get(path.len() + 1..)?;
    Query::new(query).has_room_for(0).then(|| String::from_utf8_lossy(&all).into_owned())
}

/// The options in the body of a deletion, made those of a dry run: where there are some, the API server does not read
/// the query (`DeleteResource` of apiserver's handlers).
///
/// # Errors
/// If they cannot be read.
pub fn delete_options(content_type: &str, body: &[u8]) -> Result<Vec<u8>, UnreadableOptions> {
    let encoding = Encoding::of_editable(content_type, body).or_else(|| Encoding::of(content_type));
    let encoding = encoding.ok_or(UnreadableOptions)?;
    with_dry_run(body, encoding).map_err(|_malformed| UnreadableOptions)
}

/// The part of an `Accept` header that is JSON; `None` where the client takes none.
pub fn json_accept(accept: &str) -> Option<String> {
    let accept = if accept.is_empty() { "*/*" } else { accept };
    let is_json = |range: &&str| {
        let media_type = range.split(';').next().unwrap_or_default().trim();
        media_type.eq_ignore_ascii_case("application/json") || media_type == "*/*"
    };
    let json: Vec<&str> = accept.split(',').filter(is_json).map(str::trim).collect();
    (!json.is_empty()).then(|| json.join(",").replace("*/*", "application/json"))
}

fn outcome(info: &RequestInfo<'_>, target: &str) -> Outcome {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let path = path.trim_end_matches('/');
    let owner = |path: &str| path.rsplit_once('/').map_or_else(String::new, |(owner, _)| owner.to_owned());
    match (info.verb(), info.subresource()) {
        ("create", "") => Outcome::New(path.to_owned()),
        ("create", "eviction") => Outcome::Deleted(owner(path)),
        ("update" | "patch", "" | "scale") => Outcome::Object(path.to_owned()),
        // The answer is the whole object.
        ("update" | "patch", "status" | "approval" | "ephemeralcontainers" | "resize" | "finalize") => {
            Outcome::Object(owner(path))
        }
        ("delete", "") => Outcome::Deleted(path.to_owned()),
        ("deletecollection", "") => Outcome::Emptied(format!("{path}?{}", selection(query))),
        _ => Outcome::Unseen,
    }
}

/// What a query says of which objects, and that some of them are enough.
fn selection(query: &str) -> String {
    let selects = |pair: &crate::request::Pair<'_>| pair.is("labelSelector") || pair.is("fieldSelector");
    let pairs = Query::new(query.as_bytes()).pairs().filter(|pair| !query.is_empty() && selects(pair));
    let pairs = pairs.map(|pair| format!("{}&", String::from_utf8_lossy(pair.raw)));
    format!("{}limit=100", pairs.collect::<String>())
}

#[cfg(test)]
mod tests;
