//! The status in the text format of Prometheus (version 0.0.4).
//!
//! Each family is an entry of [`FAMILIES`]: its name, its help, and how its samples are read off a [`Status`].
//! docs/api.md shows the table; a test compares them.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use model::state::{KERNEL_CALLS, Named, PortStatus, Reading, Status};

/// Media type of what [`render`] makes.
pub(super) const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics of one name.
struct Family {
    name: &'static str,
    /// `counter` or `gauge`.
    kind: &'static str,
    help: &'static str,
    samples: fn(&Status, &mut Samples),
}

const FAMILIES: &[Family] = &[
    Family {
        name: "vhost_af_xdp_build_info",
        kind: "gauge",
        help: "Version of the daemon.",
        samples: |status, samples| samples.add(&[("version", &status.version)], 1),
    },
    Family {
        name: "vhost_af_xdp_cpu_seconds_total",
        kind: "counter",
        help: "CPU time of all threads of the daemon.",
        samples: |status, samples| samples.add(&[], Micros(status.cpu_us)),
    },
    Family {
        name: "vhost_af_xdp_port_info",
        kind: "gauge",
        help: "What a port is: its NIC, the driver, how the XDP program is attached, memory, and address.",
        samples: |status, samples| {
            each_port(status, |port, labels| {
                let text = |value: &Option<String>| value.clone().unwrap_or_default();
                let (attached, driver) = (text(&port.attached), text(&port.driver));
                let more: [(&str, &str); 5] = [
                    ("nic", &port.nic),
                    ("driver", &driver),
                    ("attached", &attached),
                    ("memory", &port.memory),
                    ("mac", &port.mac),
                ];
                samples.add(&[labels, &more[..]].concat(), 1);
            });
        },
    },
    Family {
        name: "vhost_af_xdp_pair_info",
        kind: "gauge",
        help: "How a queue pair that a guest uses moves frames: its data path (mode), and the NIC's queue.",
        samples: |status, samples| {
            each_port(status, |port, labels| {
                for lane in port.lanes.iter().filter(|lane| lane.running) {
                    let pair = lane.pair.to_string();
                    let queue = lane.queue.map_or(String::new(), |queue| queue.to_string());
                    let mode = lane.mode.clone().unwrap_or_default();
                    let more: [(&str, &str); 3] = [("pair", &pair), ("queue", &queue), ("mode", &mode)];
                    samples.add(&[labels, &more[..]].concat(), 1);
                }
            });
        },
    },
    Family {
        name: "vhost_af_xdp_port_connected",
        kind: "gauge",
        help: "1 while a VMM is connected to the port.",
        samples: |status, samples| {
            each_port(status, |port, labels| {
                samples.add(labels, u8::from(port.connected));
            });
        },
    },
    Family {
        name: "vhost_af_xdp_port_impaired",
        kind: "gauge",
        help: "1 while no frames move although they should; GET /v1/ports says why.",
        samples: |status, samples| {
            each_port(status, |port, labels| {
                samples.add(labels, u8::from(port.impaired.is_some()));
            });
        },
    },
    Family {
        name: "vhost_af_xdp_sessions_total",
        kind: "counter",
        help: "Connections of VMMs to the port.",
        samples: |status, samples| each_port(status, |port, labels| samples.add(labels, port.sessions)),
    },
    Family {
        name: "vhost_af_xdp_frames_total",
        kind: "counter",
        help: "Frames moved; segments of a packet that was cut count each.",
        samples: |status, samples| each_direction(status, samples, "frames"),
    },
    Family {
        name: "vhost_af_xdp_bytes_total",
        kind: "counter",
        help: "Bytes of these frames, without the virtio-net header.",
        samples: |status, samples| each_direction(status, samples, "bytes"),
    },
    Family {
        name: "vhost_af_xdp_drops_total",
        kind: "counter",
        help: "Frames lost, by the counter that says why and by who counts it: lane, socket or program.",
        samples: |status, samples| each_counter(status, samples, "reason", true),
    },
    Family {
        name: "vhost_af_xdp_operations_total",
        kind: "counter",
        help: "What else is counted and is no loss, by the counter's name and by who counts it.",
        samples: |status, samples| each_counter(status, samples, "operation", false),
    },
    Family {
        name: "vhost_af_xdp_network_info",
        kind: "gauge",
        help: "What a network is: its uplink, the driver, how the XDP program is attached.",
        samples: |status, samples| {
            for network in &status.networks {
                let text = |value: &Option<String>| value.clone().unwrap_or_default();
                let (uplink, driver) = (text(&network.uplink), text(&network.driver));
                let attached = text(&network.attached);
                let labels: [Label<'_>; 4] = [
                    ("network", &network.name),
                    ("uplink", &uplink),
                    ("driver", &driver),
                    ("attached", &attached),
                ];
                samples.add(&labels, 1);
            }
        },
    },
    Family {
        name: "vhost_af_xdp_network_impaired",
        kind: "gauge",
        help: "1 while no frames move over the uplink although they should; GET /v1/networks says why.",
        samples: |status, samples| {
            for network in &status.networks {
                let labels: [Label<'_>; 1] = [("network", &network.name)];
                samples.add(&labels, u8::from(network.impaired.is_some()));
            }
        },
    },
    Family {
        name: "vhost_af_xdp_learned_evicted_total",
        kind: "counter",
        help: "Learned addresses of a network that were evicted: others needed their room.",
        samples: |status, samples| {
            for network in &status.networks {
                samples.add(&[("network", network.name.as_str())], network.learned_evicted);
            }
        },
    },
    Family {
        name: "vhost_af_xdp_packet_memory_bytes",
        kind: "gauge",
        help: "Packet memory of the port in the daemon.",
        samples: |status, samples| {
            each_port(status, |port, labels| {
                samples.add(
                    labels,
                    port.lanes.iter().map(|lane| lane.packet_bytes).sum::<u64>(),
                );
            });
        },
    },
    Family {
        name: "vhost_af_xdp_worker_rounds_total",
        kind: "counter",
        help: "Rounds of a worker: busy ones moved frames, idle ones did not.",
        samples: |status, samples| {
            for (index, worker) in status.workers.iter().enumerate() {
                let index = index.to_string();
                for (state, rounds) in [("busy", worker.busy_rounds), ("idle", worker.idle_rounds)] {
                    samples.add(&[("worker", &index), ("state", state)], rounds);
                }
            }
        },
    },
    Family {
        name: "vhost_af_xdp_worker_seconds_total",
        kind: "counter",
        help: "What a worker did with its time: busy in rounds that moved frames, idle in others, asleep.",
        samples: |status, samples| {
            for (index, worker) in status.workers.iter().enumerate() {
                let index = index.to_string();
                let states = [
                    ("busy", worker.busy_ns),
                    ("idle", worker.idle_ns),
                    ("asleep", worker.asleep_ns),
                ];
                for (state, ns) in states {
                    let seconds = Micros(ns / 1_000);
                    samples.add(&[("worker", &index), ("state", state)], seconds);
                }
            }
        },
    },
    Family {
        name: "vhost_af_xdp_worker_frames_total",
        kind: "counter",
        help: "Frames that a worker took of guests, NICs and the host (in), and gave (out).",
        samples: |status, samples| {
            each_worker(status, |worker, total| {
                for (direction, frames) in [("in", total.frames_in), ("out", total.frames_out)] {
                    samples.add(&[("worker", worker), ("direction", direction)], frames);
                }
            });
        },
    },
    Family {
        name: "vhost_af_xdp_worker_batches_total",
        kind: "counter",
        help: "How often a worker took some at once.",
        samples: |status, samples| {
            each_worker(status, |worker, total| {
                samples.add(&[("worker", worker)], total.batches.iter().sum::<u64>());
            });
        },
    },
    Family {
        name: "vhost_af_xdp_worker_kernel_calls_total",
        kind: "counter",
        help: "Calls of the kernel: kick (sendto), wake (recvfrom), host (tap device), call (guest's interrupt).",
        samples: |status, samples| {
            each_worker(status, |worker, total| {
                for (call, calls) in KERNEL_CALLS.iter().zip(&total.calls) {
                    samples.add(&[("worker", worker), ("call", call)], calls.all);
                }
            });
        },
    },
    Family {
        name: "vhost_af_xdp_worker_sleeps_total",
        kind: "counter",
        help: "Times that a worker slept.",
        samples: |status, samples| {
            for (index, worker) in status.workers.iter().enumerate() {
                samples.add(&[("worker", &index.to_string())], worker.sleeps);
            }
        },
    },
    Family {
        name: "vhost_af_xdp_worker_hangs",
        kind: "gauge",
        help: "1 while a worker hangs; GET /v1/status says in which port.",
        samples: |status, samples| {
            for (index, worker) in status.workers.iter().enumerate() {
                samples.add(
                    &[("worker", &index.to_string())],
                    u8::from(worker.hangs.is_some()),
                );
            }
        },
    },
];

type Label<'a> = (&'a str, &'a str);

/// What each worker did since it started.
fn each_worker(status: &Status, mut add: impl FnMut(&str, &Reading)) {
    for (index, reading) in status.work.iter().enumerate() {
        add(&index.to_string(), &reading.total);
    }
}

/// Labels of every port's metrics: a network's ports have its name there.
fn each_port(status: &Status, mut add: impl FnMut(&PortStatus, &[Label<'_>])) {
    for port in &status.ports {
        let network = port.network.as_deref().unwrap_or("");
        add(port, &[("network", network), ("port", &port.name)]);
    }
}

fn each_direction(status: &Status, samples: &mut Samples, what: &str) {
    each_port(status, |port, labels| {
        for direction in ["from_guest", "to_guest"] {
            let counter = format!("{direction}_{what}");
            let value: u64 = port.lanes.iter().map(|lane| lane.counter(&counter)).sum();
            samples.add(&[labels, &[("direction", direction)]].concat(), value);
        }
    });
}

fn each_counter(status: &Status, samples: &mut Samples, label: &str, drops: bool) {
    each_port(status, |port, labels| {
        let counters = port.lanes.iter().flat_map(|lane| &lane.counters);
        add_counters(samples, labels, counters, (label, drops));
    });
    for network in &status.networks {
        let of_host = network.host.iter().map(|host| &host.queue);
        let lanes = network.queues.iter().chain(of_host);
        let counters = lanes.flat_map(|lane| &lane.counters);
        let labels = [("network", network.name.as_str()), ("port", "")];
        let counters = counters.chain(&network.groups).chain(&network.links);
        add_counters(samples, &labels, counters, (label, drops));
    }
}

/// All but those that have a family of their own.
fn add_counters<'a>(
    samples: &mut Samples,
    labels: &[Label<'_>],
    counters: impl Iterator<Item = &'a Named>,
    (label, drops): (&str, bool),
) {
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
    for ((name, source), value) in sums {
        samples.add(&[labels, &[(label, name), ("source", source)]].concat(), value);
    }
}

/// Seconds, from microseconds.
struct Micros(u64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

/// The samples of a family, as text.
struct Samples {
    name: &'static str,
    text: String,
}

impl Samples {
    fn add(&mut self, labels: &[Label<'_>], value: impl fmt::Display) {
        self.text.push_str(self.name);
        let mut separator = '{';
        for (label, value) in labels {
            self.text.push(separator);
            // Writing to a String cannot fail.
            let _ = write!(self.text, "{label}=\"{}\"", escaped(value));
            separator = ',';
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// All metrics.
pub(super) fn render(status: &Status) -> String {
    let mut text = String::new();
    for family in FAMILIES {
        let mut samples = Samples {
            name: family.name,
            text: String::new(),
        };
        (family.samples)(status, &mut samples);
        let Family { name, kind, help, .. } = family;
        let _ = write!(
            text,
            "# HELP {name} {help}\n# TYPE {name} {kind}\n{}",
            samples.text
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_tell_of_each_family() {
        let document = include_str!("../../../docs/api.md");
        for family in FAMILIES {
            let row = format!("| `{}` | {} |", family.name, family.kind);
            assert!(document.contains(&row), "docs/api.md has no row {row}");
        }
    }

    #[test]
    fn names_cannot_leave_their_quotes() {
        let mut samples = Samples {
            name: "m",
            text: String::new(),
        };
        samples.add(&[("port", "a\"} 1\nm \\")], 2);
        assert_eq!(samples.text, "m{port=\"a\\\"} 1\\nm \\\\\"} 2\n");
        samples.add(&[], Micros(1_000_020));
        assert!(samples.text.ends_with("\nm 1.000020\n"), "{}", samples.text);
    }
}
