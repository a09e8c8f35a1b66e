//! Ports that come, change and go because somebody says so while the daemon runs (`--api`), beside those of the file.
//!
//! A port of the file is the file's: it is changed there. One that was added is kept until it is removed, until the file
//! has one of its name, which counts from then on, or until the daemon ends. All else is as with a file that is read
//! again: the helper judges the port as if it stood there, and what is said otherwise without a new beginning disturbs
//! nobody. If a port cannot begin, all is put back to what it was before.

use model::config::{ADDED, ConfigFile, Entry, Mistake, Port, Table};
use model::control::{Change, Changed, Done, Refused};
use steer::with_sources;

use super::{Outcome, Reader, tell};
use crate::config::file::port_of;
use crate::supervision::helper::RequestError;

fn wrong(mistake: Mistake) -> Refused {
    Refused::mistake(mistake.key, mistake.what)
}

/// The name of the port that a change is about.
fn name_in(change: &Change) -> &str {
    match change {
        Change::Reload | Change::ResetWorkers => "",
        Change::Put { name, .. } | Change::Patch { name, .. } | Change::Remove { name } => name,
    }
}

impl Reader {
    /// Does it.
    pub(super) fn change(&mut self, change: &Change) -> Result<Changed, Refused> {
        if *change == Change::Reload {
            let Outcome { done, failed } = self.read_and_tell();
            let what = Done::Reloaded;
            return Ok(Changed { what, done, failed });
        }
        let name = name_in(change);
        let named = |table: &&Entry<Port>| table.name == name;
        if self.file.ports.iter().any(|table| table.name == name) {
            return Err(Refused::in_file(name, &self.file.path.display().to_string()));
        }
        let before = self.file.added.iter().find(named).cloned();
        if let (Change::Put { only_new: true, .. }, Some(_)) = (change, &before) {
            return Err(Refused::exists(name));
        }
        let wanted = self.wanted(change, before.as_ref())?;
        let file = self.propose(name, wanted.as_ref())?;
        // Judged: names of users became numbers.
        let after = file.added.iter().find(named);
        let what = self.what(change, before.as_ref(), after)?;
        if what == Done::Nothing {
            return Ok(Changed {
                what,
                done: Vec::new(),
                failed: Vec::new(),
            });
        }
        let Outcome { mut done, mut failed } = self.settle(file, name)?;
        if failed.is_empty() {
            done.push(self.keep());
            return Ok(Changed { what, done, failed });
        }
        if what != Done::Removed {
            failed.extend(self.put_back(name, before.as_ref()));
        }
        Err(Refused::failed(failed.join("; ")))
    }

    /// What a change comes to.
    /// Errors: the port would have to begin anew, and it was not said that it may.
    fn what(
        &self,
        change: &Change,
        before: Option<&Entry<Port>>,
        after: Option<&Entry<Port>>,
    ) -> Result<Done, Refused> {
        let (before, after) = match (before, after) {
            (None, _) => return Ok(Done::Added),
            (Some(_), None) => return Ok(Done::Removed),
            (Some(before), Some(after)) => (before, after),
        };
        if !self.running.iter().any(|table| table.name == before.name) {
            return Ok(Done::Added);
        }
        let keys = before.differences(after);
        let begins: Vec<String> = keys
            .iter()
            .filter(|key| !before.value.is_live(key))
            .cloned()
            .collect();
        Ok(match change {
            _ if keys.is_empty() => Done::Nothing,
            _ if begins.is_empty() => Done::Changed,
            Change::Patch {
                name,
                disconnect: false,
                ..
            } => {
                return Err(Refused::disconnects(name, begins));
            }
            _ => Done::Replaced,
        })
    }

