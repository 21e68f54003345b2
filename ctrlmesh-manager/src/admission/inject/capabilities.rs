//! Takes from containers what they could send packets under another pod's address with.
//!
//! Container runtimes give `NET_RAW` to all containers, unless they are told not to. The node tells pods apart by the
//! addresses of their packets.

use k8s_openapi::api::core::v1::{Container, SecurityContext};

const NET_RAW: &str = "NET_RAW";

/// Drops `NET_RAW`, unless the container asks for it by name, or is privileged.
pub(super) fn apply(container: &mut Container) {
    if !is_settled(container.security_context.as_ref()) {
        let security = container.security_context.get_or_insert_default();
        let capabilities = security.capabilities.get_or_insert_default();
        capabilities.drop.get_or_insert_default().push(NET_RAW.to_owned());
    }
}

/// Whether the container has said itself what it needs.
fn is_settled(security: Option<&SecurityContext>) -> bool {
    let Some(security) = security else { return false };
    let capabilities = security.capabilities.iter();
    let mut named = capabilities.flat_map(|one| one.add.iter().chain(&one.drop).flatten());
    security.privileged == Some(true)
        || named.any(|name| matches!(name.strip_prefix("CAP_").unwrap_or(name), NET_RAW | "ALL"))
}
