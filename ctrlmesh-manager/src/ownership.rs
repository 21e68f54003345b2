//! The fence in the API server: who may write which objects of an operator, and what every API server has shown of it.

pub mod fence_state;
pub mod fence_names;
pub mod fence_table;
mod admission_policy;
pub mod fence_policy;
pub mod informer_policy;
pub mod fence_plan;
mod endpoints;
mod probe;
mod prober;
pub mod fence_keeper;

pub use fence_keeper::FenceKeeper;
