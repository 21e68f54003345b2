//! The manager decides who owns what.
#![forbid(unsafe_code)]

pub mod definitions;
pub mod validate;
pub mod pod;
pub mod shard;
pub mod compile;
pub mod manifest;
