//! The gauges of the audit.
//!
//! They are made anew for each scrape, so that what is audited no more leaves nothing behind.

use std::collections::BTreeMap;
use std::fmt::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::comparison::{Gap, KindAudit, KindKey};

/// What the last audit said; empty while this replica does not lead.
#[derive(Clone, Debug, Default)]
pub struct AuditMetrics(Arc<Mutex<Arc<AuditedOperators>>>);

/// By the name of the operator.
pub(super) type AuditedOperators = BTreeMap<String, AuditedOperator>;

#[derive(Clone, Debug, Default)]
pub(super) struct AuditedOperator {
    pub(super) kinds: BTreeMap<KindKey, AuditedKind>,
    /// How many kinds more it divides.
    pub(super) uncounted: u64,
}

#[derive(Clone, Debug)]
pub(super) struct AuditedKind {
    pub(super) audit: KindAudit,
    pub(super) unwatched: Duration,
}

#[derive(Clone, Debug, EncodeLabelSet)]
struct KindLabels {
    root: String,
    group: String,
    resource: String,
}

#[derive(Clone, Debug, EncodeLabelSet)]
struct GapLabels {
    #[prometheus(flatten)]
    kind: KindLabels,
    reason: &'static str,
}

impl AuditMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        registry.register_collector(Box::new(this.clone()));
        this
    }

    pub(super) fn set(&self, audited: AuditedOperators) {
        *lock(&self.0) = Arc::new(audited);
    }

    pub(super) fn clear(&self) {
        self.set(AuditedOperators::default());
    }
}

impl Collector for AuditMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let audited = lock(&self.0).clone();
        let help = "Objects that are divided, and have exactly one owner that watches them";
        gauges(&mut encoder, "owned_objects", help, &audited, |kind| Some(kind.audit.owned))?;
        let help = "Objects that are divided, and have no owner that watches them, by reason";
        let mut family = encoder.encode_descriptor("unowned_objects", help, None, MetricType::Gauge)?;
        for (name, key, kind) in kinds(&audited) {
            let mut by_reason: BTreeMap<Gap, u64> = Gap::UNOWNED.iter().map(|gap| (*gap, 0)).collect();
            kind.audit.unowned().for_each(|(gap, objects)| *by_reason.entry(gap).or_default() += objects.count);
            for (reason, count) in by_reason {
                let labels = GapLabels { kind: labels(name, key), reason: reason.name() };
                ConstGauge::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Objects that are divided, and that more than one shard sees";
        gauges(&mut encoder, "double_owned_objects", help, &audited, |kind| Some(kind.audit.doubled()))?;
        let help = "How long nobody has watched the oldest of the objects without an owner";
        gauges(&mut encoder, "unwatched_seconds", help, &audited, |kind| Some(kind.unwatched.as_secs_f64()))?;
        let help = "How many times as many objects as the mean the shard with the most objects is to own";
        gauges(&mut encoder, "imbalance_ratio", help, &audited, |kind| kind.audit.imbalance())?;
        let help = "Kinds that are divided, and whose objects are not known";
        let mut family = encoder.encode_descriptor("uncounted_kinds", help, None, MetricType::Gauge)?;
        for (root, operator) in &*audited {
            ConstGauge::new(operator.uncounted).encode(family.encode_family(&[("root", root.as_str())])?)?;
        }
        Ok(())
    }
}

fn gauges<Value: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    audited: &AuditedOperators,
    value: impl Fn(&AuditedKind) -> Option<Value>,
) -> Result<(), Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (operator, key, kind) in kinds(audited) {
        if let Some(value) = value(kind) {
            ConstGauge::new(value).encode(family.encode_family(&labels(operator, key))?)?;
        }
    }
    Ok(())
}

fn kinds(audited: &AuditedOperators) -> impl Iterator<Item = (&str, &KindKey, &AuditedKind)> {
    audited.iter().flat_map(|(name, one)| one.kinds.iter().map(|(key, kind)| (name.as_str(), key, kind)))
}

fn labels(operator: &str, (group, resource): &KindKey) -> KindLabels {
    KindLabels { root: operator.to_owned(), group: group.clone(), resource: resource.clone() }
}
