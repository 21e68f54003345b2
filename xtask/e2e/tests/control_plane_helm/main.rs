//! The chart, with both versions of Helm, on a real API server.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod helm;
mod rendered;
mod accepted;
mod release;
mod versions;
