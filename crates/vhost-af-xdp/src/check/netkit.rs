//! Advice for a netkit without a peer, to which queues of a NIC are leased (Linux 7.1).

/// Why it can only be used with a program on the NIC.
pub(super) const REFUSED: &str = "frames come by the queue of a NIC that is leased to it, which only a program on that \
                                  NIC sees: --inhibit with a map, below";

/// For a netkit that has no queue but its own.
pub(super) fn not_leased(name: &str) -> String {
    format!("no queue is leased to {name}: `vhost-af-xdp netkit` has the steward make one that has")
}

/// Goals, and the lines to type for each.
pub(super) fn lines(name: &str) -> Vec<(&'static str, Vec<String>)> {
    let serve = [
        "# MAP: pinned by who leased it the queue (`vhost-af-xdp netkit --pin MAP`)".to_owned(),
        format!(
            "vhost-af-xdp serve --socket-path /run/vm1.sock --ifname {name} --start-queue 1 --inhibit --map-path MAP"
        ),
    ];
    vec![("one guest on the leased queue", serve.to_vec())]
}
