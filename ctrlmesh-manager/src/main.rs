//! `ctrlmesh-manager`
fn main() {}
