//! The thread that runs the vCPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use anyhow::{Context as _, Result, bail};
use kvm_ioctls::VcpuExit;
use rustix::io::Errno;
use vm_device::bus::MmioAddress;
use vm_device::device_manager::{IoManager, MmioManager as _};

use crate::kvm::Vcpu;
use crate::layout::END_PORT;
use crate::thread::Thread;

/// Runs the guest. `io` handles its accesses to registers, `end` receives how it ended. The thread returns the number
/// of exits.
///
/// # Errors
/// There is no such CPU, or no thread is left.
pub fn start(vcpu: Vcpu, io: IoManager, cpu: Option<usize>, end: Sender<Result<()>>) -> Result<Thread<u64>> {
    Thread::start("vcpu", cpu, move |stop| {
        let mut exits = 0;
        // The receiver may be gone, at the end of the machine.
        let _ = end.send(run(vcpu, &io, stop, &mut exits));
        // The thread stays until it is stopped, so that its CPU time can be read.
        while !stop.load(Ordering::Relaxed) {
            rustix::event::pause();
        }
        exits
    })
}

fn run(mut vcpu: Vcpu, io: &IoManager, stop: &AtomicBool, exits: &mut u64) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        match vcpu.fd.run() {
            // A write to an address without a device has no effect.
            Ok(VcpuExit::MmioWrite(address, data)) => _ = io.mmio_write(MmioAddress(address), data),
            Ok(VcpuExit::MmioRead(address, data)) => {
                if io.mmio_read(MmioAddress(address), data).is_err() {
                    data.fill(0xff);
                }
            }
            Ok(VcpuExit::IoOut(port, _)) if u64::from(port) == END_PORT => return Ok(()),
            Ok(other) => bail!("the guest caused an exit that this VMM does not handle: {other:?}"),
            Err(error) if Errno::from_raw_os_error(error.errno()) == Errno::INTR => (),
            Err(error) => return Err(error).context("KVM_RUN"),
        }
        *exits += 1;
    }
    Ok(())
}
