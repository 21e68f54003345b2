//! Name and labels of the objects of a fence.

use std::collections::BTreeMap;

use ctrlmesh_common::names::{self, label};
use ctrlmesh_common::slots;

/// Begins the names of all of them.
pub(super) const PREFIX: &str = "ctrlmesh-fence";

/// Name of a fence's policy, its binding and its table. No namespace has a dot, so no two roots have the same.
pub fn object_name(namespace: &str, root: &str) -> String {
    let name = format!("{PREFIX}.{namespace}.{root}");
    if names::is_dns_subdomain(&name) {
        return name;
    }
    format!("{PREFIX}.{:016x}", slots::fnv1a(name.as_bytes()))
}

/// Of all objects of a fence.
pub fn labels(namespace: &str, root: &str) -> BTreeMap<String, String> {
    let labels =
        [("app.kubernetes.io/part-of", "ctrlmesh"), (label::FENCE_NAMESPACE, namespace), (label::FENCE_ROOT, root)];
    labels.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_its_root_and_is_never_too_long() {
        assert_eq!(object_name("ops", "op"), "ctrlmesh-fence.ops.op");
        let long = object_name("ops", &"o".repeat(253));
        assert!(names::is_dns_subdomain(&long) && long != object_name("ops", &"p".repeat(253)), "{long}");
    }
}
