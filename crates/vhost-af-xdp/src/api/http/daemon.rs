//! Asks the daemon: one question at a time, however many clients ask.
//!
//! Who asks while a question is under way shares the next answer with all who do; so an answer is never older than its
//! question. Between questions is a pause: clients can make the daemon read its status so often, and not more often.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

use super::problem::Problem;
use crate::api::link::{self, PAUSE, Question};
use crate::api::rules_status::RulesStatus;
use crate::api::status::Status;

/// How long an answer is waited for.
const ANSWER: Duration = Duration::from_secs(10);
/// Clients that may wait to be taken in; more wait for them.
const WAITING: usize = 64;

/// Who asks, and waits for the answer.
enum Asker {
    Status(oneshot::Sender<Arc<Status>>),
    /// For filter rules of the port of that name.
    Rules(String, oneshot::Sender<Option<RulesStatus>>),
}

/// See the module's head.
#[derive(Clone)]
pub(super) struct Daemon(mpsc::Sender<Asker>);

/// The end that [`Daemon::serve`] takes them from.
pub(super) struct Askers(mpsc::Receiver<Asker>);

impl Daemon {
    pub(super) fn new() -> (Self, Askers) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self(sender), Askers(receiver))
    }

    /// What it is doing.
    /// Errors: it does not answer.
    pub(super) async fn status(&self) -> Result<Arc<Status>, Problem> {
        self.ask(Asker::Status).await
    }

    /// The filter rules of the port of that name; `None`: there is none.
    /// Errors: it does not answer.
    pub(super) async fn rules(&self, port: &str) -> Result<Option<RulesStatus>, Problem> {
        self.ask(|sender| Asker::Rules(port.to_owned(), sender)).await
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

impl Askers {
    /// Asks for them until the daemon ends.
    /// Errors: the daemon has ended, or says what is no status.
    pub(super) async fn serve(mut self, stream: UnixStream) -> io::Result<()> {
        let (from, mut to) = stream.into_split();
        let mut from = BufReader::new(from);
        let mut next = Instant::now();
        let mut waiting: VecDeque<Asker> = VecDeque::new();
        loop {
            if waiting.is_empty() {
                let first = tokio::select! {
                    first = self.0.recv() => first,
                    // Nothing is said unasked: it is the end.
                    _ = from.fill_buf() => None,
                };
                let Some(first) = first else { return Ok(()) };
                waiting.push_back(first);
            }
            sleep_until(next).await;
            next = Instant::now() + PAUSE;
            while let Ok(asker) = self.0.try_recv() {
                waiting.push_back(asker);
            }
            let question = match waiting.front() {
                Some(Asker::Rules(port, _)) => Question::Rules(port.clone()),
                _ => Question::Status,
            };
            to.write_all(&link::line(&question)?).await?;
            let mut text = Vec::new();
            if from.read_until(b'\n', &mut text).await? == 0 {
                return Ok(());
            }
            // Who has gone needs none.
            match waiting.pop_front() {
                Some(Asker::Rules(_, sender)) => _ = sender.send(serde_json::from_slice(&text)?),
                first => {
                    let status: Arc<Status> = Arc::new(serde_json::from_slice(&text)?);
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
