//! What an operator can ask: `status`, `queues`, and the socket that answers.

pub(crate) mod control_socket;
pub(crate) mod queues;
pub(crate) mod status;
pub(crate) mod status_view;
