//! The kernel programs and the maps that they share with this process.

pub(crate) mod map;
pub(crate) mod object;
pub(crate) mod link;
pub(crate) mod target_table;
pub(crate) mod original;
pub(crate) mod event;
