//! The smallest VMM that embeds the virtio-net device, in process: KVM, one vCPU, guest memory in a memfd, virtio-mmio.
//!
//! It is there to be read by who writes a VMM, and to be measured. What belongs to embedding is in these files:
//!
//! | file | what it shows |
//! |---|---|
//! | [`net`] | crate `device`: features, rings, control queue, what follows from them |
//! | [`port`] | queue pairs: taking frames of the guest, giving it some, kicks on and off |
//! | [`board`] | crate `notifier`: which event comes before which step of the device, and where exits go |
//! | [`machine`] | all of it put together: start, stop, save, restore, threads |
//! | [`sink::xdp`] | crates `xsk` and `steer`: frames by an AF_XDP socket |
//!
//! The rest is a VMM's own: [`kvm`], [`vcpu`], [`memory`], [`mmio`], [`worker`]; a second device, [`entropy`]; and a
//! guest program (`guest/`), which works as its [`mailbox`] says. There is no kernel in the guest and no PCI.
//!
//! x86-64 alone, as the guest program is. For a trial: `cargo run --release -p tiny-vmm -- --help`.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use tiny_vmm::machine::{Machine, MachineConfig, Notify};
//! use tiny_vmm::mailbox::{Task, Work};
//! use tiny_vmm::sink::null::Null;
//!
//! # fn main() -> Result<(), tiny_vmm::machine::MachineError> {
//! let task = Task::new(Work::Send, 1_000);
//! let mut machine = Machine::new(MachineConfig::new(Notify::Eventfd), &task, Box::new(Null::new(0, 64)))?;
//! machine.run()?;
//! let answer = machine.await_answer(Duration::from_secs(10))?;
//! assert_eq!(answer.done, 1_000);
//! for queue in machine.status() {
//!     println!("{queue:?}");
//! }
//! machine.stop()?;
//! # Ok(())
//! # }
//! ```

#![cfg(target_arch = "x86_64")]

pub mod backend;
pub mod backend_slot;
pub mod board;
pub mod entropy;
pub mod interrupts;
pub mod kvm;
pub mod layout;
pub mod machine;
pub mod mailbox;
pub mod memory;
pub mod mmio;
pub mod net;
pub mod options;
pub mod page;
pub mod port;
pub mod report;
pub mod sink;
pub mod vcpu;
pub mod worker;
