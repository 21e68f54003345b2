//! Canary upgrades of an operator on a real kubelet, judged by the audit log of the API server.
//!
//! An ordinary run tries a good version and three bad ones of a Deployment. A full run (`--full`) tries everything.

mod bed;
mod elastic;
mod metrics_server;
mod scaling;
mod vanishing;
mod pods;
mod trial;
mod promotions;
mod failures;
mod shadows;
mod managers;
#[path = "../mesh/mod.rs"]
mod mesh;
