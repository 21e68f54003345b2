//! Audits who owns what: whether every object that is divided has exactly one shard that sees it, and a pod that
//! watches it.
//!
//! Operators that are sharded can leave an object to nobody, and nobody notices: it looks healthy, and was not looked
//! at for days. So the leader compares all objects of the labelled kinds with what each proxy has in force, and with
//! the watches that it passes on.

mod holders;
mod operators;
mod comparison;
mod condition;
mod metrics;
mod auditor;

pub use auditor::Auditor;
pub use condition::{OWNED, OwnedFinding, Ownerships};
pub use metrics::AuditMetrics;
