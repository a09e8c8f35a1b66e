//! What a command that goes on until it is enough is told by signals.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};

/// Raised when a signal says that it is enough.
pub(crate) fn to_end() -> anyhow::Result<Arc<AtomicBool>> {
    let signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The second one ends it at once.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&signalled))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&signalled)))
            .context("cannot handle signals")?;
    }
    Ok(signalled)
}
