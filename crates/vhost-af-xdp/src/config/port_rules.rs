//! Which frames a port's guest may send and gets, as it was asked for: what `status`, `port list` and `serve --check`
//! tell of that.

use model::config::MemberOptions;
use serde::{Deserialize, Serialize};
use steer::ranges_text;

use super::port::{MemberVlans, NicConfig, PortConfig};
use crate::switch::filter::{Action, Direction, Filter};

/// IP addresses that are named where there is little room.
const FEW: usize = 2;

/// See the module's head.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PortRules {
    /// The one VLAN of a port of a network, whose tag the guest does not see.
    pub(crate) vlan: Option<u16>,
    /// Those of a port of a network whose tags the guest sees, as a file has them.
    pub(crate) trunk: Option<String>,
    /// What it may do in its network.
    #[serde(flatten)]
    pub(crate) options: MemberOptions,
    /// The guest sends from its own address and VLANs only.
    pub(crate) guard: bool,
    /// And from these IP addresses and networks only; empty: from any.
    pub(crate) ips: Vec<String>,
    /// With `ips`: it may say that it is a router.
    pub(crate) router: bool,
    /// With `ips`: it may answer as a DHCP server.
    pub(crate) dhcp_server: bool,
    /// Filter rules, if it has some, or a default that says more than none; an older daemon says nothing of them.
    #[serde(default)]
    pub(crate) filter: Option<FilterSummary>,
}

/// How a port is filtered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FilterSummary {
    /// How many rules it has, of both directions.
    pub(crate) rules: usize,
    /// What becomes of what the guest sends and none of them matches: `allow` or `deny`.
    pub(crate) from_guest_default: String,
    /// The same of what it gets.
    pub(crate) to_guest_default: String,
}

impl FilterSummary {
    fn of(filter: &Filter) -> Option<Self> {
        let default = |direction| filter.default_for(direction).name().to_owned();
        let of = [Direction::FromGuest, Direction::ToGuest];
        let denies = of
            .iter()
            .any(|&direction| filter.default_for(direction) == Action::Deny);
        (denies || !filter.rule.is_empty()).then(|| Self {
            rules: filter.rule.len(),
            from_guest_default: default(Direction::FromGuest),
            to_guest_default: default(Direction::ToGuest),
        })
    }
}

impl std::fmt::Display for FilterSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} filter rule(s), else from guest {}, to guest {}",
            self.rules, self.from_guest_default, self.to_guest_default
        )
    }
}

impl PortRules {
    pub(crate) fn of(port: &PortConfig) -> Self {
        let guard = &port.guard;
        let mut rules = Self {
            guard: guard.guard || guard.ips.is_some(),
            ips: guard
                .ips
                .iter()
                .flat_map(|ips| &ips.0)
                .map(ToString::to_string)
                .collect(),
            router: guard.router,
            dhcp_server: guard.dhcp_server,
            filter: FilterSummary::of(&port.filter),
            ..Self::default()
        };
        if let NicConfig::Network { vlans, options, .. } = &port.nic {
            match vlans {
                MemberVlans::Untagged => {}
                MemberVlans::Access(vlan) => rules.vlan = Some(*vlan),
                MemberVlans::Trunk(vlans) => rules.trunk = Some(ranges_text(vlans.iter().copied())),
            }
            rules.options = *options;
            rules.guard = !options.learning;
        }
        rules
    }

    /// Of which VLANs it is, if any was named.
    pub(crate) fn vlans(&self) -> Option<String> {
        match (self.vlan, &self.trunk) {
            (Some(vlan), _) => Some(format!("VLAN {vlan}")),
            (None, Some(trunk)) => Some(format!("VLANs {trunk} with tags")),
            (None, None) => None,
        }
    }

