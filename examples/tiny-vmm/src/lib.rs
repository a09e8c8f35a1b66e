//! A small VMM that embeds the virtio-net device in process: KVM, one vCPU, guest memory in a memfd, virtio-mmio.
//!
//! For authors of VMMs to read, and for measurements. These files show how to embed the device:
//!
//! | file | what it shows |
//! |---|---|
//! | [`net`] | crate `device`: features, rings, control queue |
//! | [`port`] | queue pairs: frames from the guest and to it, kicks on and off |
//! | [`mmio`] | registers, and crate `notifier`: which event comes before which step of the device |
//! | [`machine`] | all parts together: start, threads, stop |
//! | [`sink::xdp`] | crates `xsk` and `steer`: frames by an AF_XDP socket |
//!
//! The rest is what each VMM has: [`kvm`], [`vcpu`], [`memory`], [`worker`], on the crates of rust-vmm. `guest/` is the
//! guest, a program without a kernel, which works as its [`mailbox`] requests.
//!
//! For x86-64, as the guest is. To try it: `cargo run --release -p tiny-vmm -- --help`.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use tiny_vmm::machine::{Config, Machine, Notify};
//! use tiny_vmm::mailbox::{Work, task};
//! use tiny_vmm::sink::null::Null;
//!
//! # fn main() -> anyhow::Result<()> {
//! let config = Config { notify: Notify::Eventfd, vcpu_cpu: None, worker_cpu: None };
//! let mut machine = Machine::new(config, &task(Work::Send, 1_000), Box::new(Null))?;
//! machine.run()?;
//! let answer = machine.await_answer(Duration::from_secs(10))?;
//! assert_eq!(answer.done, 1_000);
//! for queue in machine.mmio.notifiers.status() {
//!     println!("{queue:?}");
//! }
//! machine.stop();
//! # Ok(())
//! # }
//! ```

#![cfg(target_arch = "x86_64")]

pub mod kvm;
pub mod layout;
pub mod machine;
pub mod mailbox;
pub mod memory;
pub mod mmio;
pub mod net;
pub mod port;
pub mod sink;
pub mod thread;
pub mod vcpu;
pub mod worker;
