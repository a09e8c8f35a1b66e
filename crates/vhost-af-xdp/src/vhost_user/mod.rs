//! vhost-user: one front of the device. Connections of VMMs, their messages, and what comes with these.

pub(crate) mod accept;
pub(crate) mod connection;
mod error;
pub(crate) mod eventfd;
pub(crate) mod files;
pub(crate) mod handler;
pub(crate) mod message;
