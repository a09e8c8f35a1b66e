//! What a queue of an interface is used for.
//!
//! ```text
//!     copy placement:    closed ──opened──▶ open ──lent──▶ lent ──given back──▶ open
//!     direct placement:  closed, open ──coupled──▶ coupled ──its lane ends──▶ closed
//! ```
//!
//! Only an open queue can be lent, and only the lane that has it can give it back. If a lane
//! is lost with its worker, its socket is closed, and so is the queue.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use steer::QueueConf;
use xsk::BindRequest;

use dataplane::nic::endpoint::NicQueue;
use dataplane::nic::xdp::XdpNic;

/// The time when a socket was closed; set when that happens.
pub(super) type Ended = Arc<OnceLock<Instant>>;

pub(super) enum QueueState {
    /// There is no socket. `since`: when the last one was closed; the kernel keeps the queue a while longer.
    Closed { since: Option<Instant> },
    /// Bound, with memory of the daemon; no lane moves its frames, which go to the host.
    Open(Box<OpenQueue>),
    /// Bound, with memory of the daemon; a lane moves its frames.
    Lent { opened: Opened, ended: Ended },
    /// Bound, with a guest's memory; a direct lane moves its frames.
    Coupled { opened: Opened, ended: Ended },
}

pub(super) struct OpenQueue {
    pub(super) nic: NicQueue<XdpNic>,
    pub(super) opened: Opened,
    pub(super) ended: Ended,
}

/// The configuration that a queue was opened with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Opened {
    /// The longest frame, bytes; differs from the interface's until a new MTU is applied.
    pub(super) frame_limit: u32,
    /// The requested data path.
    pub(super) ask: BindRequest,
    /// Chunks of its memory, bytes.
    pub(super) chunk_bytes: u32,
    /// Frames in several pieces were requested.
    pub(super) pieces: bool,
    /// The program leaves metadata before its frames.
    pub(super) leaves: bool,
}

impl Opened {
    /// Whether a queue that was opened with this configuration suits the wanted one: the same data path, several pieces
    /// if needed, and chunks that are large enough.
    pub(super) fn does_for(&self, wanted: &Self) -> bool {
        self.ask == wanted.ask && self.chunk_bytes >= wanted.chunk_bytes && (self.pieces || !wanted.pieces)
    }

    /// The queue's configuration for the program.
    pub(super) fn conf(&self) -> QueueConf {
        QueueConf {
            virtio_header: None,
            frame_limit: self.frame_limit,
            hints: self.leaves,
        }
    }
}

/// Kept with a socket; records when it is closed.
pub(super) struct NotesEnd(pub(super) Ended);

impl Drop for NotesEnd {
    fn drop(&mut self) {
        // The only one that sets it.
        let _ = self.0.set(Instant::now());
    }
}

impl Default for QueueState {
    fn default() -> Self {
        Self::Closed { since: None }
    }
}

impl QueueState {
    /// As it is now: without a socket, if its holder has closed it.
    pub(super) fn now(&mut self) -> &mut Self {
        if let Self::Lent { ended, .. } | Self::Coupled { ended, .. } = self
            && let Some(since) = ended.get().copied()
        {
            *self = Self::Closed { since: Some(since) };
        }
        self
    }

    /// Closes the socket of an open queue.
    pub(super) fn close(&mut self) {
        if let Self::Open(_) = self {
            // Closes the socket before the time is read.
            *self = Self::default();
            *self = Self::Closed {
                since: Some(Instant::now()),
            };
        }
    }

    /// Takes an open queue out for a lane.
    pub(super) fn lend(&mut self) -> Option<Box<OpenQueue>> {
        match std::mem::take(self) {
            Self::Open(open) => {
                *self = Self::Lent {
                    opened: open.opened,
                    ended: Arc::clone(&open.ended),
                };
                Some(open)
            }
            other => {
                *self = other;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Opened = Opened {
        frame_limit: 1518,
        ask: BindRequest::ForceCopy,
        chunk_bytes: 2048,
        pieces: false,
        leaves: false,
    };

    #[test]
    fn queue_does_for_less_than_it_was_opened_for_in_the_same_data_path() {
        let large = Opened {
            frame_limit: 3018,
            chunk_bytes: 4096,
            ..SMALL
        };
        let in_pieces = Opened {
            frame_limit: 9018,
            pieces: true,
            ..large
        };
        let zero_copy = Opened {
            ask: BindRequest::Auto,
            ..large
        };
        let does_for =
            |opened: Opened| [SMALL, large, in_pieces, zero_copy].map(|wanted| opened.does_for(&wanted));
        assert_eq!(does_for(SMALL), [true, false, false, false]);
        assert_eq!(does_for(large), [true, true, false, false]);
        assert_eq!(does_for(in_pieces), [true, true, true, false]);
        assert_eq!(does_for(zero_copy), [false, false, false, true]);
    }

    #[test]
    fn queue_is_closed_when_its_holder_lets_it_go() {
        let ended = Ended::default();
        let held = NotesEnd(Arc::clone(&ended));
        let mut state = QueueState::Coupled { opened: SMALL, ended };
        assert!(matches!(state.now(), QueueState::Coupled { .. }));
        assert!(state.lend().is_none(), "a coupled queue is in use");
        drop(held);
        assert!(matches!(state.now(), QueueState::Closed { since: Some(_) }));
        assert!(state.lend().is_none(), "nor is one that is closed");
    }
}
