//! What an operator writes and reads, each thing described by one type.
//!
//! [`config`] has ports, networks and the daemon's own options. Each is a serde type that is the table of a
//! configuration file, the body of an API request, the options of a command line ([`clap::Args`]) and a JSON Schema at
//! once. An option is added by adding its field: its documentation comment is its help, and its attributes say whether
//! it can change at run time.
//!
//! [`policy`] is the file of the steward. [`state`] is what a daemon shows of itself, [`events`] what happens in it, [`control`] how a client of its control
//! socket asks for both and changes something. [`rates`] are limits of ports. Nothing here does I/O.

#[cfg(feature = "config")]
pub mod config;
#[cfg(feature = "config")]
pub mod control;
#[cfg(feature = "config")]
pub mod events;
#[cfg(feature = "config")]
pub mod mistakes;
#[cfg(feature = "config")]
pub mod policy;
#[cfg(feature = "config")]
pub mod rates;
#[cfg(feature = "config")]
pub mod state;
pub mod text;
