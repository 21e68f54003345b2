//! Changes, and an API server that knows one object.

use std::sync::{Arc, Mutex};

use http::Method;

use super::*;
use crate::migrate::fake_server;
use crate::migrate::object::CONFIG_MAP;

const SECOND: Duration = Duration::from_secs(1);

/// An API server with at most one object, which notes what it is asked to change.
#[derive(Clone, Default)]
struct Server {
    object: Arc<Mutex<Option<Value>>>,
    writes: Arc<Mutex<Vec<Method>>>,
}

impl Server {
    fn with(metadata: &Value) -> Self {
        let mut object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b", "namespace": "a"}});
        object["metadata"].as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
        Self { object: Arc::new(Mutex::new(Some(object))), ..Self::default() }
    }

    fn answer(&self, method: &Method) -> (u16, Value) {
        if *method != Method::GET {
            self.writes.lock().unwrap().push(method.clone());
        }
        let there = match *method {
            Method::DELETE => self.object.lock().unwrap().take(),
            _ => self.object.lock().unwrap().clone(),
        };
        let gone = || (404, json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}));
        there.map_or_else(gone, |object| (200, object))
    }

    async fn carry_out(&self, action: Action, purpose: Purpose) -> Result<Outcome, MigrateError> {
        let change = Change::new(CONFIG_MAP.named(Some("a"), "b"), action);
        let this = self.clone();
        carry_out(&fake_server::client(move |method, _| this.answer(method)), &change, purpose, SECOND).await
    }
}

#[tokio::test]
async fn an_undo_goes_on_where_an_object_is_gone() {
    let gone = Server::default();
    for action in [Action::Merge(json!({"data": {}})), Action::MergeStatus(json!({"status": {}}))] {
        let undone = gone.carry_out(action.clone(), Purpose::Undo).await;
        assert!(matches!(undone, Ok(Outcome::Absent)), "{undone:?}");
        let done = gone.carry_out(action, Purpose::Step).await;
        assert!(matches!(done, Err(MigrateError::Change { .. })), "a step needs it: {done:?}");
    }
}

#[tokio::test]
async fn what_is_being_deleted_gets_no_finalizer() {
    let deleted = Server::with(&json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["of.another/one"]}));
    let outcome = deleted.carry_out(Action::AddFinalizer("x/y".to_owned()), Purpose::Undo).await;
    assert!(matches!(outcome, Ok(Outcome::Absent)), "{outcome:?}");
    assert_eq!(*deleted.writes.lock().unwrap(), Vec::<Method>::new());
    let alive = Server::with(&json!({}));
    let outcome = alive.carry_out(Action::AddFinalizer("x/y".to_owned()), Purpose::Undo).await;
    assert!(matches!(outcome, Ok(Outcome::Done)), "{outcome:?}");
}

#[tokio::test]
async fn an_undo_deletes_only_what_a_migration_made() {
    let by = |manager: &str| Server::with(&json!({"managedFields": [{"manager": manager, "operation": "Update"}]}));
    for (manager, purpose, wanted) in [
        ("kubectl", Purpose::Undo, Outcome::Foreign),
        (FIELD_MANAGER, Purpose::Undo, Outcome::Done),
        ("kubectl", Purpose::Step, Outcome::Done),
    ] {
        let server = by(manager);
        assert_eq!(server.carry_out(Action::Delete, purpose).await.unwrap(), wanted, "{manager} {purpose:?}");
        assert_eq!(server.object.lock().unwrap().is_some(), wanted == Outcome::Foreign, "{manager} {purpose:?}");
    }
}

#[tokio::test]
async fn a_webhook_that_is_asked_a_moment_longer_is_waited_for() {
    let refused =
        |message: &str| (500, json!({"kind": "Status", "status": "Failure", "code": 500, "message": message}));
    let there = || (200, json!({"metadata": {"name": "b", "namespace": "a"}}));
    let patch = Change::new(CONFIG_MAP.named(Some("a"), "b"), Action::Merge(json!({"data": {}})));
    for (message, is_waited_for) in [("failed calling webhook \"x\": refused", true), ("disk full", false)] {
        let asked = Arc::new(Mutex::new(0));
        let client = fake_server::client(move |_, _| {
            let mut asked = asked.lock().unwrap();
            *asked += 1;
            if *asked < 3 { refused(message) } else { there() }
        });
        let outcome = carry_out(&client, &patch, Purpose::Step, SECOND).await;
        assert_eq!(outcome.is_ok(), is_waited_for, "{outcome:?}");
    }
}

#[test]
fn defaults_make_no_difference_and_values_do() {
    let there = json!({"spec": {"a": 1, "default": true, "list": [{"x": 1, "scope": "*"}]}});
    for wanted in [json!({"spec": {"a": 1, "list": [{"x": 1}]}}), json!({"spec": {"gone": null}})] {
        assert!(contains(&there, &wanted), "{wanted}");
    }
    for wanted in
        [json!({"spec": {"a": 2}}), json!({"spec": {"list": []}}), json!({"b": 1}), json!({"spec": {"a": null}})]
    {
        assert!(!contains(&there, &wanted), "{wanted}");
    }
}
