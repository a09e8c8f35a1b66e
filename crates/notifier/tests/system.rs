//! Tests of notifications, with eventfds and with KVM.
//!
//! One program, because linking one for each file takes most of the time of a build.

mod adversity;
mod descriptors;
mod kvm;
mod many;
mod notifiers;
mod support;
