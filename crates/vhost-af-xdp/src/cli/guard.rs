//! Options that say what a guest may send.

use anyhow::bail;
use clap::Args;

use crate::config::GuardConfig;
use crate::switch::guard::IpPrefix;

/// Most that a port has: each is compared with for each frame.
const MOST_ADDRESSES: usize = 64;

/// See the module's head.
#[derive(Debug, Clone, Args)]
pub(super) struct GuardArgs {
    /// Let the guest send only from the address of --mac, and in the VLANs of --vlan. Guests of a network never send
    /// otherwise
    #[arg(long)]
    guard: bool,
    /// IP addresses and networks of the guest, for instance 192.0.2.10,2001:db8:1::/64: it sends from these only, by
    /// ARP, IPv4, IPv6 and its neighbour discovery, and nothing else; neither router advertisements nor what DHCP
    /// servers answer [default: any, and all protocols]
    #[arg(long, value_name = "LIST", value_parser = parse_addresses)]
    ips: Option<AddressList>,
    /// With --ips: the guest may say that it is a router
    #[arg(long)]
    router: bool,
    /// With --ips: the guest may answer as a DHCP server
    #[arg(long)]
    dhcp_server: bool,
}

impl GuardArgs {
    /// Errors: one line, naming the key.
    pub(super) fn build(self) -> anyhow::Result<GuardConfig> {
        let Self {
            guard: source,
            ips,
            router,
            dhcp_server,
        } = self;
        let AddressList(ips) = ips.unwrap_or_default();
        let only_with_ips = [("router", router), ("dhcp-server", dhcp_server)];
        if let Some((key, _)) = only_with_ips.iter().find(|(_, said)| *said && ips.is_empty()) {
            bail!("{key}: goes with ips: name the guest's addresses; without them it may send what it likes");
        }
        Ok(GuardConfig {
            source,
            ips,
            router,
            dhcp_server,
        })
    }
}

/// IP addresses and networks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AddressList(Vec<IpPrefix>);

/// Joined by commas, or by `+` where commas have another meaning.
fn parse_addresses(text: &str) -> Result<AddressList, String> {
    let parts = text.split([',', '+']).map(str::trim);
    let list: Vec<IpPrefix> = parts.map(str::parse).collect::<Result<_, _>>()?;
    match list.len() > MOST_ADDRESSES {
        true => Err(format!(
            "{} addresses, a port has {MOST_ADDRESSES} at most",
            list.len()
        )),
        false => Ok(AddressList(list)),
    }
}
