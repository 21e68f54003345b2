//! `ctrlmesh-proxy`
fn main() {}
