//! Says whether a pod is ready, and why not.
//!
//! Pure.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};

use crate::text::{cut, line};
use crate::version::part;

/// Of what a container said at its end, in characters.
const MESSAGE_WIDTH: usize = 300;

pub(super) fn is_ready(pod: &Pod) -> bool {
    part::is_ready(pod) && pod.metadata.deletion_timestamp.is_none()
}

/// By the containers of the pod, and else by its conditions.
pub(super) fn why_not_ready(pod: &Pod) -> String {
    if pod.metadata.deletion_timestamp.is_some() {
        return "it is being deleted".to_owned();
    }
    let Some(status) = &pod.status else { return "it has no status yet".to_owned() };
    let containers = status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    if let Some(reason) = containers.filter(|one| !one.ready).find_map(of_container) {
        return reason;
    }
    let conditions = status.conditions.iter().flatten();
    let messages = conditions.filter(|one| one.status != "True").filter_map(|one| one.message.as_deref());
    messages.map(line).next().unwrap_or_else(|| "it says no reason".to_owned())
}

/// Why a container does not run, and what ended it before. `None`: it runs, or ended well.
fn of_container(container: &ContainerStatus) -> Option<String> {
    let ended = |state: &Option<ContainerState>| {
        let ended = state.as_ref()?.terminated.as_ref()?;
        // The end of its log, of which the last line has the error.
        let mut lines = ended.message.as_deref().unwrap_or_default().lines().rev();
        let why = lines.find(|line| !line.trim().is_empty());
        let code = || format!("exit code {}", ended.exit_code);
        Some(why.map_or_else(code, |why| cut(&line(why), MESSAGE_WIDTH)))
    };
    let before = ended(&container.last_state);
    let now = container.state.as_ref().and_then(|state| state.waiting.as_ref()).and_then(|it| it.reason.clone());
    let now = now.or_else(|| ended(&container.state));
    let also = before.map_or_else(String::new, |before| format!("; it ended before: {before}"));
    match now {
        Some(now) => Some(format!("container {}: {now}{also}", container.name)),
        None if !also.is_empty() => Some(format!("container {} is not ready{also}", container.name)),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
    }

    #[test]
    fn the_last_line_of_a_log_says_why_a_container_ended() {
        let ended = json!({"terminated": {"exitCode": 1, "message": "starts\nthe kernel (5.10) is too old\n"}});
        let container = json!({"name": "proxy", "image": "", "imageID": "", "ready": false, "restartCount": 1,
            "state": ended});
        let said = why_not_ready(&pod(json!({"containerStatuses": [container]})));
        assert_eq!(said, "container proxy: the kernel (5.10) is too old");
    }

    #[test]
    fn conditions_say_why_no_container_runs() {
        let condition = json!({"type": "PodScheduled", "status": "False", "message": "no node fits"});
        assert_eq!(why_not_ready(&pod(json!({"conditions": [condition]}))), "no node fits");
        assert_eq!(why_not_ready(&pod(json!({}))), "it says no reason");
        assert!(!is_ready(&pod(json!({}))));
        assert!(is_ready(&pod(json!({"conditions": [{"type": "Ready", "status": "True"}]}))));
    }
}
