//! Decides what a pod may talk to beside the API server.
//!
//! The first bytes of a connection say what the client speaks, and for TLS which server it means. The rules then say
//! whether the connection, or each request on it, passes.

mod token;
mod protocol;
mod client_hello;
mod path;
mod target;
mod rules;

pub use client_hello::{Hello, MAX_HELLO_BYTES, read_hello};
pub(crate) use path::normalised;
pub use protocol::{Protocol, protocol};
pub(crate) use rules::UrlRequests;
pub use rules::{Rules, needs_path};
pub use target::Visible;
pub(crate) use target::{Host, Target};
pub use token::{ServiceAccountToken, TOKEN_SUBPROTOCOL};
