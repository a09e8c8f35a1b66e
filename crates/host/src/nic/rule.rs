//! One n-tuple rule: frames of a station, a VLAN or a TCP flow, and their target.

use std::fmt;
use std::net::SocketAddr;

use derive_more::Display;
use steer::mac_text;
use zerocopy::FromZeros;

use super::abi::{self, FlowSpec};
use super::flow;

/// Where a rule sends frames.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize, Display,
)]
pub enum Target {
    /// To a queue.
    #[display("queue {_0}")]
    Queue(u32),
    /// To the queues of an RSS context.
    #[display("RSS context {_0}")]
    Context(u32),
}

/// A rule of the steward: frames of one station, of one VLAN, or both; or of one TCP flow; never of none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Rule {
    /// To this station; `None`: to any.
    pub mac: Option<[u8; 6]>,
    /// Of this VLAN, 1 to 4094; `None`: of any.
    pub vlan: Option<u16>,
    /// Only frames of TCP connections to this local address and port; `mac` and `vlan` are `None` then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<SocketAddr>,
    /// Where they go.
    pub target: Target,
}

/// A rule in a NIC, the steward's or another program's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Its location in the table; if locations have precedence, lower ones come first.
    pub location: u32,
    /// The rule, if the steward could have made it; `None`: it could not.
    pub rule: Option<Rule>,
    /// Where frames go; `None`: they are dropped, or go to another function of the NIC.
    pub target: Option<Target>,
    /// Which frames, in words.
    pub text: String,
}

impl Rule {
    /// For a flow, to a queue.
    #[must_use]
    pub fn of_flow(flow: SocketAddr, queue: u32) -> Self {
        Self {
            mac: None,
            vlan: None,
            flow: Some(flow),
            target: Target::Queue(queue),
        }
    }

    /// The rule for the driver, without location and context.
    #[must_use]
    pub fn spec(&self) -> FlowSpec {
        let ethernet = || FlowSpec {
            flow_type: abi::ETHER_FLOW,
            ..FlowSpec::new_zeroed()
        };
        let mut spec = self.flow.map_or_else(ethernet, flow::spec);
        if let Some(mac) = self.mac {
            spec.h_u.h_dest = mac;
            spec.m_u.h_dest = [0xff; 6];
        }
        if let Some(vlan) = self.vlan {
            spec.flow_type |= abi::FLOW_EXT;
            spec.h_ext.vlan_tci = vlan.to_be_bytes();
            spec.m_ext.vlan_tci = abi::VLAN_MASK.to_be_bytes();
        }
        match self.target {
            Target::Queue(queue) => spec.ring_cookie = queue.into(),
            Target::Context(_) => spec.flow_type |= abi::FLOW_RSS,
        }
        spec
    }

    /// The rule that these bytes describe, if the steward could have written it.
    fn of(spec: &FlowSpec, context: u32) -> Option<Self> {
        let target = target_of(spec, context)?;
        if let (Some(flow), Target::Queue(queue)) = (flow::of(spec), target) {
            return Some(Self::of_flow(flow, queue));
        }
        let kind = spec.flow_type & !(abi::FLOW_EXT | abi::FLOW_RSS);
        let (m, ext) = (&spec.m_u, &spec.m_ext);
        let others_are_any = m.h_source == [0; 6] && m.h_proto == [0; 2];
        let is_plain = kind == abi::ETHER_FLOW && spec.flow_type & abi::FLOW_MAC_EXT == 0;
        if !is_plain || !others_are_any {
            return None;
        }
        let mac = match m.h_dest {
            [0xff, 0xff, 0xff, 0xff, 0xff, 0xff] => Some(spec.h_u.h_dest),
            [0, 0, 0, 0, 0, 0] => None,
            _ => return None,
        };
        let vlan = match spec.flow_type & abi::FLOW_EXT {
            0 => None,
            _ if ext.data != [[0; 4]; 2] => return None,
            _ => match u16::from_be_bytes(ext.vlan_tci) {
                0 => None,
                // Some drivers widen the mask.
                mask if mask & abi::VLAN_MASK == abi::VLAN_MASK => {
                    Some(u16::from_be_bytes(spec.h_ext.vlan_tci) & abi::VLAN_MASK)
                }
                _ => return None,
            },
        };
        (mac.is_some() || vlan.is_some()).then_some(Self {
            mac,
            vlan,
            flow: None,
            target,
        })
    }
}

