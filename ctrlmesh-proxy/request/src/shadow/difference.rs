//! Compares what a write meant with what there is.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// Most fields of one write that are compared.
const MAX_FIELDS: usize = 200;

/// Most bytes of one write that are compared, as JSON.
const MAX_BYTES: usize = 64 << 10;

/// Longest value that is shown, in characters.
const MAX_SHOWN: usize = 60;

/// Longest path that is shown, in characters.
const MAX_PATH: usize = 200;

/// Fields of the metadata that each write changes, that the API server makes up, or that the path has.
const OF_EACH_WRITE: [&str; 9] = [
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "name",
    "namespace",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// What is in the path of a value that may be secret.
const SECRET: [&str; 17] = [
    "annotation",
    "arg",
    "auth",
    "cert",
    "command",
    "config",
    "credential",
    "dsn",
    "env",
    "key",
    "pass",
    "private",
    "pwd",
    "secret",
    "token",
    "url",
    "userdata",
];

/// Fields of new objects that the API server, or who watches them at once, makes up, by resource and path. `*` is every
/// item of a list.
const MADE_UP: [(&str, &[&str]); 10] = [
    ("services", &["spec", "clusterIP"]),
    ("services", &["spec", "clusterIPs"]),
    ("services", &["spec", "healthCheckNodePort"]),
    ("services", &["spec", "ports", "*", "nodePort"]),
    ("pods", &["spec", "volumes"]),
    ("pods", &["spec", "containers", "*", "volumeMounts"]),
    ("pods", &["spec", "initContainers", "*", "volumeMounts"]),
    ("jobs.batch", &["spec", "selector"]),
    ("jobs.batch", &["spec", "template", "metadata", "labels"]),
    ("jobs.batch", &["metadata", "labels"]),
];

/// Parts of a path whose values may be secret: those of Secrets and of `ConfigMaps`.
const DATA: [&str; 3] = ["data", "binaryData", "stringData"];

/// What a write would change of an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Intent {
    changes: Vec<Change>,
    /// Whether that is all.
    is_whole: bool,
    /// What does not count.
    made_up: Vec<&'static [&'static str]>,
}

#[derive(Clone, Debug, PartialEq)]
struct Change {
    path: Vec<Step>,
    /// `None`: the field was to go.
    meant: Option<Value>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// A field that is not as it was meant.
#[derive(Clone, Debug, PartialEq)]
pub struct Field<'a> {
    change: &'a Change,
    is: Option<Value>,
}

impl Intent {
    /// What a write changed of the object `before`. At most 200 fields of 64 KiB in all.
    pub fn change(before: &Value, meant: &Value) -> Self {
        Self::of(Some(&plain(before)), &plain(meant), Vec::new())
    }

    /// The same of a write that made a new object of this resource. Nobody means a status, or what is made up.
    pub fn creation(resource: &str, meant: &Value) -> Self {
        let mut meant = plain(meant);
        meant.as_object_mut().map(|fields| fields.remove("status"));
        let made_up: Vec<_> = MADE_UP.iter().filter(|(of, _)| *of == resource).map(|(_, path)| *path).collect();
        for path in &made_up {
            remove(&mut meant, path);
        }
        Self::of(None, &meant, made_up)
    }

    fn of(before: Option<&Value>, meant: &Value, made_up: Vec<&'static [&'static str]>) -> Self {
        let mut changes = Vec::new();
        walk(before, Some(meant), &mut Vec::new(), &mut changes);
        let (all, mut bytes) = (changes.len(), 0);
        changes.truncate(MAX_FIELDS);
        changes.retain(|change| {
            bytes += change.meant.as_ref().map_or(0, |value| value.to_string().len());
            bytes <= MAX_BYTES
        });
        let is_whole = changes.len() == all;
        Self { changes, is_whole, made_up }
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.is_whole && self.changes.is_empty()
    }

    /// Whether nothing was left out because it is too much.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// The fields that are not as they were meant in the object of `now`; `None`: there is none.
    pub fn unmet(&self, now: Option<&Value>) -> Vec<Field<'_>> {
        let mut now = now.map(plain);
        if let Some(now) = &mut now {
            for path in &self.made_up {
                remove(now, path);
            }
        }
        let unmet = self.changes.iter().filter_map(|change| {
            let is = now.as_ref().and_then(|now| at(now, &change.path));
            (!same(is, change.meant.as_ref())).then(|| Field { change, is: is.cloned() })
        });
        unmet.collect()
    }
}

impl Field<'_> {
    /// Path, present value, and what was meant. `is_secret`: no value is shown.
    pub fn describe(&self, is_secret: bool) -> String {
        let path = path(&self.change.path);
        let is_secret = is_secret || self.change.path.iter().any(Step::may_be_secret);
        let (is, meant) = (shown(self.is.as_ref(), is_secret), shown(self.change.meant.as_ref(), is_secret));
        format!("{path}: is {is}, meant {meant}")
    }
}

