//! Bodies of responses: complete bytes, or a stream to which events add bytes.
//!
//! Complete bytes are passed to hyper in pieces, as they are sent: bytes that a client has not read stay here, where
//! they are counted ([`Place::hold`](super::Place::hold)), and not in hyper's buffers.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::sync::mpsc;

/// Bytes that are passed on at a time.
const PIECE: usize = 64 << 10;

/// See the module's head.
pub(super) enum Body {
    Whole {
        rest: Bytes,
        /// Counts these bytes until they are sent or dropped.
        _held: Option<Box<dyn Send>>,
    },
    Coming {
        chunks: mpsc::Receiver<Bytes>,
        _held: Option<Box<dyn Send>>,
    },
}

impl Body {
    pub(super) fn whole(bytes: impl Into<Bytes>) -> Self {
        let rest = bytes.into();
        Self::Whole { rest, _held: None }
    }

    pub(super) fn coming(chunks: mpsc::Receiver<Bytes>) -> Self {
        Self::Coming { chunks, _held: None }
    }

    /// Bytes of a complete body that are not passed on yet.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Whole { rest, .. } => rest.len(),
            Self::Coming { .. } => 0,
        }
    }

    /// Drops `held` together with the body.
    pub(super) fn held(self, held: impl Send + 'static) -> Self {
        let held: Option<Box<dyn Send>> = Some(Box::new(held));
        match self {
            Self::Whole { rest, .. } => Self::Whole { rest, _held: held },
            Self::Coming { chunks, .. } => Self::Coming { chunks, _held: held },
        }
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = match &mut *self {
            Self::Whole { rest, .. } => {
                let piece = rest.split_to(rest.len().min(PIECE));
                Poll::Ready(Some(piece).filter(|piece| !piece.is_empty()))
            }
            Self::Coming { chunks, .. } => chunks.poll_recv(context),
        };
        next.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        !matches!(self, Self::Coming { .. }) && self.bytes() == 0
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Coming { .. } => SizeHint::default(),
            there => SizeHint::with_exact(there.bytes() as u64),
        }
    }
}
