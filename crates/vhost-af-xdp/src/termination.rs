//! SIGINT and SIGTERM for commands that run until they are interrupted.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};

/// A flag that SIGINT or SIGTERM sets; a second signal ends the process.
pub(crate) fn flag() -> anyhow::Result<Arc<AtomicBool>> {
    let signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&signalled))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&signalled)))
            .context("cannot handle signals")?;
    }
    Ok(signalled)
}
