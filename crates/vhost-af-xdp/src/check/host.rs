//! What the host's own traffic costs while a daemon uses the interface.

use super::facts::Facts;

/// Instructions for 64,000 bytes of TCP to the host with a network, divided by those without (docs/benchmarks.md, "The
/// host's own traffic"), and why: on veth and on igb, each in native and in skb mode.
const COSTS: [[(&str, &str); 2]; 2] = [
    [
        ("14", "the peer sends no GSO packets to a native XDP program"),
        (
            "1.4",
            "the kernel copies GSO packets for an XDP program in skb mode",
        ),
    ],
    [
        ("1.3", "measured on igb"),
        (
            "3.3",
            "measured on igb: the kernel joins no segments for an XDP program in skb mode",
        ),
    ],
];

impl Facts {
    /// `None`: no guest can receive frames through the interface.
    pub(super) fn host(&self) -> Option<String> {
        // Interfaces on top of others receive packets whole, as a veth does.
        let gets_whole = self.link.partial_checksums || !self.losses.is_empty();
        let modes = COSTS[usize::from(!gets_whole)];
        let (times, why) = modes[usize::from(self.native().is_err())];
        (!self.loopback && !self.link.has_leased_only).then(|| {
            format!("what it receives by TCP costs it {times} times the instructions beside an XDP program ({why}); not in tap mode")
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::COSTS;

    #[test]
    fn costs_are_those_that_were_measured() {
        let rows = include_str!("../../../../docs/benchmarks/whole.json");
        let rows: Vec<Value> = serde_json::from_str(rows).expect("JSON");
        for (nic, modes) in ["veth", "igb"].into_iter().zip(COSTS) {
            let of = |mode: &str| {
                let name = format!("{nic}/host/{mode}/stream-to-host/64000 x1");
                let row = rows.iter().find(|row| row["name"] == *name);
                row.and_then(|row| row["instructions"].as_f64())
                    .expect("measured")
            };
            for (mode, (times, _)) in ["native", "skb"].into_iter().zip(modes) {
                let said: f64 = times.parse().expect("a number");
                let ratio = of(mode) / of("alone");
                assert!((ratio / said - 1.0).abs() < 0.1, "{nic}, {mode}: {ratio}");
            }
            let tap = of("tap") / of("alone");
            assert!((tap - 1.0).abs() < 0.1, "{nic}, tap: {tap}");
        }
    }
}