impl Step {
    fn may_be_secret(&self) -> bool {
        let Self::Key(key) = self else { return false };
        let lower = key.to_ascii_lowercase();
        DATA.contains(&key.as_str()) || SECRET.iter().any(|word| lower.contains(word))
    }
}

/// The object without what each write changes.
fn plain(object: &Value) -> Value {
    let mut plain = object.clone();
    if let Value::Object(fields) = &mut plain {
        fields.remove("kind");
        fields.remove("apiVersion");
    }
    let metadata = plain.get_mut("metadata").and_then(Value::as_object_mut);
    if let Some(metadata) = metadata {
        for field in OF_EACH_WRITE {
            metadata.remove(field);
        }
        // That of an owner which is only a dry run itself is made up.
        for owner in metadata.get_mut("ownerReferences").and_then(Value::as_array_mut).into_iter().flatten() {
            owner.as_object_mut().map(|owner| owner.remove("uid"));
        }
    }
    plain
}

/// Takes what is at `path` out of a value.
fn remove(value: &mut Value, path: &[&str]) {
    match (path, value) {
        ([last], Value::Object(fields)) => drop(fields.remove(*last)),
        (["*", rest @ ..], Value::Array(items)) => items.iter_mut().for_each(|item| remove(item, rest)),
        ([first, rest @ ..], Value::Object(fields)) => {
            if let Some(value) = fields.get_mut(*first) {
                remove(value, rest);
            }
        }
        _ => {}
    }
}

fn walk(before: Option<&Value>, meant: Option<&Value>, path: &mut Vec<Step>, changes: &mut Vec<Change>) {
    if same(before, meant) {
        return;
    }
    match (before, meant) {
        (Some(Value::Object(_)) | None, Some(Value::Object(fields))) => {
            let none = Map::new();
            let former = before.and_then(Value::as_object).unwrap_or(&none);
            let gone = former.keys().filter(|key| !fields.contains_key(*key));
            for key in fields.keys().chain(gone) {
                path.push(Step::Key(key.clone()));
                walk(former.get(key), fields.get(key), path, changes);
                path.pop();
            }
        }
        (Some(Value::Array(former)), Some(Value::Array(items))) if former.len() == items.len() => {
            for (index, (former, item)) in former.iter().zip(items).enumerate() {
                path.push(Step::Index(index));
                walk(Some(former), Some(item), path, changes);
                path.pop();
            }
        }
        _ => changes.push(Change { path: path.clone(), meant: meant.cloned() }),
    }
}

fn at<'v>(object: &'v Value, path: &[Step]) -> Option<&'v Value> {
    path.iter().try_fold(object, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Index(index) => value.get(index),
    })
}

/// Nothing, null and an empty list or object are the same, and so are all times: each writer takes its own.
fn same(one: Option<&Value>, other: Option<&Value>) -> bool {
    let [one, other] = [one, other].map(|value| value.filter(|value| is_anything(value)));
    let (Some(one), Some(other)) = (one, other) else { return one.is_none() && other.is_none() };
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let keys = one.keys().chain(other.keys());
            keys.into_iter().all(|key| same(one.get(key), other.get(key)))
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(Some(one), Some(other)))
        }
        (Value::String(one), Value::String(other)) => one == other || is_time(one) && is_time(other),
        _ => one == other,
    }
}

