//! Reads type and version of a watch event, and which object it is about.

use std::borrow::Cow;

use crate::rewrite::document::{Document, Encoding, json_early, json_text};

/// The annotation of the bookmark that ends the initial events.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

pub(super) struct EventSummary {
    pub(super) is_added: bool,
    pub(super) is_bookmark: bool,
    pub(super) ends_initial_events: bool,
    pub(super) version: Option<u64>,
}

/// What a watch event says of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectChange {
    /// Empty for an object of cluster scope.
    pub namespace: String,
    pub name: String,
    /// Whether it is there no more, for this watch.
    pub is_deleted: bool,
}

/// What a frame (without its length or newline) says; `None` where it is about no object, or cannot be read.
pub fn object_change(frame: &[u8], encoding: Encoding) -> Option<ObjectChange> {
    let named = |kind: &str, namespace: Option<Cow<'_, str>>, name: Option<Cow<'_, str>>| {
        let namespace = namespace.unwrap_or_default().into_owned();
        Some(ObjectChange { namespace, name: name?.into_owned(), is_deleted: kind == "DELETED" })
    };
    if encoding == Encoding::Json {
        let kind = json_text(&frame[json_early(frame, &["type"])?]).filter(|kind| is_change(kind))?;
        let metadata = &frame[json_early(frame, &["object", "metadata"])?];
        let text = |name| json_text(&metadata[json_early(metadata, &[name])?]);
        return named(&kind, text("namespace"), text("name"));
    }
    let document = Document { body: frame, encoding };
    let event = document.event().ok()?;
    let kind = document.text_of(&event, "type").ok()?.filter(|kind| is_change(kind))?;
    let object = document.event_object(&event).ok()??;
    let metadata = document.field(&object, "metadata").ok()??;
    let text = |field| document.text_of(&metadata, field).ok().flatten();
    named(&kind, text("namespace"), text("name"))
}

/// Whether it is an event of an object, by its type.
fn is_change(kind: &str) -> bool {
    matches!(kind, "ADDED" | "MODIFIED" | "DELETED")
}

impl EventSummary {
    /// `None` if the frame cannot be read.
    pub(super) fn read(frame: &[u8], encoding: Encoding) -> Option<Self> {
        if encoding == Encoding::Json {
            return Self::read_json(frame);
        }
        let document = Document { body: frame, encoding };
        let event = document.event().ok()?;
        let kind = document.text_of(&event, "type").ok()??;
        let object = document.event_object(&event).ok()??;
        let metadata = document.field(&object, "metadata").ok()??;
        let version = document.text_of(&metadata, "resourceVersion").ok()?;
        Some(Self::new(&kind, version.as_deref(), || &frame[metadata.at]))
    }

    /// Type and version stand near the beginning of an object, and reading ends behind them.
    fn read_json(frame: &[u8]) -> Option<Self> {
        let metadata = ["object", "metadata"];
        let kind = json_text(&frame[json_early(frame, &["type"])?])?;
        let version = json_early(frame, &[metadata[0], metadata[1], "resourceVersion"]);
        let version = version.and_then(|at| json_text(&frame[at]));
        let metadata = || json_early(frame, &metadata).map_or(&[][..], |at| &frame[at]);
        Some(Self::new(&kind, version.as_deref(), metadata))
    }

    fn new<'f>(kind: &str, version: Option<&str>, metadata: impl FnOnce() -> &'f [u8]) -> Self {
        let is_bookmark = kind == "BOOKMARK";
        Self {
            is_added: kind == "ADDED",
            is_bookmark,
            ends_initial_events: is_bookmark && has_annotation(metadata()),
            version: version.and_then(|version| version.parse().ok()),
        }
    }
}

/// Whether the first bytes already show an ADDED event.
pub(super) fn starts_as_added(frame: &[u8], encoding: Encoding) -> bool {
    match encoding {
        Encoding::Json => frame.starts_with(br#"{"type":"ADDED""#),
        Encoding::Protobuf => frame.starts_with(b"\x0a\x05ADDED"),
        Encoding::Cbor => false,
    }
}

/// Whether the annotation is among the metadata; its key occurs nowhere else in a bookmark.
fn has_annotation(metadata: &[u8]) -> bool {
    let annotation = INITIAL_EVENTS_END.as_bytes();
    metadata.windows(annotation.len()).any(|window| window == annotation)
}
