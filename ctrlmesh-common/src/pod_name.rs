//! Names a pod by its namespace and name: `NAMESPACE/NAME`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A pod's namespace and name. It is printed, and written to JSON, as `NAMESPACE/NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// A text that names no pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not NAMESPACE/NAME")]
pub struct PodNameError {
    text: String,
}

impl fmt::Display for PodName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for PodName {
    type Err = PodNameError;

    fn from_str(text: &str) -> Result<Self, PodNameError> {
        let parts = text.split_once('/').filter(|(_, name)| !name.contains('/'));
        let parts = parts.filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty());
        let (namespace, name) = parts.ok_or_else(|| PodNameError { text: text.to_owned() })?;
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

impl Serialize for PodName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PodName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_name_is_read_as_it_is_printed() {
        let name = PodName { namespace: "ns".to_owned(), name: "a".to_owned() };
        assert_eq!(name.to_string().parse(), Ok(name));
        for wrong in ["", "a", "/a", "ns/", "a/b/c"] {
            assert!(wrong.parse::<PodName>().is_err(), "{wrong}");
        }
    }
}
