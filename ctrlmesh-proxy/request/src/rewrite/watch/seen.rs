//! What does an event say of the watch that it comes by?

use crate::rewrite::document::{Document, Encoding, json_early, json_text};

/// The annotation of the bookmark that ends the initial events.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// What an event says of the stream.
pub(super) struct Seen {
    pub(super) is_added: bool,
    pub(super) is_bookmark: bool,
    pub(super) ends_initial_events: bool,
    pub(super) version: Option<u64>,
}

impl Seen {
    /// Looks into a frame; `None` where it cannot be read.
    pub(super) fn of(frame: &[u8], encoding: Encoding) -> Option<Self> {
        if encoding == Encoding::Json {
            return Self::of_json(frame);
        }
        let document = Document { body: frame, encoding };
        let event = document.event().ok()?;
        let kind = document.text_of(&event, "type").ok()??;
        let object = document.event_object(&event).ok()??;
        let metadata = document.field(&object, "metadata").ok()??;
        let version = document.text_of(&metadata, "resourceVersion").ok()?;
        Some(Self::saying(&kind, version.as_deref(), || &frame[metadata.at]))
    }

    /// The type and the version stand before nearly all of an object; of text, what stands behind them is not read.
    fn of_json(frame: &[u8]) -> Option<Self> {
        let metadata = ["object", "metadata"];
        let kind = json_text(&frame[json_early(frame, &["type"])?])?;
        let version = json_early(frame, &[metadata[0], metadata[1], "resourceVersion"]);
        let version = version.and_then(|at| json_text(&frame[at]));
        let metadata = || json_early(frame, &metadata).map_or(&[][..], |at| &frame[at]);
        Some(Self::saying(&kind, version.as_deref(), metadata))
    }

    fn saying<'f>(kind: &str, version: Option<&str>, metadata: impl FnOnce() -> &'f [u8]) -> Self {
        let is_bookmark = kind == "BOOKMARK";
        Self {
            is_added: kind == "ADDED",
            is_bookmark,
            ends_initial_events: is_bookmark && has_annotation(metadata()),
            version: version.and_then(|version| version.parse().ok()),
        }
    }
}

/// Whether the first bytes already say that an object was there before.
pub(super) fn begins_added(frame: &[u8], encoding: Encoding) -> bool {
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
