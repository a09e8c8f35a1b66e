//! Networks and ports that a client adds, changes and removes while the daemon runs, in addition to those of the file.
//!
//! The client cannot change a table of the file. An added one stays until it is removed, until the file has one of the
//! same name, which replaces it, or until the daemon ends. All else is as in a reload: the helper checks it as if it
//! were in the file, and changes that need no restart of a port interrupt no traffic. If something cannot start, the
//! previous configuration is restored.

use model::config::{ADDED, Entry, Mistake, NamedTable, Network, Port, TableKind, Tables};
use model::control::{Change, Changed, Done, Kind, Refused};
use steer::with_sources;

use super::{Outcome, Reader, log, of_name};
use crate::supervision::helper::RequestError;

/// A refusal because of these keys.
fn refused_keys(kind: Kind, what: impl Into<String>, keys: impl IntoIterator<Item = String>) -> Refused {
    let keys = keys.into_iter().collect();
    Refused {
        keys,
        ..Refused::new(kind, what)
    }
}

fn wrong(mistake: Mistake) -> Refused {
    refused_keys(Kind::Mistake, mistake.what, mistake.key)
}

impl Reader {
    /// Applies a change.
    pub(super) fn change(&mut self, change: &Change) -> Result<Changed, Refused> {
        match change.table() {
            Some((TableKind::Port, name)) => self.change_table::<Port>(change, name),
            Some((TableKind::Network, name)) => self.change_table::<Network>(change, name),
            None => {
                let Outcome { done, failed, .. } = self.read_and_log();
                let what = Done::Reloaded;
                Ok(Changed { what, done, failed })
            }
        }
    }

    fn change_table<T: NamedTable>(&mut self, change: &Change, name: &str) -> Result<Changed, Refused> {
        if of_name(T::of(&self.file.tables), name).is_some() {
            let what = format!("{} {name} is one of {}", T::KIND, self.file.path.display());
            return Err(Refused::new(Kind::InFile, what));
        }
        let added = of_name(T::of(&self.file.added), name).cloned();
        let left_out = of_name(T::of(&self.file.left_out), name).cloned();
        let before = added.as_ref().or(left_out.as_ref());
        let runs = of_name(T::of(&self.running), name).is_some();
        if matches!(change, Change::Put { only_new: true, .. }) && runs {
            let what = format!("{} {name} already exists", T::KIND);
            return Err(Refused::new(Kind::Exists, what));
        }
        let wanted = wanted(change, name, before)?;
        if T::KIND == TableKind::Network && wanted.is_none() {
            self.check_unused(name)?;
        }
        let after = self.propose(name, wanted)?;
        let what = self.what(change, before, after.as_ref())?;
        if what == Done::Nothing {
            return Ok(Changed {
                what,
                done: Vec::new(),
                failed: Vec::new(),
            });
        }
        let Outcome {
            mut done, mut failed, ..
        } = self.settle(after, name)?;
        if what == Done::Removed && !runs {
            done.push(format!("{} {name} is removed; it did not run", T::KIND));
        }
        if failed.is_empty() && T::KIND == TableKind::Network && !runs {
            done.extend(self.start_waiting(name));
        }
        let mut unkept = None;
        if failed.is_empty() || what == Done::Removed {
            match self.keep() {
                Ok(kept) => done.push(kept),
                Err(why) => unkept = Some(why),
            }
        } else {
            let further = self.restore(name, added, left_out).into_iter();
            let further: Vec<_> = further.filter(|line| !failed.contains(line)).collect();
            failed.extend(further);
        }
        let is_done = failed.is_empty();
        failed.extend(unkept);
        match is_done {
            true => Ok(Changed { what, done, failed }),
            false => Err(Refused::new(Kind::Failed, failed.join("; "))),
        }
    }

    /// Starts added ports that could not start without their network, which has begun now; returns what was done. What
    /// fails is logged, and a reload tries again.
    fn start_waiting(&mut self, network: &str) -> Vec<String> {
        let ports = [&self.file.added, &self.file.left_out].map(|tables| &tables.ports);
        let is_waiting = |port: &&Entry<Port>| {
            let is_its = port.value.member.network.as_deref() == Some(network);
            is_its && of_name(&self.running.ports, &port.name).is_none()
        };
        let waiting: Vec<_> = ports.into_iter().flatten().filter(is_waiting).cloned().collect();
        let mut done = Vec::new();
        for port in waiting {
            let name = port.name.clone();
            let checked = self.propose(&name, Some(port));
            match checked.and_then(|port| self.settle(port, &name)) {
                Ok(outcome) => done.extend(outcome.done),
                Err(why) => tracing::error!("API: port {name}: {why}"),
            }
        }
        done
    }

    /// Errors: ports are in that network.
    fn check_unused(&self, network: &str) -> Result<(), Refused> {
        let is_its = |port: &&Entry<Port>| port.value.member.network.as_deref() == Some(network);
        let ports: Vec<_> = self
            .file
            .all()
            .filter(is_its)
            .map(|port| port.name.as_str())
            .collect();
        match ports.as_slice() {
            [] => Ok(()),
            ports => {
                let what = format!("network {network} has port(s) {}", ports.join(", "));
                Err(Refused::new(Kind::InUse, what))
            }
        }
    }

