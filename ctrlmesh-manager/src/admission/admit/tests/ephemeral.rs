use serde_json::{Value, json};

use super::*;

#[test]
fn no_ephemeral_container_gets_at_what_is_the_proxys_alone() {
    let answer = |container: Value| {
        let mut debugged = pod("op-0", "op");
        debugged["spec"]["ephemeralContainers"] = json!([container]);
        let mut review = asked("UPDATE", debugged, None);
        review.sub_resource = Some("ephemeralcontainers".to_owned());
        validate(&review, None, &Labelling::default())
    };
    let mount = |name: &str| json!({"name": "debug", "volumeMounts": [{"name": name, "mountPath": "/x"}]});
    for (container, field) in [
        (mount("ctrlmesh-proxy"), "volumeMounts"),
        (mount("ctrlmesh-state"), "volumeMounts"),
        (json!({"name": "debug", "targetContainerName": "ctrlmesh-proxy"}), "targetContainerName"),
    ] {
        let response = answer(container);
        assert!(!response.allowed && response.result.message.contains(field), "{response:?}");
    }
    for container in [mount("data"), json!({"name": "debug", "targetContainerName": "operator"})] {
        assert!(answer(container).allowed);
    }
}
