//! Objects that give rules to proxies: CircuitBreakers and FaultInjections.

use std::sync::Arc;

use ctrlmesh_common::api::{CircuitBreaker, FaultInjection};
use kube::Resource;

use crate::rules::breaker::Breaker;
use crate::rules::injection::Injection;
use crate::rules::object_name::full_name;

/// An object, and what it asks of the proxies.
#[derive(Clone, Debug)]
pub struct CachedRules<Object, Read> {
    pub object: Arc<Object>,
    pub read: Read,
}

pub type CachedBreaker = CachedRules<CircuitBreaker, Breaker>;

pub type CachedInjection = CachedRules<FaultInjection, Injection>;

impl<Object: Resource, Read: for<'a> From<&'a Object>> CachedRules<Object, Read> {
    /// Its name, and what it asks.
    pub(super) fn read(mut object: Object) -> (String, Self) {
        object.meta_mut().managed_fields = None;
        let read = Read::from(&object);
        (full_name(object.meta()), Self { object: Arc::new(object), read })
    }
}

impl<Object, Read: PartialEq> PartialEq for CachedRules<Object, Read> {
    /// Only what policies depend on: a write of the status compiles nothing.
    fn eq(&self, other: &Self) -> bool {
        self.read == other.read
    }
}