fn is_anything(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// Whether it is a time as the API writes it (RFC 3339).
fn is_time(text: &str) -> bool {
    text.len() >= "2026-01-01T00:00:00Z".len() && text.parse::<jiff::Timestamp>().is_ok()
}

fn path(steps: &[Step]) -> String {
    let mut path = String::new();
    for step in steps {
        let part = match step {
            Step::Index(index) => format!("[{index}]"),
            Step::Key(key) if key.contains(['.', '/']) => format!("[{key:?}]"),
            Step::Key(key) if path.is_empty() => key.clone(),
            Step::Key(key) => format!(".{key}"),
        };
        path.push_str(&part);
    }
    clipped(&path, MAX_PATH).into_owned()
}

fn shown(value: Option<&Value>, is_secret: bool) -> String {
    match value {
        None | Some(Value::Null) => "absent".to_owned(),
        Some(_) if is_secret => "not shown".to_owned(),
        Some(Value::Array(items)) => format!("a list of {}", items.len()),
        Some(Value::Object(_)) => "an object".to_owned(),
        Some(value) => clipped(&value.to_string(), MAX_SHOWN).into_owned(),
    }
}

fn clipped(text: &str, longest: usize) -> Cow<'_, str> {
    match text.char_indices().nth(longest) {
        Some((at, _)) => Cow::Owned(format!("{}…", &text[..at])),
        None => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(before: Option<&Value>, meant: &Value, now: Option<&Value>) -> Vec<String> {
        let intent = match before {
            Some(before) => Intent::change(before, meant),
            None => Intent::creation("services", meant),
        };
        intent.unmet(now).iter().map(|field| field.describe(false)).collect()
    }

    fn object(replicas: u32, label: &str) -> Value {
        json!({
            "kind": "Deployment",
            "metadata": {"name": "a", "resourceVersion": label, "labels": {"example.com/l": label}, "generation": 1},
            "spec": {"replicas": replicas, "containers": [{"image": "a:1", "env": [{"name": "P", "value": label}]}]},
            "status": {"conditions": [{"lastTransitionTime": format!("2026-01-01T00:00:0{replicas}Z")}]},
        })
    }

    #[test]
    fn only_what_a_write_changes_is_looked_at() {
        let (before, meant) = (object(1, "l"), object(3, "l"));
        assert!(Intent::change(&meant, &meant).is_empty());
        assert_eq!(told(Some(&before), &meant, Some(&object(3, "other"))), [""; 0], "somebody changed the label");
        assert_eq!(told(Some(&before), &meant, Some(&object(2, "l"))), ["spec.replicas: is 2, meant 3"]);
        assert_eq!(told(Some(&before), &meant, None), ["spec.replicas: is absent, meant 3"]);
    }

    #[test]
    fn a_field_that_goes_and_a_list_that_grows_are_told() {
        let (before, mut meant) = (object(1, "l"), object(1, "l"));
        meant["metadata"]["labels"] = json!({});
        meant["spec"]["containers"] = json!([{"image": "a:1"}, {"image": "b:1"}]);
        let expected = [
            "metadata.labels[\"example.com/l\"]: is \"l\", meant absent",
            "spec.containers: is a list of 1, meant a list of 2",
        ];
        assert_eq!(told(Some(&before), &meant, Some(&before)), expected);
        assert_eq!(told(Some(&before), &meant, Some(&meant)), [""; 0]);
    }

    #[test]
    fn a_new_object_is_compared_as_a_whole_but_for_what_the_server_makes_up() {
        let owner = |uid: &str| json!({"metadata": {"uid": uid, "ownerReferences": [{"name": "o", "uid": uid}]}});
        assert_eq!(told(None, &owner("1"), Some(&owner("2"))), [""; 0]);
        let mut now = object(3, "l");
        now["status"]["replicas"] = json!(3);
        assert_eq!(told(None, &object(3, "l"), Some(&now)), [""; 0], "another one writes more");
        let made_up = |address: &str| json!({"spec": {"clusterIP": address, "ports": [{"nodePort": address}]}});
        assert!(Intent::creation("services", &made_up("10.0.0.1")).unmet(Some(&made_up("10.0.0.2"))).is_empty());
        assert_eq!(Intent::creation("widgets", &made_up("1")).unmet(Some(&made_up("2"))).len(), 2);
        now["spec"]["containers"][0]["image"] = json!("b:1");
        assert_eq!(told(None, &object(3, "l"), Some(&now)), ["spec.containers: is a list of 1, meant a list of 1"]);
    }

    #[test]
    fn values_that_may_be_secret_and_long_ones_are_not_shown() {
        let with = |text: &str| json!({"data": {"a": text}, "spec": {"apiToken": text, "env": [text], "title": text}});
        let long = "x".repeat(100);
        let told = told(Some(&with("s")), &with(&long), Some(&with("s")));
        assert_eq!(told.len(), 4);
        let hidden = ["data.a", "spec.apiToken", "spec.env[0]"];
        for path in hidden {
            assert!(told.contains(&format!("{path}: is not shown, meant not shown")), "{told:?}");
        }
        let clipped = format!("spec.title: is \"s\", meant \"{}…", "x".repeat(59));
        assert!(told.contains(&clipped), "{told:?}");
        let write = Intent::creation("secrets", &json!({"a": 1}));
        assert_eq!(write.unmet(None)[0].describe(true), "a: is absent, meant not shown");
    }

    #[test]
    fn a_large_write_is_compared_in_part() {
        let many: Map<String, Value> = (0..1000).map(|number| (number.to_string(), json!(number))).collect();
        let intent = Intent::creation("widgets", &Value::from(many));
        assert_eq!((intent.changes.len(), intent.is_whole()), (MAX_FIELDS, false));
        let large = Intent::creation("widgets", &json!({"a": "x".repeat(MAX_BYTES)}));
        assert!(!large.is_empty() && !large.is_whole() && large.unmet(None).is_empty(), "nobody knows");
    }
}
