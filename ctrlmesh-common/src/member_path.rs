//! Finds the member cluster that a path leads to: behind a prefix that a template describes.
//!
//! Multi-cluster systems serve each member's API behind a path of the host's API server:
//! `/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/proxy` and then the path on the member.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The most segments of a template.
pub const MAX_SEGMENTS: usize = 16;

/// The longest template, in bytes.
pub const MAX_BYTES: usize = 512;

const CLUSTER: &str = "{cluster}";

const NAMESPACE: &str = "{namespace}";

const ANY: &str = "*";

/// A path that leads to a member, with `{cluster}` in the place of its name. It is printed, and written to JSON, as it
/// was read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathTemplate {
    segments: Vec<Segment>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Segment {
    Literal(String),
    Cluster,
    Namespace,
    Any,
}

/// Why a text is no template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} {problem}")]
pub struct PathTemplateError {
    text: String,
    problem: PathTemplateProblem,
}

/// What is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathTemplateProblem {
    /// It is too long.
    #[error("has more than {MAX_BYTES} bytes or {MAX_SEGMENTS} segments")]
    TooLong,
    /// It does not begin with a slash, ends with one, or has two in a row.
    #[error("is not a path of segments, as /clusters/{{cluster}} is: it begins with a slash, and ends with none")]
    Slashes,
    /// No segment is the cluster's, or several are.
    #[error("must have exactly one segment {{cluster}}")]
    Cluster,
    /// Several segments are the namespace's.
    #[error("may have only one segment {{namespace}}")]
    Namespace,
    /// The first segment stands for anything, so that every path would lead to a member.
    #[error("must begin with a segment that is a word")]
    First,
    /// A segment that is neither a word nor one of those that stand for something.
    #[error(
        "has a segment {segment:?}: allowed are a-z A-Z 0-9 - . _ ~ : and, as whole segments, {{cluster}}, {{namespace}} \
         and *"
    )]
    Segment {
        /// Which.
        segment: String,
    },
    /// It leads to an object of the host's own API.
    #[error(
        "leads to objects of the host itself: below /api and /apis, only subresource proxy of a group's resource leads \
         elsewhere"
    )]
    OwnApi,
}

/// A path that leads to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'p> {
    /// The member's name.
    pub cluster: &'p str,
    /// What stands where the template has `{namespace}`.
    pub namespace: Option<&'p str>,
    /// How many segments lead to the member; the others are the path there.
    pub segments: usize,
}

/// A path of which it cannot be told whether it leads to a member: a reader who cleans paths would find one where one
/// who does not finds none, or another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ambiguous;

impl PathTemplate {
    /// Whether some path could be read by both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let alike = |(one, other): (&Segment, &Segment)| match (one, other) {
            (Segment::Literal(one), Segment::Literal(other)) => one == other,
            _ => true,
        };
        self.segments.iter().zip(&other.segments).all(alike)
    }

    fn find<'p>(&self, segments: &[&'p str]) -> Option<Found<'p>> {
        let own = segments.get(..self.segments.len())?;
        let (mut cluster, mut namespace) = ("", None);
        for (expected, segment) in self.segments.iter().zip(own) {
            match expected {
                Segment::Literal(literal) if literal == segment => {}
                Segment::Literal(_) => return None,
                _ if segment.is_empty() => return None,
                Segment::Cluster => cluster = segment,
                Segment::Namespace => namespace = Some(*segment),
                Segment::Any => {}
            }
        }
        Some(Found { cluster, namespace, segments: own.len() })
    }

    fn check(&self) -> Result<(), PathTemplateProblem> {
        let count = |wanted: &Segment| self.segments.iter().filter(|segment| *segment == wanted).count();
        if count(&Segment::Cluster) != 1 {
            return Err(PathTemplateProblem::Cluster);
        }
        if count(&Segment::Namespace) > 1 {
            return Err(PathTemplateProblem::Namespace);
        }
        let Some(Segment::Literal(first)) = self.segments.first() else { return Err(PathTemplateProblem::First) };
        if !matches!(first.as_str(), "api" | "apis") {
            return Ok(());
        }
        // A service has several spellings in a path, and may be the host itself: none of the core group is a member.
        let resource = self.segments.get(3..).filter(|_| first == "apis");
        let is_named =
            self.segments.iter().take(3).all(|segment| matches!(segment, Segment::Literal(_) | Segment::Any));
        let is_proxy = is_named && resource.is_some_and(is_proxy_of_object);
        if is_proxy { Ok(()) } else { Err(PathTemplateProblem::OwnApi) }
    }
}

/// Whether these segments, behind the version, are of subresource `proxy` of an object, which no other request for the
/// object has. What is behind it is for the member.
fn is_proxy_of_object(segments: &[Segment]) -> bool {
    let is = |segment: &Segment, text: &str| *segment == Segment::Literal(text.to_owned());
    let object = match segments {
        [namespaces, _, rest @ ..] if is(namespaces, "namespaces") && rest.len() > 2 => rest,
        all => all,
    };
    let [Segment::Literal(resource), _name, subresource, behind @ ..] = object else { return false };
    !matches!(resource.as_str(), "namespaces" | "watch" | "proxy")
        && is(subresource, "proxy")
        && behind.iter().all(|segment| matches!(segment, Segment::Literal(_)))
}

