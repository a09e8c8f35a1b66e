//! Host notifiers (ioeventfd) of a virtio device, for VMMs that embed it.
//!
//! A driver notifies a queue by a write to an address of the device. If the write causes an exit, that costs time of
//! the vCPU: KVM returns to the VMM, which looks at the queue while the vCPU waits. With an ioeventfd KVM signals an
//! eventfd, the vCPU continues, and another thread looks. This crate chooses between the two for each queue, and tracks
//! which thread looks at it:
//!
//! ```text
//! guest's write ──┬── no ioeventfd: exit ──▶ vCPU thread: Notifiers::exit ──▶ Serve::look      deassigned
//!                 │                                  │ late exit
//!                 │                                  ▼
//!                 └── ioeventfd ─────────────────▶ eventfd ──┬──▶ thread "notify" ──▶ Serve::look   assigned
//!                                                            └──▶ backend (vhost, vhost-user)     off-limits
//! ```
//!
//! It knows only a device's queue addresses ([`address`]) and a [`Serve`](notifiers::Serve) for each, so it serves any
//! virtio device. The VMM reports events to [`Notifiers`](notifiers::Notifiers); [`state`] is the table of their
//! consequences; [`bus`] binds eventfds, in KVM or in a test.
//!
//! # States
//!
//! A queue is *ready* if the driver has set `DRIVER_OK` and enabled it, the device may access memory (bus master, over
//! PCI) and vCPUs run. Those conditions are noted in each state. [`state::next`] is the whole table:
//!
//! | event                                  | deassigned           | assigned   | off-limits                     |
//! |----------------------------------------|----------------------|------------|--------------------------------|
//! | guest or run state: ready afterwards   | assigned¹            | assigned   | off-limits²                    |
//! | the same: not ready afterwards         | deassigned           | deassigned | off-limits, backend must stop² |
//! | `BackendStart` of a ready queue        | off-limits           | off-limits | refused                        |
//! | `BackendStart` of another queue        | refused              | -          | refused                        |
//! | `BackendStop`                          | refused              | refused    | assigned¹ if ready, else deassigned |
//! | `Save`, `Restore`: vCPUs stopped       | allowed              | -          | refused                        |
//! | `Save`, `Restore`: vCPUs running       | refused              | refused    | refused                        |
//!
//! ¹ Deassigned if the VMM chose exits ([`By::Exit`](notifiers::By)), or if no eventfd can be bound.
//!
//! ² Once a queue was not ready, its backend must stop, even if the queue is ready again: its rings may be elsewhere.
//!
//! # Nothing is lost
//!
//! The new owner of a queue looks at it once, without a notification, because an earlier notification went to the
//! earlier owner:
//!
//!  - To assigned and to off-limits: the ioeventfd is bound, then the eventfd is written once. An exit that was under
//!    way meanwhile is passed on by the eventfd.
//!  - To deassigned: the ioeventfd is unbound, which waits for vCPUs that signal it, the eventfd is emptied, and the
//!    calling thread looks at the queue once; the thread "notify" looks at what that leaves. The calling thread does
//!    not look if the rings are closed: the queue or the device was reset, or the device may not access memory. Nor if
//!    the VM was stopped before: the look at `VmRun` finds everything.
//!  - From off-limits the queue gets a new eventfd: the backend keeps a duplicate of the old one, and could read it, or
//!    make it blocking. The queue stays deassigned while no new one can be created.
//!  - A look may leave chains that were notified. It reports that, and the thread looks again after the other queues.
//!
//! # Threads and ownership
//!
//! A queue is looked at under its lock. A transition waits for a look that is under way, and later looks see the new
//! state: the thread reads an eventfd only while the queue is assigned. So a queue never has two owners at once. The
//! lock does not cover a backend: the VMM must first stop the backend, then report `BackendStop`.
//!
//! Events of a device are handled one at a time. Any thread may report them, also a vCPU's thread during an exit.
//! Waiting events go before waiting looks. A waiting thread sleeps. A transition takes as long as the look before it
//! and KVM's call: microseconds, or milliseconds while many vCPUs run. The thread that reports the event waits as long,
//! and so may other queues of the device.
//!
//! # No eventfd for a queue
//!
//! A queue to which no eventfd can be bound (`ENOSPC` of a full bus, or any other error of the host) stays deassigned,
//! and is notified by exits. The [`Report`](notifiers::Report) names it once, the
//! [status](notifiers::Notifiers::status) always, and each event of the queue tries again. Its backend is notified by
//! the exits that [`Notifiers::exit`](notifiers::Notifiers::exit) passes on.
//!
//! # A hostile guest
//!
//! It may notify without pause, also queues that it never set up: an eventfd counts, so that many notifications are one
//! look; the thread serves each queue once a round. It may write any data of any length: anything but an exact
//! notification is ignored. It may reset at any time, and set bits of the status over and over: each costs its own vCPU
//! the transition. None of it is rejected, fails or panics. Looks belong to the device, which bounds the work of one
//! look, and reports the rest: a queue that the guest never leaves empty is the thread's work, once a round.
//!
//! # Faults of devices and backends
//!
//! A look that panics leaves its device in an unknown state. The panic continues in the thread that looked, except in
//! the thread "notify", which goes on. The queue is [broken](notifiers::QueueStatus::broken), and not looked at any
//! more, while its transitions, the device's other queues and the end of the notifiers work as before.
//!
//! A backend may do anything to its eventfd, with one exception: if it fills the count and makes the eventfd blocking,
//! an exit that is passed on waits for it, and holds the queue's lock. KVM's own signals never wait.
//!
//! Addresses do not change. If a guest moves a BAR, the VMM must make new notifiers, or prevent the move.
//!
//! # Migration
//!
//! The VMM stops vCPUs, stops backends and reports `BackendStop`, reports `VmStop`, at which each queue is looked at
//! once more, and [saves](notifiers::Notifiers::save). If a backend is stopped only after `VmStop`, the last look at
//! its queues happens on the destination. There the VMM restores the state, then reports `VmRun`, and each ready queue
//! is looked at once. So notifications need not be in the image. A saved state that does not match the device is
//! refused, whoever sent it.
//!
//! # Example
//!
//! A device with one queue by virtio-mmio, on KVM if this machine has it:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::mpsc::{Sender, channel};
//!
//! use kvm_ioctls::Kvm;
//! use notifier::address::{Bus, NotifyAddress};
//! use notifier::notifiers::{By, Left, Notifiers, QueueSetup, Serve};
//! use notifier::state::{Event, State};
//!
//! /// The device's side of the queue: here it only reports that it was called.
//! struct Entropy(Sender<&'static str>);
//!
//! impl Serve for Entropy {
//!     fn look(&mut self) -> Left {
//!         let _ = self.0.send("looked");
//!         Left::Nothing
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
//! #     println!("SKIPPED: there is no /dev/kvm");
//! #     return Ok(());
//! # }
//! let vm = Arc::new(Kvm::new()?.create_vm()?);
//! let (told, looks) = channel();
//! let address = NotifyAddress::mmio(0xd000_0000, 0)?;
//! let queue = QueueSetup { address, by: By::Eventfd, serve: Box::new(Entropy(told)) };
//! let notifiers = Notifiers::new(Arc::clone(&vm), vec![queue], true)?;
//!
//! // The VMM starts its vCPUs. The guest's driver sets the queue up, then DRIVER_OK.
//! notifiers.event(Event::VmRun)?;
//! notifiers.queue_event(0, Event::QueueEnable)?;
//! let report = notifiers.event(Event::DriverOk)?;
//! assert!(report.stop_backends.is_empty());
//! assert_eq!(notifiers.state(0), Some(State::Assigned));
//! assert_eq!(looks.recv()?, "looked");
//!
//! // A vCPU exits with a write: the VMM first lets the notifiers check whether that is a notification.
//! assert_eq!(notifiers.exit(Bus::Mmio, 0xd000_0050, &0u32.to_le_bytes()), Some(0));
//! assert_eq!(looks.recv()?, "looked");
//! assert_eq!(notifiers.exit(Bus::Mmio, 0xd000_0070, &0u32.to_le_bytes()), None);
//!
//! // A vhost-user backend gets the eventfd as its kick descriptor, and gives the queue back when the guest resets.
//! let kick = notifiers.eventfd(0)?;
//! notifiers.queue_event(0, Event::BackendStart)?;
//! assert_eq!(kick.read()?, 1); // it looks once
//! assert_eq!(notifiers.event(Event::Reset)?.stop_backends, [0]);
//! notifiers.queue_event(0, Event::BackendStop)?;
//! assert_eq!(notifiers.state(0), Some(State::Deassigned));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod address;
pub mod bus;
pub mod notifiers;
mod queue;
mod serve;
mod service;
mod slot;
pub mod state;
