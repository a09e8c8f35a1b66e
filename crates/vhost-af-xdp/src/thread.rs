//! Threads with names.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread of that name, of which the kernel keeps 15 bytes.
pub(crate) fn start<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.to_owned()).spawn(body)
}
