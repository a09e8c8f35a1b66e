//! Tests of the VMM: its guest, its devices, hostile drivers.
//!
//! One program, because linking one for each file takes most of the time of a build.

mod common;
mod descriptors;
mod devices;
mod failures;
mod frames;
mod network;
mod owners;
mod registers;
