//! Types for everything that an operator writes and reads: each fact is described once.
//!
//! [`config`] has ports, networks and the daemon's own options. Each is a serde type that is the table of a
//! configuration file, the body of an API request, the options of a command line ([`clap::Args`]) and a JSON Schema at
//! once. An option is added by adding its field: its documentation comment is its help, and its attributes say whether
//! it can change at run time.
//!
//! [`policy`] is the steward's policy file. [`state`] is the state that a daemon reports, [`events`] its events,
//! [`control`] the protocol of its control socket, [`gateway`] the gateway's options, [`rates`] the limits of ports.
//! Nothing here does I/O.

#[cfg(feature = "config")]
pub mod config;
#[cfg(feature = "config")]
pub mod control;
#[cfg(feature = "config")]
pub mod events;
#[cfg(feature = "config")]
pub mod gateway;
#[cfg(feature = "config")]
pub mod mistakes;
#[cfg(feature = "config")]
pub mod policy;
#[cfg(feature = "config")]
pub mod rates;
#[cfg(feature = "config")]
pub mod state;
pub mod text;
