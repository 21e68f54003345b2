//! Reads a request line as kube-apiserver's `RequestInfo` does.
//!
//! It refuses what the API server refuses. Nothing is copied unless the target holds escapes. Whether a request may
//! pass is decided later.

use std::borrow::Cow;
use std::ops::Range;

mod fields;
mod query;
mod url;

pub use fields::{FieldSelector, FieldSelectorError, NAME, NAMESPACE, Term};
pub use query::{DecodedPair, Pair, Query};
pub use url::TargetError;

/// A request as the API server understands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInfo<'a> {
    method: &'a [u8],
    raw_path: &'a [u8],
    query: Query<'a>,
    origin_form: bool,
    path: Cow<'a, str>,
    resource_request: bool,
    verb_in_path: bool,
    verb: Cow<'a, str>,
    api_prefix: Range<usize>,
    api_group: Range<usize>,
    api_version: Range<usize>,
    namespace: Range<usize>,
    resource: Range<usize>,
    name: Range<usize>,
    subresource: Range<usize>,
    required_name: Option<String>,
    field_selector: Option<Cow<'a, str>>,
    label_selector: Option<Cow<'a, str>>,
}

/// An object, whatever the version of its API.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey {
    /// Empty for the core group.
    pub group: String,
    pub resource: String,
    /// Empty for an object of cluster scope.
    pub namespace: String,
    /// Empty where it is any object of the collection.
    pub name: String,
}

/// The segments of a path, as ranges of it, without the slashes at its ends.
struct Segments<'p> {
    path: &'p str,
    rest: Option<Range<usize>>,
}

impl<'a> RequestInfo<'a> {
    /// Reads a request line's method and target.
    ///
    /// # Errors
    /// Where the API server answers 400 because of the target alone.
    pub fn parse(method: &'a str, target: &'a str) -> Result<Self, TargetError> {
        Self::parse_bytes(method.as_bytes(), target.as_bytes())
    }

    /// Takes bytes that need not be UTF-8.
    ///
    /// # Errors
    /// As [`RequestInfo::parse`].
    pub fn parse_bytes(method: &'a [u8], target: &'a [u8]) -> Result<Self, TargetError> {
        let target = url::split(method, target)?;
        let mut info = Self {
            method,
            raw_path: target.raw_path,
            query: Query::new(target.raw_query),
            origin_form: target.origin_form,
            path: url::text(url::unescape(target.raw_path, b'+')?),
            resource_request: false,
            verb_in_path: false,
            verb: lowercase(method),
            api_prefix: 0..0,
            api_group: 0..0,
            api_version: 0..0,
            namespace: 0..0,
            resource: 0..0,
            name: 0..0,
            subresource: 0..0,
            required_name: None,
            field_selector: None,
            label_selector: None,
        };
        info.read_path()?;
        if info.resource_request {
            info.read_options();
        }
        Ok(info)
    }

    pub fn is_resource_request(&self) -> bool {
        self.resource_request
    }

