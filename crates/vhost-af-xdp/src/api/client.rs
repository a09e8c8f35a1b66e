//! A client of the API: what this program's own commands ask of a daemon.

use std::future::poll_fn;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, IF_NONE_MATCH};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// How long an answer may take: longer than the server takes for one.
const ANSWER: Duration = Duration::from_secs(40);
/// Most bytes of an answer, and of a line of a stream.
const LONGEST: usize = 64 << 20;

/// See the module's head.
pub(crate) struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

/// What is asked.
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    pub(crate) path: &'a str,
    pub(crate) body: Option<Value>,
    /// Nothing is to be replaced.
    pub(crate) only_new: bool,
}

impl<'a> Ask<'a> {
    pub(crate) fn get(path: &'a str) -> Self {
        Self {
            method: Method::GET,
            path,
            body: None,
            only_new: false,
        }
    }
}

impl Client {
    /// Of the API at this socket.
    pub(crate) fn new(socket: &Path) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build();
        Ok(Self {
            socket: socket.to_owned(),
            runtime: runtime.context("no event queue")?,
        })
    }

    /// The document that is answered.
    /// Errors: nobody answers, or it was refused, with the remedy.
    pub(crate) fn ask(&self, ask: &Ask<'_>) -> anyhow::Result<Value> {
        let asked = async {
            let response = self.send(ask, "application/json").await?;
            let is_done = response.status().is_success();
            let document = document(response.into_body()).await?;
            match is_done {
                true => Ok(document),
                false => bail!("{}", words_of(&document)),
            }
        };
        let done = self.runtime.block_on(async { timeout(ANSWER, asked).await });
        done.unwrap_or_else(|_| bail!("{} does not answer in time", self.socket.display()))
    }

    /// Calls `on_line` with each line of a stream, until that says false, or the stream ends.
    /// Errors: nobody answers, or it was refused.
    pub(crate) fn stream(&self, path: &str, mut on_line: impl FnMut(&str) -> bool) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            let response = self.send(&Ask::get(path), "text/event-stream").await?;
            if !response.status().is_success() {
                bail!("{}", words_of(&document(response.into_body()).await?));
            }
            let (mut body, mut rest) = (response.into_body(), Vec::new());
            while let Ok(Some(data)) = next(&mut body).await {
                rest.extend_from_slice(&data);
                while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
                    let line: Vec<u8> = rest.drain(..=end).collect();
                    if !on_line(String::from_utf8_lossy(&line[..end]).as_ref()) {
                        return Ok(());
                    }
                }
                if rest.len() > LONGEST {
                    bail!("{} says what is no event", self.socket.display());
                }
            }
            Ok(())
        })
    }

    async fn send(&self, ask: &Ask<'_>, accepted: &str) -> anyhow::Result<Response<Incoming>> {
        let nobody = || nobody(&self.socket);
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(|error| unreached(&self.socket, error))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .with_context(nobody)?;
        // It ends with the connection, whose end is seen by who reads.
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(ask.method.clone())
            .uri(ask.path)
            .header(HOST, "localhost")
            .header(ACCEPT, accepted)
            .header(CONTENT_TYPE, "application/json");
        if ask.only_new {
            request = request.header(IF_NONE_MATCH, "*");
        }
        let body = ask.body.as_ref().map_or_else(String::new, Value::to_string);
        let request = request.body(body).context("this cannot be asked")?;
        sender.send_request(request).await.with_context(nobody)
    }
}

/// What to say where nobody answers.
fn nobody(socket: &Path) -> String {
    format!(
        "no daemon answers at {}: is it running, with --api?",
        socket.display()
    )
}

/// Why there is no connection.
fn unreached(socket: &Path, error: Error) -> anyhow::Error {
    let what = match error.kind() {
        ErrorKind::PermissionDenied => format!(
            "this user may not ask at {}: ask as root, or as one of the group that the daemon has by --api-group",
            socket.display()
        ),
        _ => nobody(socket),
    };
    anyhow::Error::new(error).context(what)
}

async fn next(body: &mut Incoming) -> anyhow::Result<Option<Bytes>> {
    loop {
        match poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
            None => return Ok(None),
            Some(frame) => {
                if let Ok(data) = frame?.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

async fn document(mut body: Incoming) -> anyhow::Result<Value> {
    let mut text = Vec::new();
    while let Some(data) = next(&mut body).await? {
        text.extend_from_slice(&data);
        if text.len() > LONGEST {
            bail!("the answer is longer than any");
        }
    }
    Ok(serde_json::from_slice(&text)?)
}

/// A problem in one line.
fn words_of(problem: &Value) -> String {
    let text = |key: &str| problem[key].as_str().unwrap_or("no reason was given").to_owned();
    format!("{}: {}", text("detail"), text("remedy"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_ask_is_told_who_may() {
        let said = |kind: ErrorKind| format!("{:#}", unreached(Path::new("/run/api.sock"), kind.into()));
        let denied = said(ErrorKind::PermissionDenied);
        assert!(
            denied.starts_with("this user may not ask at /run/api.sock: ask as root, or"),
            "{denied}"
        );
        assert!(
            denied.contains("--api-group") && !denied.contains("no daemon"),
            "{denied}"
        );
        for kind in [ErrorKind::NotFound, ErrorKind::ConnectionRefused] {
            let absent = said(kind);
            assert!(
                absent.starts_with("no daemon answers at /run/api.sock: is it running"),
                "{absent}"
            );
        }
    }
}
