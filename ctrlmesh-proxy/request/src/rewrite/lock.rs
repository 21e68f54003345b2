//! Renames the leader-election lock in bodies and watch frames.
//!
//! Only `metadata.name` changes; in a Status also the name in its details and message, and in a Table the cell that
//! shows it. Locks of other shards, and the one without a shard, are taken out of lists and watches.

use std::borrow::Cow;

use super::document::{Document, DocumentError, Edit, Encoding, Node};
use crate::decide::Rename;

mod items;

pub use items::Items;

/// The most that is held of a body, in bytes: what the API server takes.
pub const MAX_BODY_BYTES: usize = 3 * 1024 * 1024;

/// Why a body is not sent on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    #[error("the body is longer than {MAX_BODY_BYTES} bytes")]
    TooLarge,
    #[error("look for the leader-election lock")]
    Document(#[from] DocumentError),
    #[error("the name {name:?} is kept for the leader-election locks of shards")]
    ReservedName { name: String },
}

/// A body in which the lock is being renamed.
struct Renaming<'b, 'r> {
    document: Document<'b>,
    rename: &'r Rename,
    /// In no order.
    edits: Vec<Edit>,
}

/// Renames in a client's body: an object or a patch of one.
///
/// # Errors
/// Where the body is too large or malformed, or names another shard's lock.
pub fn request<'b>(body: &'b [u8], encoding: Encoding, rename: &Rename) -> Result<Cow<'b, [u8]>, LockError> {
    let mut renaming = Renaming::of(body, encoding, rename)?;
    if body.is_empty() {
        return Ok(Cow::Borrowed(body));
    }
    let document = renaming.document;
    let root = document.root()?;
    if encoding == Encoding::Json && body.get(root.at.start) == Some(&b'[') {
        for operation in document.elements(&root)? {
            renaming.operation(&operation)?;
        }
    } else if let Some(metadata) = document.field(&root, "metadata")? {
        renaming.sent(&metadata)?;
    }
    Ok(document.apply(renaming.edits)?)
}

/// Renames in the server's answer: an object, a list, a Table or a Status.
///
/// # Errors
/// Where the body is too large or malformed.
pub fn response<'b>(body: &'b [u8], encoding: Encoding, rename: &Rename) -> Result<Cow<'b, [u8]>, LockError> {
    let mut renaming = Renaming::of(body, encoding, rename)?;
    if body.is_empty() {
        return Ok(Cow::Borrowed(body));
    }
    let document = renaming.document;
    renaming.answered(&document.root()?)?;
    Ok(document.apply(renaming.edits)?)
}

/// The same of a Lease, which nobody holds then, whoever does.
///
/// # Errors
/// As [`response`].
pub fn vacated<'b>(body: &'b [u8], encoding: Encoding, rename: &Rename) -> Result<Cow<'b, [u8]>, LockError> {
    let mut renaming = Renaming::of(body, encoding, rename)?;
    let document = renaming.document;
    let root = document.root()?;
    renaming.answered(&root)?;
    if let Some(spec) = document.field(&root, "spec")?
        && let Some(holder) = document.field(&spec, "holderIdentity")?
    {
        renaming.set(&holder, "");
    }
    Ok(document.apply(renaming.edits)?)
}

/// Who holds a Lease by a body of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// There is no `spec.holderIdentity`: nobody does, but by a patch.
    Unsaid,
    /// It is empty, or null.
    Nobody,
    Somebody(String),
}

/// Who holds a Lease, by its `spec.holderIdentity`. `None` where the body cannot be read.
pub fn holder(body: &[u8], encoding: Encoding) -> Option<Holder> {
    let document = Document { body, encoding };
    let spec = document.field(&document.root().ok()?, "spec").ok()?;
    let holder = spec.map(|spec| document.field(&spec, "holderIdentity")).transpose().ok()?.flatten();
    let Some(holder) = holder else { return Some(Holder::Unsaid) };
    let name = document.text(&holder).unwrap_or_default();
    Some(if name.is_empty() { Holder::Nobody } else { Holder::Somebody(name.into_owned()) })
}

/// Renames in a frame of a watch (without its length, in protobuf); `None` where the client must not see it.
///
/// # Errors
/// Where the frame is too large or malformed.
pub fn frame<'b>(frame: &'b [u8], encoding: Encoding, rename: &Rename) -> Result<Option<Cow<'b, [u8]>>, LockError> {
    let mut renaming = Renaming::of(frame, encoding, rename)?;
    let document = renaming.document;
    let event = document.event()?;
    if let Some(object) = document.event_object(&event)? {
        let rows = document.items(&object, "rows")?;
        let hidden = if rows.is_empty() {
            renaming.is_hidden(&object)?
        } else {
            rows.iter().try_fold(true, |all, row| Ok::<_, DocumentError>(all && renaming.is_hidden_row(row)?))?
        };
        if hidden {
            return Ok(None);
        }
        renaming.answered(&object)?;
    }
    Ok(Some(document.apply(renaming.edits)?))
}

impl<'b, 'r> Renaming<'b, 'r> {
    fn of(body: &'b [u8], encoding: Encoding, rename: &'r Rename) -> Result<Self, LockError> {
        if body.len() > MAX_BODY_BYTES {
            return Err(LockError::TooLarge);
        }
        Ok(Self { document: Document { body, encoding }, rename, edits: Vec::new() })
    }

