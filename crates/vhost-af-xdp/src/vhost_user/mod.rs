//! vhost-user: one front of the device. Connections of VMMs, their messages, and what comes with these.

pub(crate) mod alarm;
pub(crate) mod announce;
pub(crate) mod attend;
pub(crate) mod connection;
pub(crate) mod eventfd;
pub(crate) mod features;
pub(crate) mod files;
pub(crate) mod front;
pub(crate) mod handler;
pub(crate) mod listener;
pub(crate) mod memory;
pub(crate) mod peer;
