//! The driver between a real API server, a real daemon and a kubelet that is played.

mod claims;
mod faults;
mod many;
mod support;
