//! A claim's parameters for its ports.
//!
//! The keys of a [`PortConfig`](KIND) are those of `[port.NAME]` in the daemon's file (docs/keys.md) and are checked by the
//! same code ([`model::config::Port`]), except those that the driver decides. In a device class, `PortConfig` is the
//! administrator's word: a claim cannot change a key that it has. `PortDefaults` there can be changed.

use anyhow::{Context as _, anyhow, bail, ensure};
use k8s_openapi::api::resource::v1::{DeviceAllocationConfiguration, DeviceRequestAllocationResult};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use model::config::{Port, Table as _};
use model::mistakes::nearest;
use serde_json::{Map, Value};

use crate::names;

/// Version of the parameters.
const VERSION: &str = "vhost-af-xdp.dev/v1alpha1";
/// Kind of the parameters, in classes and claims.
const KIND: &str = "PortConfig";
/// Kind of parameters of a class that a claim may change.
const DEFAULTS: &str = "PortDefaults";

/// Keys of a port that a claim cannot have, and why.
const DECIDED: [(&[&str], &str); 3] = [
    (
        &["network", "socket-path"],
        "the driver sets it, by the device that was allocated and the names of claim and request",
    ),
    (
        &[
            "fd",
            "client",
            "sock-fds",
            "inhibit",
            "map-path",
            "map-fd",
            "map-start-index",
            "map-layout",
            "afxdp-plugin",
        ],
        "a port that is added while the daemon runs cannot have it",
    ),
    (
        &["ifname", "cable", "null"],
        "its frames go to and come from the network",
    ),
];

/// Keys by which a claim would loosen what its class has fixed by another key.
const LOOSENING: [(&str, &[&str]); 9] = [
    ("vlan", &["trunk"]),
    ("trunk", &["vlan"]),
    ("isolated", &["promiscuous"]),
    ("ips", &["router", "dhcp-server"]),
    ("rule", &["from-guest-default", "to-guest-default"]),
    ("from-guest-bits", &["from-guest-bits-burst"]),
    ("from-guest-packets", &["from-guest-packets-burst"]),
    ("to-guest-bits", &["to-guest-bits-burst"]),
    ("to-guest-packets", &["to-guest-packets-burst"]),
];

/// Keys that only classes can have, because they affect the guests of others.
const OF_CLASSES: [&str; 1] = ["memory-files"];

/// Keys of the port for a device of a claim: those of its class, then those of the claim.
///
/// # Errors
/// What is wrong, with the remedy.
pub(crate) fn keys(
    result: &DeviceRequestAllocationResult,
    configs: &[DeviceAllocationConfiguration],
) -> anyhow::Result<Map<String, Value>> {
    ensure!(
        result.admin_access != Some(true),
        "adminAccess is for programs that watch devices, and has no port: remove it"
    );
    let (mut keys, mut fixed) = (Map::new(), Map::new());
    let is_of_class = |config: &&DeviceAllocationConfiguration| config.source == "FromClass";
    let of_class = configs.iter().filter(is_of_class);
    let of_claim = configs.iter().filter(|config| !is_of_class(config));
    for config in of_class.chain(of_claim).filter(|config| concerns(config, result)) {
        let Some(opaque) = &config.opaque else { continue };
        let is_class = is_of_class(&config);
        let (kind, given) = read(&opaque.parameters.0, is_class)?;
        if !is_class {
            given.keys().try_for_each(|key| check_of_claim(key, &fixed))?;
        }
        if is_class && kind == KIND {
            fixed.extend(given.clone());
        }
        keys.extend(given);
    }
    // Also where defaults of a class come after them.
    keys.extend(fixed);
    keys.retain(|_, value| !value.is_null());
    set_queues(&mut keys, result)?;
    Port::read(keys.clone()).map_err(|mistake| anyhow!(mistake.what))?;
    Ok(keys)
}

/// Whether a claim can have this key, if its class has fixed those.
fn check_of_claim(key: &String, fixed: &Map<String, Value>) -> anyhow::Result<()> {
    if fixed.contains_key(key) {
        bail!("{key} is set by the DeviceClass: remove it from the claim, or use another class");
    }
    if OF_CLASSES.contains(&key.as_str()) {
        bail!("{key} can affect guests of others: only a DeviceClass can have it");
    }
    let mut loosening = LOOSENING.iter();
    match loosening.find(|(of, keys)| fixed.contains_key(*of) && keys.contains(&key.as_str())) {
        Some((fixed, _)) => bail!(
            "{key} would change {fixed}, which the DeviceClass sets: remove it from the claim, or use another class"
        ),
        None => Ok(()),
    }
}

/// Whether the configuration is for this driver and request.
fn concerns(config: &DeviceAllocationConfiguration, result: &DeviceRequestAllocationResult) -> bool {
    let is_ours = config
        .opaque
        .as_ref()
        .is_some_and(|opaque| opaque.driver == result.driver);
    let requests = config.requests.as_deref().unwrap_or_default();
    let is_meant = |request: &String| *request == result.request || *request == names::base(&result.request);
    is_ours && (requests.is_empty() || requests.iter().any(is_meant))
}