    /// What the port is to be then; `None`: gone.
    fn wanted(&self, change: &Change, before: Option<&Entry<Port>>) -> Result<Option<Entry<Port>>, Refused> {
        let there = || before.ok_or_else(|| Refused::no_port(name_in(change)));
        match change {
            Change::Put { name, keys, .. } => Ok(Some(port_of(name, keys).map_err(wrong)?)),
            Change::Patch { name, keys, .. } => {
                let mut all = there()?.value.keys();
                // What is wrong with one of these is reported without the others.
                all.extend(port_of(name, keys).map_err(wrong)?.value.keys());
                all.retain(|key, _| {
                    keys.get(key)
                        .is_none_or(|value| !(value.is_null() || *value == false))
                });
                Ok(Some(port_of(name, &all).map_err(wrong)?))
            }
            Change::Remove { .. } | Change::Reload | Change::ResetWorkers => there().map(|_| None),
        }
    }

    /// Has the helper judge it.
    fn propose(&self, name: &str, port: Option<&Entry<Port>>) -> Result<ConfigFile, Refused> {
        let proposed = match port {
            // Rules give nobody anything that the helper watches over, and are longer than its messages.
            Some(port) => self.requests.put(&without_rules(port)),
            None => self.requests.without(name),
        };
        let proposed = proposed.map(|file| self.with_rules(file, port));
        proposed.map_err(|error| match error {
            RequestError::Refused(words) => mistake(port, &words),
            error @ RequestError::Gone(_) => Refused::failed(with_sources(&error)),
        })
    }

    /// The same with the filter rules of ports that are in no file, which only this thread has; `port`: one that says them
    /// anew.
    pub(super) fn with_rules(&self, mut file: ConfigFile, port: Option<&Entry<Port>>) -> ConfigFile {
        for table in &mut file.added {
            let anew = port.filter(|port| port.name == table.name);
            let known = anew.or_else(|| self.file.added.iter().find(|known| known.name == table.name));
            if let Some(known) = known {
                table.value.filter.rule.clone_from(&known.value.filter.rule);
            }
        }
        file
    }

    /// Lets the port be what the helper has judged.
    fn settle(&mut self, file: ConfigFile, name: &str) -> Result<Outcome, Refused> {
        let table = file.added.iter().find(|table| table.name == name).cloned();
        let difference = self.difference(&file, Some(name));
        let difference = difference.map_err(|words| mistake(table.as_ref(), &words))?;
        let mut outcome = Outcome::default();
        self.apply(file, difference, &mut outcome);
        tell("API", &outcome);
        Ok(outcome)
    }

    /// Keeps the ports that were added for the next start; in words.
    pub(super) fn keep(&self) -> String {
        let Some(path) = &self.state else {
            return "added ports end with the daemon: `state` below [daemon] names a file that keeps them"
                .to_owned();
        };
        let path = path.display();
        match self.requests.keep(&self.file.added) {
            Ok(()) => format!("added ports are kept in {path} for the next start"),
            Err(error) => {
                let why = with_sources(&error);
                tracing::error!("added ports are not kept in {path}: {why}");
                format!("added ports are NOT kept in {path}: {why}")
            }
        }
    }

    /// What went wrong with that, too.
    fn put_back(&mut self, name: &str, before: Option<&Entry<Port>>) -> Vec<String> {
        let proposed = self.propose(name, before);
        match proposed.and_then(|file| self.settle(file, name)) {
            Ok(outcome) => outcome.failed,
            Err(refused) => vec![refused.to_string()],
        }
    }
}

/// A mistake in the words of who reads a file.
fn mistake(port: Option<&Entry<Port>>, words: &str) -> Refused {
    let what = words
        .strip_prefix(ADDED)
        .and_then(|words| words.strip_prefix(": "));
    let what = what.unwrap_or(words);
    // Its name could be that of a key.
    let said = port.and_then(|port| what.strip_prefix(&format!("port {}: ", port.name)));
    let key = port.and_then(|port| port.named_by(said.unwrap_or(what)));
    Refused::mistake(key, what.to_owned())
}

/// The same without its filter rules.
fn without_rules(port: &Entry<Port>) -> Entry<Port> {
    let mut port = port.clone();
    port.value.filter.rule.clear();
    port
}
