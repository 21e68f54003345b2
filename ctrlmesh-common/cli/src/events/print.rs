//! Prints batches of events one after the other.

use std::io::{Write as _, stdout};

use jiff::Timestamp;
use serde::Serialize;

use super::entry::Entry;
use super::{EventsError, render};
use crate::text::{self, Document, Format};

/// Kind of the document.
const KIND: &str = "EventList";

/// What was printed so far, which decides what stands before the rest.
pub(super) struct Printer {
    /// `None`: for people.
    format: Option<Format>,
    has_namespaces: bool,
    /// Whether a document was printed, or a table with its head.
    has_begun: bool,
}

impl Printer {
    pub(super) fn new(format: Option<Format>, has_namespaces: bool) -> Self {
        Self { format, has_namespaces, has_begun: false }
    }

    /// # Errors
    /// Standard output is closed, or the format cannot have the events.
    pub(super) fn print(&mut self, entries: &[Entry]) -> Result<(), EventsError> {
        #[derive(Serialize)]
        struct List<'a> {
            items: &'a [Entry],
        }
        let printed = match self.format {
            Some(format) => {
                let between = if format == Format::Yaml && self.has_begun { "---\n" } else { "" };
                between.to_owned() + &text::document(format, &Document::new(KIND, &List { items: entries }))?
            }
            None => render::list(entries, self.has_namespaces, !self.has_begun, Timestamp::now()),
        };
        self.has_begun |= self.format.is_some() || !entries.is_empty();
        write!(stdout().lock(), "{printed}")?;
        Ok(stdout().flush()?)
    }
}
