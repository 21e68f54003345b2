//! What is the leader-election lock called on the other side?
//!
//! Takes whole bodies and frames. Only `metadata.name` changes (and, in a Status, the name in its details and its
//! message; in a Table, the cell that shows it). The lock's other names, those of other shards and the one without a
//! shard, do not exist for the client: they are taken out of lists and watches.

use std::borrow::Cow;

use super::document::{Document, DocumentError, Edit, Encoding, Node};
use crate::decide::Rename;

/// The most that is held of a body, in bytes: what the API server takes.
pub const MAX_BODY_BYTES: usize = 3 * 1024 * 1024;

/// A body that is not sent on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    /// More than is held of a body.
    #[error("the body is longer than {MAX_BODY_BYTES} bytes")]
    TooLarge,
    /// It cannot be looked into.
    #[error("look for the leader-election lock")]
    Document(#[from] DocumentError),
    /// It names what only the server may know.
    #[error("the name {name:?} is kept for the leader-election locks of shards")]
    ReservedName {
        /// The name in the body.
        name: String,
    },
}

/// What a client sends: an object or a patch of one.
///
/// # Errors
/// Where the body is too large or malformed, or names another shard's lock.
pub fn request<'b>(
    body: &'b [u8],
    encoding: Encoding,
    rename: &Rename,
) -> Result<Cow<'b, [u8]>, LockError> {
    let document = checked(body, encoding)?;
    if body.is_empty() {
        return Ok(Cow::Borrowed(body));
    }
    let root = document.root()?;
    let mut edits = Vec::new();
    if encoding == Encoding::Json && body.get(root.at.start) == Some(&b'[') {
        for operation in document.elements(&root)? {
            rename_operation(document, &operation, rename, &mut edits)?;
        }
    } else if let Some(metadata) = document.field(&root, "metadata")? {
        rename_sent(document, &metadata, rename, &mut edits)?;
    }
    Ok(document.apply(edits)?)
}

/// What the server answers: an object, a list, a Table or a Status.
///
/// # Errors
/// Where the body is too large or malformed.
pub fn response<'b>(
    body: &'b [u8],
    encoding: Encoding,
    rename: &Rename,
) -> Result<Cow<'b, [u8]>, LockError> {
    let document = checked(body, encoding)?;
    if body.is_empty() {
        return Ok(Cow::Borrowed(body));
    }
    let mut edits = Vec::new();
    rename_answered(document, &document.root()?, rename, &mut edits)?;
    Ok(document.apply(edits)?)
}

/// One frame of a watch (without its length, in protobuf); `None` where the client must not see it.
///
/// # Errors
/// Where the frame is too large or malformed.
pub fn frame<'b>(
    frame: &'b [u8],
    encoding: Encoding,
    rename: &Rename,
) -> Result<Option<Cow<'b, [u8]>>, LockError> {
    let document = checked(frame, encoding)?;
    let event = document.event()?;
    let mut edits = Vec::new();
    if let Some(object) = document.event_object(&event)? {
        let rows = document.items(&object, "rows")?;
        let hidden = if rows.is_empty() {
            is_hidden(document, &object, rename)?
        } else {
            rows.iter().try_fold(true, |all, row| {
                Ok::<_, DocumentError>(all && is_hidden_row(document, row, rename)?)
            })?
        };
        if hidden {
            return Ok(None);
        }
        rename_answered(document, &object, rename, &mut edits)?;
    }
    Ok(Some(document.apply(edits)?))
}

/// Whether an object that the client creates may be sent: see [`request`].
fn rename_sent(
    document: Document<'_>,
    metadata: &Node,
    rename: &Rename,
    edits: &mut Vec<Edit>,
) -> Result<(), LockError> {
    if let Some(prefix) = document.text_of(metadata, "generateName")?
        && rename.lock.reserves(&prefix)
    {
        return Err(LockError::ReservedName { name: prefix.into_owned() });
    }
    match document.field(metadata, "name")? {
        Some(name) => rename_sent_name(document, &name, rename, edits),
        None => Ok(()),
    }
}

fn rename_sent_name(
    document: Document<'_>,
    name: &Node,
    rename: &Rename,
    edits: &mut Vec<Edit>,
) -> Result<(), LockError> {
    match document.text(name) {
        Some(text) if text == rename.lock.name => {
            edits.push(document.set_text(name, &rename.on_server));
        }
        Some(text) if rename.lock.reserves(&text) => {
            return Err(LockError::ReservedName { name: text.into_owned() });
        }
        _ => {}
    }
    Ok(())
}

/// One operation of a JSON patch, whose value may be the name or hold it.
fn rename_operation(
    document: Document<'_>,
    operation: &Node,
    rename: &Rename,
    edits: &mut Vec<Edit>,
) -> Result<(), LockError> {
    let (Some(path), Some(value)) =
        (document.text_of(operation, "path")?, document.field(operation, "value")?)
    else {
        return Ok(());
    };
    let metadata = match &*path {
        "" => document.field(&value, "metadata")?,
        "/metadata" => Some(value),
        "/metadata/name" => return rename_sent_name(document, &value, rename, edits),
        _ => None,
    };
    metadata.map_or(Ok(()), |metadata| rename_sent(document, &metadata, rename, edits))
}

