//! Renames the leader-election lock in a list, item by item.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use ctrlmesh_request::rewrite::lock::Items;
use hyper::body::{Body as _, Frame};
use tracing::debug;

use crate::net::body::{BodyError, Relay};

#[derive(Debug)]
pub(super) struct LockList {
    items: Items,
    upstream: Relay,
}

impl LockList {
    pub(super) fn new(items: Items, upstream: Relay) -> Self {
        Self { items, upstream }
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            let Some(frame) = ready!(Pin::new(&mut self.upstream).poll_frame(cx)) else {
                return Poll::Ready(None);
            };
            let data = match frame.map(Frame::into_data) {
                Ok(Ok(data)) => data,
                Ok(Err(trailers)) => return Poll::Ready(Some(Ok(trailers))),
                Err(error) => return Poll::Ready(Some(Err(error))),
            };
            let mut out = Vec::with_capacity(data.len());
            if let Err(error) = self.items.feed(&data, &mut out) {
                debug!(error = &error as &dyn std::error::Error, "list of locks cannot be read");
                self.upstream = Relay::Empty;
                return Poll::Ready(Some(Err(BodyError::GivenUp)));
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
    }
}
