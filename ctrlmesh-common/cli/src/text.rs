//! Tables, fields and ages, as kubectl prints them, and documents in JSON or YAML.
//!
//! Pure.

use clap::ValueEnum;
use ctrlmesh_common::api::Root;
use ctrlmesh_common::slots::Slot;
use jiff::Timestamp;
use serde::Serialize;

/// Puts a terminal's cursor where the screen begins, and clears the screen.
pub(crate) const CLEAR: &str = "\x1b[H\x1b[2J";

/// A document's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Json,
    Yaml,
}

/// A table for people, or a document for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Table,
    Json,
    Yaml,
}

impl Output {
    /// `None` where it is for people.
    pub(crate) fn format(self) -> Option<Format> {
        match self {
            Self::Table => None,
            Self::Json => Some(Format::Json),
            Self::Yaml => Some(Format::Yaml),
        }
    }
}

/// Group and version of the documents that commands print for programs. A field is removed or changes its meaning only
/// in another version.
const API_VERSION: &str = "cli.ctrlmesh.kusionstack.io/v1alpha1";

/// What a command prints for programs, with its version and kind as Kubernetes objects have them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Document<'a, T> {
    api_version: &'static str,
    kind: &'static str,
    #[serde(flatten)]
    content: &'a T,
}

impl<'a, T> Document<'a, T> {
    pub(crate) fn new(kind: &'static str, content: &'a T) -> Self {
        Self { api_version: API_VERSION, kind, content }
    }
}

/// A document cannot be printed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DocumentError {
    #[error("print JSON")]
    Json(#[from] serde_json::Error),
    #[error("print YAML")]
    Yaml(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// # Errors
/// Where the format cannot have it.
pub(crate) fn document(format: Format, part: &impl Serialize) -> Result<String, DocumentError> {
    match format {
        Format::Json => Ok(serde_json::to_string_pretty(part)? + "\n"),
        Format::Yaml => serde_saphyr::to_string(part).map_err(|error| DocumentError::Yaml(error.into())),
    }
}

/// A line for each field, with the values below each other.
pub(crate) fn described(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or_default() + 1;
    let lines = fields.iter().map(|(name, value)| format!("{:<width$} {value}\n", format!("{name}:")));
    lines.collect::<Vec<_>>().concat()
}

/// Columns with three spaces between them, as kubectl has them. The last one is as wide as it is.
pub(crate) fn table(rows: &[Vec<String>], indent: &str) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{indent}{}\n", cells.collect::<Vec<_>>().join("   ").trim_end())
    });
    lines.collect::<Vec<_>>().concat()
}

/// What stands in the place of a value that there is not.
pub(crate) fn dash() -> String {
    "-".to_owned()
}

/// A cell that is no wider than this; what is left out is told by `…`.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// As `1 pod`, `2 pods`.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// A message in one line.
pub(crate) fn line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// How long ago that was.
pub(crate) fn since(then: Timestamp, now: Timestamp) -> String {
    duration(u64::try_from(now.duration_since(then).as_secs()).unwrap_or_default())
}

/// Two units at most, as kubectl says ages.
pub(crate) fn duration(seconds: u64) -> String {
    let (large, small, units) = match seconds {
        0..60 => return format!("{seconds}s"),
        60..3600 => (seconds / 60, seconds % 60, ["m", "s"]),
        3600..86400 => (seconds / 3600, seconds % 3600 / 60, ["h", "m"]),
        _ => (seconds / 86400, 0, ["d", ""]),
    };
    if small == 0 { format!("{large}{}", units[0]) } else { format!("{large}{}{small}{}", units[0], units[1]) }
}

/// As `KIND NAME`.
pub(crate) fn workload(rule: &Root) -> String {
    match (&rule.target_deployment, &rule.target_stateful_set) {
        (Some(name), _) => format!("Deployment {name}"),
        (None, Some(name)) => format!("StatefulSet {name}"),
        (None, None) => "no workload".to_owned(),
    }
}

/// Neighbours as one range: `0-3,7`.
pub(crate) fn ranges(slots: &[Slot]) -> String {
    let mut parts: Vec<(u8, u8)> = Vec::new();
    for slot in slots.iter().map(|slot| slot.number()) {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == slot => *last = slot,
            _ => parts.push((slot, slot)),
        }
    }
    let text = |(first, last): &(u8, u8)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}
