//! The control socket: how clients ask a daemon and change it, by the protocol of [`model::control`].
//!
//! The socket is for its owner and root. [`directories`]: where these sockets are, and whose. [`server`] and
//! [`connections`]: the daemon's side. [`client`]: the side of commands.

mod client;
mod connections;
mod directories;
mod server;
mod writing;

pub(crate) use client::{Error, ask, ask_all, begin_capture, change, events, no_answer, rules};
pub(crate) use connections::Connections;
pub(crate) use directories::{default_path, find_all, is_own, listen};
pub(crate) use server::{Access, Server};
pub(crate) use writing::answer;
