//! Reads `Chart.yaml`, and writes what `helm push` makes of it. Pure.
//!
//! It reads what we write: a line for each field, lists in brackets, and one level of mappings. It refuses the rest.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

/// The fields of a chart, in the order in which Helm writes them.
const FIELDS: [&str; 12] = [
    "name",
    "home",
    "sources",
    "version",
    "description",
    "keywords",
    "icon",
    "apiVersion",
    "appVersion",
    "annotations",
    "kubeVersion",
    "type",
];

/// What OCI calls some of the fields.
const ANNOTATIONS: [(&str, &str); 4] = [
    ("description", "org.opencontainers.image.description"),
    ("name", "org.opencontainers.image.title"),
    ("version", "org.opencontainers.image.version"),
    ("home", "org.opencontainers.image.url"),
];

/// What a chart cannot annotate otherwise.
const KEPT: [&str; 2] = ["org.opencontainers.image.title", "org.opencontainers.image.version"];

/// The value of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Text(String),
    List(Vec<String>),
    Map(BTreeMap<String, String>),
}

/// A `Chart.yaml`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chart(BTreeMap<String, Value>);

impl Chart {
    /// # Errors
    /// The first line that is not understood.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (mut fields, mut last) = (BTreeMap::new(), String::new());
        let lines = text.lines().filter(|line| !line.trim_start().starts_with('#') && !line.trim().is_empty());
        for line in lines {
            let what = || format!("a line of Chart.yaml that a release does not understand: {line}");
            let (key, value) = line.split_once(':').with_context(what)?;
            let value = value.trim();
            if let Some(key) = key.strip_prefix("  ") {
                match fields.get_mut(&last) {
                    Some(Value::Map(map)) => map.insert(key.to_owned(), scalar(value).with_context(what)?),
                    _ => bail!(what()),
                };
                continue;
            }
            if !FIELDS.contains(&key) {
                bail!(what());
            }
            key.clone_into(&mut last);
            let inside = value.strip_prefix('[').and_then(|value| value.strip_suffix(']'));
            let value = match inside.map(|inside| inside.split(',').map(|one| scalar(one.trim())).collect()) {
                _ if value.is_empty() => Value::Map(BTreeMap::new()),
                Some(texts) => Value::List(Option::<_>::with_context(texts, what)?),
                None => Value::Text(scalar(value).with_context(what)?),
            };
            fields.insert(last.clone(), value);
        }
        Ok(Self(fields))
    }

    /// # Errors
    /// Where it has none.
    pub(super) fn name(&self) -> Result<&str> {
        self.text("name").context("Chart.yaml has no name")
    }

    /// # Errors
    /// Where it has none.
    pub(super) fn version(&self) -> Result<&str> {
        self.text("version").context("Chart.yaml has no version")
    }

    fn text(&self, field: &str) -> Option<&str> {
        match self.0.get(field) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The configuration of its image: all fields, as Go writes JSON.
    ///
    /// # Errors
    /// Never: text can be written.
    pub(super) fn config(&self) -> Result<String> {
        let mut fields = Vec::new();
        for field in FIELDS {
            let Some(value) = self.0.get(field) else { continue };
            let value = match value {
                Value::Text(text) => go_json(text)?,
                Value::List(list) => {
                    format!("[{}]", list.iter().map(|one| go_json(one)).collect::<Result<Vec<_>>>()?.join(","))
                }
                Value::Map(map) => {
                    let pair =
                        |(name, value): (&String, &String)| Ok(format!("{}:{}", go_json(name)?, go_json(value)?));
                    format!("{{{}}}", map.iter().map(pair).collect::<Result<Vec<_>>>()?.join(","))
                }
            };
            fields.push(format!("\"{field}\":{value}"));
        }
        Ok(format!("{{{}}}", fields.join(",")))
    }

    /// The annotations of its manifest, but for the time.
    pub(super) fn annotations(&self) -> BTreeMap<&str, &str> {
        let mut annotations = BTreeMap::new();
        annotations.extend(ANNOTATIONS.iter().filter_map(|(field, name)| Some((*name, self.text(field)?))));
        if let Some(Value::List(sources)) = self.0.get("sources") {
            annotations.extend(sources.first().map(|first| ("org.opencontainers.image.source", first.as_str())));
        }
        if let Some(Value::Map(own)) = self.0.get("annotations") {
            let others = own.iter().filter(|(name, _)| !KEPT.contains(&name.as_str()));
            annotations.extend(others.map(|(name, value)| (name.as_str(), value.as_str())));
        }
        annotations
    }
}

/// A plain or quoted text; none where it is something else in YAML.
fn scalar(text: &str) -> Option<String> {
    let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    let inside = quoted.unwrap_or(text);
    let is_plain = !inside.contains(['"', '\\'])
        && (quoted.is_some() || !inside.starts_with(['[', '{', '\'', '&', '*', '|', '>']));
    (is_plain && !inside.contains(" #")).then(|| inside.to_owned())
}

/// Text in JSON as Go writes it, which minds that somebody could put it into HTML.
///
/// # Errors
/// Never: text can be written.
pub(super) fn go_json(text: &str) -> Result<String> {
    let plain = serde_json::to_string(text)?;
    Ok(plain.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "apiVersion: v2\nname: a\n# Why.\nversion: 1.2.3\ndescription: What it is, in short\n\
        kubeVersion: \">=1.30.0-0\"\nkeywords: [one, two]\nannotations:\n  licenses: MIT\n";

    #[test]
    fn fields_are_in_the_order_of_helm_and_signs_are_escaped() {
        let config = Chart::parse(TEXT).unwrap().config().unwrap();
        let expected = [
            r#"{"name":"a","version":"1.2.3","description":"What it is, in short","keywords":["one","two"],"#,
            r#""apiVersion":"v2","annotations":{"licenses":"MIT"},"kubeVersion":"\u003e=1.30.0-0"}"#,
        ];
        assert_eq!(config, expected.concat());
    }

    #[test]
    fn a_chart_cannot_annotate_its_name_and_version_away() {
        let text = format!("{TEXT}  org.opencontainers.image.version: \"9\"\n");
        let chart = Chart::parse(&text).unwrap();
        let annotations = chart.annotations();
        assert_eq!(annotations["org.opencontainers.image.version"], "1.2.3");
        assert_eq!(annotations["org.opencontainers.image.title"], "a");
        assert_eq!(annotations["licenses"], "MIT");
    }

    #[test]
    fn what_is_not_understood_is_refused_and_not_left_out() {
        for wrong in ["dependencies:\n", "keywords: [a, \"b\n", "- a\n", "name: &a b\n", "  x: y\n", "name: a # b\n"] {
            let error = Chart::parse(&format!("version: 1\n{wrong}")).unwrap_err().to_string();
            assert!(error.contains("does not understand"), "{wrong}: {error}");
        }
        let chart = std::fs::read_to_string(crate::chart::folder().join("Chart.yaml")).unwrap();
        Chart::parse(&chart).unwrap().config().unwrap();
    }
}
