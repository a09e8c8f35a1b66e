//! What the tests of this crate stand on: two network namespaces joined by a veth pair, frames by packet socket, and
//! a look at the interface that does not go through the crate under test.
//!
//! Guards remove what they made, also when a test panics. The near end is where the program goes; the calling
//! thread is moved into its namespace. The far end sends.
#![allow(unsafe_code, dead_code)]

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libbpf_rs::libbpf_sys;

/// Interface names of the two ends, each in a namespace of its own.
pub(crate) const NEAR: &str = "near0";
pub(crate) const FAR: &str = "far0";

/// Says why a test cannot run here, or fails it where skipping is not allowed.
fn skip(reason: &str) {
    assert!(
        std::env::var("REQUIRE_PRIV").as_deref() != Ok("1"),
        "REQUIRE_PRIV=1, but {reason}"
    );
    println!("SKIPPED: {reason}");
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
}

pub(crate) fn ip(args: &[&str]) {
    run("ip", args);
}

/// A namespace with a name, removed with everything in it on drop.
pub(crate) struct NetNs {
    pub(crate) name: String,
}

impl NetNs {
    fn new(name: String) -> Self {
        ip(&["netns", "add", &name]);
        let ns = Self { name };
        // No neighbour discovery: tests count frames.
        ns.exec("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        ns.exec("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6");
        ns
    }

    pub(crate) fn exec(&self, script: &str) {
        ip(&["netns", "exec", &self.name, "sh", "-c", script]);
    }

    pub(crate) fn enter(&self) {
        let file = File::open(format!("/run/netns/{}", self.name)).expect("namespace is there");
        // SAFETY: no memory is passed; the descriptor is open.
        let result = unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(result, 0, "setns: {}", io::Error::last_os_error());
    }
}

impl Drop for NetNs {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}

/// Two namespaces joined by a veth pair; this thread is in the near one.
pub(crate) struct Pair {
    pub(crate) near: NetNs,
    pub(crate) far: NetNs,
    pub(crate) near_socket: PacketSocket,
    pub(crate) far_socket: PacketSocket,
}

impl Pair {
    /// `None` after saying `SKIPPED` where namespaces cannot be made.
    pub(crate) fn new(mtu: u32) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // SAFETY: no arguments, cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            skip("network namespaces and XDP need root");
            return None;
        }
        let prefix = format!(
            "steer-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let near = NetNs::new(format!("{prefix}-near"));
        let far = NetNs::new(format!("{prefix}-far"));
        let mtu = mtu.to_string();
        ip(&[
            "link", "add", NEAR, "mtu", &mtu, "netns", &near.name, "type", "veth", "peer", "name", FAR,
            "mtu", &mtu, "netns", &far.name,
        ]);
        far.exec(&format!("ip link set dev {FAR} up arp off"));
        near.exec(&format!(
            "ip link set dev {NEAR} up arp off && ip link set dev lo up"
        ));
        far.enter();
        let far_socket = PacketSocket::open(FAR);
        near.enter();
        let near_socket = PacketSocket::open(NEAR);
        Some(Self {
            near,
            far,
            near_socket,
            far_socket,
        })
    }

    pub(crate) fn ifindex(&self) -> u32 {
        index_of(NEAR)
    }
}

pub(crate) fn index_of(interface: &str) -> u32 {
    let name = std::ffi::CString::new(interface).expect("no NUL in a name");
    // SAFETY: name is a C string that outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    assert_ne!(index, 0, "{interface}: {}", io::Error::last_os_error());
    index
}

