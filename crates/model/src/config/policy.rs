//! What a port's guest may send, and which frames it receives: in words, for `status`, `port list` and `serve --check`.

use schemars::{JsonSchema, Schema, SchemaGenerator, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::port::{Filter, Guard, MemberOptions, Port};
use super::rule::{Action, Direction};
use super::table::names_of_set;

/// Number of IP addresses that the short form lists.
const FEW: usize = 2;

/// The keys of a [`Port`] that decide about frames of its guest, as `status` and the API show them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Policy {
    /// The one VLAN of a port of a network, whose tag the guest does not see.
    pub vlan: Option<u16>,
    /// VLANs of a port of a network whose tags the guest sees, as in the configuration file.
    pub trunk: Option<String>,
    /// What the guest may do in its network.
    #[serde(flatten)]
    pub options: MemberOptions,
    /// What the guest may send. `guard` is set for each guest of a network, unless addresses are learned.
    #[serde(flatten, with = "shown")]
    #[schemars(schema_with = "shown::schema")]
    pub guard: Guard,
    /// Filter rules, if there are any, or a default that denies.
    pub filter: Option<FilterSummary>,
}

/// How a port is filtered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FilterSummary {
    /// Number of rules of the port, for both directions; `/v1/ports/{name}/rules` lists them.
    pub rules: usize,
    /// What happens to frames from the guest that no rule matches.
    pub from_guest_default: Action,
    /// What happens to frames to the guest that no rule matches.
    pub to_guest_default: Action,
}

impl FilterSummary {
    fn of(filter: &Filter) -> Option<Self> {
        let defaults = [Direction::FromGuest, Direction::ToGuest].map(|of| filter.default_for(of));
        let [from_guest_default, to_guest_default] = defaults;
        let is_filtered = defaults.contains(&Action::Deny) || !filter.rule.is_empty();
        is_filtered.then_some(Self {
            rules: filter.rule.len(),
            from_guest_default,
            to_guest_default,
        })
    }
}

impl std::fmt::Display for FilterSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} filter rule(s), else from guest {}, to guest {}",
            self.rules,
            self.from_guest_default.name(),
            self.to_guest_default.name()
        )
    }
}

impl Port {
    /// What its guest may send and which frames it receives.
    #[must_use]
    pub fn policy(&self) -> Policy {
        let mut guard = self.guard.clone();
        let trunk = self.member.trunk.as_ref();
        let mut vlan = self.interface.vlan.as_ref().filter(|_| trunk.is_none());
        if self.member.network.is_some() {
            guard.guard = !self.options.learning;
        } else {
            guard.guard |= guard.ips.is_some();
            vlan = None;
        }
        Policy {
            vlan: vlan.and_then(|vlans| vlans.0.first().copied()),
            trunk: trunk.map(ToString::to_string),
            options: self.options,
            guard,
            filter: FilterSummary::of(&self.filter),
        }
    }
}

impl Policy {
    /// Its VLANs, if any is configured.
    #[must_use]
    pub fn vlans(&self) -> Option<String> {
        match (self.vlan, &self.trunk) {
            (Some(vlan), _) => Some(format!("VLAN {vlan}")),
            (None, Some(trunk)) => Some(format!("VLANs {trunk} with tags")),
            (None, None) => None,
        }
    }

    fn ips(&self) -> Vec<String> {
        let ips = self.guard.ips.iter().flat_map(|ips| &ips.0);
        ips.map(ToString::to_string).collect()
    }

    /// Names of the roles that the guest has: `router`, `dhcp-server`.
    fn roles(&self) -> Vec<String> {
        let names = names_of_set(&self.guard);
        names.into_iter().filter(|name| name != "guard").collect()
    }

    /// From which addresses its guest sends.
    #[must_use]
    pub fn sends_from(&self) -> String {
        let mut words = match (self.guard.guard, self.options.learning) {
            (true, _) => "its mac only".to_owned(),
            (false, true) => "its mac and learned addresses".to_owned(),
            (false, false) => return "any address".to_owned(),
        };
        match self.ips().as_slice() {
            [] => words += ", any IP address",
            ips => words += &format!(", of IP addresses {}", ips.join(", ")),
        }
        let known = schema_for!(Guard);
        for role in self.roles() {
            let shown = &known.as_value()["properties"][&role]["x-words"];
            words += &format!("; {}", shown.as_str().unwrap_or(&role));
        }
        words
    }

