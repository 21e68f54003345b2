//! Does a target hold a `#`?
//!
//! The API server takes it for a part of the path. The libraries that read requests here cut the target off before it
//! and do not say so, and `DELETE /api/v1/namespaces/a#b` would become the deletion of `a`. So the bytes are looked at on
//! their way to those libraries: request lines, and the paths in header blocks. Nothing is copied of what came whole.

mod blocks;
mod lines;

pub use blocks::Blocks;
pub use lines::{Found, Lines};

/// What looks at the bytes that a client sends, all of them, in order.
pub trait Look {
    /// Looks at the next bytes.
    fn look(&mut self, bytes: &[u8]);

    /// How long the head of a request is by now that has begun and is not whole, in bytes.
    fn unfinished(&self) -> usize;
}
