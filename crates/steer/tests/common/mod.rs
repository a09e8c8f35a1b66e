//! Support for the tests of this crate: two network namespaces connected by a veth pair, packet sockets, and queries to
//! the interface that do not use the crate under test.
//!
//! The near end is where the program goes; the calling thread is moved into its namespace. The far end sends.
#![allow(unsafe_code, dead_code)]

pub(crate) mod hinted;
pub(crate) mod receiver;
pub(crate) mod tap;

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::time::Duration;

use libbpf_rs::libbpf_sys;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use steer::{Program, TapDevice};
use testkit::privilege::{Need, have};
use testkit::{NetNs, PacketPort, VethPair, foreign, frame, wait};

/// Two namespaces joined by a veth pair; this thread is in the near one.
pub(crate) struct Pair {
    pub(crate) near_socket: PacketPort,
    pub(crate) far_socket: PacketPort,
    pub(crate) veth: VethPair,
}

impl Pair {
    /// `None`, after `SKIPPED` was printed, if namespaces cannot be created.
    pub(crate) fn new(mtu: u32) -> Option<Self> {
        if !have(&[Need::Root]) {
            return None;
        }
        let veth = VethPair::with(1, mtu);
        veth.near.move_here();
        Some(Self {
            near_socket: PacketPort::open(&veth.near, VethPair::NIC),
            far_socket: PacketPort::open(&veth.far, VethPair::WIRE),
            veth,
        })
    }

    pub(crate) fn ifindex(&self) -> u32 {
        self.veth.near.index_of(VethPair::NIC)
    }

    /// The loopback interface of the near namespace, whose driver has no XDP.
    pub(crate) fn loopback(&self) -> u32 {
        self.veth.near.index_of("lo")
    }

    /// An AF_XDP socket that is bound to nothing, with an RX ring: good enough for a slot of the map.
    pub(crate) fn unbound_xsk(&self) -> OwnedFd {
        foreign::socket(&self.veth.near)
    }

    /// Waits until the kernel has closed the sockets of queue 0, which were closed here: while another test of this process
    /// starts a program, that has copies of all descriptors for a moment.
    pub(crate) fn await_closed(&self, program: &Program) {
        let other = self.unbound_xsk();
        let has_socket = || program.has_socket(0, other.as_fd()).expect("in range");
        assert!(
            wait::until(wait::SOON, || !has_socket()),
            "a socket is still open"
        );
    }
}

/// A device by its name.
pub(crate) fn device(netns: &NetNs, name: &str) -> TapDevice {
    let shown = netns.output_of("ip", &["-o", "link", "show", "dev", name]);
    let (_, mac) = shown.split_once("link/ether ").expect("an Ethernet interface");
    let bytes = mac[..17].split(':').map(|byte| u8::from_str_radix(byte, 16));
    let bytes: Vec<u8> = bytes.collect::<Result<_, _>>().expect("six bytes");
    TapDevice {
        index: netns.index_of(name),
        mac: bytes.try_into().expect("six bytes"),
    }
}

/// A frame of `len` bytes.
pub(crate) fn frame(len: usize) -> Vec<u8> {
    frame::plain(len, 1)
}

/// A frame to an address, with tags: type and number of each.
pub(crate) fn frame_to(to: [u8; 6], tags: &[(u16, u16)]) -> Vec<u8> {
    let mut bytes = to.to_vec();
    bytes.extend([2, 0, 0, 0, 0, 1]);
    for (kind, tci) in tags {
        bytes.extend(kind.to_be_bytes());
        bytes.extend(tci.to_be_bytes());
    }
    bytes.extend([0x88, 0xb5]);
    bytes.resize(80, 7);
    bytes
}

/// Id of the XDP program of an interface in this namespace, asked of the kernel directly.
pub(crate) fn program_on(ifindex: u32) -> Option<u32> {
    let mut id = 0;
    // SAFETY: id is valid for the call.
    let result = unsafe { libbpf_sys::bpf_xdp_query_id(ifindex as i32, 0, &raw mut id) };
    assert_eq!(result, 0, "bpf_xdp_query_id");
    (id != 0).then_some(id)
}

/// Waits until the interface has no program.
pub(crate) fn gone_within(ifindex: u32, timeout: Duration) -> bool {
    wait::until(timeout, || program_on(ifindex).is_none())
}

/// A program that passes everything, attached by netlink instead of a link: it stays until it is removed.
pub(crate) struct ForeignProgram {
    fd: OwnedFd,
    ifindex: u32,
    flags: u32,
    pub(crate) id: u32,
}

impl ForeignProgram {
    pub(crate) const NAME: &CStr = c"not_ours";

    pub(crate) fn attach(ifindex: u32, native: bool) -> Self {
        // r0 = XDP_PASS; exit
        let instructions: [u64; 2] = [0x0000_0002_0000_00b7, 0x0000_0000_0000_0095];
        // SAFETY: two instructions of eight bytes, a C string each for name and licence; null options are allowed.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_XDP,
                Self::NAME.as_ptr(),
                c"GPL".as_ptr(),
                instructions.as_ptr().cast(),
                2,
                ptr::null_mut(),
            )
        };
        assert!(fd >= 0, "bpf_prog_load: {fd}");
        // SAFETY: the call just returned this descriptor, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let flags = if native {
            libbpf_sys::XDP_FLAGS_DRV_MODE
        } else {
            libbpf_sys::XDP_FLAGS_SKB_MODE
        };
        // SAFETY: null options are allowed.
        let result =
            unsafe { libbpf_sys::bpf_xdp_attach(ifindex as i32, fd.as_raw_fd(), flags, ptr::null()) };
        assert_eq!(result, 0, "bpf_xdp_attach");
        let id = program_on(ifindex).expect("just attached");
        Self {
            fd,
            ifindex,
            flags,
            id,
        }
    }
}

