//! Which frames a port's guest may send, and which it receives, as configured: for `status`, `port list` and
//! `serve --check`.

use serde::{Deserialize, Serialize};

use crate::config::MemberOptions;

/// Number of IP addresses that the short form lists.
const FEW: usize = 2;

/// Which frames the guest of a port may send, and which it receives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortRules {
    /// The one VLAN of a port of a network, whose tag the guest does not see.
    pub vlan: Option<u16>,
    /// VLANs of a port of a network whose tags the guest sees, as in the configuration file.
    pub trunk: Option<String>,
    /// What it may do in its network.
    #[serde(flatten)]
    pub options: MemberOptions,
    /// The guest sends from its own address and VLANs only.
    pub guard: bool,
    /// It sends from these IP addresses and networks only; empty: from any.
    pub ips: Vec<String>,
    /// With `ips`: it may act as a router.
    pub router: bool,
    /// With `ips`: it may act as a DHCP server.
    pub dhcp_server: bool,
    /// Filter rules, if there are any, or a default that denies.
    #[serde(default)]
    pub filter: Option<FilterSummary>,
}

/// How a port is filtered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterSummary {
    /// How many rules it has, of both directions.
    pub rules: usize,
    /// For frames from the guest that no rule matches: `allow` or `deny`.
    pub from_guest_default: String,
    /// For frames to the guest that no rule matches: `allow` or `deny`.
    pub to_guest_default: String,
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
    /// Its VLANs, if any is configured.
    #[must_use]
    pub fn vlans(&self) -> Option<String> {
        match (self.vlan, &self.trunk) {
            (Some(vlan), _) => Some(format!("VLAN {vlan}")),
            (None, Some(trunk)) => Some(format!("VLANs {trunk} with tags")),
            (None, None) => None,
        }
    }

    /// From which addresses its guest sends.
    #[must_use]
    pub fn sends_from(&self) -> String {
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

    /// Everything that differs from the defaults, in a line; `None`: nothing does. `in_network`: the port is part of a
    /// network, and guarded by default.
    #[must_use]
    pub fn line(&self, in_network: bool) -> Option<String> {
        let options = self.options.names();
        let mut words: Vec<String> = self.vlans().into_iter().chain(options).collect();
        if self.guard != in_network || !self.ips.is_empty() {
            words.push(format!("sends from {}", self.sends_from()));
        }
        words.extend(self.filter.as_ref().map(FilterSummary::to_string));
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// The same without VLANs, by names of keys, for a column of a table.
    #[must_use]
    pub fn short(&self, in_network: bool) -> String {
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
