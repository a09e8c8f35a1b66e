//! Standard output of commands.

use std::io::{ErrorKind, Write as _};

use serde::Serialize;

/// Writes to stdout; `false`: the reader has closed the pipe.
pub(crate) fn print(text: &str) -> anyhow::Result<bool> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        written => Ok(written.is_ok()),
    }
}

/// Writes a document as JSON.
pub(crate) fn print_json(document: &impl Serialize) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(document)? + "\n")).map(drop)
}
