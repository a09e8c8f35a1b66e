//! What a daemon tells of itself by its control socket, as `vhost-af-xdp status` asks it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::Daemon;
use crate::{Driver, DriverConfig, wait};

impl Daemon {
    /// The daemon's status, read from its control socket. Starting `vhost-af-xdp status` each time took a tenth of the
    /// suite's CPU time.
    ///
    /// # Panics
    /// If there is none within [`wait::SOON`], or it is not JSON.
    pub fn status(&self) -> Value {
        let text = self
            .ask()
            .unwrap_or_else(|error| panic!("no status ({error}; is the daemon stopped?)\n{}", self.said()));
        // By serde_json's own instance of its parser, which is optimized in debug builds too (Cargo.toml).
        let mut answer: Value = text
            .parse()
            .unwrap_or_else(|error| panic!("status is not JSON ({error}): {text}"));
        answer["ok"].take()
    }

    /// What its control socket answers to a request for its status.
    pub(super) fn ask(&self) -> std::io::Result<String> {
        let mut control = UnixStream::connect(self.dir.path().join("control"))?;
        control.set_read_timeout(Some(wait::SOON))?;
        control.write_all(b"{\"get\": []}\n")?;
        control.shutdown(Shutdown::Write)?;
        let mut text = String::new();
        control.read_to_string(&mut text)?;
        Ok(text)
    }

    /// What `status` tells of a port.
    pub fn port(&self, port: usize) -> Value {
        self.status()["ports"][port].take()
    }

    /// Waits until `condition` holds for what `status` tells of a port.
    ///
    /// # Panics
    /// If it never does.
    pub fn await_port(&self, port: usize, what: &str, condition: impl Fn(&Value) -> bool) {
        let became = wait::until(wait::SOON, || condition(&self.port(port)));
        assert!(
            became,
            "{what} did not come true: {:#}\nThe daemon said:\n{}",
            self.port(port),
            self.said()
        );
    }

    /// The only network in `status`.
    pub fn network(&self) -> Value {
        self.status()["networks"][0].take()
    }

    /// Waits until `condition` holds for the only network in `status`.
    ///
    /// # Panics
    /// If it never does.
    #[track_caller]
    pub fn await_network(&self, what: &str, condition: impl Fn(&Value) -> bool) {
        let became = wait::until(wait::SOON, || condition(&self.network()));
        assert!(became, "{what}: {:#}", self.network());
    }

    /// A guest of a port, at that socket, with so many usual buffers; returns when it is served.
    ///
    /// # Panics
    /// If it is not.
    pub fn connect(&self, port: usize, socket: &Path, config: &DriverConfig, buffers: usize) -> Driver {
        let mut guest = Driver::connect(socket, config).expect("accepted");
        guest.pairs[0].post(buffers, &[2048]);
        self.await_port(port, "a lane runs", |port| port["lanes"][0]["running"] == true);
        guest
    }

    /// Waits until a port says that it is impaired, and why, in text that contains `words`.
    ///
    /// # Panics
    /// If it never does.
    pub fn await_impaired(&self, port: usize, words: &str) {
        let is_why = |why: &str| why.contains(words);
        self.await_port(port, words, |port| port["impaired"].as_str().is_some_and(is_why));
    }

    /// Waits until a port is not impaired any more.
    ///
    /// # Panics
    /// If it stays so.
    pub fn await_recovered(&self, port: usize) {
        self.await_port(port, "recovered", |port| port["impaired"].is_null());
    }

    /// Sum, over all ports and lanes, of a counter with that name in `status`.
    pub fn counter(&self, name: &str) -> u64 {
        sum_named(&self.status(), name)
    }

    /// The same of the lanes of one port, by its name.
    pub fn counter_of(&self, port: &str, name: &str) -> u64 {
        self.port_named(port).map_or(0, |port| sum_named(&port, name))
    }

    /// The same of the queues of one network, and of its underlay.
    ///
    /// # Panics
    /// If there is no network of that name.
    pub fn network_counter(&self, network: &str, name: &str) -> u64 {
        let status = self.status();
        let networks = status["networks"].as_array().expect("a list");
        let its = networks.iter().find(|its| its["name"] == network);
        sum_named(its.expect("it is there"), name)
    }

    /// Waits until a counter has that value at least.
    ///
    /// # Panics
    /// If it does not.
    pub fn await_counter(&self, name: &str, value: u64) {
        let reached = wait::until(wait::SOON, || self.counter(name) >= value);
        assert!(reached, "{name} is below {value}: {:#}", self.status());
    }

    /// Does something that wakes a worker, a kick say, and returns when it has been awake for it and all sleep again.
    ///
    /// # Panics
    /// If that never comes about.
    pub fn await_rest_after(&self, act: impl FnOnce()) {
        let before = self.sleeps_at_rest();
        act();
        let woken = wait::until(wait::SOON, || self.sleeps_at_rest() > before);
        assert!(woken, "nobody woke: {:#}", self.status());
    }

    /// How often workers have fallen asleep, as soon as that stays the same for a while.
    fn sleeps_at_rest(&self) -> u64 {
        let sleeps = || sum_named(&self.status()["workers"], "sleeps");
        let steady = wait::until_some(wait::SOON, || {
            let seen = sleeps();
            std::thread::sleep(Duration::from_millis(50));
            (sleeps() == seen).then_some(seen)
        });
        steady.unwrap_or_else(|| panic!("workers do not come to rest: {:#}", self.status()))
    }
}

/// Counters appear as `"name": number` or as an object with `"name"` and `"value"`.
fn sum_named(value: &Value, name: &str) -> u64 {
    match value {
        Value::Object(map) if map.get("name").and_then(Value::as_str) == Some(name) => {
            map.get("value").and_then(Value::as_u64).unwrap_or(0)
        }
        Value::Object(map) => {
            let own = map.get(name).and_then(Value::as_u64).unwrap_or(0);
            own + map.values().map(|inner| sum_named(inner, name)).sum::<u64>()
        }
        Value::Array(items) => items.iter().map(|inner| sum_named(inner, name)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_wherever_they_are() {
        let status = serde_json::json!({
            "ports": [{"drops": {"runt": 2}}, {"lanes": [{"counters": [{"name": "runt", "value": 3}]}]}]
        });
        assert_eq!((sum_named(&status, "runt"), sum_named(&status, "other")), (5, 0));
    }
}
