//! Turns ShardingConfigs and pods into policies, without any I/O.

pub mod object_name;
pub mod shared;
pub mod pod;
pub mod workload;
pub mod metric;
pub mod validate;
pub mod pod_selection;
pub mod breaker;
pub mod injection;
pub mod shard;
pub mod balance;
pub mod label_scheme;
pub mod label_coverage;
pub mod manifest;
pub mod fenced;
pub mod evidence;
pub mod rollout;
pub mod compile;