/// `ring_cookie`: a queue in the lower 32 bits, a virtual function above (include/uapi/linux/ethtool.h,
/// `ethtool_get_flow_spec_ring`).
fn target_of(spec: &FlowSpec, context: u32) -> Option<Target> {
    match u32::try_from(spec.ring_cookie) {
        Ok(0) if spec.flow_type & abi::FLOW_RSS != 0 => Some(Target::Context(context)),
        Ok(queue) if spec.flow_type & abi::FLOW_RSS == 0 => Some(Target::Queue(queue)),
        _ => None,
    }
}

impl Known {
    pub(super) fn of(spec: &FlowSpec, location: u32, context: u32) -> Self {
        let rule = Rule::of(spec, context);
        Self {
            location,
            rule,
            target: target_of(spec, context),
            text: rule.map_or_else(|| words(spec), |rule| rule.to_string()),
        }
    }
}

/// Which frames a rule is for that is not like ours.
fn words(spec: &FlowSpec) -> String {
    let kind = match spec.flow_type & 0x1fff_ffff {
        1 => "TCP over IPv4",
        2 => "UDP over IPv4",
        3 => "SCTP over IPv4",
        5 => "TCP over IPv6",
        6 => "UDP over IPv6",
        7 => "SCTP over IPv6",
        0x0d => "IPv4",
        0x0e => "IPv6",
        abi::ETHER_FLOW => "Ethernet",
        _ => "other",
    };
    let dropped = if spec.ring_cookie == abi::COOKIE_DROP {
        ", dropped"
    } else {
        ""
    };
    format!("{kind}{dropped}")
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut space = "";
        if let Some(flow) = self.flow {
            write!(f, "TCP to {flow}")?;
        }
        if let Some(mac) = self.mac {
            write!(f, "MAC {}", mac_text(mac))?;
            space = " ";
        }
        match self.vlan {
            Some(vlan) => write!(f, "{space}VLAN {vlan}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];

    fn rule(mac: Option<[u8; 6]>, vlan: Option<u16>, target: Target) -> Rule {
        Rule {
            mac,
            vlan,
            flow: None,
            target,
        }
    }

    #[test]
    fn rule_has_the_bytes_of_ethtool_h() {
        let spec = rule(Some(MAC), Some(100), Target::Queue(3)).spec();
        let bytes = spec.as_bytes();
        assert_eq!(bytes[..4], (abi::ETHER_FLOW | abi::FLOW_EXT).to_ne_bytes());
        assert_eq!((&bytes[4..10], &bytes[76..82]), (&MAC[..], &[0xff; 6][..]));
        // Offsets of vlan_tci in h_ext and m_ext; big-endian.
        assert_eq!(
            (&bytes[66..68], &bytes[138..140]),
            (&[0, 100][..], &[0x0f, 0xff][..])
        );
        assert_eq!(bytes[152..160], 3u64.to_ne_bytes());
        let set: usize = bytes.iter().filter(|&&byte| byte != 0).count();
        // Type 2 bytes, address 3, mask 6, VLAN 1, mask 2, queue 1: nothing else.
        assert_eq!(set, 15, "{bytes:?}");
    }

    #[test]
    fn own_rules_are_read_back_and_other_rules_are_not() {
        for rule in [
            rule(Some(MAC), None, Target::Queue(0)),
            rule(None, Some(4094), Target::Context(2)),
            rule(Some(MAC), Some(1), Target::Context(1)),
        ] {
            let context = match rule.target {
                Target::Context(context) => context,
                Target::Queue(_) => 0,
            };
            let known = Known::of(&rule.spec(), 7, context);
            assert_eq!((known.rule, known.target), (Some(rule), Some(rule.target)));
        }
        let ours = rule(Some(MAC), Some(1), Target::Queue(2));
        let changed = |change: fn(&mut FlowSpec)| {
            let mut spec = ours.spec();
            change(&mut spec);
            Known::of(&spec, 7, 0).rule
        };
        for change in [
            (|spec| spec.flow_type = 1) as fn(&mut FlowSpec),
            |spec| spec.m_u.h_dest[5] = 0,
            |spec| spec.m_u.h_source = [0xff; 6],
            |spec| spec.m_u.h_proto = [0xff; 2],
            |spec| spec.m_ext.vlan_tci = [0, 0xff],
            |spec| spec.m_ext.data[0] = [1; 4],
            |spec| spec.ring_cookie = abi::COOKIE_DROP,
            |spec| spec.ring_cookie |= 1 << 32,
            |spec| spec.flow_type |= abi::FLOW_MAC_EXT,
        ] {
            assert_eq!(changed(change), None);
        }
    }
}
