//! Recognises runtimes that give a pod a kernel of its own, or one in user space.
//!
//! Such a pod makes no `connect()` on the node's kernel, so nothing there can redirect it.

use k8s_openapi::api::core::v1::PodSpec;

use super::{Interception, Refusal};

/// What the handlers of `RuntimeClasses` begin with: gVisor, Kata Containers (also of clouds), Firecracker, Hyper-V.
const SANDBOXES: [&str; 6] = ["runsc", "gvisor", "kata", "firecracker", "aws.firecracker", "runhcs"];

/// How connections of a pod reach its proxy, where `wanted` is what the pod asks for, and `handler` that of its
/// `RuntimeClass`.
///
/// # Errors
/// Where the pod asks for what its runtime cannot do.
pub(super) fn interception(
    wanted: Option<Interception>,
    spec: &PodSpec,
    handler: Option<&str>,
) -> Result<Interception, Refusal> {
    let class = spec.runtime_class_name.as_deref();
    // A class that is not known yet: its name mostly is that of its handler.
    let handler = handler.or(class).map(str::to_ascii_lowercase);
    let sandboxed = handler.is_some_and(|handler| SANDBOXES.iter().any(|sandbox| handler.starts_with(sandbox)));
    match wanted {
        None if sandboxed => Ok(Interception::Env),
        None => Ok(Interception::Ebpf),
        Some(Interception::Ebpf) if sandboxed => Err(Refusal::Runtime { class: class.unwrap_or_default().to_owned() }),
        Some(wanted) => Ok(wanted),
    }
}
