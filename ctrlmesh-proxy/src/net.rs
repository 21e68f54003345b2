//! Sockets, TLS and message bodies, and the memory that they may take.

pub mod memory_budget;
pub mod accept;
pub mod body;
pub mod pod_socket;
pub mod prefixed;
pub mod tls;
pub mod tunnel;
