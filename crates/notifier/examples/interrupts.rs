//! What an interrupt of a guest costs: by an eventfd that KVM has (irqfd), and by calls (KVM_IRQ_LINE, KVM_SIGNAL_MSI); of
//! a line of a PC's first interrupt controllers, and as a message, which PCI devices send.
//!
//!     cargo run --release -p notifier --example interrupts -- 10000
//!
//! It prints JSON. An irqfd delivers a message where the eventfd is written. A line takes a kernel thread, because the
//! lock of its controllers cannot be taken there (`irqfd_wakeup`, virt/kvm/eventfd.c). The guest sleeps in real mode,
//! and its handlers count; each interrupt is made when the guest has seen the one before. Real VMMs bind the eventfd of
//! `NetDevice::set_call` in the same way (docs/embedding.md, Interrupts).
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod guest {
    use std::arch::global_asm;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use kvm_bindings::{
        KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_PIC_MASTER, KVM_MAX_CPUID_ENTRIES,
        KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip,
        kvm_irq_routing_msi, kvm_msi, kvm_userspace_memory_region,
    };
    use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
    use virtqueue::GuestAddr;
    use virtqueue::driver::GuestRam;
    use vmm_sys_util::eventfd::EventFd;

    type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

    const RAM_BYTES: u64 = 0x1_0000;
    const CODE: u64 = 0x1000;
    /// The line, the number of the message, and its vector; the program has them, too.
    const LINE: u32 = 5;
    const MESSAGE: u32 = 24;
    const VECTOR: u32 = 0x26;
    /// The interrupt controller of the vCPU.
    const MESSAGE_ADDRESS: u32 = 0xfee0_0000;
    /// Words: interrupts that the guest has seen, 1 when it is ready, 1 to end it with the next interrupt.
    const SEEN: u64 = 0x500;
    const READY: u64 = 0x504;
    const STOP: u64 = 0x508;
    /// Only ends what hangs.
    const LIMIT: Duration = Duration::from_secs(60);

    // Line 5 is vector 0x25, the message vector 0x26. The first controller is set up (vectors from 0x20 on, a second one on
    // line 2, 8086 mode, line 5 alone), and the vCPU's own is switched on in x2APIC mode, whose registers are MSRs.
    global_asm!(
        ".pushsection .rodata",
        ".code16",
        "interrupts_start:",
        "xorw %ax, %ax; movw %ax, %ds; movw %ax, %ss; movw $0x4000, %sp",
        "movw $(3f - interrupts_start + 0x1000), 0x94; movw %ax, 0x96",
        "movw $(4f - interrupts_start + 0x1000), 0x98; movw %ax, 0x9a",
        "movb $0x11, %al; outb %al, $0x20",
        "movb $0x20, %al; outb %al, $0x21",
        "movb $0x04, %al; outb %al, $0x21",
        "movb $0x01, %al; outb %al, $0x21",
        "movb $0xdf, %al; outb %al, $0x21",
        "movl $0x1b, %ecx; rdmsr; orl $0xc00, %eax; wrmsr",
        "movl $0x80f, %ecx; movl $0x1ff, %eax; xorl %edx, %edx; wrmsr",
        "movl $1, 0x504",
        "2: sti; hlt; cli; cmpl $0, 0x508; je 2b",
        "outb %al, $0xf4",
        // A line: end of interrupt to the first controller.
        "3: pushw %ax; incl 0x500; movb $0x20, %al; outb %al, $0x20; popw %ax; iretw",
        // A message: to the vCPU's own.
        "4: pushl %eax; pushl %ecx; pushl %edx; incl 0x500",
        "movl $0x80b, %ecx; xorl %eax, %eax; xorl %edx, %edx; wrmsr",
        "popl %edx; popl %ecx; popl %eax; iretw",
        "interrupts_end:",
        ".code64",
        ".popsection",
        options(att_syntax)
    );

    unsafe extern "C" {
        static interrupts_start: u8;
        static interrupts_end: u8;
    }

    fn program() -> &'static [u8] {
        let (start, end) = (&raw const interrupts_start, &raw const interrupts_end);
        // SAFETY: both are labels of the code above, in this order and in one section, which nothing writes.
        unsafe { std::slice::from_raw_parts(start, end.offset_from_unsigned(start)) }
    }

    struct Guest {
        vm: VmFd,
        ram: Arc<GuestRam>,
        line: EventFd,
        message: EventFd,
    }

    /// Makes `count` interrupts in each way; the JSON of what they cost.
    pub(crate) fn measure(count: u32) -> Result<String> {
        let (kvm, ram) = (
            Kvm::new()?,
            Arc::new(GuestRam::new(&[(GuestAddr(0), RAM_BYTES)])?),
        );
        ram.write(GuestAddr(CODE), program());
        let vm = kvm.create_vm()?;
        vm.create_irq_chip()?;
        let region = kvm_userspace_memory_region {
            memory_size: RAM_BYTES,
            userspace_addr: ram.user_addr(GuestAddr(0)),
            ..kvm_userspace_memory_region::default()
        };
        // SAFETY: the region is one mapping of `RAM_BYTES`, which the vCPU's thread keeps as long as the guest runs.
        unsafe { vm.set_user_memory_region(region)? };
        let guest = Guest {
            line: EventFd::new(0)?,
            message: EventFd::new(0)?,
            vm,
            ram,
        };
        guest.route()?;
        let vcpu = guest.vcpu(&kvm)?;
        let kept = Arc::clone(&guest.ram);
        let thread = std::thread::spawn(move || {
            run(vcpu);
            drop(kept);
        });
        guest.await_word(READY, 1);
        let ways = ["line-irqfd", "line-call", "message-irqfd", "message-call"];
        let costs: Vec<_> = ways
            .iter()
            .map(|way| guest.cost(way, count))
            .collect::<Result<_>>()?;
        guest.word(STOP).store(1, Ordering::SeqCst);
        guest.make("line-irqfd")?;
        thread.join().map_err(|_| "the vCPU's thread panicked")?;
        Ok(format!("{{\"interrupts\":[{}]}}", costs.join(",")))
    }

    fn run(mut vcpu: VcpuFd) {
        loop {
            match vcpu.run() {
                Ok(VcpuExit::IoOut(0xf4, _)) => return,
                Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => (),
                other => panic!("the guest caused another exit: {other:?}"),
            }
        }
    }

    impl Guest {
        /// Makes one interrupt number a message, keeps the line, and binds the eventfds.
        fn route(&self) -> Result<()> {
            let message = kvm_irq_routing_msi {
                address_lo: MESSAGE_ADDRESS,
                data: VECTOR,
                ..kvm_irq_routing_msi::default()
            };
            let line = kvm_irq_routing_irqchip {
                irqchip: KVM_IRQCHIP_PIC_MASTER,
                pin: LINE,
            };
            let entry = |gsi, type_, u| kvm_irq_routing_entry {
                gsi,
                type_,
                u,
                ..Default::default()
            };
            let entries = [
                entry(
                    MESSAGE,
                    KVM_IRQ_ROUTING_MSI,
                    kvm_irq_routing_entry__bindgen_ty_1 { msi: message },
                ),
                entry(
                    LINE,
                    KVM_IRQ_ROUTING_IRQCHIP,
                    kvm_irq_routing_entry__bindgen_ty_1 { irqchip: line },
                ),
            ];
            self.vm.set_gsi_routing(&KvmIrqRouting::from_entries(&entries)?)?;
            self.vm.register_irqfd(&self.line, LINE)?;
            Ok(self.vm.register_irqfd(&self.message, MESSAGE)?)
        }

        /// A vCPU at the program's first instruction.
        fn vcpu(&self, kvm: &Kvm) -> Result<VcpuFd> {
            let vcpu = self.vm.create_vcpu(0)?;
            vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
            let mut special = vcpu.get_sregs()?;
            (special.cs.base, special.cs.selector) = (0, 0);
            vcpu.set_sregs(&special)?;
            let mut registers = vcpu.get_regs()?;
            (registers.rip, registers.rflags) = (CODE, 2);
            vcpu.set_regs(&registers)?;
            Ok(vcpu)
        }

        fn word(&self, at: u64) -> &AtomicU32 {
            let pointer = self.ram.user_addr(GuestAddr(at)) as *mut u32;
            // SAFETY: an aligned word of the mapping, which lives as long as `self`; it is accessed as a word only.
            unsafe { AtomicU32::from_ptr(pointer) }
        }

        /// Polls: to sleep would take longer than what is measured.
        fn await_word(&self, at: u64, wanted: u32) {
            let start = Instant::now();
            while self.word(at).load(Ordering::SeqCst) != wanted {
                assert!(
                    start.elapsed() < LIMIT,
                    "the guest saw no interrupt within {LIMIT:?}"
                );
                // There may be one CPU for both.
                std::thread::yield_now();
            }
        }

        fn make(&self, way: &str) -> Result<()> {
            match way {
                "line-irqfd" => self.line.write(1)?,
                "message-irqfd" => self.message.write(1)?,
                "line-call" => {
                    self.vm.set_irq_line(LINE, true)?;
                    self.vm.set_irq_line(LINE, false)?;
                }
                _ => {
                    let message = kvm_msi {
                        address_lo: MESSAGE_ADDRESS,
                        data: VECTOR,
                        ..kvm_msi::default()
                    };
                    self.vm.signal_msi(message)?;
                }
            }
            Ok(())
        }

        /// `make_ns`: time that making one takes, mean. `seen_after_ns`: time from there until the guest has counted
        /// it, median.
        fn cost(&self, way: &str, count: u32) -> Result<String> {
            let before = self.word(SEEN).load(Ordering::SeqCst);
            let (mut making, mut seen_after) = (Duration::ZERO, Vec::new());
            for number in 1..=count {
                let start = Instant::now();
                self.make(way)?;
                making += start.elapsed();
                self.await_word(SEEN, before.wrapping_add(number));
                seen_after.push(start.elapsed());
            }
            seen_after.sort_unstable();
            let median = seen_after.get(seen_after.len() / 2).copied().unwrap_or_default();
            let (make_ns, seen_after_ns) = ((making / count.max(1)).as_nanos(), median.as_nanos());
            Ok(format!(
                "{{\"by\":\"{way}\",\"make_ns\":{make_ns},\"seen_after_ns\":{seen_after_ns}}}"
            ))
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count = std::env::args().nth(1).map_or(Ok(1_000), |count| count.parse())?;
    println!("{}", guest::measure(count)?);
    Ok(())
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    panic!("the guest of this example is for x86-64");
}