/// An `AF_PACKET` socket on one interface: what it reads has reached the host's stack.
pub(crate) struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    fn open(interface: &str) -> Self {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: no memory is passed.
        let fd = unsafe {
            libc::socket(
                libc::AF_PACKET,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC,
                i32::from(protocol),
            )
        };
        assert!(fd >= 0, "packet socket: {}", io::Error::last_os_error());
        // SAFETY: the call just returned this descriptor, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: sockaddr_ll is plain data, for which all zeroes are valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index_of(interface) as i32;
        // SAFETY: address is a sockaddr_ll, of the length given, that outlives the call.
        let result = unsafe {
            libc::bind(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            )
        };
        assert_eq!(result, 0, "bind to {interface}: {}", io::Error::last_os_error());
        Self { fd }
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        // SAFETY: the buffer is valid for its length during the call.
        let sent = unsafe { libc::send(self.fd.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        assert_eq!(sent, frame.len() as isize, "send: {}", io::Error::last_os_error());
    }

    /// The next frame that came in (not one that went out), or `None` if none comes within `timeout`.
    pub(crate) fn receive(&self, timeout: Duration) -> Option<Vec<u8>> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut poll = libc::pollfd {
                fd: self.fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one pollfd, valid for the call.
            let ready = unsafe { libc::poll(&raw mut poll, 1, left.as_millis() as i32) };
            if ready <= 0 {
                return None;
            }
            let mut frame = vec![0u8; 65_536];
            let mut from = MaybeUninit::<libc::sockaddr_ll>::zeroed();
            let mut from_len = size_of::<libc::sockaddr_ll>() as u32;
            // SAFETY: buffer and address are valid for their lengths during the call.
            let len = unsafe {
                libc::recvfrom(
                    self.fd.as_raw_fd(),
                    frame.as_mut_ptr().cast(),
                    frame.len(),
                    0,
                    from.as_mut_ptr().cast(),
                    &raw mut from_len,
                )
            };
            assert!(len >= 0, "recvfrom: {}", io::Error::last_os_error());
            // SAFETY: zeroed at first and written by the kernel since; plain data either way.
            let from = unsafe { from.assume_init() };
            if from.sll_pkttype != libc::PACKET_OUTGOING {
                frame.truncate(len as usize);
                return Some(frame);
            }
        }
    }
}

/// A broadcast frame of `len` bytes with a local experimental Ethertype and bytes that can be told apart.
pub(crate) fn frame(len: usize) -> Vec<u8> {
    let mut bytes = vec![0xff; 6];
    bytes.extend([0x02, 0, 0, 0, 0, 0x01, 0x88, 0xb5]);
    bytes.extend((bytes.len()..len).map(|at| (at % 251) as u8));
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
    let deadline = Instant::now() + timeout;
    while program_on(ifindex).is_some() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// A program that passes everything, attached the old way (netlink, no link): it stays until somebody removes it.
pub(crate) struct ForeignProgram {
    fd: OwnedFd,
    ifindex: u32,
    flags: u32,
    pub(crate) id: u32,
}

impl ForeignProgram {
    pub(crate) const NAME: &str = "not_ours";

    pub(crate) fn attach(ifindex: u32, native: bool) -> Self {
        // r0 = XDP_PASS; exit
        let instructions: [u64; 2] = [0x0000_0002_0000_00b7, 0x0000_0000_0000_0095];
        let name = std::ffi::CString::new(Self::NAME).expect("no NUL in the name");
        // SAFETY: two instructions of eight bytes, a C string each for name and licence; null options are allowed.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_XDP,
                name.as_ptr(),
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

/// An AF_XDP socket that is bound to nothing, with an RX ring: good enough for a slot of the map.
pub(crate) fn unbound_xsk() -> OwnedFd {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "AF_XDP socket: {}", io::Error::last_os_error());
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::net::sockopt::set_xdp_rx_ring_size(&socket, 64).expect("a fresh socket");
    socket
}

/// Any descriptor that is no socket.
pub(crate) fn no_socket() -> File {
    File::open("/dev/null").expect("/dev/null opens")
}

/// Runs the program with this id once over `frame` (BPF_PROG_TEST_RUN), as if queue 0 had received it with
/// `metadata` bytes of XDP metadata before it; returns the verdict.
pub(crate) fn test_run(id: u32, metadata_bytes: u32, frame: &[u8]) -> u32 {
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
        repeat: 1,
        ..Default::default()
    };
    // SAFETY: opts says its own size, and names buffers that outlive the call with their lengths.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(fd.as_raw_fd(), &raw mut opts) };
    assert_eq!(result, 0, "bpf_prog_test_run_opts");
    opts.retval
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
