//! Admission reviews of operators, as users have them: each is answered by the replica that owns the object.
//!
//! On a cluster of their own: what these operators divide may be labelled here. `node_mesh` checks that nothing may be
//! labelled that nobody has named.

mod reviews;
mod admission;
mod verdicts;
mod renewal;
#[path = "../mesh/mod.rs"]
mod mesh;
