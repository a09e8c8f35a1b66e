//! Queues of interfaces: where they come from, and how frames go through them.

pub(crate) mod afxdp_plugin;
pub(crate) mod binding;
pub(crate) mod demand;
pub(crate) mod endpoint;
pub(crate) mod error;
pub(crate) mod external;
pub(crate) mod interface;
pub(crate) mod interface_queue;
pub(crate) mod interfaces;
pub(crate) mod lent;
pub(crate) mod mode;
pub(crate) mod null;
pub(crate) mod queue;
mod queue_state;
pub(crate) mod steering;
pub(crate) mod xdp;
