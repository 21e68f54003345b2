//! The contracts of ctrlmesh: between kernel programs, proxy, manager and users.
#![cfg_attr(not(feature = "core"), no_std)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod kernel;
#[cfg(feature = "loader")]
pub mod pod;
#[cfg(feature = "core")]
pub mod names;
#[cfg(feature = "core")]
pub mod pod_name;
#[cfg(feature = "core")]
pub mod selector;
#[cfg(feature = "core")]
pub mod resource;
#[cfg(feature = "core")]
pub mod member_path;
#[cfg(feature = "core")]
pub mod slots;
#[cfg(feature = "core")]
pub mod balance;
#[cfg(feature = "core")]
pub mod ownership;
#[cfg(feature = "core")]
pub mod handover;
#[cfg(feature = "api")]
pub mod api;
#[cfg(feature = "core")]
pub mod policy;
#[cfg(feature = "api")]
pub mod share;
#[cfg(feature = "api")]
pub mod rollout;
#[cfg(feature = "wire")]
pub mod wire;