impl Drop for ForeignProgram {
    fn drop(&mut self) {
        // SAFETY: null options are allowed.
        unsafe { libbpf_sys::bpf_xdp_detach(self.ifindex as i32, self.flags, ptr::null()) };
    }
}

/// Any descriptor that is no socket.
pub(crate) fn no_socket() -> File {
    File::open("/dev/null").expect("/dev/null opens")
}

/// Runs the program with this id once over `frame` (BPF_PROG_TEST_RUN), as if queue 0 had received it with
/// `metadata` bytes of XDP metadata before it; returns the verdict.
pub(crate) fn test_run(id: u32, metadata_bytes: u32, frame: &[u8]) -> u32 {
    test_runs(id, metadata_bytes, frame, 1).0
}

/// As [`test_run`], `repeat` times; returns the last verdict, and the time of one run, ns.
pub(crate) fn test_runs(id: u32, metadata_bytes: u32, frame: &[u8], repeat: u32) -> (u32, u32) {
    // SAFETY: no memory is passed.
    let fd: RawFd = unsafe { libbpf_sys::bpf_prog_get_fd_by_id(id) };
    assert!(fd >= 0, "bpf_prog_get_fd_by_id: {fd}");
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut data = vec![0u8; metadata_bytes as usize];
    data.extend(frame);
    let mut context = libbpf_sys::xdp_md {
        data: metadata_bytes,
        data_end: data.len() as u32,
        ..Default::default()
    };
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: data.as_ptr().cast(),
        data_size_in: data.len() as u32,
        ctx_in: (&raw mut context).cast(),
        ctx_size_in: size_of::<libbpf_sys::xdp_md>() as u32,
        repeat: repeat as i32,
        ..Default::default()
    };
    // SAFETY: opts says its own size, and names buffers that outlive the call with their lengths.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(fd.as_raw_fd(), &raw mut opts) };
    assert_eq!(result, 0, "bpf_prog_test_run_opts");
    (opts.retval, opts.duration)
}

/// Reads one line from a child's output.
pub(crate) fn read_line(from: &mut impl io::Read) -> String {
    let mut line = String::new();
    let mut byte = [0u8];
    while from.read(&mut byte).expect("child's output is readable") == 1 && byte[0] != b'\n' {
        line.push(byte[0] as char);
    }
    line
}

/// Everything a reader has left.
pub(crate) fn read_all(from: &mut impl io::Read) -> String {
    let mut text = String::new();
    from.read_to_string(&mut text).expect("child's output is text");
    text
}

/// Runs `call` with only the capabilities of a steward. Without CAP_PERFMON the verifier rejects more, and inserts
/// speculation barriers into a program.
pub(crate) fn as_a_steward<T>(call: impl FnOnce() -> T) -> T {
    let before = capabilities(None).expect("own");
    let mut few = before;
    few.effective = CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW | CapabilitySet::BPF;
    set_capabilities(None, few).expect("fewer");
    let result = call();
    set_capabilities(None, before).expect("permitted");
    result
}

/// Runs `call` with this thread pinned to one CPU.
pub(crate) fn on_one_cpu<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: a set is plain bits; the calls get its size, and it outlives them.
    let before = unsafe {
        let mut before: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        assert_eq!(libc::sched_getaffinity(0, size, &raw mut before), 0);
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut one);
        assert_eq!(libc::sched_setaffinity(0, size, &raw const one), 0);
        before
    };
    let result = call();
    // SAFETY: as above.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const before) };
    result
}

fn map_ring(ring: BorrowedFd<'_>, bytes: usize, from: usize, protection: i32) -> Option<NonNull<usize>> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            protection,
            libc::MAP_SHARED,
            ring.as_raw_fd(),
            from as i64,
        )
    };
    (base != libc::MAP_FAILED).then(|| NonNull::new(base.cast()).expect("not at zero"))
}

/// That no page of a ring but the first can be mapped for writing.
pub(crate) fn assert_ring_not_writable(ring: BorrowedFd<'_>) {
    let (reads, writes) = (libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE);
    for page in 1..4 {
        assert!(map_ring(ring, 4096, page * 4096, writes).is_none(), "page {page}");
    }
    assert!(map_ring(ring, 8192, 0, writes).is_none(), "two pages");
    assert!(map_ring(ring, 4096, 4096, reads).is_some(), "to read it can");
}

/// Sets the read position of a ring.
pub(crate) fn set_ring_position(ring: BorrowedFd<'_>, position: usize) {
    let page = map_ring(ring, 4096, 0, libc::PROT_READ | libc::PROT_WRITE).expect("the first page");
    // SAFETY: a page just mapped.
    unsafe { page.as_ptr().write_volatile(position) };
}

/// Of a queue whose frames have no header and no hints.
pub(crate) fn bare(frame_limit: u32) -> steer::QueueConf {
    steer::QueueConf {
        virtio_header: None,
        frame_limit,
        hints: false,
    }
}
