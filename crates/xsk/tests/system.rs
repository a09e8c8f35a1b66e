//! Tests of AF_XDP sockets, on the kernel of this machine.
//!
//! One program, because linking one for each file takes most of the time of a build.

mod frames;
mod open;
mod shared;
mod support;
