//! Installs, changes and removes ctrlmesh with Helm while an operator works: nothing is refused, and nothing is left.

mod helm;
mod removal;
mod whole;
#[path = "../mesh/mod.rs"]
mod mesh;