    pub fn method(&self) -> &'a [u8] {
        self.method
    }

    /// The path, without its escapes.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn raw_path(&self) -> &'a [u8] {
        self.raw_path
    }

    pub fn query(&self) -> Query<'a> {
        self.query
    }

    /// Whether the target was a path, not an absolute URI.
    pub fn is_origin_form(&self) -> bool {
        self.origin_form
    }

    /// `get`, `list`, `watch`, `create`, …; for other paths the method in lower case.
    pub fn verb(&self) -> &str {
        &self.verb
    }

    /// Whether the verb came from a `/watch/` or `/proxy/` in the path.
    pub fn is_verb_in_path(&self) -> bool {
        self.verb_in_path
    }

    /// `api` or `apis`.
    pub fn api_prefix(&self) -> &str {
        &self.path[self.api_prefix.clone()]
    }

    /// Empty for the core group.
    pub fn api_group(&self) -> &str {
        &self.path[self.api_group.clone()]
    }

    pub fn api_version(&self) -> &str {
        &self.path[self.api_version.clone()]
    }

    /// Empty across namespaces and for resources of cluster scope.
    pub fn namespace(&self) -> &str {
        &self.path[self.namespace.clone()]
    }

    /// In its plural form.
    pub fn resource(&self) -> &str {
        &self.path[self.resource.clone()]
    }

    pub fn subresource(&self) -> &str {
        &self.path[self.subresource.clone()]
    }

    /// The object's name, from the path or from a field selector.
    pub fn name(&self) -> &str {
        self.required_name.as_deref().unwrap_or(self.name_in_path())
    }

    pub fn name_in_path(&self) -> &str {
        &self.path[self.name.clone()]
    }

    /// In [`RequestInfo::path`].
    pub fn name_range(&self) -> Range<usize> {
        self.name.clone()
    }

    /// In [`RequestInfo::path`].
    pub fn subresource_range(&self) -> Range<usize> {
        self.subresource.clone()
    }

    /// Empty where the server does not authorize by it.
    pub fn field_selector(&self) -> &str {
        self.field_selector.as_deref().unwrap_or_default()
    }

    /// Empty where the server does not authorize by it.
    pub fn label_selector(&self) -> &str {
        self.label_selector.as_deref().unwrap_or_default()
    }

    /// The object that the path names, or its collection. A namespace is in none, though `RequestInfo` has it in
    /// itself.
    pub fn object(&self) -> ObjectKey {
        let text = str::to_owned;
        let is_namespace = (self.api_group(), self.resource()) == ("", "namespaces");
        ObjectKey {
            group: text(self.api_group()),
            resource: text(self.resource()),
            namespace: if is_namespace { String::new() } else { text(self.namespace()) },
            name: text(self.name_in_path()),
        }
    }

    pub fn is_collection(&self) -> bool {
        self.resource_request && matches!(&*self.verb, "list" | "watch" | "deletecollection")
    }

    pub fn is_watch(&self) -> bool {
        self.resource_request && self.verb == "watch"
    }

    /// A list of any version (`resourceVersion=0`) is never paged.
    pub fn is_paged(&self) -> bool {
        let query = self.query();
        let number = |key| query.text(key).and_then(|text| text.parse::<u64>().ok());
        self.verb == "list" && number("limit").is_some_and(|limit| limit > 0) && number("resourceVersion") != Some(0)
    }

    /// Whether the server lets it last for ever.
    pub fn is_long_running(&self) -> bool {
        self.resource_request
            && (matches!(&*self.verb, "watch" | "proxy")
                || matches!(self.subresource(), "attach" | "exec" | "proxy" | "log" | "portforward"))
    }

    fn read_path(&mut self) -> Result<(), TargetError> {
        let path = std::mem::take(&mut self.path);
        let read = self.read_segments(&path);
        self.path = path;
        read
    }

    fn read_segments(&mut self, path: &str) -> Result<(), TargetError> {
        let mut segments = Segments::new(path);
        let count = segments.count();
        let prefix = segments.next();
        let groupless = &path[prefix.clone()] == "api";
        if count < 3 || !groupless && &path[prefix.clone()] != "apis" {
            return Ok(());
        }
        self.api_prefix = prefix;
        if !groupless {
            if count < 4 {
                return Ok(());
            }
            self.api_group = segments.next();
        }
        self.resource_request = true;
        self.api_version = segments.next();
        self.read_verb(path, &mut segments)?;
        self.read_namespace(path, &mut segments);
        self.resource = segments.next();
        self.name = segments.next();
        // A `/proxy/` prefix leaves no subresource: everything behind the name is for whom is proxied to.
        if self.verb != "proxy" {
            self.subresource = segments.next();
        }
        Ok(())
    }

    fn read_verb(&mut self, path: &str, segments: &mut Segments<'_>) -> Result<(), TargetError> {
        let first = match &path[segments.peek()] {
            "watch" => "watch",
            "proxy" => "proxy",
            _ => {
                self.verb = Cow::Borrowed(verb(self.method));
                return Ok(());
            }
        };
        if segments.count() < 2 {
            return Err(TargetError::NothingBehindVerb);
        }
        segments.next();
        self.verb = Cow::Borrowed(first);
        self.verb_in_path = true;
        Ok(())
    }

    fn read_namespace<'p>(&mut self, path: &'p str, segments: &mut Segments<'p>) {
        if &path[segments.peek()] != "namespaces" || segments.count() < 2 {
            return;
        }
        let mut behind = Segments { path, rest: segments.rest.clone() };
        behind.next();
        self.namespace = behind.next();
        if behind.count() > 0 && !matches!(&path[behind.peek()], "status" | "finalize") {
            *segments = behind;
        }
    }

    /// Takes the verb and the name from the query.
    fn read_options(&mut self) {
        if self.verb == "get" && self.name.is_empty() {
            let options = self.query.list_options();
            self.verb = Cow::Borrowed(if options.watch { "watch" } else { "list" });
            self.required_name = options.name;
        }
        if self.verb == "delete" && self.name.is_empty() {
            self.verb = Cow::Borrowed("deletecollection");
        }
        if !self.verb_in_path && self.is_collection() {
            self.field_selector = self.query.text("fieldSelector");
            self.label_selector = self.query.text("labelSelector");
        }
    }
}

impl<'p> Segments<'p> {
    fn new(path: &'p str) -> Self {
        let start = path.len() - path.trim_start_matches('/').len();
        let end = start + path[start..].trim_end_matches('/').len();
        Self { path, rest: (start < end).then_some(start..end) }
    }

    /// How many segments are left.
    fn count(&self) -> usize {
        self.rest.clone().map_or(0, |rest| self.path[rest].split('/').count())
    }

    /// The next segment; empty where none is left.
    fn peek(&self) -> Range<usize> {
        let Some(rest) = self.rest.clone() else {
            return 0..0;
        };
        let end = self.path[rest.clone()].find('/').map_or(rest.end, |length| rest.start + length);
        rest.start..end
    }

    /// Takes the next segment; empty where none is left.
    fn next(&mut self) -> Range<usize> {
        let segment = self.peek();
        self.rest = self.rest.take().filter(|rest| segment.end < rest.end).map(|rest| segment.end + 1..rest.end);
        segment
    }
}

fn verb(method: &[u8]) -> &'static str {
    match method {
        b"POST" => "create",
        b"GET" | b"HEAD" => "get",
        b"PUT" => "update",
        b"PATCH" => "patch",
        b"DELETE" => "delete",
        _ => "",
    }
}

fn lowercase(method: &[u8]) -> Cow<'_, str> {
    match method {
        b"GET" => Cow::Borrowed("get"),
        b"POST" => Cow::Borrowed("post"),
        other => Cow::Owned(String::from_utf8_lossy(other).to_ascii_lowercase()),
    }
}

#[cfg(test)]
mod tests;
