//! What lives, dies, is updated and is removed, with everything as users have it; each test on a node of its own.

mod life;
mod starts;
mod unfit;
mod upgrade;
#[path = "../mesh/mod.rs"]
mod mesh;
