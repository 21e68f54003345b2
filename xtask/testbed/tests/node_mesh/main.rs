//! Everything, as users have it: manager and node proxies from `deploy/`, and ordinary operators that are enrolled by a
//! label.

mod mesh;
mod operator;
mod shards;
mod modes;
mod life;
