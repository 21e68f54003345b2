//! Reads a request line as kube-apiserver's `RequestInfo` does.
//!
//! It refuses what the API server refuses. Nothing is copied unless the target holds escapes. Whether a request may
//! pass is decided later.

use std::borrow::Cow;
use std::ops::Range;

use ctrlmesh_common::resource::ResourceKey;

mod fields;
mod member;
mod query;
mod segments;
mod url;

pub use fields::{FieldSelector, FieldSelectorError, NAME, NAMESPACE, Term};
pub use member::Member;
pub use query::{DecodedPair, Pair, Query};
use segments::{Segments, Span};
pub use url::TargetError;

/// A request as the API server understands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInfo<'a> {
    method: &'a [u8],
    /// Everything but the raw path is as this member cluster reads it.
    member: Option<Box<Member>>,
    /// With what leads to the member.
    raw_path: &'a [u8],
    query: Query<'a>,
    origin_form: bool,
    path: Cow<'a, str>,
    resource_request: bool,
    verb_in_path: bool,
    verb: Cow<'a, str>,
    api_prefix: Span,
    api_group: Span,
    api_version: Span,
    namespace: Span,
    resource: Span,
    name: Span,
    subresource: Span,
    required_name: Option<Box<str>>,
    field_selector: Option<Cow<'a, str>>,
    label_selector: Option<Cow<'a, str>>,
}

/// An object, whatever the version of its API.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey {
    /// The member cluster that has it; `None` for the API server itself.
    pub cluster: Option<String>,
    /// Empty for the core group.
    pub group: String,
    pub resource: String,
    /// Empty for an object of cluster scope.
    pub namespace: String,
    /// Empty where it is any object of the collection.
    pub name: String,
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
        Self::of(method, target.raw_path, Query::new(target.raw_query), target.origin_form)
    }

    fn of(method: &'a [u8], raw_path: &'a [u8], query: Query<'a>, origin_form: bool) -> Result<Self, TargetError> {
        let mut info = Self {
            method,
            member: None,
            raw_path,
            query,
            origin_form,
            path: url::text(url::unescape(raw_path, b'+')?),
            resource_request: false,
            verb_in_path: false,
            verb: lowercase(method),
            api_prefix: Span::default(),
            api_group: Span::default(),
            api_version: Span::default(),
            namespace: Span::default(),
            resource: Span::default(),
            name: Span::default(),
            subresource: Span::default(),
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

    /// Behind what leads to a member.
    pub fn raw_path(&self) -> &'a [u8] {
        &self.raw_path[self.prefix().len()..]
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
        self.api_prefix.of(&self.path)
    }

    /// Empty for the core group.
    pub fn api_group(&self) -> &str {
        self.api_group.of(&self.path)
    }

    pub fn api_version(&self) -> &str {
        self.api_version.of(&self.path)
    }

    /// Empty across namespaces and for resources of cluster scope.
    pub fn namespace(&self) -> &str {
        self.namespace.of(&self.path)
    }

    /// In its plural form.
    pub fn resource(&self) -> &str {
        self.resource.of(&self.path)
    }

    /// The resource, and where it is.
    pub fn resource_key(&self) -> ResourceKey<'_> {
        let member = self.member().map(Member::key);
        ResourceKey { member, group: self.api_group(), resource: self.resource() }
    }

    pub fn subresource(&self) -> &str {
        self.subresource.of(&self.path)
    }

    /// The object's name, from the path or from a field selector.
    pub fn name(&self) -> &str {
        self.required_name.as_deref().unwrap_or(self.name_in_path())
    }

    pub fn name_in_path(&self) -> &str {
        self.name.of(&self.path)
    }

    /// In [`RequestInfo::path`].
    pub fn name_range(&self) -> Range<usize> {
        self.name.range()
    }

    /// In [`RequestInfo::path`].
    pub fn subresource_range(&self) -> Range<usize> {
        self.subresource.range()
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
            cluster: self.cluster().map(text),
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
        self.api_prefix = prefix.into();
        if !groupless {
            if count < 4 {
                return Ok(());
            }
            self.api_group = segments.next().into();
        }
        self.resource_request = true;
        self.api_version = segments.next().into();
        self.read_verb(path, &mut segments)?;
        self.read_namespace(path, &mut segments);
        self.resource = segments.next().into();
        self.name = segments.next().into();
        // A `/proxy/` prefix leaves no subresource: everything behind the name is for whom is proxied to.
        if self.verb != "proxy" {
            self.subresource = segments.next().into();
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
        let mut behind = segments.clone();
        behind.next();
        self.namespace = behind.next().into();
        if behind.count() > 0 && !matches!(&path[behind.peek()], "status" | "finalize") {
            *segments = behind;
        }
    }

    /// Takes the verb and the name from the query.
    fn read_options(&mut self) {
        if self.verb == "get" && self.name.is_empty() {
            let options = self.query.list_options();
            self.verb = Cow::Borrowed(if options.watch { "watch" } else { "list" });
            self.required_name = options.name.map(String::into_boxed_str);
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
