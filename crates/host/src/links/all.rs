//! All interfaces of a network namespace, and how they are stacked.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;

use netlink_bindings::rt_link::{self, Ifinfomsg, IterableLinkAttrs, LinkinfoDataMsg, LinkinfoMemberDataMsg};

use super::dump;

/// The protocol of interfaces of a VLAN (802.1Q).
#[allow(clippy::cast_possible_truncation)]
const CUSTOMER_TAG: u16 = libc::ETH_P_8021Q as u16;

/// Interfaces by index.
pub(super) type Links = BTreeMap<u32, Seen>;

/// Attributes of an interface.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) name: String,
    /// `IFLA_INFO_KIND`; may be empty.
    pub(super) kind: String,
    pub(super) mac: [u8; 6],
    /// The interface that it is on, in this network namespace; of a veth its other end.
    pub(super) below: Option<u32>,
    /// The interface below is in another network namespace.
    pub(super) is_below_elsewhere: bool,
    /// The bridge, bond or team that it is part of.
    pub(super) master: Option<u32>,
    /// It receives the frames of this VLAN from the interface below, without the tag.
    pub(super) vlan: Option<u16>,
    /// It may set a priority in the tag of frames that it sends (`egress-qos-map`).
    pub(super) sets_priority: bool,
    /// It is a bridge with VLAN filtering.
    pub(super) filters_vlans: bool,
    /// It is a bridge with the spanning tree protocol.
    pub(super) has_stp: bool,
    /// It is a port where its bridge learns addresses.
    pub(super) is_learned_at: bool,
}

impl Seen {
    pub(super) fn of(attributes: &IterableLinkAttrs<'_>) -> Self {
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        let info = attributes.get_linkinfo();
        let is_below_elsewhere = attributes.get_link_netnsid().is_ok();
        let mut seen = Self {
            name: attributes.get_ifname().map(text).unwrap_or_default(),
            kind: info
                .clone()
                .and_then(|info| info.get_kind())
                .map(text)
                .unwrap_or_default(),
            mac: attributes
                .get_address()
                .map(|mac| mac.try_into().unwrap_or_default())
                .unwrap_or_default(),
            below: attributes.get_link().ok().filter(|_| !is_below_elsewhere),
            is_below_elsewhere,
            master: attributes.get_master().ok(),
            ..Self::default()
        };
        if let Ok(LinkinfoMemberDataMsg::Bridge(port)) = info.clone().and_then(|info| info.get_slave_data()) {
            seen.is_learned_at = port.get_learning().is_ok_and(|learns| learns != 0);
        }
        match info.and_then(|info| info.get_data()) {
            Ok(LinkinfoDataMsg::Bridge(bridge)) => {
                seen.filters_vlans = bridge.get_vlan_filtering().is_ok_and(|filters| filters != 0);
                seen.has_stp = bridge.get_stp_state().is_ok_and(|state| state != 0);
            }
            // The protocol is in network order.
            Ok(LinkinfoDataMsg::Vlan(vlan))
                if vlan
                    .get_protocol()
                    .is_ok_and(|tag| [tag, tag.swap_bytes()].contains(&CUSTOMER_TAG)) =>
            {
                seen.vlan = vlan.get_id().ok();
                seen.sets_priority = vlan.get_egress_qos().is_ok();
            }
            _ => {}
        }
        seen
    }
}

/// All interfaces of this network namespace.
pub(super) fn read_links() -> io::Result<Links> {
    let mut links = Links::new();
    for_each(|index, attributes| drop(links.insert(index, Seen::of(attributes))))?;
    Ok(links)
}

/// Names and aliases of the interfaces that have an alias.
///
/// # Errors
/// An error of the kernel.
pub fn aliases() -> io::Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for_each(|_, attributes| {
        let name = attributes.get_ifname().map(CStr::to_str);
        let alias = attributes.get_ifalias().map(CStr::to_str);
        if let (Ok(Ok(name)), Ok(Ok(alias))) = (name, alias) {
            found.push((name.to_owned(), alias.to_owned()));
        }
    })?;
    Ok(found)
}

/// Calls `look` for each interface, with its index.
///
/// # Errors
/// An error of the kernel.
pub fn for_each(mut look: impl FnMut(u32, &IterableLinkAttrs<'_>)) -> io::Result<()> {
    let request = rt_link::Request::new().op_getlink_dump(&Ifinfomsg::default());
    dump(&request, |(header, attributes)| {
        look(u32::try_from(header.ifi_index).unwrap_or_default(), &attributes);
    })
}
