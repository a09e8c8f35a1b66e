//! The state of the daemon as metrics, in the text format of Prometheus (version 0.0.4).
//!
//! Each family is an entry of [`FAMILIES`]: its name, its help, and its samples of a [`Status`]. docs/api.md shows the
//! table; a test compares them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use model::state::{KERNEL_CALLS, Named, NetworkStatus, PortStatus, Status, Traffic};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;

/// Media type of the text of [`render`].
pub(super) use prometheus_client::encoding::prometheus_text::CONTENT_TYPE as MEDIA_TYPE;

/// Metrics of one name.
struct Family {
    /// For a counter without `_total`, which the format adds.
    name: &'static str,
    kind: MetricType,
    help: &'static str,
    samples: fn(&Status) -> Vec<Sample>,
}

type Labels = Vec<(&'static str, String)>;

struct Sample {
    labels: Labels,
    value: Value,
}

enum Value {
    Count(u64),
    Seconds(f64),
}

const fn counter(name: &'static str, help: &'static str, samples: fn(&Status) -> Vec<Sample>) -> Family {
    Family {
        name,
        kind: MetricType::Counter,
        help,
        samples,
    }
}

const fn gauge(name: &'static str, help: &'static str, samples: fn(&Status) -> Vec<Sample>) -> Family {
    Family {
        name,
        kind: MetricType::Gauge,
        help,
        samples,
    }
}

const FAMILIES: &[Family] = &[
    gauge("vhost_af_xdp_build_info", "Version of the daemon.", |status| {
        vec![count([("version", status.version.clone())], 1)]
    }),
    counter(
        "vhost_af_xdp_cpu_seconds",
        "CPU time of all threads of the daemon.",
        |status| vec![seconds([], status.cpu_us as f64 / 1e6)],
    ),
    gauge(
        "vhost_af_xdp_port_info",
        "What a port is: its NIC, the driver, how the XDP program is attached, memory, and address.",
        |status| {
            of_ports(status, |port| {
                let labels = [
                    ("nic", port.nic.clone()),
                    ("driver", text(port.driver.as_ref())),
                    ("attached", text(port.attached.as_ref())),
                    ("memory", port.memory.clone()),
                    ("mac", port.mac.clone()),
                ];
                vec![count(labels, 1)]
            })
        },
    ),
    gauge(
        "vhost_af_xdp_pair_info",
        "How a queue pair that a guest uses moves frames: its data path (mode), and the NIC's queue.",
        |status| {
            of_ports(status, |port| {
                let running = port.lanes.iter().filter(|lane| lane.running);
                let info = running.map(|lane| {
                    let labels = [
                        ("pair", lane.pair.to_string()),
                        ("queue", text(lane.queue)),
                        ("mode", text(lane.mode.as_ref())),
                    ];
                    count(labels, 1)
                });
                info.collect()
            })
        },
    ),
    gauge(
        "vhost_af_xdp_port_connected",
        "1 while a VMM is connected to the port.",
        |status| of_ports(status, |port| vec![count([], port.connected.into())]),
    ),
    gauge(
        "vhost_af_xdp_port_impaired",
        "1 while no frames move although they should; GET /v1/ports says why.",
        |status| of_ports(status, |port| vec![count([], port.impaired.is_some().into())]),
    ),
    counter(
        "vhost_af_xdp_sessions",
        "Connections of VMMs to the port.",
        |status| of_ports(status, |port| vec![count([], port.sessions)]),
    ),
    counter(
        "vhost_af_xdp_frames",
        "Frames moved; each segment of a GSO packet counts.",
        |status| {
            of_directions(status, |traffic| {
                [traffic.from_guest_frames, traffic.to_guest_frames]
            })
        },
    ),
    counter(
        "vhost_af_xdp_bytes",
        "Bytes of these frames, without the virtio-net header.",
        |status| {
            of_directions(status, |traffic| {
                [traffic.from_guest_bytes, traffic.to_guest_bytes]
            })
        },
    ),
    counter(
        "vhost_af_xdp_drops",
        "Frames dropped, by the counter's name (reason) and by who counts: lane, socket or program.",
        |status| of_counters(status, "reason", true),
    ),
    counter(
        "vhost_af_xdp_operations",
        "Other events, which are no losses, by the counter's name and by who counts.",
        |status| of_counters(status, "operation", false),
    ),
    gauge(
        "vhost_af_xdp_network_info",
        "What a network is: its uplink, the driver, how the XDP program is attached.",
        |status| {
            let info = status.networks.iter().map(|network| {
                let labels = [
                    ("network", network.name.clone()),
                    ("uplink", text(network.uplink.as_ref())),
                    ("driver", text(network.driver.as_ref())),
                    ("attached", text(network.attached.as_ref())),
                ];
                count(labels, 1)
            });
            info.collect()
        },
    ),
    gauge(
        "vhost_af_xdp_network_impaired",
        "1 while no frames move over the uplink although they should; GET /v1/networks says why.",
        |status| of_networks(status, |network| network.impaired.is_some().into()),
    ),
    counter(
        "vhost_af_xdp_learned_evicted",
        "Learned addresses of a network that were evicted to make room for others.",
        |status| of_networks(status, |network| network.learned_evicted),
    ),
    gauge(
        "vhost_af_xdp_packet_memory_bytes",
        "Packet memory of the port in the daemon.",
        |status| {
            of_ports(status, |port| {
                vec![count([], port.lanes.iter().map(|lane| lane.packet_bytes).sum())]
            })
        },
    ),
    counter(
        "vhost_af_xdp_worker_rounds",
        "Rounds of a worker: busy ones moved frames, idle ones did not.",
        |status| {
            of_each(&status.workers, |worker| {
                let states = [("busy", worker.busy_rounds), ("idle", worker.idle_rounds)];
                by_label("state", states)
            })
        },
    ),
    counter(
        "vhost_af_xdp_worker_seconds",
        "Time of a worker: busy in rounds that moved frames, idle in others, asleep.",
        |status| {
            of_each(&status.workers, |worker| {
                let states = [
                    ("busy", worker.busy_ns),
                    ("idle", worker.idle_ns),
                    ("asleep", worker.asleep_ns),
                ];
                states
                    .map(|(state, ns)| seconds([("state", state.to_owned())], ns as f64 / 1e9))
                    .into()
            })
        },
    ),
    counter(
        "vhost_af_xdp_worker_frames",
        "Frames that a worker took from guests, NICs and the host (in), and delivered (out).",
        |status| {
            of_each(&status.work, |work| {
                by_label(
                    "direction",
                    [("in", work.total.frames_in), ("out", work.total.frames_out)],
                )
            })
        },
    ),
    counter(
        "vhost_af_xdp_worker_batches",
        "Batches of frames that a worker took.",
        |status| {
            of_each(&status.work, |work| {
                vec![count([], work.total.batches.iter().sum())]
            })
        },
    ),
    counter(
        "vhost_af_xdp_worker_kernel_calls",
        "System calls: kick (sendto), wake (recvfrom), host (tap device), call (guest's interrupt).",
        |status| {
            of_each(&status.work, |work| {
                by_label(
                    "call",
                    KERNEL_CALLS
                        .into_iter()
                        .zip(work.total.calls.map(|calls| calls.all)),
                )
            })
        },
    ),
    counter(
        "vhost_af_xdp_worker_sleeps",
        "Times that a worker slept.",
        |status| of_each(&status.workers, |worker| vec![count([], worker.sleeps)]),
    ),
    gauge(
        "vhost_af_xdp_worker_hangs",
        "1 while a worker hangs; GET /v1/status says in which port.",
        |status| {
            of_each(&status.workers, |worker| {
                vec![count([], worker.hangs.is_some().into())]
            })
        },
    ),
];

fn count(labels: impl Into<Labels>, value: u64) -> Sample {
    Sample {
        labels: labels.into(),
        value: Value::Count(value),
    }
}

fn seconds(labels: impl Into<Labels>, value: f64) -> Sample {
    Sample {
        labels: labels.into(),
        value: Value::Seconds(value),
    }
}

fn text(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

fn by_label<'a>(label: &'static str, values: impl IntoIterator<Item = (&'a str, u64)>) -> Vec<Sample> {
    let values = values.into_iter();
    values
        .map(|(name, value)| count([(label, name.to_owned())], value))
        .collect()
}

/// Samples with these labels before their own.
fn with(labels: &Labels, samples: Vec<Sample>) -> impl Iterator<Item = Sample> {
    samples.into_iter().map(|Sample { labels: own, value }| Sample {
        labels: labels.iter().cloned().chain(own).collect(),
        value,
    })
}

/// Samples of all workers, by number.
fn of_each<T>(workers: &[T], samples: impl Fn(&T) -> Vec<Sample>) -> Vec<Sample> {
    let workers = workers.iter().enumerate();
    let all = workers.flat_map(|(index, worker)| {
        with(&vec![("worker", index.to_string())], samples(worker)).collect::<Vec<_>>()
    });
    all.collect()
}

/// Samples of all ports; a port of a network has its name, too.
fn of_ports(status: &Status, samples: impl Fn(&PortStatus) -> Vec<Sample>) -> Vec<Sample> {
    let all = status.ports.iter().flat_map(|port| {
        let labels = vec![
            ("network", text(port.network.as_ref())),
            ("port", port.name.clone()),
        ];
        with(&labels, samples(port)).collect::<Vec<_>>()
    });
    all.collect()
}

/// A value of each network.
fn of_networks(status: &Status, value: fn(&NetworkStatus) -> u64) -> Vec<Sample> {
    let networks = status.networks.iter();
    let samples = networks.map(|network| count([("network", network.name.clone())], value(network)));
    samples.collect()
}

/// A value of all ports for each direction: from guest, to guest.
fn of_directions(status: &Status, of: fn(Traffic) -> [u64; 2]) -> Vec<Sample> {
    of_ports(status, |port| {
        let [from_guest, to_guest] = of(port.traffic());
        by_label("direction", [("from_guest", from_guest), ("to_guest", to_guest)])
    })
}

fn of_counters(status: &Status, label: &'static str, drops: bool) -> Vec<Sample> {
    let mut all = of_ports(status, |port| {
        sums(port.lanes.iter().flat_map(|lane| &lane.counters), label, drops)
    });
    for network in &status.networks {
        let counters = network.lanes().flat_map(|(_, lane)| &lane.counters);
        let counters = counters.chain(&network.groups);
        let labels = vec![("network", network.name.clone()), ("port", String::new())];
        all.extend(with(&labels, sums(counters, label, drops)));
    }
    all
}

/// Sums by name and source, without those that have a family of their own.
fn sums<'a>(counters: impl Iterator<Item = &'a Named>, label: &'static str, drops: bool) -> Vec<Sample> {
    let has_own = |name: &str| {
        let what = name
            .strip_prefix("from_guest_")
            .or(name.strip_prefix("to_guest_"));
        what.is_some_and(|what| ["frames", "bytes"].contains(&what))
    };
    let mut sums: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for counter in counters.filter(|counter| counter.drop == drops && !has_own(&counter.name)) {
        *sums.entry((&counter.name, &counter.source)).or_default() += counter.value;
    }
    let samples = sums.into_iter().map(|((name, source), value)| {
        count([(label, name.to_owned()), ("source", source.to_owned())], value)
    });
    samples.collect()
}

/// Encodes all families.
#[derive(Debug)]
struct Metrics(Arc<Status>);

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Family {
            name,
            kind,
            help,
            samples,
        } in FAMILIES
        {
            let mut family = encoder.encode_descriptor(name, help, None, *kind)?;
            for Sample { labels, value } in samples(&self.0) {
                let mut metric = family.encode_family(&labels)?;
                let no_exemplar = None::<&Exemplar<Labels, f64>>;
                match (kind, value) {
                    (MetricType::Counter, Value::Count(count)) => metric.encode_counter(&count, no_exemplar),
                    (MetricType::Counter, Value::Seconds(seconds)) => {
                        metric.encode_counter(&seconds, no_exemplar)
                    }
                    (_, Value::Count(count)) => metric.encode_gauge(&count),
                    (_, Value::Seconds(seconds)) => metric.encode_gauge(&seconds),
                }?;
            }
        }
        Ok(())
    }
}

/// All metrics.
pub(super) fn render(status: Arc<Status>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics(status)));
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = prometheus_text::encode(&mut text, &registry);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn document_has_each_family() {
        let document = include_str!("../../../docs/api.md");
        for Family { name, kind, .. } in FAMILIES {
            let name = name.trim_start_matches("vhost_af_xdp_");
            let total = if matches!(kind, MetricType::Counter) {
                "_total"
            } else {
                ""
            };
            assert!(
                document.contains(&format!("`{name}{total}`")),
                "docs/api.md lacks {name}"
            );
        }
    }
}