fn rename_answered(
    document: Document<'_>,
    root: &Node,
    rename: &Rename,
    edits: &mut Vec<Edit>,
) -> Result<(), DocumentError> {
    rename_object(document, root, rename, edits)?;
    rename_status(document, root, rename, edits)?;
    let items = document.items(root, "items")?;
    remove_hidden(document, root, "items", &items, edits, |item| {
        is_hidden(document, item, rename)
    })?;
    for item in &items {
        rename_object(document, item, rename, edits)?;
    }
    let rows = document.items(root, "rows")?;
    remove_hidden(document, root, "rows", &rows, edits, |row| {
        is_hidden_row(document, row, rename)
    })?;
    for row in &rows {
        rename_row(document, row, rename, edits)?;
    }
    Ok(())
}

fn rename_object(
    document: Document<'_>,
    object: &Node,
    rename: &Rename,
    edits: &mut Vec<Edit>,
) -> Result<(), DocumentError> {
    if let Some(metadata) = metadata_here(document, object, rename)?
        && let Some(name) = document.field(&metadata, "name")?
        && document.text(&name).is_some_and(|text| text == rename.on_server)
    {
        edits.push(document.set_text(&name, &rename.lock.name));
    }
    Ok(())
}

/// A Table's row: the object in it, and the cell that shows its name.
fn rename_row(
    document: Document<'_>,
    row: &Node,
    rename: &Rename,
    edits: &mut Vec<Edit>,
) -> Result<(), DocumentError> {
    let Some(object) = document.field(row, "object")? else {
        return Ok(());
    };
    let before = edits.len();
    rename_object(document, &object, rename, edits)?;
    let cells = if edits.len() > before { document.items(row, "cells")? } else { Vec::new() };
    if let Some(cell) = cells.first()
        && document.text(cell).is_some_and(|text| text == rename.on_server)
    {
        edits.push(document.set_text(cell, &rename.lock.name));
    }
    Ok(())
}

/// A Status: the name in its details, and, quoted, in its message.
fn rename_status(
    document: Document<'_>,
    status: &Node,
    rename: &Rename,
    edits: &mut Vec<Edit>,
) -> Result<(), DocumentError> {
    let Some(details) = document.field(status, "details")? else {
        return Ok(());
    };
    let Some(name) = document.field(&details, "name")? else {
        return Ok(());
    };
    if document.text(&name).is_none_or(|text| text != rename.on_server) {
        return Ok(());
    }
    edits.push(document.set_text(&name, &rename.lock.name));
    if let Some(message) = document.field(status, "message")?
        && let Some(text) = document.text(&message)
    {
        let quoted = |name: &str| format!("\"{name}\"");
        let renamed = text.replace(&quoted(&rename.on_server), &quoted(&rename.lock.name));
        if renamed != text {
            edits.push(document.set_text(&message, &renamed));
        }
    }
    Ok(())
}

fn remove_hidden(
    document: Document<'_>,
    root: &Node,
    field: &'static str,
    items: &[Node],
    edits: &mut Vec<Edit>,
    is_hidden: impl Fn(&Node) -> Result<bool, DocumentError>,
) -> Result<(), DocumentError> {
    let hidden = items.iter().map(is_hidden).collect::<Result<Vec<_>, _>>()?;
    if hidden.contains(&true) {
        let array =
            if document.encoding == Encoding::Cbor { document.field(root, field)? } else { None };
        edits.extend(document.remove(items, &hidden, array.as_ref()));
    }
    Ok(())
}

fn is_hidden_row(
    document: Document<'_>,
    row: &Node,
    rename: &Rename,
) -> Result<bool, DocumentError> {
    document.field(row, "object")?.map_or(Ok(false), |object| is_hidden(document, &object, rename))
}

/// Whether an object is another shard's lock, or the one without a shard.
fn is_hidden(
    document: Document<'_>,
    object: &Node,
    rename: &Rename,
) -> Result<bool, DocumentError> {
    let Some(metadata) = metadata_here(document, object, rename)? else {
        return Ok(false);
    };
    let name = document.text_of(&metadata, "name")?.unwrap_or_default();
    Ok(name == rename.lock.name || rename.lock.reserves(&name) && name != rename.on_server)
}

/// The metadata of an object in the lock's namespace.
fn metadata_here(
    document: Document<'_>,
    object: &Node,
    rename: &Rename,
) -> Result<Option<Node>, DocumentError> {
    let Some(metadata) = document.field(object, "metadata")? else {
        return Ok(None);
    };
    let namespace = document.text_of(&metadata, "namespace")?;
    Ok((namespace.as_deref() == Some(rename.lock.namespace.as_str())).then_some(metadata))
}

fn checked(body: &[u8], encoding: Encoding) -> Result<Document<'_>, LockError> {
    if body.len() > MAX_BODY_BYTES {
        Err(LockError::TooLarge)
    } else {
        Ok(Document { body, encoding })
    }
}

#[cfg(test)]
mod tests;