    /// What differs from the defaults, without VLANs, by names of keys, for a column of a table. `in_network`: the port
    /// is part of a network, and guarded by default.
    #[must_use]
    pub fn short(&self, in_network: bool) -> String {
        let mut words = names_of_set(&self.options);
        match self.ips().as_slice() {
            [] if self.guard.guard && !in_network => words.push("guard".to_owned()),
            [] => {}
            ips => words.push(match ips.split_at_checked(FEW) {
                Some((few, more @ [_, ..])) => format!("ips {} and {} more", few.join(" "), more.len()),
                _ => format!("ips {}", ips.join(" ")),
            }),
        }
        words.extend(self.roles());
        words.extend(
            self.filter
                .as_ref()
                .map(|filter| format!("rules {}", filter.rules)),
        );
        words.join(", ")
    }
}

/// [`Guard`] as `status` and the API show it: IP addresses as a list, and names with `_`.
mod shown {
    use serde::de::Error as _;
    use serde::ser::Error as _;
    use serde::{Deserializer, Serializer};
    use serde_json::Map;

    use super::*;
    use crate::config::table::fields;

    pub(super) fn serialize<S: Serializer>(guard: &Guard, to: S) -> Result<S::Ok, S::Error> {
        let keys = serde_json::to_value(guard).map_err(S::Error::custom)?;
        let keys = keys.as_object().into_iter().flatten();
        let mut keys: Map<String, Value> = keys
            .map(|(key, it)| (key.replace('-', "_"), it.clone()))
            .collect();
        keys["ips"] = json!(guard.ips.as_ref().map_or(&[][..], |ips| &ips.0));
        keys.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Guard, D::Error> {
        let shown = Map::deserialize(from)?;
        let key = |field: &&str| Some(((*field).to_owned(), shown.get(&field.replace('-', "_"))?.clone()));
        let mut keys: Map<String, Value> = fields::<Guard>().iter().filter_map(key).collect();
        keys.retain(|_, value| *value != json!([]));
        serde_json::from_value(keys.into()).map_err(D::Error::custom)
    }

    pub(super) fn schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = Guard::json_schema(generator);
        let shown = |(key, schema): (&String, &Value)| (key.replace('-', "_"), schema.clone());
        let keys = schema.get("properties").and_then(Value::as_object);
        let mut keys: Map<String, Value> = keys.into_iter().flatten().map(shown).collect();
        keys["ips"]["type"] = "array".into();
        keys["ips"]["items"] = json!({ "type": "string" });
        let names: Vec<&String> = keys.keys().collect();
        schema.insert("required".to_owned(), json!(names));
        schema.insert("properties".to_owned(), keys.into());
        schema
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Table;

    fn policy(keys: &Value) -> Policy {
        let keys = keys.as_object().expect("an object").clone();
        Port::read(keys).expect("possible").policy()
    }

    fn trunk() -> Policy {
        policy(&json!({
            "network": "lan", "trunk": "100,200-203", "isolated": true, "hairpin": true, "router": true,
            "ips": ["192.0.2.10", "192.0.2.11", "2001:db8::/64"],
        }))
    }

    #[test]
    fn addresses_and_vlans_are_described() {
        let sends_from = |keys: Value| policy(&keys).sends_from();
        assert_eq!(
            sends_from(json!({ "guard": true })),
            "its mac only, any IP address"
        );
        assert_eq!(
            sends_from(json!({ "network": "lan", "learning": true })),
            "its mac and learned addresses, any IP address"
        );
        assert_eq!(
            trunk().sends_from(),
            "its mac only, of IP addresses 192.0.2.10, 192.0.2.11, 2001:db8::/64; as a router, too"
        );
        let access = policy(&json!({ "network": "lan", "vlan": 7 }));
        assert_eq!(access.vlans().as_deref(), Some("VLAN 7"));
        assert_eq!(trunk().vlans().as_deref(), Some("VLANs 100,200-203 with tags"));
        assert_eq!(policy(&json!({ "vlan": [7, 8] })).vlans(), None, "of its queues");
    }

    #[test]
    fn short_form_has_keys_and_the_first_addresses() {
        assert_eq!(
            trunk().short(true),
            "isolated, hairpin, ips 192.0.2.10 192.0.2.11 and 1 more, router"
        );
        let of_network = policy(&json!({ "network": "lan" }));
        let guarded = policy(&json!({ "guard": true }));
        assert_eq!([of_network.short(true), guarded.short(false)], ["", "guard"]);
    }

    #[test]
    fn document_has_a_list_of_addresses_and_is_read_again() {
        let server = policy(&json!({ "network": "lan", "ips": "192.0.2.1", "dhcp-server": true }));
        for (policy, ips, is_server) in [
            (server, json!(["192.0.2.1"]), true),
            (Policy::default(), json!([]), false),
        ] {
            let shown = json!(policy);
            assert_eq!((&shown["ips"], &shown["dhcp_server"]), (&ips, &json!(is_server)));
            assert_eq!(shown["link-control"], false);
            assert_eq!(serde_json::from_value::<Policy>(shown).expect("the same"), policy);
        }
    }
}
