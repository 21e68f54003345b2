//! Generates the manifests that an installation needs: CRDs and RBAC.

pub mod crds;
pub mod rbac;

#[cfg(test)]
mod tests;
