//! Limits how often a pod asks the API server for something.
//!
//! A [`Guards`] holds the rules of a pod with their buckets and breakers. Time is a value: [`Moment`]. A request that
//! several rules match must pass them all. If one of them refuses it, none is charged; their order does not matter.

mod bucket;
mod breaker;
mod matching;
mod refused;
mod rules;
mod window;

pub use breaker::{Breaker, ProbeId, Verdict};
pub use bucket::{Moment, TokenBucket};
pub use matching::matches;
pub use refused::{Cause, Refused};
pub use rules::{Admitted, Guards, OpenRule};
pub use window::Window;
