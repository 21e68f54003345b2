//! Tries new versions of operators: decides by what their pods do and by metrics, promotes pods, and puts pod templates
//! back.

mod prometheus;
mod metrics;
mod shadow;
mod window;
mod telemetry;
mod action;
pub mod gate;
pub mod workload;
pub mod controller;

pub use telemetry::RolloutMetrics;
