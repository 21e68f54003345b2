//! Decides whether a request can touch the leader-election lock, and where its name stands.
//!
//! The client knows the lock under one name, and the server knows it under one name for each shard. A client may not
//! ask for the server's names, so no spelling of a request reaches another shard's lock.

use ctrlmesh_common::policy::{LOCK_RESOURCES, Lock};

use super::{FencedWrite, Refusal};
use crate::request::{FieldSelector, NAME, NAMESPACE, RequestInfo};

/// Where a request names the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockPlan {
    pub rename: Rename,
    pub in_path: bool,
    pub in_fields: Option<InFields>,
    /// The body may hold the lock, and must be read as a whole.
    pub in_body: bool,
    /// The request is refused for this where its body does not hold the lock.
    pub unless_lock: Option<Box<FencedWrite>>,
}

/// How a field selector names the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InFields {
    /// It lets nothing else through.
    Alone,
    /// It may name the lock to leave it out.
    Among,
}

/// The two names of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rename {
    /// Namespace, the client's name, and shard.
    pub lock: Lock,
    pub on_server: String,
}

/// What to rename; `None` where the request cannot touch the lock.
pub(super) fn plan(lock: &Lock, request: &RequestInfo<'_>) -> Result<Option<LockPlan>, Refusal> {
    let resource = (request.api_group(), request.resource());
    let namespace = request.namespace();
    if !LOCK_RESOURCES.contains(&resource) || !namespace.is_empty() && namespace != lock.namespace {
        return Ok(None);
    }
    let name = request.name_in_path();
    // Across namespaces only collections exist; a name there is the server's to refuse.
    if !name.is_empty() {
        return if namespace.is_empty() { Ok(None) } else { named(lock, name, request) };
    }
    if request.verb() == "create" {
        return Ok(Some(LockPlan::new(lock, false, None, true)));
    }
    if request.is_collection() { collection(lock, request).map(Some) } else { Ok(None) }
}

impl LockPlan {
    fn new(lock: &Lock, in_path: bool, in_fields: Option<InFields>, in_body: bool) -> Self {
        let rename = Rename { lock: lock.clone(), on_server: lock.per_shard() };
        Self { rename, in_path, in_fields, in_body, unless_lock: None }
    }

    /// Whether the request is for the lock and nothing else; `None` where only its body tells.
    pub fn is_for_lock(&self) -> Option<bool> {
        match (self.in_path || self.in_fields == Some(InFields::Alone), self.in_body) {
            (true, _) => Some(true),
            (false, true) => None,
            (false, false) => Some(false),
        }
    }
}

fn named(lock: &Lock, name: &str, request: &RequestInfo<'_>) -> Result<Option<LockPlan>, Refusal> {
    if lock.reserves(name) {
        return Err(Refusal::ReservedName { name: name.to_owned() });
    }
    let in_body = matches!(request.verb(), "create" | "update" | "patch");
    Ok((name == lock.name).then(|| LockPlan::new(lock, true, None, in_body)))
}

fn collection(lock: &Lock, request: &RequestInfo<'_>) -> Result<LockPlan, Refusal> {
    let text = request.query().first("fieldSelector").unwrap_or_default();
    // One that does not parse is the server's to refuse; it reaches no object.
    let fields = FieldSelector::parse(&text).unwrap_or_default();
    let mut in_fields = false;
    for term in fields.terms().iter().filter(|term| term.field == NAME) {
        if lock.reserves(&term.value) {
            return Err(Refusal::ReservedName { name: term.value.clone() });
        }
        in_fields |= term.value == lock.name;
    }
    if request.namespace().is_empty() && in_fields {
        match fields.required(NAMESPACE) {
            None => return Err(Refusal::LockAcrossNamespaces),
            Some(namespace) => in_fields = namespace == lock.namespace,
        }
    }
    if request.verb() == "deletecollection" && fields.required(NAME).is_none() {
        return Err(Refusal::LockCollection);
    }
    let is_alone = fields.required(NAME) == Some(&lock.name);
    let in_fields = in_fields.then_some(if is_alone { InFields::Alone } else { InFields::Among });
    Ok(LockPlan::new(lock, false, in_fields, false))
}