/// Kind and keys of parameters.
fn read(parameters: &Value, is_class: bool) -> anyhow::Result<(&str, Map<String, Value>)> {
    let Value::Object(all) = parameters else {
        bail!("parameters are no object: give apiVersion: {VERSION}, kind: {KIND}, and keys of a port");
    };
    let text = |key: &str| {
        all.get(key)
            .map_or_else(|| "(none)".to_owned(), ToString::to_string)
    };
    if all.get("apiVersion").and_then(Value::as_str) != Some(VERSION) {
        bail!("apiVersion = {}: give {VERSION}", text("apiVersion"));
    }
    let wrong = match is_class {
        true => "PortConfig, or PortDefaults for what claims may change",
        false => KIND,
    };
    let kind = all.get("kind").and_then(Value::as_str);
    let kind = kind.filter(|kind| *kind == KIND || (is_class && *kind == DEFAULTS));
    let kind = kind.with_context(|| format!("kind = {}: give {wrong}", text("kind")))?;
    let mut keys = all.clone();
    keys.retain(|key, _| !["apiVersion", "kind"].contains(&key.as_str()));
    for key in keys.keys() {
        if let Some((_, why)) = DECIDED
            .iter()
            .find(|(decided, _)| decided.contains(&key.as_str()))
        {
            bail!("{key}: {why}: remove it");
        }
        let kebab = kebab(key);
        if kebab != *key && nearest(&kebab, Port::schema().keys().map(String::as_str)) == Some(&*kebab) {
            bail!("unknown key {key:?}: did you mean {kebab:?}?");
        }
    }
    Ok((kind, keys))
}

/// `fromGuestBits` as `from-guest-bits`: what authors of Kubernetes objects try first.
fn kebab(key: &str) -> String {
    key.chars().fold(String::new(), |mut text, c| {
        if c.is_ascii_uppercase() {
            text.push('-');
        }
        text.push(c.to_ascii_lowercase());
        text
    })
}

