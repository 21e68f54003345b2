//! Reads a Kubernetes API request, limits how often it passes, decides what a policy makes of it, rewrites it, and says
//! which faults it meets, without sockets, tasks or clocks. Says of requests to other servers whether they pass, and of
//! admission reviews who answers them, and of the writes of a shadow what became of them.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

pub mod request;
pub mod classify;
pub mod egress;
pub mod guard;
pub mod decide;
pub mod rewrite;
pub mod fault;
pub mod review;
pub mod shadow;
