//! Bytes of an n-tuple rule for TCP: frames to a local address and port, to a queue.

use std::net::{IpAddr, SocketAddr};

use zerocopy::{FromZeros, IntoBytes};

use super::abi::{Flow, FlowSpec};

/// `TCP_V4_FLOW` and `TCP_V6_FLOW`, include/uapi/linux/ethtool.h.
const TCP_OVER_FOUR: u32 = 1;
const TCP_OVER_SIX: u32 = 5;

/// Where the destination's address and port are in `struct ethtool_tcpip4_spec` and `ethtool_tcpip6_spec`, bytes.
const ADDRESS_AT: [usize; 2] = [4, 16];
const PORT_AT: [usize; 2] = [10, 34];

/// The rule for the driver, without target and location.
pub(super) fn spec(flow: SocketAddr) -> FlowSpec {
    let mut spec = FlowSpec::new_zeroed();
    spec.flow_type = match flow {
        SocketAddr::V4(_) => TCP_OVER_FOUR,
        SocketAddr::V6(_) => TCP_OVER_SIX,
    };
    match flow.ip() {
        IpAddr::V4(address) => put(&mut spec, 0, &address.octets(), flow.port()),
        IpAddr::V6(address) => put(&mut spec, 1, &address.octets(), flow.port()),
    }
    spec
}

/// The flow that these bytes describe, if the steward could have written them.
pub(super) fn of(from: &FlowSpec) -> Option<SocketAddr> {
    let flow = match from.flow_type {
        TCP_OVER_FOUR => SocketAddr::from((read::<4>(&from.h_u, 0)?, port(&from.h_u, 0)?)),
        TCP_OVER_SIX => SocketAddr::from((read::<16>(&from.h_u, 1)?, port(&from.h_u, 1)?)),
        _ => return None,
    };
    // Some drivers fill in what no mask asks for.
    (spec(flow).m_u == from.m_u).then_some(flow)
}

/// Puts address and port into a rule, and their masks.
fn put(spec: &mut FlowSpec, family: usize, address: &[u8], port: u16) {
    let (at, port_at) = (ADDRESS_AT[family], PORT_AT[family]);
    let (values, masks) = (spec.h_u.as_mut_bytes(), spec.m_u.as_mut_bytes());
    values[at..at + address.len()].copy_from_slice(address);
    values[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
    masks[at..at + address.len()].fill(0xff);
    masks[port_at..port_at + 2].fill(0xff);
}

fn read<const N: usize>(flow: &Flow, family: usize) -> Option<[u8; N]> {
    let at = *ADDRESS_AT.get(family)?;
    flow.as_bytes().get(at..at + N)?.try_into().ok()
}

fn port(flow: &Flow, family: usize) -> Option<u16> {
    let at = *PORT_AT.get(family)?;
    let bytes = flow.as_bytes().get(at..at + 2)?.try_into().ok()?;
    Some(u16::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::super::abi;
    use super::super::rule::{Known, Rule, Target};
    use super::*;

    #[test]
    fn rule_for_a_flow_has_the_bytes_of_ethtool_h_and_is_read_back() {
        for (text, at, len) in [("192.0.2.1:443", 4, 4), ("[2001:db8::1]:8080", 16, 16)] {
            let flow: SocketAddr = text.parse().expect("an address and a port");
            let rule = Rule::of_flow(flow, 3);
            let spec = rule.spec();
            let (values, masks) = (spec.h_u.as_bytes(), spec.m_u.as_bytes());
            let port_at = at + len + 2;
            assert_eq!(values[port_at..port_at + 2], flow.port().to_be_bytes());
            assert_eq!(masks.iter().filter(|&&byte| byte == 0xff).count(), len + 2);
            assert!(masks[at..at + len].iter().all(|&byte| byte == 0xff));
            assert_eq!(masks[port_at..port_at + 2], [0xff; 2]);
            assert_eq!(spec.ring_cookie, 3);
            let known = Known::of(&spec, 7, 0);
            assert_eq!((known.rule, known.target), (Some(rule), Some(Target::Queue(3))));
            let mut wider = spec.clone();
            wider.m_u = FlowSpec::new_zeroed().m_u;
            assert_eq!(Known::of(&wider, 7, 0).rule, None);
            let mut elsewhere = spec;
            elsewhere.ring_cookie = abi::COOKIE_DROP;
            assert_eq!(Known::of(&elsewhere, 7, 0).rule, None);
        }
    }
}
