//! What clients can read and change: `status`, `workers`, `queues`, the control socket, and the gateway for HTTP.

pub(crate) mod capture;
pub(crate) mod control_socket;
pub(crate) mod gateway;
mod lane_status;
pub(crate) mod network_status;
pub(crate) mod queues;
pub(crate) mod rules_status;
pub(crate) mod status;