    /// From where its guest sends.
    pub(crate) fn sends_from(&self) -> String {
        let mut words = match (self.guard, self.options.learning) {
            (true, _) => "its mac only".to_owned(),
            (false, true) => "its mac, and further ones that are learned".to_owned(),
            (false, false) => return "any address".to_owned(),
        };
        if self.ips.is_empty() {
            return words + ", any IP address";
        }
        words += &format!(", of IP addresses {}", self.ips.join(", "));
        for (is_said, role) in [(self.router, "router"), (self.dhcp_server, "DHCP server")] {
            if is_said {
                words += &format!("; as a {role}, too");
            }
        }
        words
    }

    /// All that is not as it is where nothing is said, in a line; `None`: nothing. `in_network`: of a port of one,
    /// which is always guarded.
    pub(crate) fn line(&self, in_network: bool) -> Option<String> {
        let options = self.options.names();
        let mut words: Vec<String> = self.vlans().into_iter().chain(options).collect();
        if self.guard != in_network || !self.ips.is_empty() {
            words.push(format!("sends from {}", self.sends_from()));
        }
        words.extend(self.filter.as_ref().map(FilterSummary::to_string));
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// The same but for VLANs by the names of keys, where there is little room.
    pub(crate) fn short(&self, in_network: bool) -> String {
        let mut words: Vec<String> = self.options.names();
        if !self.ips.is_empty() {
            let mut ips = self.ips.iter().take(FEW).cloned().collect::<Vec<_>>().join(" ");
            if let Some(more @ 1..) = self.ips.len().checked_sub(FEW) {
                ips += &format!(" and {more} more");
            }
            words.push(format!("ips {ips}"));
        } else if self.guard && !in_network {
            words.push("guard".to_owned());
        }
        for (is_said, key) in [(self.router, "router"), (self.dhcp_server, "dhcp-server")] {
            words.extend(is_said.then(|| key.to_owned()));
        }
        words.extend(
            self.filter
                .as_ref()
                .map(|filter| format!("rules {}", filter.rules)),
        );
        words.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trunk() -> PortRules {
        PortRules {
            trunk: Some("100,200-203".to_owned()),
            options: MemberOptions {
                isolated: true,
                hairpin: true,
                ..MemberOptions::default()
            },
            guard: true,
            ips: ["192.0.2.10", "192.0.2.11", "2001:db8::/64"]
                .map(str::to_owned)
                .to_vec(),
            router: true,
            ..PortRules::default()
        }
    }

    #[test]
    fn line_has_what_was_said_and_nothing_else() {
        let guarded = PortRules {
            guard: true,
            ..PortRules::default()
        };
        assert_eq!(guarded.line(true), None, "in a network nobody has to say that");
        assert_eq!(
            guarded.line(false).as_deref(),
            Some("sends from its mac only, any IP address")
        );
        assert_eq!(PortRules::default().line(false), None);
        let access = PortRules {
            vlan: Some(7),
            ..guarded
        };
        assert_eq!(access.line(true).as_deref(), Some("VLAN 7"));
        assert_eq!(
            trunk().line(true).as_deref(),
            Some(
                "VLANs 100,200-203 with tags, isolated, hairpin, sends from its mac only, of IP addresses 192.0.2.10, \
                 192.0.2.11, 2001:db8::/64; as a router, too"
            )
        );
        let learns = PortRules {
            options: MemberOptions {
                learning: true,
                ..MemberOptions::default()
            },
            ..PortRules::default()
        };
        assert_eq!(
            learns.line(true).as_deref(),
            Some("learning, sends from its mac, and further ones that are learned, any IP address")
        );
    }

    #[test]
    fn short_form_has_keys_and_the_first_addresses() {
        assert_eq!(
            trunk().short(true),
            "isolated, hairpin, ips 192.0.2.10 192.0.2.11 and 1 more, router"
        );
        let guarded = PortRules {
            guard: true,
            ..PortRules::default()
        };
        assert_eq!([guarded.short(true), guarded.short(false)], ["", "guard"]);
    }
}
