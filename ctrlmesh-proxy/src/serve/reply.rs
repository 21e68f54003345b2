//! What does the client read?

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::body::{BodyError, Relay};
use crate::metrics::Open;
use crate::serve::items::List;
use crate::serve::watch::Watch;

/// The body of a response to a client. The request counts as under way until it is dropped.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) content: Content,
    pub(super) _open: Open,
}

/// Where a response's body comes from.
#[derive(Debug)]
pub(super) enum Content {
    /// The API server, or the proxy itself.
    Plain(Relay),
    /// A watch of the API server, which follows the policy.
    Watch(Box<Watch>),
    /// A list of the API server, in which the lock is renamed.
    Items(Box<List>),
}

impl Body for Reply {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.get_mut().content {
            Content::Plain(body) => Pin::new(body).poll_frame(cx),
            Content::Watch(watch) => watch.poll_frame(cx),
            Content::Items(list) => list.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Plain(body) => body.is_end_stream(),
            Content::Watch(_) | Content::Items(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Plain(body) => body.size_hint(),
            Content::Watch(_) | Content::Items(_) => SizeHint::default(),
        }
    }
}
