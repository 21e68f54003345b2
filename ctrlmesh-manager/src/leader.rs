//! Elects one replica as leader and publishes the list of replicas.

pub mod lease;
pub mod replica_list;
