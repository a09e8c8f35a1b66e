//! Connections of lessees: who may connect, what is read and sent, and when it ends.

pub(super) mod admission;
pub(super) mod closing;
pub(super) mod connection;
pub mod limits;
pub(super) mod notify;
pub(super) mod ready;
