//! `vhost-af-xdp check --try` on a wire: what it says beforehand, what it tries, and what `serve` then does are one.

use testkit::daemon::binary;
use testkit::{VethPair, Wire, kernel};

use crate::kit::{Seen, start_with};
use crate::setting::Setting;

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire) -> Seen {
    let pair = wire.lay();
    let args = ["check", VethPair::NIC, "--try", "--json"];
    let said = pair.near.output_of(binary().to_str().expect("a path"), &args);
    let report: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let tried = &report["tried"];
    assert_eq!(tried["refused"], serde_json::Value::Null, "{report:#}");
    // Older kernels do not say whether a NIC takes a program natively.
    let is_said = kernel::version() >= (6, 3) || wire.driver() == "veth";
    for (at, setting) in [Setting::AUTO, Setting::SEND_DIRECT, Setting::INTO_GUEST]
        .iter()
        .enumerate()
        .filter(|_| is_said)
    {
        let placement = &report["placements"][at];
        assert_eq!(placement["mode"], setting.expected(wire.driver()), "{report:#}");
    }
    let link = pair.near.output_of("ip", &["link", "show", "dev", VethPair::NIC]);
    assert!(!link.contains("xdp"), "a program stayed behind: {link}");

    let rig = start_with(pair, &Setting::AUTO.serve(), &Setting::AUTO.guest());
    let seen = Seen::of(&rig.daemon);
    // AF_XDP is tried.
    let by_xdp = Setting::DEFAULT.expected(wire.driver());
    assert_eq!(tried["mode"], by_xdp, "{report:#}");
    let why = report["placements"][0]["why_not_more"]
        .as_array()
        .into_iter()
        .flatten();
    let is_foreseen = report["placements"][0]["mode"] == seen.mode;
    let why: Vec<_> = why
        .filter(|_| is_foreseen)
        .filter_map(|reason| reason.as_str())
        .collect();
    // What the kernel says of a bind that was tried is known afterwards only.
    for reason in why {
        assert!(seen.note.contains(reason), "{reason}: {}", seen.note);
    }
    seen
}
