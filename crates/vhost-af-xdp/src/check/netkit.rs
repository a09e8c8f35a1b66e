//! What to type where somebody asked for a netkit without a peer, which queues of a NIC are leased to (Linux 7.1).

/// Why nothing else is had there.
pub(super) const REFUSED: &str = "frames come by the queue of a NIC that is leased to it, which only a program on that \
                                  NIC sees: --inhibit with a map, below";

/// Goals, and the lines that lead there. Its queues are its own and those that are leased to it.
pub(super) fn lines(name: &str, queues: u32) -> Vec<(&'static str, Vec<String>)> {
    let none =
        format!("# no queue is leased to {name}: `vhost-af-xdp netkit` has the steward make one that has");
    let serve = [
        "# MAP: pinned by who leased it the queue (`vhost-af-xdp netkit --pin MAP`)".to_owned(),
        format!(
            "vhost-af-xdp serve --socket-path /run/vm1.sock --ifname {name} --start-queue 1 --inhibit --map-path MAP"
        ),
    ];
    vec![(
        "one guest on the leased queue",
        match queues {
            0 | 1 => vec![none],
            _ => serve.to_vec(),
        },
    )]
}
