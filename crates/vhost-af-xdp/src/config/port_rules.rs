//! Which frames a port's guest may send and receives, as configured.

use model::state::{FilterSummary, PortRules};
use steer::ranges_text;

use super::port::{MemberVlans, NicConfig, PortConfig};
use crate::switch::filter::{Action, Direction, Filter};

fn summary(filter: &Filter) -> Option<FilterSummary> {
    let default = |direction| filter.default_for(direction).name().to_owned();
    let of = [Direction::FromGuest, Direction::ToGuest];
    let denies = of
        .iter()
        .any(|&direction| filter.default_for(direction) == Action::Deny);
    (denies || !filter.rule.is_empty()).then(|| FilterSummary {
        rules: filter.rule.len(),
        from_guest_default: default(Direction::FromGuest),
        to_guest_default: default(Direction::ToGuest),
    })
}

/// Those of a port.
pub(crate) fn rules_of(port: &PortConfig) -> PortRules {
    let guard = &port.guard;
    let mut rules = PortRules {
        guard: guard.guard || guard.ips.is_some(),
        ips: guard
            .ips
            .iter()
            .flat_map(|ips| &ips.0)
            .map(ToString::to_string)
            .collect(),
        router: guard.router,
        dhcp_server: guard.dhcp_server,
        filter: summary(&port.filter),
        ..PortRules::default()
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
