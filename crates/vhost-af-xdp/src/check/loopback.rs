//! Advice for the loopback interface, behind which there can be no guest.

/// Why it cannot be used, and what to use instead.
pub(super) fn unusable(name: &str) -> String {
    format!(
        "{name} is this host with itself, no LAN and no guest is behind it: use a network without an uplink, a pair of \
         interfaces, or a NIC"
    )
}

/// Goals, and the lines to type for each, in reading order.
pub(super) fn lines() -> Vec<(&'static str, Vec<String>)> {
    let advice = |goal, lines: &[&str]| (goal, lines.iter().map(|&line| line.to_owned()).collect());
    vec![
        advice(
            "guests among themselves",
            &[
                "# a network without an uplink, which takes no interface and no privilege, in \
                 /etc/vhost-af-xdp/inner.toml:",
                "[network.inner]",
                "# and [port.vm1] with network, socket-path and mac for each guest (docs/networks.md); then",
                "vhost-af-xdp serve --config /etc/vhost-af-xdp/inner.toml",
            ],
        ),
        advice(
            "guests and this host",
            &[
                "# a pair of interfaces: guests have vms as their uplink, the host an address of theirs at vms-host",
                "ip link add vms type veth peer name vms-host",
                "ip link set dev vms up",
                "ip link set dev vms-host up",
                "ip address add 192.0.2.1/24 dev vms-host",
                "vhost-af-xdp check vms",
            ],
        ),
        advice(
            "guests on a LAN",
            &["# its NIC: `ip -br link` lists them, `vhost-af-xdp check NAME` checks one"],
        ),
    ]
}
