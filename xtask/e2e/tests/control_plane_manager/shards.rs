//! The shards of roots, written into a real API server, with the controllers of Kubernetes beside us.

mod bed;
mod changes;
mod made;
