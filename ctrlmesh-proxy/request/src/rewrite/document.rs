//! Finds fields in JSON, protobuf and CBOR bodies, and edits JSON and protobuf in place.
//!
//! A node is a range of the body, and an edit replaces a range. Only fields that are asked for are decoded, and only
//! edited ranges are written anew. CBOR is read and not edited.

use std::borrow::Cow;
use std::ops::Range;

use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use crate::decide::DRY_RUN;

mod cbor;
mod framing;
mod json;
mod protobuf;
mod shape;

pub(super) use cbor::{map as cbor_map, number as cbor_number, text_item as cbor_text};
pub(super) use framing::Framer;
pub use framing::framed;
pub(super) use json::{compacted, early as json_early, text as json_text};
pub(super) use protobuf::{envelope, field as protobuf_field};
use shape::Shape;

/// The number of `DeleteOptions.dryRun` in protobuf. It is repeated.
const DRY_RUN_NUMBER: u32 = 5;

/// The head of a list of one item in CBOR.
const CBOR_LIST_OF_ONE: u8 = 0x81;

/// How a body is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// `application/json`, and the patches that are JSON.
    Json,
    /// `application/vnd.kubernetes.protobuf`.
    Protobuf,
    /// `application/cbor` and `application/cbor-seq`.
    Cbor,
}

/// A body that cannot be looked into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// The body does not match its encoding.
    #[error("the body is not well-formed {encoding:?}")]
    Malformed {
        /// What it should be.
        encoding: Encoding,
    },
    /// CBOR is read, and not edited.
    #[error("the leader-election lock cannot be renamed in CBOR")]
    ReadOnly,
    /// A field stands twice. Readers disagree which of the two counts.
    #[error("the field {field:?} stands twice in the body")]
    Repeated {
        /// Its name.
        field: &'static str,
    },
}

/// A value in a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// The value.
    pub(super) at: Range<usize>,
    /// The value with what is there only because of it: in protobuf its tag and length.
    whole: Range<usize>,
    shape: Shape,
}

/// Bytes to put in the place of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Edit {
    at: Range<usize>,
    with: Vec<u8>,
}

/// A body and its encoding.
#[derive(Clone, Copy, Debug)]
pub(super) struct Document<'b> {
    pub(super) body: &'b [u8],
    pub(super) encoding: Encoding,
}

impl Encoding {
    /// The encoding of a `Content-Type`; `None` where it is none that can be edited.
    pub fn of(content_type: &str) -> Option<Self> {
        match media_type(content_type).as_str() {
            "application/json"
            | "application/json-patch+json"
            | "application/merge-patch+json"
            | "application/strategic-merge-patch+json" => Some(Self::Json),
            "application/vnd.kubernetes.protobuf" => Some(Self::Protobuf),
            "application/cbor" | "application/cbor-seq" | "application/apply-patch+cbor" => Some(Self::Cbor),
            _ => None,
        }
    }

    /// The encoding of a request body, if it can be edited.
    ///
    /// No `Content-Type` means JSON, as it does to the API server. Clients send server-side applies as YAML and write
    /// them in JSON, so the body decides. Real YAML and CBOR are `None`.
    pub fn of_editable(content_type: &str, body: &[u8]) -> Option<Self> {
        match media_type(content_type).as_str() {
            "" => Some(Self::Json),
            "application/yaml" | "application/apply-patch+yaml" => {
                serde_json::from_slice::<IgnoredAny>(body).is_ok().then_some(Self::Json)
            }
            other => Self::of(other).filter(|encoding| *encoding != Self::Cbor),
        }
    }

    fn malformed(self) -> DocumentError {
        DocumentError::Malformed { encoding: self }
    }
}

impl<'b> Document<'b> {
    /// The object, list or status that a body holds, without its envelope.
    pub(super) fn root(self) -> Result<Node, DocumentError> {
        match self.encoding {
            Encoding::Json => self.node(json::root(self.body), Shape::Object),
            Encoding::Cbor => self.node(cbor::root(self.body), Shape::Object),
            Encoding::Protobuf => self.enveloped(0..self.body.len()),
        }
    }

    /// An item that was taken out of its list.
    pub(super) fn item(self) -> Result<Node, DocumentError> {
        match self.encoding {
            Encoding::Protobuf => self.node(Some(0..self.body.len()), Shape::Object),
            Encoding::Json | Encoding::Cbor => self.root(),
        }
    }

    /// The event that a watch frame holds (without its length, in protobuf).
    pub(super) fn event(self) -> Result<Node, DocumentError> {
        match self.encoding {
            Encoding::Protobuf => self.node(Some(0..self.body.len()), Shape::WatchEvent),
            _ => self.root(),
        }
    }

    /// The object of a watch event.
    pub(super) fn event_object(self, event: &Node) -> Result<Option<Node>, DocumentError> {
        let Some(object) = self.field(event, "object")? else {
            return Ok(None);
        };
        if self.encoding != Encoding::Protobuf {
            return Ok(Some(object));
        }
        self.field(&object, "raw")?.map(|raw| self.enveloped(raw.at)).transpose()
    }

