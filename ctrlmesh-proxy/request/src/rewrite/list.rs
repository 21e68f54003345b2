//! Turns a list into watch events.
//!
//! Each item becomes the object of an event, in the list's encoding, unchanged but for white space. Items of built-in
//! types do not name their kind, so the list's kind is added.

use super::document::{
    Document, DocumentError, Encoding, Node, cbor_map, cbor_text, compacted, envelope, framed, protobuf_field,
    with_type_meta,
};
use super::status::{self, Status};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Events are ADDED.
    Joins,
    /// Events are DELETED.
    Leaves,
}

/// A list that cannot become events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    #[error("read the list")]
    Document(#[from] DocumentError),
    #[error("the list has no version")]
    NoVersion,
    #[error("the list does not say what its items are")]
    NoKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    pub api_version: String,
    pub kind: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEvents {
    /// The events, framed.
    pub frames: Vec<u8>,
    pub items: usize,
    pub version: u64,
    /// The token for the next page.
    pub next: Option<String>,
    pub kind: Option<Kind>,
}

/// The items of a list as events.
///
/// # Errors
/// Where it is no list, or does not say enough.
pub fn events(body: &[u8], encoding: Encoding, change: Change) -> Result<ListEvents, ListError> {
    let document = Document { body, encoding };
    let root = document.root()?;
    let list_kind = kind_of(document, &root)?.ok_or(ListError::NoKind)?;
    let items = document.items(&root, "items")?;
    // A Table holds rows, and no event could be made of them that the client would understand.
    if list_kind.kind == "Table" {
        return Err(ListError::NoKind);
    }
    let item_kind = list_kind.kind.strip_suffix("List").map(str::to_owned);
    let item_kind = item_kind.map(|kind| Kind { api_version: list_kind.api_version, kind });
    let mut frames = Vec::with_capacity(body.len() + items.len() * 64);
    let mut own_kind = None;
    for item in &items {
        let own = if encoding == Encoding::Protobuf { None } else { kind_of(document, item)? };
        let missing = if own.is_some() { None } else { Some(item_kind.as_ref().ok_or(ListError::NoKind)?) };
        let object = object(document, item, missing);
        frames.extend(event(encoding, change.event(), &object));
        own_kind = own.or(own_kind);
    }
    let metadata = document.field(&root, "metadata")?.ok_or(ListError::NoVersion)?;
    let version = document.text_of(&metadata, "resourceVersion")?.and_then(|version| version.parse().ok());
    let next = document.text_of(&metadata, "continue")?.filter(|token| !token.is_empty());
    Ok(ListEvents {
        frames,
        items: items.len(),
        version: version.ok_or(ListError::NoVersion)?,
        next: next.map(std::borrow::Cow::into_owned),
        kind: own_kind.or(item_kind),
    })
}

/// A BOOKMARK at `version`.
pub fn bookmark(encoding: Encoding, kind: &Kind, version: u64) -> Vec<u8> {
    let version = version.to_string();
    let (api_version, name) = (kind.api_version.as_str(), kind.kind.as_str());
    let object = match encoding {
        Encoding::Json => serde_json::json!({
            "kind": name,
            "apiVersion": api_version,
            "metadata": { "resourceVersion": version },
        })
        .to_string()
        .into_bytes(),
        Encoding::Protobuf => {
            let metadata = protobuf_field(6, version.as_bytes());
            envelope(api_version, name, &protobuf_field(1, &metadata))
        }
        Encoding::Cbor => cbor_map(&[
            ("kind", cbor_text(name)),
            ("apiVersion", cbor_text(api_version)),
            ("metadata", cbor_map(&[("resourceVersion", cbor_text(&version))])),
        ]),
    };
    event(encoding, "BOOKMARK", &object)
}

/// A frame that ends a watch with a Status.
pub(super) fn error(encoding: Encoding, status: &Status) -> Vec<u8> {
    let object = match encoding {
        Encoding::Json => status::json(status),
        Encoding::Protobuf => status::protobuf(status),
        Encoding::Cbor => status::cbor(status),
    };
    event(encoding, "ERROR", &object)
}

impl Change {
    fn event(self) -> &'static str {
        match self {
            Self::Joins => "ADDED",
            Self::Leaves => "DELETED",
        }
    }
}

/// A framed event.
fn event(encoding: Encoding, kind: &str, object: &[u8]) -> Vec<u8> {
    let frame = match encoding {
        Encoding::Json => [b"{\"type\":\"", kind.as_bytes(), b"\",\"object\":", object, b"}"].concat(),
        Encoding::Protobuf => {
            [protobuf_field(1, kind.as_bytes()), protobuf_field(2, &protobuf_field(1, object))].concat()
        }
        Encoding::Cbor => cbor_map(&[("type", cbor_text(kind)), ("object", object.to_vec())]),
    };
    framed(&frame, encoding)
}

/// An item as an object that stands alone.
fn object(document: Document<'_>, item: &Node, missing: Option<&Kind>) -> Vec<u8> {
    let bytes = &document.body[item.at.clone()];
    let (api_version, kind) = match missing {
        Some(kind) => (kind.api_version.as_str(), kind.kind.as_str()),
        None if document.encoding == Encoding::Json => return compacted(bytes),
        None => return bytes.to_vec(),
    };
    match document.encoding {
        Encoding::Protobuf => envelope(api_version, kind, bytes),
        Encoding::Json | Encoding::Cbor => with_type_meta(bytes, document.encoding, api_version, kind),
    }
}

/// The `apiVersion` and kind of a list or an item.
fn kind_of(document: Document<'_>, node: &Node) -> Result<Option<Kind>, DocumentError> {
    let holder = match document.encoding {
        Encoding::Protobuf => document.type_meta()?,
        Encoding::Json | Encoding::Cbor => Some(node.clone()),
    };
    let Some(holder) = holder else { return Ok(None) };
    let kind = document.text_of(&holder, "kind")?;
    let api_version = document.text_of(&holder, "apiVersion")?;
    Ok(kind
        .zip(api_version)
        .map(|(kind, api_version)| Kind { api_version: api_version.into_owned(), kind: kind.into_owned() }))
}

#[cfg(test)]
mod tests;
