//! A connection to the daemon, for the control protocol.

use std::io;

use model::control::{Answer, Refused, Request, line};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// See the module's head.
pub(crate) struct Link(BufReader<UnixStream>);

impl Link {
    pub(crate) fn new(stream: std::os::unix::net::UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self(BufReader::new(UnixStream::from_std(stream)?)))
    }

    pub(crate) async fn send(&mut self, request: &Request) -> io::Result<()> {
        self.0.get_mut().write_all(&line(request)?).await
    }

    /// The next answer.
    /// Errors: the daemon has ended, or sends an invalid answer.
    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Result<T, Refused>> {
        let mut text = Vec::new();
        if self.0.read_until(b'\n', &mut text).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice::<Answer<T>>(&text)?.into_result())
    }

    pub(crate) async fn ask<T: DeserializeOwned>(
        &mut self,
        request: &Request,
    ) -> io::Result<Result<T, Refused>> {
        self.send(request).await?;
        self.receive().await
    }

    /// Returns when the daemon ends: it sends nothing without a request.
    pub(crate) async fn ended(&mut self) {
        let _ = self.0.fill_buf().await;
    }
}
