//! vhost-user: accepts connections of VMMs, and handles their messages and the descriptors in them.

pub(crate) mod accept;
pub(crate) mod connection;
pub(crate) mod eventfd;
pub(crate) mod files;
pub(crate) mod handler;
pub(crate) mod message;
