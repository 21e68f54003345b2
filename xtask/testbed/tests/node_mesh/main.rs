//! Everything, as users have it: manager and node proxies from `deploy/`, and ordinary operators that are enrolled by a
//! label, on one cluster.

mod shards;
mod modes;
mod sidecars;
mod rights;
mod from_inside;
mod egress;
mod bypass;
mod users;
#[path = "../mesh/mod.rs"]
mod mesh;
