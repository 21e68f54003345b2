//! The manager as a process, and a real API server that asks it: validating, injecting, labelling.

mod webhooks;
mod bed;
mod labels;
mod many;
mod shapes;
