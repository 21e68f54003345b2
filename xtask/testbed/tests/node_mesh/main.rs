//! Everything, as users have it: manager and node proxies from `deploy/`, and ordinary operators that are enrolled by a
//! label.

mod mesh;
mod operator;
mod delays;
mod shards;
mod modes;
mod life;
mod rights;
mod upgrade;
mod from_inside;