    /// What a change does. The guests of a network stay connected, whichever of its keys change.
    /// Errors: a port would have to be restarted, and the client does not allow it.
    fn what<T: NamedTable>(
        &self,
        change: &Change,
        before: Option<&Entry<T>>,
        after: Option<&Entry<T>>,
    ) -> Result<Done, Refused> {
        let (before, after) = match (before, after) {
            (None, _) => return Ok(Done::Added),
            (Some(_), None) => return Ok(Done::Removed),
            (Some(before), Some(after)) => (before, after),
        };
        if of_name(T::of(&self.running), &before.name).is_none() {
            return Ok(Done::Added);
        }
        let keys = before.differences(after);
        let restarting: Vec<String> = keys
            .iter()
            .filter(|key| T::KIND == TableKind::Port && !before.value.is_live(key))
            .cloned()
            .collect();
        Ok(match change {
            _ if keys.is_empty() => Done::Nothing,
            _ if restarting.is_empty() => Done::Changed,
            Change::Patch {
                name,
                disconnect: false,
                ..
            } => {
                let changed = restarting.join(", ");
                let what = format!("changing {changed} of port {name} disconnects its guest");
                return Err(refused_keys(Kind::Disconnects, what, restarting));
            }
            _ => Done::Replaced,
        })
    }

    /// Has the helper check the configuration with this table, or without it (`None`). Returns the table with numbers
    /// for names of users.
    fn propose<T: NamedTable>(
        &self,
        name: &str,
        table: Option<Entry<T>>,
    ) -> Result<Option<Entry<T>>, Refused> {
        let error_of = |table: Option<&Entry<T>>, error| match error {
            RequestError::Refused(words) => mistake(table, &words),
            error @ RequestError::Gone(_) => Refused::new(Kind::Failed, with_sources(&error)),
        };
        let Some(table) = table else {
            let without = self.requests.without(T::KIND, name);
            return without.map(|()| None).map_err(|error| error_of(None, error));
        };
        let checked = self.requests.put(&Tables::of(Some(table.clone())));
        let mut checked = checked.map_err(|error| error_of(Some(&table), error))?;
        Ok(T::of_mut(&mut checked).pop())
    }

    /// Makes a table that the helper has checked take effect; `None`: the one of that name is removed.
    fn settle<T: NamedTable>(&mut self, table: Option<Entry<T>>, name: &str) -> Result<Outcome, Refused> {
        let running = Tables::of(of_name(T::of(&self.running), name).cloned());
        let now = Tables::of(table.clone());
        let is_other = |port: &&Entry<Port>| T::KIND != TableKind::Port || port.name != name;
        let ports = self.file.all().filter(is_other).count() + now.ports.len();
        let difference = self.difference((&running, "was removed"), &now, ports);
        let difference = difference.map_err(|words| mistake(table.as_ref(), &words))?;
        let mut outcome = Outcome::default();
        if self.apply(difference, &mut outcome) {
            match table {
                Some(table) => self.file.put(table),
                None => self.file.remove::<T>(name),
            }
        }
        self.describe_one::<T>(name);
        log("API", &outcome);
        Ok(outcome)
    }

    /// Stores added networks and ports for the next start; returns a message.
    /// Errors: they cannot be stored.
    pub(super) fn keep(&self) -> Result<String, String> {
        let Some(path) = &self.state else {
            let ends =
                "what was added ends with the daemon: `state` below [daemon] names a file that keeps it";
            return Ok(ends.to_owned());
        };
        let path = path.display();
        match self.requests.keep() {
            Ok(()) => Ok(format!("what was added is kept in {path} for the next start")),
            Err(error) => {
                let why = with_sources(&error);
                let unkept =
                    format!("the change is in force, but NOT kept in {path} for the next start: {why}");
                tracing::error!("{unkept}");
                Err(unkept)
            }
        }
    }

    /// Restores the table as it was before, added or left out; returns what failed.
    fn restore<T: NamedTable>(
        &mut self,
        name: &str,
        added: Option<Entry<T>>,
        left_out: Option<Entry<T>>,
    ) -> Vec<String> {
        let proposed = match left_out.clone() {
            None => self.propose(name, added),
            Some(table) => {
                let done = self.requests.leave_out(&Tables::of(Some(table)));
                done.map(|()| None)
                    .map_err(|error| Refused::new(Kind::Failed, with_sources(&error)))
            }
        };
        let settled = proposed.and_then(|table| self.settle(table, name));
        if let Some(table) = left_out {
            self.file.leave_out(table);
            self.describe_one::<T>(name);
        }
        match settled {
            Ok(outcome) => outcome.failed,
            Err(refused) => vec![refused.to_string()],
        }
    }
}

/// The table that a change asks for; `None`: removed.
fn wanted<T: NamedTable>(
    change: &Change,
    name: &str,
    before: Option<&Entry<T>>,
) -> Result<Option<Entry<T>>, Refused> {
    let there = before.ok_or_else(|| Refused::absent(T::KIND, name));
    match change {
        Change::Put { keys, .. } => Ok(Some(T::named(name, keys).map_err(wrong)?)),
        Change::Patch { keys, .. } => {
            let mut all = there?.value.keys();
            // Mistakes in the new keys are reported before those of the whole table.
            T::named(name, keys).map_err(wrong)?;
            all.extend(keys.clone());
            Ok(Some(T::named(name, &all).map_err(wrong)?))
        }
        Change::Remove { .. } | Change::Reload | Change::ResetWorkers => there.map(|_| None),
    }
}

/// Converts the error message of a parser or check.
fn mistake<T: NamedTable>(table: Option<&Entry<T>>, words: &str) -> Refused {
    let what = words
        .strip_prefix(ADDED)
        .and_then(|words| words.strip_prefix(": "));
    let what = what.unwrap_or(words);
    // The name of the port or network could be that of a key.
    let said = table.and_then(|table| what.strip_prefix(&format!("{} {}: ", T::KIND, table.name)));
    let key = table.and_then(|table| table.named_by(said.unwrap_or(what)));
    refused_keys(Kind::Mistake, what, key)
}
