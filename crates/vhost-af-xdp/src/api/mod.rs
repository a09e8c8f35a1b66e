//! What an operator can ask: `status`, `workers`, `queues`, the socket that answers, and the process that answers HTTP.

pub(crate) mod capture;
pub(crate) mod client;
pub(crate) mod control_socket;
mod http;
pub(crate) mod lane_status;
mod link;
pub(crate) mod network_status;
pub(crate) mod process;
pub(crate) mod queues;
pub(crate) mod rules_status;
pub(crate) mod service;
pub(crate) mod status;
pub(crate) mod status_view;
pub(crate) mod workers;
pub(crate) mod workers_view;
