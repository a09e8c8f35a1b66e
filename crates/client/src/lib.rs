//! The client side of a daemon's control socket, for commands: [`directories`] finds the sockets, [`connection`] asks
//! and changes, and [`text`] shows the state for people to read.

pub mod connection;
pub mod directories;
pub mod text;
pub mod top;
