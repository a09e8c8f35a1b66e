//! A netkit without a peer, to which queues of NICs can be leased (Linux 7.1). `ip` of today does not make one.

/// Makes one in the network namespace of this thread; the kernel's refusal if it has none of the kind.
pub(crate) fn make(name: &str) -> Result<(), String> {
    let made = vhost_af_xdp_steward::netkit::device::make(name, 1500, None);
    made.map(drop).map_err(|error| error.to_string())
}
