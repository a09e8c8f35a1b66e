//! Rules for io_uring zero-copy receive: users, queues and flows.
//!
//! A queue's lessee sees the payload of all frames that the queue receives. So a rule names the allowed flows, each by
//! the local address and port of its connections. No lease gets other flows.

use program::peer::Credentials;
use steward::policy::{Policy, Rule, flows_text, listed};
use steward_protocol::{Reason, Refusal, ZcrxWanted};

/// The first rule that allows a queue and all its flows. `leased` returns how many queues are leased under a rule.
pub(super) fn find(
    policy: &Policy,
    peer: &Credentials,
    wanted: &ZcrxWanted,
    leased: impl Fn(usize) -> u32,
) -> Result<usize, Refusal> {
    let ZcrxWanted { interface, queue, .. } = wanted;
    let uid = peer.uid;
    let mut text = format!(
        "user {uid} may not lease queues of {interface} for zero-copy receive: the policy has no rule for that: \
         add one with `user = {uid}`, `interface = {interface:?}` and `zcrx = [\"ADDRESS:PORT\"]`"
    );
    for (index, rule) in policy.rules_for(peer) {
        if rule.interface != *interface || rule.zcrx.is_empty() {
            continue;
        }
        match check(rule, wanted, leased(index)) {
            Ok(()) => return Ok(index),
            Err(why) => {
                text = format!(
                    "user {uid}, queue {queue} of {interface}: {why} (rule {})",
                    index + 1
                );
            }
        }
    }
    Reason::NotAllowed.refuse(text)
}

