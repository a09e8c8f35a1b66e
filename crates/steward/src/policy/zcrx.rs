//! Queues for io_uring zero-copy receive: who may have which, with which flows.
//!
//! A queue's holder sees the payload of all frames that come to it, so a rule names the flows, each by the address and
//! the port of this host at which its connections end. What it does not name nobody gets.

use std::net::SocketAddr;

use super::{Policy, Rule, listed};
use crate::peer::Credentials;
use crate::protocol::{Reason, Refusal, ZcrxWanted};

/// What a rule says of such queues, beside their flows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ZcrxRule {
    /// The NIC may be set up for them: header and data apart, the main RSS table without the queue.
    pub(crate) sets_up: bool,
}

impl Policy {
    /// What a rule says of queues for zero-copy receive.
    pub(crate) fn zcrx(&self, rule: usize) -> ZcrxRule {
        let sets_up = self.rules.get(rule).is_some_and(|rule| rule.zcrx_setup);
        ZcrxRule { sets_up }
    }

    /// Whether any rule allows such queues.
    #[must_use]
    pub fn allows_zcrx(&self) -> bool {
        self.rules.iter().any(|rule| !rule.zcrx.is_empty())
    }

    /// The first rule that allows a queue and all its flows; `leased` says how many queues are leased under a rule.
    pub(crate) fn find_zcrx(
        &self,
        peer: &Credentials,
        wanted: &ZcrxWanted,
        leased: impl Fn(usize) -> u32,
    ) -> Result<usize, Refusal> {
        let ZcrxWanted { interface, queue, .. } = wanted;
        let uid = peer.uid;
        let mut text = format!(
            "user {uid} may not lease queues of {interface} for zero-copy receive: the policy has no rule for that: \
             add one that says `user = {uid}`, `interface = {interface:?}` and `zcrx = [\"ADDRESS:PORT\"]`"
        );
        for (index, rule) in self.rules.iter().enumerate() {
            if !rule.is_for(peer) || rule.interface != *interface || rule.zcrx.is_empty() {
                continue;
            }
            match rule.check_zcrx(wanted, leased(index)) {
                Ok(()) => return Ok(index),
                Err(why) => {
                    text = format!(
                        "user {uid}, queue {queue} of {interface}: {why} (rule {})",
                        index + 1
                    );
                }
            }
        }
        Err(Refusal::new(Reason::NotAllowed, text))
    }
}

impl Rule {
    /// Errors: why not.
    fn check_zcrx(&self, wanted: &ZcrxWanted, leased: u32) -> Result<(), String> {
        if !self.queues.contains(&wanted.queue) {
            let may = listed(&self.queues);
            return Err(format!(
                "the policy allows {may}: ask for one of these, or widen `queues`"
            ));
        }
        if let Some(flow) = wanted.flows.iter().find(|flow| !self.zcrx.contains(flow)) {
            return Err(format!(
                "the policy does not allow flows to {flow}, it allows {}: add it to `zcrx`",
                flows_text(&self.zcrx)
            ));
        }
        if leased >= self.at_most {
            return Err(format!(
                "the policy allows {} queue(s) at a time, {leased} are leased: raise `at-most`",
                self.at_most
            ));
        }
        Ok(())
    }
}

/// Flows as a list.
pub(super) fn flows_text(flows: &[SocketAddr]) -> String {
    let flows: Vec<String> = flows.iter().map(SocketAddr::to_string).collect();
    flows.join(", ")
}

/// Reads the flows of a rule.
pub(super) fn flows(list: &[String]) -> Result<Vec<SocketAddr>, String> {
    list.iter().map(|text| flow(text)).collect()
}

fn flow(text: &str) -> Result<SocketAddr, String> {
    let wrong = |why: &str| {
        format!(
            "zcrx: {text:?}: {why}: name an address and a port such as 192.0.2.1:443 or [2001:db8::1]:443"
        )
    };
    let flow: SocketAddr = text
        .parse()
        .map_err(|_| wrong("it is not an address with a port"))?;
    let ip = flow.ip();
    match () {
        () if flow.port() == 0 => Err(wrong("no connection ends at port 0")),
        () if ip.is_unspecified() => Err(wrong("a NIC finds frames by one address")),
        () if ip.is_multicast() => Err(wrong("TCP has no groups")),
        // As a lease names it: without a scope.
        () => Ok(SocketAddr::new(ip, flow.port())),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

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
    fn queue_is_allowed_with_named_flows_to_whom_a_rule_names_and_refused_with_the_remedy() {
        let policy = policy(RULES).expect("a policy");
        let find = |uid, queue, flows: &[&str], leased| {
            policy
                .find_zcrx(&peer(uid), &wanted(queue, flows), |_| leased)
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
        assert!(policy.allows_zcrx() && !policy.zcrx(0).sets_up);
        let text = policy.to_string();
        assert!(text.contains("zero-copy receive of 192.0.2.1:443"), "{text}");
    }

    #[test]
    fn flows_that_cannot_be_meant_are_refused_with_what_is() {
        for (list, words) in [
            ("[\"192.0.2.1\"]", "not an address with a port"),
            ("[\"192.0.2.1:0\"]", "port 0"),
            ("[\"0.0.0.0:443\"]", "one address"),
            ("[\"224.0.0.1:443\"]", "no groups"),
            ("[]", "leave `zcrx` out, which allows no zero-copy receive"),
        ] {
            let text = RULES.replacen("[\"192.0.2.1:443\", \"[2001:db8::1]:443\"]", list, 1);
            let refused = policy(&text).expect_err(words);
            assert!(refused.contains(words), "{refused}");
        }
        let alone = RULES.replace("queues = \"all\"\n", "queues = \"all\"\nzcrx-setup = true\n");
        let refused = policy(&alone).expect_err("nothing to set up for");
        assert!(refused.contains("it goes with `zcrx`"), "{refused}");
    }
}
