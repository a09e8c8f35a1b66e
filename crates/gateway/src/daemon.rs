//! Asks the daemon for its state: one request at a time, however many clients ask.
//!
//! Clients that ask for the status while a request is under way share the next answer; so an answer is never older than
//! its request. Between requests is a pause, which limits how often clients can make the daemon read its state.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use model::control::{Kind, Refused, Request};
use model::state::{RulesStatus, Status};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

use crate::link::Link;
use crate::problem::Problem;

/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Least time from the beginning of a request to the beginning of the next one.
const PAUSE: Duration = Duration::from_millis(50);
/// Clients in the queue; further ones wait for room in it.
const WAITING: usize = 64;

/// A client that waits.
enum Asker {
    Status(oneshot::Sender<Arc<Status>>),
    /// For filter rules of the port of that name.
    Rules(String, oneshot::Sender<Result<RulesStatus, Refused>>),
}

/// See the module's head.
#[derive(Clone)]
pub(super) struct Daemon(mpsc::Sender<Asker>);

/// The receiving end of the queue.
pub(super) struct StatusQueue(mpsc::Receiver<Asker>);

impl Daemon {
    pub(super) fn new() -> (Self, StatusQueue) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self(sender), StatusQueue(receiver))
    }

    /// The daemon's status.
    /// Errors: it does not answer.
    pub(super) async fn status(&self) -> Result<Arc<Status>, Problem> {
        self.ask(Asker::Status).await
    }

    /// The filter rules of the port of that name; `None`: there is none.
    /// Errors: it does not answer.
    pub(super) async fn rules(&self, port: &str) -> Result<Option<RulesStatus>, Problem> {
        match self.ask(|sender| Asker::Rules(port.to_owned(), sender)).await? {
            Ok(rules) => Ok(Some(rules)),
            Err(refused) if refused.kind == Kind::NoPort => Ok(None),
            Err(refused) => Err(Problem::Refused(refused)),
        }
    }

    async fn ask<T>(&self, asker: impl FnOnce(oneshot::Sender<T>) -> Asker) -> Result<T, Problem> {
        let asked = async {
            let (sender, receiver) = oneshot::channel();
            self.0.send(asker(sender)).await.map_err(|_| Problem::Ending)?;
            receiver.await.map_err(|_| Problem::Ending)
        };
        timeout(ANSWER, asked).await.unwrap_or(Err(Problem::Silent))
    }
}

impl StatusQueue {
    /// Asks the daemon on behalf of clients, until it ends.
    /// Errors: the daemon has ended, or sends an invalid answer.
    pub(super) async fn serve(mut self, mut link: Link) -> io::Result<()> {
        let mut next = Instant::now();
        let mut waiting: VecDeque<Asker> = VecDeque::new();
        loop {
            if waiting.is_empty() {
                let first = tokio::select! {
                    first = self.0.recv() => first,
                    () = link.ended() => None,
                };
                let Some(first) = first else { return Ok(()) };
                waiting.push_back(first);
            }
            sleep_until(next).await;
            next = Instant::now() + PAUSE;
            while let Ok(asker) = self.0.try_recv() {
                waiting.push_back(asker);
            }
            // A client may have gone.
            match waiting.pop_front() {
                Some(Asker::Rules(port, sender)) => {
                    let path = vec!["ports".to_owned(), port, "rules".to_owned()];
                    _ = sender.send(link.ask(&Request::Get(path)).await?);
                }
                first => {
                    let status = link.ask::<Status>(&Request::Get(Vec::new())).await?;
                    let status = Arc::new(status.map_err(io::Error::other)?);
                    for asker in first.into_iter().chain(std::mem::take(&mut waiting)) {
                        match asker {
                            Asker::Status(sender) => _ = sender.send(Arc::clone(&status)),
                            rules => waiting.push_back(rules),
                        }
                    }
                }
            }
        }
    }
}