    /// Metadata that a client sends: whether they may be sent, see [`request`].
    fn sent(&mut self, metadata: &Node) -> Result<(), LockError> {
        if let Some(prefix) = self.document.text_of(metadata, "generateName")?
            && self.rename.lock.reserves(&prefix)
        {
            return Err(LockError::ReservedName { name: prefix.into_owned() });
        }
        match self.document.field(metadata, "name")? {
            Some(name) => self.sent_name(&name),
            None => Ok(()),
        }
    }

    fn sent_name(&mut self, name: &Node) -> Result<(), LockError> {
        match self.document.text(name) {
            Some(text) if text == self.rename.lock.name => self.set(name, &self.rename.on_server),
            Some(text) if self.rename.lock.reserves(&text) => {
                return Err(LockError::ReservedName { name: text.into_owned() });
            }
            _ => {}
        }
        Ok(())
    }

    /// One operation of a JSON patch, whose value may be the name or hold it.
    fn operation(&mut self, operation: &Node) -> Result<(), LockError> {
        let (Some(path), Some(value)) =
            (self.document.text_of(operation, "path")?, self.document.field(operation, "value")?)
        else {
            return Ok(());
        };
        let metadata = match &*path {
            "" => self.document.field(&value, "metadata")?,
            "/metadata" => Some(value),
            "/metadata/name" => return self.sent_name(&value),
            _ => None,
        };
        metadata.map_or(Ok(()), |metadata| self.sent(&metadata))
    }

    fn answered(&mut self, root: &Node) -> Result<(), DocumentError> {
        self.object(root)?;
        self.status(root)?;
        let items = self.document.items(root, "items")?;
        self.remove_hidden(&items, Self::is_hidden)?;
        for item in &items {
            self.object(item)?;
        }
        let rows = self.document.items(root, "rows")?;
        self.remove_hidden(&rows, Self::is_hidden_row)?;
        for row in &rows {
            self.row(row)?;
        }
        Ok(())
    }

    fn object(&mut self, object: &Node) -> Result<(), DocumentError> {
        if let Some(metadata) = self.metadata_here(object)?
            && let Some(name) = self.document.field(&metadata, "name")?
            && self.is_on_server(&name)
        {
            self.set(&name, &self.rename.lock.name);
        }
        Ok(())
    }

    /// A Table's row: the object in it, and the cell that shows its name.
    fn row(&mut self, row: &Node) -> Result<(), DocumentError> {
        let Some(object) = self.document.field(row, "object")? else {
            return Ok(());
        };
        let before = self.edits.len();
        self.object(&object)?;
        if self.edits.len() > before
            && let Some(cell) = self.document.items(row, "cells")?.first()
            && self.is_on_server(cell)
        {
            self.set(cell, &self.rename.lock.name);
        }
        Ok(())
    }

    /// A Status: the name in its details, and, quoted, in its message.
    fn status(&mut self, status: &Node) -> Result<(), DocumentError> {
        let Some(details) = self.document.field(status, "details")? else {
            return Ok(());
        };
        let Some(name) = self.document.field(&details, "name")? else {
            return Ok(());
        };
        if !self.is_on_server(&name) {
            return Ok(());
        }
        self.set(&name, &self.rename.lock.name);
        if let Some(message) = self.document.field(status, "message")?
            && let Some(text) = self.document.text(&message)
        {
            let quoted = |name: &str| format!("\"{name}\"");
            let (theirs, ours) = (quoted(&self.rename.on_server), quoted(&self.rename.lock.name));
            let renamed = text.replace(&theirs, &ours);
            if renamed != text {
                self.set(&message, &renamed);
            }
        }
        Ok(())
    }

    fn remove_hidden(
        &mut self,
        items: &[Node],
        is_hidden: impl Fn(&Self, &Node) -> Result<bool, DocumentError>,
    ) -> Result<(), DocumentError> {
        let hidden = items.iter().map(|item| is_hidden(self, item)).collect::<Result<Vec<_>, _>>()?;
        if hidden.contains(&true) {
            self.edits.extend(self.document.remove(items, &hidden));
        }
        Ok(())
    }

    fn is_hidden_row(&self, row: &Node) -> Result<bool, DocumentError> {
        let object = self.document.field(row, "object")?;
        object.map_or(Ok(false), |object| self.is_hidden(&object))
    }

    /// Whether an object is another shard's lock, or the one without a shard.
    fn is_hidden(&self, object: &Node) -> Result<bool, DocumentError> {
        let Some(metadata) = self.metadata_here(object)? else {
            return Ok(false);
        };
        let Rename { lock, on_server } = self.rename;
        let name = self.document.text_of(&metadata, "name")?.unwrap_or_default();
        Ok(name == lock.name || lock.reserves(&name) && name != on_server.as_str())
    }

    /// The metadata of an object in the lock's namespace.
    fn metadata_here(&self, object: &Node) -> Result<Option<Node>, DocumentError> {
        let Some(metadata) = self.document.field(object, "metadata")? else {
            return Ok(None);
        };
        let namespace = self.document.text_of(&metadata, "namespace")?;
        let here = namespace.as_deref() == Some(self.rename.lock.namespace.as_str());
        Ok(here.then_some(metadata))
    }

    fn is_on_server(&self, name: &Node) -> bool {
        self.document.text(name).is_some_and(|text| text == self.rename.on_server)
    }

    fn set(&mut self, node: &Node, text: &str) {
        self.edits.push(self.document.set_text(node, text));
    }
}

#[cfg(test)]
mod tests;