/// The member that a path, without its escapes, leads to by any of these templates.
///
/// # Errors
/// Where a reader who cleans the path would find another one.
pub fn find<'p>(templates: &[PathTemplate], path: &'p str) -> Result<Option<Found<'p>>, Ambiguous> {
    if templates.is_empty() {
        return Ok(None);
    }
    let segments: Vec<&str> = path.strip_prefix('/').unwrap_or(path).split('/').collect();
    let found = |segments: &[&'p str]| templates.iter().find_map(|template| template.find(segments));
    let as_it_is = found(&segments);
    // No member is called `*`, by which some servers mean all, and none has a slash in its name.
    let is_named = as_it_is.is_none_or(|found| is_word(found.cluster) && found.namespace.is_none_or(is_word));
    if is_named && as_it_is == found(&cleaned(&segments)) { Ok(as_it_is) } else { Err(Ambiguous) }
}

/// Without empty segments, and with `.` and `..` resolved.
fn cleaned<'p>(segments: &[&'p str]) -> Vec<&'p str> {
    let mut cleaned = Vec::with_capacity(segments.len());
    for segment in segments {
        match *segment {
            "" | "." => {}
            ".." => drop(cleaned.pop()),
            segment => cleaned.push(segment),
        }
    }
    cleaned
}

impl FromStr for PathTemplate {
    type Err = PathTemplateError;

    fn from_str(text: &str) -> Result<Self, PathTemplateError> {
        let wrong = |problem| PathTemplateError { text: text.to_owned(), problem };
        let segments: Vec<&str> =
            text.strip_prefix('/').ok_or_else(|| wrong(PathTemplateProblem::Slashes))?.split('/').collect();
        if text.len() > MAX_BYTES || segments.len() > MAX_SEGMENTS {
            return Err(wrong(PathTemplateProblem::TooLong));
        }
        let segments = segments.into_iter().map(|segment| match segment {
            "" => Err(PathTemplateProblem::Slashes),
            CLUSTER => Ok(Segment::Cluster),
            NAMESPACE => Ok(Segment::Namespace),
            ANY => Ok(Segment::Any),
            word if is_word(word) => Ok(Segment::Literal(word.to_owned())),
            other => Err(PathTemplateProblem::Segment { segment: other.to_owned() }),
        });
        let template = Self { segments: segments.collect::<Result<_, _>>().map_err(wrong)? };
        template.check().map_err(wrong)?;
        Ok(template)
    }
}

/// Whether it is a segment that nobody escapes or cleans away.
pub fn is_word(segment: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte);
    !matches!(segment, "." | "..") && segment.bytes().all(is_plain)
}

impl fmt::Display for PathTemplate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.segments.iter().try_for_each(|segment| {
            let text = match segment {
                Segment::Literal(literal) => literal,
                Segment::Cluster => CLUSTER,
                Segment::Namespace => NAMESPACE,
                Segment::Any => ANY,
            };
            write!(out, "/{text}")
        })
    }
}

