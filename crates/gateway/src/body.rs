//! What answers consist of: bytes that are there, or that come as something happens.
//!
//! Bytes that are there are handed on in pieces, as they are sent: what a client does not read stays here, where it is
//! counted ([`Place::hold`](super::Place::hold)), and not in copies of hyper's.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::sync::mpsc;

/// Bytes that are handed on at a time.
const PIECE: usize = 64 << 10;

/// See the module's head.
pub(super) enum Body {
    Whole {
        rest: Bytes,
        /// Counts them until they are sent, or given up.
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

    /// Bytes that are there.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Whole { rest, .. } => rest.len(),
            Self::Coming { .. } => 0,
        }
    }

    /// Drops that once nothing is to be sent of it any more.
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
