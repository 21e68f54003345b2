//! Shows conditions that say that something is wrong as metrics.

use std::fmt::Error;
use std::sync::{Arc, OnceLock};

use ctrlmesh_common::api::is_problem;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::cluster::plan::Plans;
use crate::leader::lease::Leadership;
use crate::rules::object_name::{name, namespace};

/// The conditions of ShardingConfigs, as the API server has them; nothing while this replica does not lead.
#[derive(Clone, Debug, Default)]
pub(super) struct ConditionMetrics(Arc<OnceLock<(Plans, Leadership)>>);

impl ConditionMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        registry.register_collector(Box::new(this.clone()));
        this
    }

    /// Shows the conditions of these plans from now on.
    pub(super) fn follow(&self, plans: &Plans, leadership: &Leadership) {
        // Set once, at start.
        drop(self.0.set((plans.clone(), leadership.clone())));
    }
}

impl Collector for ConditionMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let help = "1 for each condition of a ShardingConfig that says that something is wrong";
        let mut family = encoder.encode_descriptor("problem_conditions", help, None, MetricType::Gauge)?;
        let followed = self.0.get().filter(|(_, leadership)| leadership.is_held());
        let plan = followed.and_then(|(plans, _)| plans.borrow().clone());
        for config in plan.iter().flat_map(|plan| &plan.snapshot.configs) {
            let conditions = config.status.iter().flat_map(|status| &status.conditions);
            for problem in conditions.filter(|condition| is_problem(condition)) {
                let labels = [
                    ("namespace", namespace(&config.metadata)),
                    ("shardingconfig", name(&config.metadata)),
                    ("condition", problem.type_.as_str()),
                    ("reason", problem.reason.as_str()),
                ];
                ConstGauge::new(1_u64).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