impl Serialize for PathTemplate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PathTemplate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KARMADA: &str = "/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/proxy";

    fn template(text: &str) -> PathTemplate {
        text.parse().unwrap()
    }

    fn found(templates: &[&str], path: &str) -> Result<Option<(String, usize)>, Ambiguous> {
        let templates: Vec<PathTemplate> = templates.iter().map(|text| template(text)).collect();
        Ok(find(&templates, path)?.map(|found| (found.cluster.to_owned(), found.segments)))
    }

    #[test]
    fn templates_of_known_systems_are_read_as_they_are_printed() {
        for text in [
            KARMADA,
            "/apis/cluster.karbour.com/v1beta1/clusterextensions/{cluster}/proxy",
            "/apis/proxies.clusternet.io/v1alpha1/sockets/{cluster}/proxy/direct",
            "/clusters/{cluster}",
            "/{cluster}".replacen("/{", "/ocm/{", 1).as_str(),
            "/apis/*/v1/namespaces/{namespace}/gateways/{cluster}/proxy",
        ] {
            assert_eq!(template(text).to_string(), text);
        }
    }

    #[test]
    fn texts_that_are_no_templates_say_why() {
        let long = format!("/clusters/{{cluster}}/{}", "a".repeat(MAX_BYTES));
        let deep = format!("/clusters/{{cluster}}{}", "/a".repeat(MAX_SEGMENTS));
        for (text, part) in [
            ("clusters/{cluster}", "begins with a slash"),
            ("/clusters/{cluster}/", "ends with none"),
            ("/clusters//{cluster}", "begins with a slash"),
            ("/clusters", "exactly one segment {cluster}"),
            ("/clusters/{cluster}/{cluster}", "exactly one segment {cluster}"),
            ("/a/{namespace}/{namespace}/{cluster}", "only one segment {namespace}"),
            ("/{cluster}", "begin with a segment that is a word"),
            ("/*/{cluster}", "begin with a segment that is a word"),
            ("/clusters/{name}/{cluster}", "\"{name}\""),
            ("/clusters/../{cluster}", "\"..\""),
            ("/clusters/a%2fb/{cluster}", "\"a%2fb\""),
            ("/clusters/x{cluster}", "\"x{cluster}\""),
            ("/api/v1/{cluster}", "of the host itself"),
            ("/api/v1/nodes/{cluster}", "of the host itself"),
            ("/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}", "of the host itself"),
            ("/apis/apps/v1/namespaces/{namespace}/deployments/{cluster}", "of the host itself"),
            ("/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/status", "of the host itself"),
            ("/apis/apps/v1/namespaces/{cluster}/deployments", "of the host itself"),
            ("/api/v1/namespaces/{cluster}/pods", "of the host itself"),
            ("/api/v1/namespaces/{cluster}/pods/proxy", "of the host itself"),
            ("/api/v1/namespaces/{namespace}/pods/{cluster}/exec", "of the host itself"),
            ("/api/v1/namespaces/{namespace}/services/{cluster}/proxy", "of the host itself"),
            ("/api/v1/*/{cluster}/pods", "of the host itself"),
            ("/api/v1/*/{cluster}/proxy", "of the host itself"),
            ("/api/v1/watch/{cluster}/proxy", "of the host itself"),
            ("/apis/{cluster}/v1/clusters/m/proxy", "of the host itself"),
            ("/apis/g/v1/{cluster}/m/proxy", "of the host itself"),
            ("/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/*", "of the host itself"),
            (&long, "more than 512 bytes"),
            (&deep, "16 segments"),
        ] {
            let error = text.parse::<PathTemplate>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn a_path_leads_to_the_member_that_it_names() {
        let name = |name: &str, segments| Ok(Some((name.to_owned(), segments)));
        let both = [KARMADA, "/clusters/{cluster}"];
        let under = |rest: &str| format!("/apis/cluster.karmada.io/v1alpha1/clusters/{rest}");
        assert_eq!(found(&both, &under("m-1/proxy/api/v1/pods")), name("m-1", 6));
        assert_eq!(found(&both, &under("m-1/proxy")), name("m-1", 6));
        assert_eq!(found(&both, "/clusters/root:org/api/v1/pods"), name("root:org", 2));
        for of_the_host in [&under("m-1"), &under("m-1/status"), &under(""), "/api/v1/pods", "/", "/clusters"] {
            assert_eq!(found(&both, of_the_host), Ok(None), "{of_the_host}");
        }
        assert_eq!(found(&[], &under("m-1/proxy/..")), Ok(None));
    }

    #[test]
    fn what_stands_for_the_namespace_is_told() {
        let templates = [template("/apis/g/v1/namespaces/{namespace}/gateways/{cluster}/proxy")];
        let found = find(&templates, "/apis/g/v1/namespaces/ocm/gateways/m-1/proxy/version").unwrap().unwrap();
        assert_eq!((found.cluster, found.namespace, found.segments), ("m-1", Some("ocm"), 8));
    }

    #[test]
    fn paths_that_could_lead_elsewhere_are_told_apart() {
        let both = [KARMADA, "/clusters/{cluster}"];
        let under = |rest: &str| format!("/apis/cluster.karmada.io/v1alpha1/clusters/{rest}");
        for ambiguous in [
            under("/m-1/proxy/api"),
            under("m-1//proxy/api"),
            under("m-1/./proxy/api"),
            under("m-1/../m-2/proxy/api"),
            under("m-1/proxy/../../m-2/proxy/api"),
            under("m-1/proxy/../status"),
            "//clusters/m-1/api".to_owned(),
            "/clusters/./api".to_owned(),
            "/clusters/../clusters/m-1/api".to_owned(),
            "/clusters/m-1/../m-2".to_owned(),
            "/clusters/*/api/v1/pods".to_owned(),
            "/clusters/m%2f1/api/v1/pods".to_owned(),
            under("*/proxy/api/v1/pods"),
        ] {
            assert_eq!(found(&both, &ambiguous), Err(Ambiguous), "{ambiguous}");
        }
        // What is behind is for the member, which reads it as it likes.
        assert_eq!(found(&both, "/clusters/m-1/api//v1/../v1"), Ok(Some(("m-1".to_owned(), 2))));
    }

    #[test]
    fn templates_that_one_path_could_be_of_overlap() {
        let overlap = |one: &str, other: &str| template(one).overlaps(&template(other));
        assert!(overlap("/clusters/{cluster}", "/clusters/{cluster}/proxy"));
        assert!(overlap("/a/*/{cluster}", "/a/b/{cluster}"));
        assert!(!overlap("/clusters/{cluster}", "/workspaces/{cluster}"));
        assert!(!overlap(KARMADA, &KARMADA.replace("alpha", "beta")));
    }
}
