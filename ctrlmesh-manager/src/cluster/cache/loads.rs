//! Knows the loads of roots that are divided by load, where this replica leads.

use std::sync::Arc;

use ctrlmesh_runtime::sync::lock;

use super::Cache;
use crate::rules::balance::RootLoads;

impl Cache {
    /// Takes all that is known of loads.
    pub fn take_loads(&self, loads: RootLoads) {
        let mut state = lock(&self.state);
        let changed = *state.loads != loads;
        state.loads = Arc::new(loads);
        drop(state);
        if changed {
            self.version.send_modify(|version| *version = version.wrapping_add(1));
        }
    }
}
