//! The part of a CircuitBreaker or FaultInjection that says for which pods it is.

use ctrlmesh_common::api::LabelSelector;
use ctrlmesh_common::selector::Selector;
use kube::Resource;

use super::object_name::{full_name, namespace};
use super::pod::Member;
use super::validate::Report;

/// For which pods an object is, where it can be used.
#[derive(Clone, Debug, PartialEq)]
pub struct PodSelection {
    /// Of the object, such as `CircuitBreaker`.
    pub kind: String,
    /// `NAMESPACE/NAME`.
    pub name: String,
    pub namespace: String,
    /// Of its pods; none where it is invalid, switched off, or being deleted.
    pub selector: Option<Selector>,
    /// Why it cannot be used.
    pub errors: Vec<String>,
}

impl PodSelection {
    /// Reads that of an object which may be switched off: by its label `switch`, or `disabled` by its spec. Only one
    /// that is on is put to `validate`.
    pub(super) fn read<Object: Resource<DynamicType = ()>>(
        object: &Object,
        (switch, disabled): (&str, bool),
        selector: &LabelSelector,
        validate: impl Fn(&Object) -> Report,
    ) -> Self {
        let meta = object.meta();
        let (kind, name, namespace) = (Object::kind(&()).into_owned(), full_name(meta), namespace(meta).to_owned());
        let switch = meta.labels.as_ref().and_then(|labels| labels.get(switch));
        let is_on = meta.deletion_timestamp.is_none() && !disabled && switch.is_none_or(|switch| switch != "true");
        if !is_on {
            return Self { kind, name, namespace, selector: None, errors: Vec::new() };
        }
        let errors: Vec<String> = validate(object).errors.iter().map(ToString::to_string).collect();
        let selector = Selector::try_from(selector).ok().filter(|_| errors.is_empty());
        Self { kind, name, namespace, selector, errors }
    }

    /// `KIND NAMESPACE/NAME`, as troubles have it.
    pub fn object(&self) -> String {
        format!("{} {}", self.kind, self.name)
    }

    /// Whether the object is for this pod.
    pub fn selects(&self, pod: &Member) -> bool {
        let selector = self.selector.as_ref().filter(|_| pod.name.namespace == self.namespace);
        selector.is_some_and(|selector| selector.matches(&pod.labels))
    }
}
