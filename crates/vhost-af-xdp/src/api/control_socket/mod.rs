//! The control socket: clients read and change a daemon's state by the protocol of [`model::control`].
//!
//! The socket is for its owner and root. [`directories`]: where these sockets are, and whose. [`server`] and
//! [`connections`]: the daemon's side; the crate `client` is the side of the commands.

mod connections;
mod directories;
mod server;
mod writing;

pub(crate) use connections::Connections;
pub(crate) use directories::{default_path, is_own, listen};
pub(crate) use server::{Access, Server};
pub(crate) use writing::answer;
