//! Tests of the VMM: its guest, its device, hostile drivers.
//!
//! One program, because linking one for each file takes most of the time of a build.
#![cfg(target_arch = "x86_64")]

mod common;
mod failures;
mod frames;
mod network;
mod registers;
