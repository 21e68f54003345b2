//! Sits between an operator and its API server: intercepts, injects selectors, forwards.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

pub mod intercept;
pub mod request;
pub mod classify;
pub mod decide;
pub mod rewrite;
