//! Host notifiers (ioeventfd) of a virtio device, for VMMs that embed it.
//!
//! A driver notifies a queue by a write to an address of the device. As an exit that costs the vCPU its time: KVM
//! returns to the VMM, which looks at the queue while the guest stands. With an ioeventfd KVM signals an eventfd, the
//! vCPU continues, and another thread looks. This crate chooses between the two for each queue, and tracks which thread
//! looks at it:
//!
//! ```text
//! guest's write ──┬── no ioeventfd: exit ──▶ vCPU thread: Notifiers::exit ──▶ Serve::look      deassigned
//!                 │                                  │ an exit that was late
//!                 │                                  ▼
//!                 └── ioeventfd ─────────────────▶ eventfd ──┬──▶ thread "notify" ──▶ Serve::look   assigned
//!                                                            └──▶ backend (vhost, vhost-user)     off-limits
//! ```
//!
//! It knows only a device's queue addresses ([`address`]) and a [`Serve`](notifiers::Serve) for each, so it serves any
//! virtio device. The VMM reports events to [`Notifiers`](notifiers::Notifiers); [`state`] is the table of their
//! consequences; [`bus`] binds eventfds, KVM or a test; [`probe`] finds out how many a bus takes.
//!
//! # States
//!
//! A queue is *ready* if the driver has set `DRIVER_OK` and enabled it, the device may access memory (bus master, over
//! PCI) and vCPUs run. Those conditions are noted in each state. [`state::next`] is the whole table:
//!
//! | event                                  | deassigned           | assigned   | off-limits                     |
//! |----------------------------------------|----------------------|------------|--------------------------------|
//! | the guest's, the run state: ready then | assigned¹            | assigned   | off-limits²                    |
//! | the same: not ready then               | deassigned           | deassigned | off-limits, backend must stop² |
//! | `BackendStart` of a ready queue        | off-limits           | off-limits | refused                        |
//! | `BackendStart` of one that is not      | refused              | -          | refused                        |
//! | `BackendStop`                          | refused              | refused    | assigned¹ if ready, else deassigned |
//! | `Save`, `Restore` while vCPUs stand    | allowed              | -          | refused                        |
//! | `Save`, `Restore` while they run       | refused              | refused    | refused                        |
//!
//! ¹ Deassigned if the VMM chose exits ([`By::Exit`](notifiers::By)), or if no eventfd can be bound.
//!
//! ² Once a queue was not ready, its backend must stop, also if the queue is ready again: its rings may be others.
//!
//! # Nothing is lost
//!
//! The new owner of a queue looks at it once, without a notification, because an earlier notification went to the
//! earlier owner:
//!
//!  - To assigned and to off-limits: the ioeventfd is bound, then the eventfd is written once. An exit that was under
//!    way meanwhile is passed on by the eventfd.
//!  - To deassigned: the ioeventfd is unbound, which waits for vCPUs that signal it, the eventfd is emptied, and the
//!    thread that calls looks at the queue once; what that leaves is looked at by the thread "notify". It does not if
//!    the rings are closed: the queue or the device was reset, or the device may not access memory. Nor if the VM
//!    stands: the look at `VmRun` finds everything.
//!  - From off-limits the queue gets a new eventfd: the backend keeps a duplicate of the old one, and could read it, or
//!    make it blocking. The queue stays deassigned while there is none to be had.
//!  - A look may leave chains that were notified. It reports that, and the thread looks again after the other queues.
//!
//! # Threads and ownership
//!
//! A queue is looked at under its lock. A look that is under way ends before a transition, and who comes after it sees
//! the new state: the thread reads an eventfd only while the queue is assigned. So two owners never meet. A
//! backend is not under the lock. The VMM keeps the order: it stops the backend, then says `BackendStop`.
//!
//! Events of a device are handled one at a time. They may come from any thread, also from a vCPU's exit. Looks give way
//! to events that wait. A waiting thread sleeps. A transition lasts as long as the look before it and KVM's call:
//! microseconds, or milliseconds while many vCPUs run. The thread waits as long, and so may other queues of the device.
//!
//! # Without room
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
//! # When others err
//!
//! A look that panics has left its device in no known state. The panic is that of the thread that looked; the thread
//! "notify" goes on. The queue is [broken](notifiers::QueueStatus::broken), and not looked at any more, while its
//! transitions, the device's other queues and the end of the notifiers are as ever.
//!
//! A backend may do to its eventfd what it likes, but one thing: if it fills the count and makes the eventfd blocking,
//! an exit that is passed on waits for it, with the queue's lock. KVM's own signals never wait.
//!
//! Addresses do not change. For a guest that moves a BAR the VMM makes other notifiers, or prevents that.
//!
//! # Migration
//!
//! The VMM stops vCPUs, stops backends and says `BackendStop`, says `VmStop`, at which each queue is looked at once more,
//! and [saves](notifiers::Notifiers::save). A backend that is stopped only after `VmStop` leaves its last look to the
//! other side. There it restores, then says `VmRun`, and each ready queue is looked at once. So nothing that was
//! notified need be in the image. A saved state that does not fit is refused, whoever sent it.
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
//! use notifier::notifiers::{By, DeviceEvent, Left, Notifiers, QueueEvent, QueueSetup, Serve};
//! use notifier::probe::{Room, room};
//! use notifier::state::State;
//!
//! /// The device's side of the queue: here it only tells that it was called.
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
//! let by = if room(&vm, Bus::Mmio, 0xe000_0000)? == Room::Many { By::Eventfd } else { By::Exit };
//! let (told, looks) = channel();
//! let queue = QueueSetup { address: NotifyAddress::mmio(0xd000_0000, 0)?, by, serve: Box::new(Entropy(told)) };
//! let notifiers = Notifiers::new(Arc::clone(&vm), vec![queue], true)?;
//!
//! // The VMM starts its vCPUs. The guest's driver sets the queue up, then DRIVER_OK.
//! notifiers.event(DeviceEvent::VmRun)?;
//! notifiers.queue_event(0, QueueEvent::QueueEnable)?;
//! let report = notifiers.event(DeviceEvent::DriverOk)?;
//! assert!(report.stop_backends.is_empty());
//! assert_eq!(notifiers.state(0), Some(State::Assigned));
//! assert_eq!(looks.recv()?, "looked");
//!
//! // A vCPU exits with a write: it is asked first whether that is a notification.
//! assert_eq!(notifiers.exit(Bus::Mmio, 0xd000_0050, &0u32.to_le_bytes()), Some(0));
//! assert_eq!(looks.recv()?, "looked");
//! assert_eq!(notifiers.exit(Bus::Mmio, 0xd000_0070, &0u32.to_le_bytes()), None);
//!
//! // A vhost-user backend gets the eventfd as its kick descriptor, and gives the queue back when the guest resets.
//! let kick = notifiers.eventfd(0)?;
//! notifiers.queue_event(0, QueueEvent::BackendStart)?;
//! assert_eq!(kick.read()?, 1); // it looks once
//! assert_eq!(notifiers.event(DeviceEvent::Reset)?.stop_backends, [0]);
//! notifiers.queue_event(0, QueueEvent::BackendStop)?;
//! assert_eq!(notifiers.state(0), Some(State::Deassigned));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod address;
pub mod bus;
pub mod notifiers;
pub mod probe;
mod queue;
mod serve;
mod service;
mod slot;
pub mod state;
