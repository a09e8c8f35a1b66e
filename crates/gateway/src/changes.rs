//! Asks the daemon for changes: one at a time, in order.
//!
//! A change may take seconds, while a guest is disconnected or a queue is waited for. If the client gives up meanwhile,
//! the change is made anyway.

use std::io;
use std::time::Duration;

use model::control::{Change, Changed, Refused, Request};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::link::Link;
use crate::problem::Problem;

/// Longest wait of a client for its answer: shorter than the idle timeout of a connection.
const ANSWER: Duration = Duration::from_secs(25);
/// Changes that may wait for the one that is under way.
const WAITING: usize = 16;

type Done = Result<Changed, Refused>;
type Asker = (Change, oneshot::Sender<Done>);

/// Additional places, for root and the owner.
const KEPT: usize = 1;

/// See the module's head.
#[derive(Clone)]
pub(super) struct Changes {
    queue: mpsc::Sender<Asker>,
    /// Number of places in the queue that this handle must leave free.
    leaves: usize,
}

/// The receiving end of the queue.
pub(super) struct Changing(mpsc::Receiver<Asker>);

impl Changes {
    pub(super) fn new() -> (Self, Changing) {
        let (sender, receiver) = mpsc::channel(WAITING + KEPT);
        let changes = Self {
            queue: sender,
            leaves: KEPT,
        };
        (changes, Changing(receiver))
    }

    /// A handle for root and the owner, who may use the whole queue.
    pub(super) fn for_owner(&self) -> Self {
        let queue = self.queue.clone();
        Self { queue, leaves: 0 }
    }

    /// Makes a change and returns its result.
    /// Errors: it was refused; too many wait; or it takes too long, and is still made.
    pub(super) async fn make(&self, change: Change) -> Result<Changed, Problem> {
        let (sender, receiver) = oneshot::channel();
        if self.queue.capacity() <= self.leaves && !self.queue.is_closed() {
            return Err(Problem::Busy);
        }
        self.queue
            .try_send((change, sender))
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => Problem::Busy,
                mpsc::error::TrySendError::Closed(_) => Problem::Ending,
            })?;
        match timeout(ANSWER, receiver).await {
            Ok(Ok(done)) => done.map_err(Problem::Refused),
            Ok(Err(_)) => Err(Problem::Ending),
            Err(_) => Err(Problem::UnderWay),
        }
    }
}

impl Changing {
    /// Makes changes until the daemon ends.
    /// Errors: the daemon has ended, or sends an invalid answer.
    pub(super) async fn serve(mut self, mut link: Link) -> io::Result<()> {
        loop {
            let next = tokio::select! {
                next = self.0.recv() => next,
                () = link.ended() => None,
            };
            let Some((change, asker)) = next else {
                return Ok(());
            };
            // The client may have gone.
            let _ = asker.send(link.ask(&Request::Change(change)).await?);
        }
    }
}
