//! Shows the requests of a pod as they come, to whoever may run a program in the proxy's container.
//!
//! The proxy listens at a Unix socket. `ctrlmesh-proxy trace` connects to it from inside the same container, which is
//! how `ctrlmesh trace` asks: the API server lets only those in who have the right to `pods/exec`. While nobody asks,
//! each request pays for one comparison.

mod shown_target;
mod line;
mod filter;
mod listeners;
mod request;
mod socket;
mod command;

pub use self::command::{TraceArgs, TraceError, run};
pub use self::filter::TraceFilter;
pub use self::line::{TraceLine, TracedRequest};
pub use self::listeners::Listeners;
pub use self::request::LiveRequest;
pub use self::shown_target::readable;
pub use self::socket::{bind, serve};
