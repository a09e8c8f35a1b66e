//! What a guest may send, as it was asked for.

use crate::switch::guard::{Addresses, IpPrefix, Lock};

/// See the module's head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GuardConfig {
    /// It sends from its own MAC address and VLANs only. In a network that goes without saying.
    pub(crate) source: bool,
    /// Its IP addresses; none: any.
    pub(crate) ips: Vec<IpPrefix>,
    /// It may say that it is a router.
    pub(crate) router: bool,
    /// It may answer as a DHCP server.
    pub(crate) dhcp_server: bool,
}

/// Whether a key of a port says something of that, and nothing else.
pub(crate) fn is_guard(key: &str) -> bool {
    matches!(key, "guard" | "ips" | "router" | "dhcp-server")
}

impl GuardConfig {
    /// By what frames are judged; `None`: nothing but the Ethernet header.
    pub(crate) fn lock(&self) -> Option<Lock> {
        (!self.ips.is_empty()).then(|| Lock {
            addresses: Addresses::new(&self.ips),
            router: self.router,
            dhcp_server: self.dhcp_server,
        })
    }
}
