//! Answers admission reviews: validates our resources, labels objects, injects pods and places them in shards.

pub mod inject;
pub mod admit;
pub mod blocking_pool;
pub mod placement;
pub mod webhook;