    /// A field of a map or message.
    pub(super) fn field(self, node: &Node, name: &'static str) -> Result<Option<Node>, DocumentError> {
        match self.encoding {
            Encoding::Json => self.nodes(json::fields(self.body, node.at.clone(), name), name),
            Encoding::Cbor => self.nodes(cbor::fields(self.body, node.at.clone(), name), name),
            Encoding::Protobuf => {
                let Some((number, shape)) = node.shape.field(name) else {
                    return Ok(None);
                };
                let found = self.protobuf_fields(node, number, shape)?;
                one(found, name)
            }
        }
    }

    /// The text in a field; `None` where there is none, or it is no text.
    pub(super) fn text_of(self, node: &Node, name: &'static str) -> Result<Option<Cow<'b, str>>, DocumentError> {
        Ok(self.field(node, name)?.and_then(|field| self.text(&field)))
    }

    /// The values of an array, or of a repeated field.
    pub(super) fn items(self, node: &Node, name: &'static str) -> Result<Vec<Node>, DocumentError> {
        if self.encoding == Encoding::Protobuf {
            return match node.shape.field(name) {
                Some((number, shape)) => self.protobuf_fields(node, number, shape),
                None => Ok(Vec::new()),
            };
        }
        self.field(node, name)?.map_or(Ok(Vec::new()), |array| self.elements(&array))
    }

    /// The values of an array.
    pub(super) fn elements(self, array: &Node) -> Result<Vec<Node>, DocumentError> {
        let found = match self.encoding {
            Encoding::Json => json::elements(self.body, array.at.clone()),
            Encoding::Cbor => cbor::elements(self.body, array.at.clone()),
            Encoding::Protobuf => Some(Vec::new()),
        };
        let found = found.ok_or(self.encoding.malformed())?;
        Ok(found.into_iter().map(|at| Node { whole: at.clone(), at, shape: Shape::Object }).collect())
    }

    /// The text of a node; `None` where it is no text.
    pub(super) fn text(self, node: &Node) -> Option<Cow<'b, str>> {
        let bytes = self.body.get(node.at.clone())?;
        match self.encoding {
            Encoding::Json => json::text(bytes),
            Encoding::Cbor => cbor::text(bytes),
            Encoding::Protobuf => std::str::from_utf8(bytes).ok().map(Cow::Borrowed),
        }
    }

    /// Puts another text in the place of a node's.
    pub(super) fn set_text(self, node: &Node, text: &str) -> Edit {
        let with = match self.encoding {
            Encoding::Json | Encoding::Cbor => json::quoted(text),
            Encoding::Protobuf => text.as_bytes().to_vec(),
        };
        Edit { at: node.at.clone(), with }
    }

    /// Takes items out of their array or repeated field.
    pub(super) fn remove(self, items: &[Node], removed: &[bool]) -> Vec<Edit> {
        let removals = |range: Range<usize>| Edit { at: range, with: Vec::new() };
        let gone = items.iter().zip(removed).filter(|(_, removed)| **removed);
        match self.encoding {
            Encoding::Json | Encoding::Cbor => json::removals(items, removed).into_iter().map(removals).collect(),
            Encoding::Protobuf => gone.map(|(item, _)| removals(item.whole.clone())).collect(),
        }
    }

    /// The body with the edits made.
    pub(super) fn apply(self, mut edits: Vec<Edit>) -> Result<Cow<'b, [u8]>, DocumentError> {
        if edits.is_empty() {
            return Ok(Cow::Borrowed(self.body));
        }
        edits.sort_by_key(|edit| edit.at.start);
        let applied = match self.encoding {
            Encoding::Protobuf => protobuf::apply(self.body, 0..self.body.len(), &edits),
            Encoding::Json => spliced(self.body, &edits),
            Encoding::Cbor => return Err(DocumentError::ReadOnly),
        };
        applied.map(Cow::Owned).ok_or(self.encoding.malformed())
    }

    /// The `apiVersion` and kind in a protobuf envelope.
    pub(super) fn type_meta(self) -> Result<Option<Node>, DocumentError> {
        let at = protobuf::unprefixed(self.body, 0..self.body.len());
        let at = at.ok_or(self.encoding.malformed())?;
        self.field(&Node { whole: at.clone(), at, shape: Shape::Envelope }, "typeMeta")
    }

    fn enveloped(self, at: Range<usize>) -> Result<Node, DocumentError> {
        let at = protobuf::unprefixed(self.body, at).ok_or(self.encoding.malformed())?;
        let envelope = Node { whole: at.clone(), at, shape: Shape::Envelope };
        let kind = match self.field(&envelope, "typeMeta")? {
            Some(type_meta) => self.text_of(&type_meta, "kind")?.unwrap_or_default(),
            None => Cow::Borrowed(""),
        };
        let shape = match &*kind {
            "Status" => Shape::Status,
            list if list.ends_with("List") => Shape::List,
            _ => Shape::Object,
        };
        let raw = self.field(&envelope, "raw")?;
        Ok(raw.map_or(Node { at: 0..0, whole: 0..0, shape }, |raw| Node { shape, ..raw }))
    }

    fn protobuf_fields(self, node: &Node, number: u32, shape: Shape) -> Result<Vec<Node>, DocumentError> {
        let fields = protobuf::fields(self.body, node.at.clone()).ok_or(self.encoding.malformed())?;
        let fields = fields.into_iter().filter(|field| field.number == number);
        fields
            .map(|field| {
                let at = field.payload.ok_or(self.encoding.malformed())?;
                Ok(Node { at, whole: field.whole, shape })
            })
            .collect()
    }

    fn node(self, at: Option<Range<usize>>, shape: Shape) -> Result<Node, DocumentError> {
        let at = at.ok_or(self.encoding.malformed())?;
        Ok(Node { whole: at.clone(), at, shape })
    }

    fn nodes(self, found: Option<Vec<Range<usize>>>, name: &'static str) -> Result<Option<Node>, DocumentError> {
        let found = found.ok_or(self.encoding.malformed())?;
        one(found.into_iter().map(|at| Node { whole: at.clone(), at, shape: Shape::Object }).collect(), name)
    }
}

