//! Bounds how many series users' names make.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use ctrlmesh_runtime::sync::lock;

/// Names with series of their own. Further ones share those of [`OTHER`].
pub(super) const MAX_NAMES: usize = 512;

/// No rule or fault is called so: the names of others have two slashes.
const OTHER: &str = "other";

/// The names that have series of their own.
#[derive(Clone, Debug, Default)]
pub(super) struct BoundedNames(Arc<Mutex<HashSet<String>>>);

impl BoundedNames {
    /// The name under which `name` is counted.
    pub(super) fn bounded<'a>(&self, name: &'a str) -> &'a str {
        let mut known = lock(&self.0);
        let is_known = known.contains(name) || known.len() < MAX_NAMES && known.insert(name.to_owned());
        if is_known { name } else { OTHER }
    }
}