/// Errors: why not.
fn check(rule: &Rule, wanted: &ZcrxWanted, leased: u32) -> Result<(), String> {
    if !rule.queues.contains(&wanted.queue) {
        let may = listed(&rule.queues);
        return Err(format!(
            "the policy allows {may}: ask for one of these, or widen `queues`"
        ));
    }
    if let Some(flow) = wanted.flows.iter().find(|flow| !rule.zcrx.contains(flow)) {
        return Err(format!(
            "the policy does not allow flows to {flow}, it allows {}: add it to `zcrx`",
            flows_text(&rule.zcrx)
        ));
    }
    if leased >= rule.at_most {
        return Err(format!(
            "the policy allows {} queue(s) at a time, {leased} are leased: raise `at-most`",
            rule.at_most
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use steer::{Filter, ModeRequest};

    use super::*;
    use steward_protocol::Wanted;

    const RULES: &str = "[[allow]]\nuser = 7\ninterface = \"eth1\"\nqueues = \"2-3\"\nat-most = 1\n\
                         zcrx = [\"192.0.2.1:443\", \"[2001:db8::1]:443\"]\n\
                         [[allow]]\nuser = 8\ninterface = \"eth1\"\nqueues = \"all\"\n";

    fn policy(text: &str) -> Result<Policy, String> {
        Policy::parse(Path::new("p.toml"), text).map_err(|error| steer::with_sources(&error))
    }

    fn peer(uid: u32) -> Credentials {
        Credentials {
            pid: 1,
            uid,
            gid: uid,
            groups: Vec::new(),
        }
    }

    fn wanted(queue: u32, flows: &[&str]) -> ZcrxWanted {
        let flows = flows
            .iter()
            .map(|flow| flow.parse().expect("an address and a port"));
        ZcrxWanted {
            interface: "eth1".to_owned(),
            queue,
            flows: flows.collect(),
        }
    }

    #[test]
    fn queue_is_allowed_by_user_and_flows_and_rejected_with_the_remedy() {
        let policy = policy(RULES).expect("a policy");
        let find = |uid, queue, flows: &[&str], leased| {
            super::find(&policy, &peer(uid), &wanted(queue, flows), |_| leased)
                .map_err(|refusal| refusal.text)
        };
        assert_eq!(find(7, 2, &["192.0.2.1:443", "[2001:db8::1]:443"], 0), Ok(0));
        for (asked, words) in [
            (find(8, 2, &["192.0.2.1:443"], 0), "`zcrx = [\"ADDRESS:PORT\"]`"),
            (find(9, 2, &["192.0.2.1:443"], 0), "`user = 9`"),
            (find(7, 1, &["192.0.2.1:443"], 0), "widen `queues`"),
            (find(7, 2, &["192.0.2.1:22"], 0), "flows to 192.0.2.1:22"),
            (
                find(7, 2, &["192.0.2.1:443", "192.0.2.2:443"], 0),
                "add it to `zcrx`",
            ),
            (find(7, 2, &["192.0.2.1:443"], 1), "raise `at-most`"),
        ] {
            let refused = asked.expect_err(words);
            assert!(refused.contains(words), "{refused}");
        }
        assert!(policy.allows_zcrx() && !policy.rule(0).zcrx_setup);
        assert_eq!(policy.warnings, [] as [&str; 0]);
    }

    fn af_xdp(queue: u32) -> Wanted {
        Wanted {
            interface: "eth1".to_owned(),
            start_queue: queue,
            queues: 1,
            mode: ModeRequest::Xdp,
            filter: Filter::default(),
            network: false,
        }
    }

    #[test]
    fn only_af_xdp_false_rejects_af_xdp_leases() {
        let lease = |text: &str| {
            let policy = policy(text).expect("a policy");
            let found = policy.find(&peer(7), &af_xdp(2), |_| 0);
            found.map_err(|refusal| refusal.text)
        };
        assert_eq!(lease(RULES), Ok(0), "as it was before there was a key");
        let with_af_xdp = |value: &str| RULES.replacen("at-most", &format!("af-xdp = {value}\nat-most"), 1);
        assert_eq!(lease(&with_af_xdp("true")), Ok(0));
        let refused = lease(&with_af_xdp("false")).expect_err("zero-copy receive only");
        assert!(
            refused.contains("take `af-xdp = false` out of rule 1"),
            "{refused}"
        );
        let only = policy(&with_af_xdp("false")).expect("a policy");
        let flows = wanted(2, &["192.0.2.1:443"]);
        assert_eq!(super::find(&only, &peer(7), &flows, |_| 0), Ok(0));
        // Another rule may allow it.
        let other = RULES.replace("user = 8", "user = 7");
        let other = other.replacen("at-most", "af-xdp = false\nat-most", 1);
        assert_eq!(lease(&other), Ok(1));
    }

    #[test]
    fn af_xdp_keys_are_rejected_without_af_xdp_and_cause_a_warning_with_zcrx() {
        for key in [
            "macs = [\"52:54:00:00:00:01\"]",
            "vlans = [\"7\"]",
            "network = true",
            "hints = \"none\"",
            "busy-poll = 64",
        ] {
            let name = key.split(' ').next().unwrap_or_default();
            let beside =
                |af_xdp: &str| policy(&RULES.replacen("at-most", &format!("{af_xdp}{key}\nat-most"), 1));
            let refused = beside("af-xdp = false\n").expect_err("it means nothing");
            let words = format!("p.toml line 6: rule 1: {name}: with af-xdp = false it has no effect");
            assert!(refused.starts_with(&words), "{refused}");
            let (warned, line) = (beside("").expect("it was allowed before"), 5);
            let words = format!("p.toml line {line}: rule 1: {name}: with `zcrx` this limits");
            assert!(
                matches!(&warned.warnings[..], [one] if one.starts_with(&words)),
                "{warned:?}"
            );
            let meant = beside("af-xdp = true\n").expect("both are meant");
            assert_eq!(meant.warnings, [] as [&str; 0]);
        }
        let nothing = RULES.replace("queues = \"all\"\n", "queues = \"all\"\naf-xdp = false\n");
        let refused = policy(&nothing).expect_err("nothing could be leased");
        assert!(
            refused.contains("line 11: rule 2: af-xdp = false: nothing could be leased: add `zcrx`"),
            "{refused}"
        );
    }

    #[test]
    fn flow_that_is_named_twice_causes_a_warning_with_its_line() {
        let twice = RULES.replacen(
            "\"[2001:db8::1]:443\"",
            "\"[2001:db8::1]:443\", \"[2001:db8:0::1]:443\"",
            1,
        );
        let twice = policy(&twice).expect("it was allowed before");
        assert_eq!(
            twice.warnings,
            ["p.toml line 6: rule 1: zcrx: [2001:db8::1]:443 is there twice: leave one out"]
        );
    }

    #[test]
    fn impossible_flows_are_rejected_with_the_remedy() {
        for (list, words) in [
            ("[\"192.0.2.1\"]", "not an address with a port"),
            ("[\"192.0.2.1:0\"]", "port 0"),
            ("[\"0.0.0.0:443\"]", "one address"),
            ("[\"224.0.0.1:443\"]", "no multicast"),
            (
                "[]",
                "zcrx = []: nothing could be leased: give some, or leave the key out",
            ),
        ] {
            let text = RULES.replacen("[\"192.0.2.1:443\", \"[2001:db8::1]:443\"]", list, 1);
            let refused = policy(&text).expect_err(words);
            assert!(refused.contains(words), "{refused}");
        }
        let alone = RULES.replace("queues = \"all\"\n", "queues = \"all\"\nzcrx-setup = true\n");
        let refused = policy(&alone).expect_err("nothing to set up for");
        assert!(refused.contains("it needs `zcrx`"), "{refused}");
    }
}
