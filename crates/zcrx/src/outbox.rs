//! Payloads for one peer, queued in order, and sent without a copy.
//!
//! One request of a connection is under way at a time, so that bytes keep their order; it names up to [`MOST_VECTORS`]
//! payloads. They stay here, unchanged, until it is completed.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use crate::piece::Piece;
use crate::ring::Ring;

/// Payloads that one request names at most.
const MOST_VECTORS: usize = 64;

/// Bytes to send. Nothing is copied.
#[derive(Debug)]
pub enum Payload {
    /// A received piece: its buffer is returned when all of it is sent.
    Piece(Piece),
    /// Bytes of the caller's.
    Bytes(Vec<u8>),
    /// Bytes that are sent on several connections.
    Shared(Arc<[u8]>),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Piece(piece) => piece,
            Self::Bytes(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl From<Piece> for Payload {
    fn from(piece: Piece) -> Self {
        Self::Piece(piece)
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Arc<[u8]>> for Payload {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self::Shared(bytes)
    }
}

/// What the kernel reads of a request that names several payloads.
struct Message {
    header: libc::msghdr,
    vectors: [libc::iovec; MOST_VECTORS],
}

/// The queue of one connection.
#[derive(Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Payload>,
    /// Bytes of the first payload that are sent already.
    sent: usize,
    under_way: bool,
    message: Option<Box<Message>>,
}

impl Outbox {
    pub(crate) fn push(&mut self, payload: Payload) {
        if !payload.bytes().is_empty() {
            self.queue.push_back(payload);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.under_way
    }

    /// Queues a send request for the payloads, unless one is under way.
    pub(crate) fn start(&mut self, ring: &mut Ring, socket: BorrowedFd<'_>, slot: u32) -> io::Result<()> {
        let Some(first) = self.queue.front().filter(|_| !self.under_way) else {
            return Ok(());
        };
        let first = first.bytes().get(self.sent..).unwrap_or(&[]);
        if self.queue.len() == 1 {
            // SAFETY: the payload stays in the queue until the request is completed (`complete`, `clear`); the
            // receiver ends all requests before it drops its connections.
            unsafe { ring.send(socket, first, slot) }?;
        } else {
            let message = self.message.get_or_insert_with(new_message);
            let vectors = message.vectors.iter_mut().zip(&self.queue);
            for (at, (vector, payload)) in vectors.enumerate() {
                let bytes = if at == 0 { first } else { payload.bytes() };
                vector.iov_base = bytes.as_ptr().cast_mut().cast();
                vector.iov_len = bytes.len();
            }
            message.header.msg_iov = message.vectors.as_mut_ptr();
            message.header.msg_iovlen = self.queue.len().min(MOST_VECTORS) as _;
            // SAFETY: as above; the message has a place of its own, and is not touched while the request is under way.
            unsafe { ring.send_message(socket, &raw const message.header, slot) }?;
        }
        self.under_way = true;
        Ok(())
    }

    /// Removes what was sent.
    pub(crate) fn complete(&mut self, bytes: usize) {
        self.under_way = false;
        self.sent += bytes;
        while let Some(first) = self.queue.front() {
            let Some(rest) = self.sent.checked_sub(first.bytes().len()) else {
                return;
            };
            self.sent = rest;
            self.queue.pop_front();
        }
        self.sent = 0;
    }

    /// Drops what is not sent, unless a request is under way.
    pub(crate) fn clear(&mut self) {
        if !self.under_way {
            self.queue.clear();
            self.sent = 0;
        }
    }
}

fn new_message() -> Box<Message> {
    let nothing = libc::iovec {
        iov_base: ptr::null_mut(),
        iov_len: 0,
    };
    Box::new(Message {
        // SAFETY: a header of zeros names no address, no vectors and no control data.
        header: unsafe { std::mem::zeroed() },
        vectors: [nothing; MOST_VECTORS],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_in_part_stays_from_there_on() {
        let mut outbox = Outbox::default();
        outbox.push(Payload::Bytes(Vec::new()));
        assert!(outbox.is_empty(), "nothing to send");
        for bytes in [&b"abc"[..], b"de", b"f"] {
            outbox.push(bytes.to_vec().into());
        }
        outbox.complete(2);
        assert_eq!((outbox.queue.len(), outbox.sent), (3, 2));
        outbox.complete(3);
        assert_eq!((outbox.queue.len(), outbox.sent), (1, 0));
        outbox.complete(1);
        assert!(outbox.is_empty());
    }
}