/// Queue pairs are a capacity of the device: the scheduler counts them.
fn set_queues(keys: &mut Map<String, Value>, result: &DeviceRequestAllocationResult) -> anyhow::Result<()> {
    let consumed = result
        .consumed_capacity
        .as_ref()
        .and_then(|all| all.get("queues"));
    // Without consumable capacity in the cluster the device is the claim's alone.
    let Some(Quantity(consumed)) = consumed else {
        return Ok(());
    };
    let consumed: u64 = consumed.parse().map_err(|_| {
        anyhow!("the allocation has queues = {consumed:?}, which is no number: delete the pod, so that it is allocated again")
    })?;
    if let Some(given) = keys
        .get("queues")
        .filter(|given| given.as_u64() != Some(consumed))
    {
        let quoted = format!("{:?}", given.to_string());
        bail!(
            "queues = {given}, but the claim has {consumed}: request capacity `queues: {quoted}`, or remove the key"
        );
    }
    keys.insert("queues".to_owned(), consumed.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;
    use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
    use serde_json::json;

    use super::*;

    const DRIVER: &str = "vhost-af-xdp.dev";

    fn result(request: &str) -> DeviceRequestAllocationResult {
        DeviceRequestAllocationResult {
            driver: DRIVER.to_owned(),
            request: request.to_owned(),
            ..Default::default()
        }
    }

    fn config(source: &str, requests: &[&str], keys: &Value) -> DeviceAllocationConfiguration {
        let mut parameters = json!({"apiVersion": VERSION, "kind": KIND});
        let all = parameters.as_object_mut().expect("an object");
        all.extend(keys.as_object().expect("an object").clone());
        let requests = requests.iter().map(|&request| request.to_owned()).collect();
        DeviceAllocationConfiguration {
            source: source.to_owned(),
            requests: Some(requests),
            opaque: Some(OpaqueDeviceConfiguration {
                driver: DRIVER.to_owned(),
                parameters: RawExtension(parameters),
            }),
        }
    }

    fn keys_of(configs: &[DeviceAllocationConfiguration]) -> Result<Value, String> {
        let keys = keys(&result("net/fast"), configs);
        keys.map(Value::Object).map_err(|error| error.to_string())
    }

    #[test]
    fn claim_adds_to_class_and_cannot_change_it() {
        let class = || config("FromClass", &[], &json!({"vlan": 5, "from-guest-bits": "100M"}));
        let defaults = || {
            config(
                "FromClass",
                &[],
                &json!({"kind": DEFAULTS, "learning": true, "unicast-only": true}),
            )
        };
        let claim = |keys: Value| config("FromClaim", &["net"], &keys);
        let mine = || claim(json!({"mac": "02:00:00:00:00:01", "learning": false, "unicast-only": null}));
        let other = config("FromClaim", &["other"], &json!({"mac": "02:00:00:00:00:02"}));
        let wanted = json!({
            "vlan": 5, "from-guest-bits": "100M", "learning": false, "mac": "02:00:00:00:00:01"
        });
        for order in [
            vec![class(), defaults(), mine(), other.clone()],
            vec![mine(), defaults(), other, class()],
        ] {
            assert_eq!(keys_of(&order).as_ref(), Ok(&wanted));
        }
        for change in [json!({"vlan": 6}), json!({"vlan": null})] {
            let refused = keys_of(&[class(), claim(change)]).expect_err("the class's");
            assert!(refused.starts_with("vlan is set by the DeviceClass"), "{refused}");
        }
        assert_eq!(keys_of(&[]), Ok(json!({})));
    }

    #[test]
    fn claim_cannot_loosen_what_its_class_fixes() {
        for (class, claim, wanted) in [
            (
                json!({"from-guest-bits": "1M"}),
                json!({"from-guest-bits-burst": "1T"}),
                "change from-guest-bits,",
            ),
            (
                json!({"to-guest-packets": "1k"}),
                json!({"to-guest-packets-burst": "1M"}),
                "change to-guest-packets,",
            ),
            (
                json!({"ips": "192.0.2.1"}),
                json!({"router": true}),
                "change ips,",
            ),
            (
                json!({"ips": "192.0.2.1"}),
                json!({"dhcp-server": true}),
                "change ips,",
            ),
            (
                json!({"rule": ["direction=to-guest action=allow protocol=tcp"]}),
                json!({"to-guest-default": "allow"}),
                "change rule,",
            ),
            (json!({"vlan": null}), json!({"trunk": "5"}), "change vlan,"),
            (
                json!({"isolated": true}),
                json!({"promiscuous": true}),
                "change isolated,",
            ),
            (json!({}), json!({"memory-files": "any"}), "only a DeviceClass"),
        ] {
            let configs = [config("FromClaim", &[], &claim), config("FromClass", &[], &class)];
            let refused = keys_of(&configs).expect_err("loosens it");
            assert!(refused.contains(wanted), "{claim}: {refused}");
        }
        let known = Port::schema();
        let loosening = LOOSENING.iter().flat_map(|(of, keys)| keys.iter().chain([of]));
        for key in loosening.chain(&OF_CLASSES) {
            assert!(known.contains_key(*key), "{key}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_remedy() {
        for (keys, wanted) in [
            (json!({"vlna": 5}), "did you mean \"vlan\"?"),
            (
                json!({"fromGuestBits": "1M"}),
                "did you mean \"from-guest-bits\"?",
            ),
            (json!({"vlan": 5000}), "vlan = 5000"),
            (json!({"mac": "01:00:00:00:00:00"}), "multicast"),
            (json!({"rule": ["direction=sideways"]}), "rule 1"),
            (json!({"socket-path": "/etc/x"}), "the driver sets it"),
            (json!({"network": "other"}), "the driver sets it"),
            (json!({"ifname": "eth0"}), "go to and come from the network"),
            (json!({"map-path": "/sys/fs/bpf/x"}), "cannot have it"),
            (
                json!({"apiVersion": "vhost-af-xdp.dev/v9"}),
                "give vhost-af-xdp.dev/v1alpha1",
            ),
            (json!({"kind": DEFAULTS}), "give PortConfig"),
        ] {
            let refused = keys_of(&[config("FromClaim", &[], &keys)]).expect_err("a mistake");
            assert!(refused.contains(wanted), "{keys}: {refused}");
        }
        let mut list = config("FromClaim", &[], &json!({}));
        list.opaque.as_mut().expect("there").parameters.0 = json!([1]);
        let refused = keys_of(&[list]).expect_err("a list");
        assert!(refused.contains("no object"), "{refused}");
    }

    #[test]
    fn each_key_that_is_decided_is_a_key_of_ports() {
        let known = Port::schema();
        for key in DECIDED.iter().flat_map(|(keys, _)| *keys) {
            assert!(known.contains_key(*key), "{key}");
        }
    }

    #[test]
    fn queues_are_those_that_the_scheduler_counted() {
        let mut result = result("net");
        result.consumed_capacity = Some(BTreeMap::from([("queues".to_owned(), Quantity("2".to_owned()))]));
        let claim = |count: u16| [config("FromClaim", &[], &json!({"queues": count}))];
        assert_eq!(keys(&result, &[]).expect("allowed")["queues"], 2);
        assert_eq!(keys(&result, &claim(2)).expect("allowed")["queues"], 2);
        let refused = keys(&result, &claim(4)).expect_err("too many").to_string();
        assert!(refused.contains("request capacity `queues: \"4\"`"), "{refused}");
        // More than was counted must not pass.
        let all = result.consumed_capacity.as_mut().expect("there");
        all.insert("queues".to_owned(), Quantity("1500m".to_owned()));
        let refused = keys(&result, &claim(128)).expect_err("no number").to_string();
        assert!(refused.contains("1500m"), "{refused}");
        // The scheduler counts nothing for access as administrator.
        result.consumed_capacity = None;
        result.admin_access = Some(true);
        let refused = keys(&result, &claim(128)).expect_err("not counted").to_string();
        assert!(refused.contains("adminAccess"), "{refused}");
    }
}
