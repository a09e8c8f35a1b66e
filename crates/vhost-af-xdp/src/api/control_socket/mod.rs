//! Where `vhost-af-xdp status` finds a running daemon.
//!
//! A connection gets one JSON document, the [`Status`](super::status::Status), and is closed; with the request `reload`
//! before, the document says what came of that ([`Outcome`](crate::reload::Outcome)); so it does with `reset`, after
//! which statistics of workers are reset. With `capture` it stays, and frames of a port are shown
//! ([`Captures`](super::capture::Captures)). Who connects and says nothing is given the status after a moment. The
//! socket is for its owner only (and root).
//!
//! [`directories`]: where these sockets are, and whose they are. [`answering`]: the daemon's side. [`asking`]: the
//! other one.

mod answering;
mod asking;
mod directories;
mod requests;

pub(crate) use answering::serve;
pub(crate) use asking::{
    ask, ask_all, begin_capture, no_answer, reload, reset_workers, without_control_characters,
};
pub(crate) use directories::{default_path, find_all, is_own, listen};