/// What to put in the place of an `Accept` header, so that the response can be edited; `None` to leave the header.
///
/// CBOR is dropped, and YAML becomes JSON, which every YAML parser reads.
pub fn editable_accept(accept: &str) -> Option<String> {
    let editable: Vec<String> = accept
        .split(',')
        .filter(|range| !matches!(media_type(range).as_str(), "application/cbor" | "application/cbor-seq"))
        .map(|range| range.replace("application/yaml", "application/json"))
        .collect();
    let editable = if editable.is_empty() { "application/json".to_owned() } else { editable.join(",") };
    (editable.trim_start() != accept).then(|| editable.trim_start().to_owned())
}

/// The options of a deletion with `dryRun: [All]` (`DeleteOptions` of apimachinery's
/// `meta/v1/generated.proto`).
///
/// # Errors
/// If they are malformed, or say something of dry runs in CBOR already.
pub fn with_dry_run(body: &[u8], encoding: Encoding) -> Result<Vec<u8>, DocumentError> {
    if encoding == Encoding::Json {
        let options = serde_json::from_slice::<Map<String, Value>>(body);
        let mut options = options.map_err(|_malformed| encoding.malformed())?;
        options.insert(DRY_RUN.to_owned(), Value::from(vec!["All"]));
        return Ok(Value::from(options).to_string().into_bytes());
    }
    let document = Document { body, encoding };
    let root = document.root()?;
    if encoding == Encoding::Cbor {
        if document.field(&root, DRY_RUN)?.is_some() {
            return Err(DocumentError::Repeated { field: DRY_RUN });
        }
        let with = cbor::with_pairs(body, &[(DRY_RUN, [&[CBOR_LIST_OF_ONE][..], &cbor_text("All")].concat())]);
        // A map without a count stays as it is.
        return if with == body { Err(encoding.malformed()) } else { Ok(with) };
    }
    // An envelope without content has nowhere to put it.
    let options = body.get(root.at.clone()).filter(|_| root.at.end > 0).ok_or(encoding.malformed())?;
    let with = [options, &protobuf_field(DRY_RUN_NUMBER, b"All")].concat();
    document.apply(vec![Edit { at: root.at, with }]).map(Cow::into_owned)
}

fn media_type(content_type: &str) -> String {
    content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Whether the type in a protobuf envelope is a list's.
pub(super) fn is_list(type_meta: &[u8]) -> bool {
    let fields = protobuf::fields(type_meta, 0..type_meta.len()).unwrap_or_default();
    let kind = fields.into_iter().filter(|field| field.number == 2).find_map(|field| field.payload);
    kind.is_some_and(|kind| type_meta[kind].ends_with(b"List"))
}

/// A JSON or CBOR map with `apiVersion` and kind added.
pub(super) fn with_type_meta(map: &[u8], encoding: Encoding, api_version: &str, kind: &str) -> Vec<u8> {
    if encoding == Encoding::Cbor {
        return cbor::with_pairs(map, &[("kind", cbor_text(kind)), ("apiVersion", cbor_text(api_version))]);
    }
    let compact = compacted(map);
    let rest = compact.strip_prefix(b"{").unwrap_or(&compact);
    let comma: &[u8] = if rest == b"}" { b"" } else { b"," };
    let (kind, api_version) = (json::quoted(kind), json::quoted(api_version));
    [b"{\"kind\":", kind.as_slice(), b",\"apiVersion\":", &api_version, comma, rest].concat()
}

fn one(mut found: Vec<Node>, field: &'static str) -> Result<Option<Node>, DocumentError> {
    if found.len() > 1 { Err(DocumentError::Repeated { field }) } else { Ok(found.pop()) }
}

fn spliced(body: &[u8], edits: &[Edit]) -> Option<Vec<u8>> {
    let mut spliced = Vec::with_capacity(body.len() + 64);
    let mut kept = 0;
    for edit in edits {
        spliced.extend(body.get(kept..edit.at.start)?);
        spliced.extend(&edit.with);
        kept = edit.at.end;
    }
    spliced.extend(body.get(kept..)?);
    Some(spliced)
}
