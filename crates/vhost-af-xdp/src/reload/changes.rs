//! Networks and ports that a client adds, changes and removes while the daemon runs, besides those of the file.
//!
//! One of the file is changed in the file. One that was added is kept until it is removed, until the file has one of its
//! name, which counts from then on, or until the daemon ends. All else is as with a file that is read again: the helper
//! checks it as if it were in the file, and changes that need no restart of a port disturb nobody. If something cannot
//! start, all is put back to what it was before.

use model::config::{ADDED, ConfigFile, Entry, Mistake, NamedTable, Network, Port, TableKind, Tables};
use model::control::{Change, Changed, Done, Refused};
use steer::with_sources;

use super::{Outcome, Reader, of_name, tell};
use crate::supervision::helper::RequestError;

fn wrong(mistake: Mistake) -> Refused {
    Refused::mistake(mistake.key, mistake.what)
}

impl Reader {
    /// Does it.
    pub(super) fn change(&mut self, change: &Change) -> Result<Changed, Refused> {
        match change.table() {
            Some((TableKind::Port, name)) => self.change_table::<Port>(change, name),
            Some((TableKind::Network, name)) => self.change_table::<Network>(change, name),
            None => {
                let Outcome { done, failed, .. } = self.read_and_tell();
                let what = Done::Reloaded;
                Ok(Changed { what, done, failed })
            }
        }
    }

    fn change_table<T: NamedTable>(&mut self, change: &Change, name: &str) -> Result<Changed, Refused> {
        if of_name(T::of(&self.file.tables), name).is_some() {
            let path = self.file.path.display().to_string();
            return Err(Refused::in_file(T::KIND, name, &path));
        }
        let left_out = of_name(T::of(&self.file.left_out), name);
        let before = of_name(T::of(&self.file.added), name).or(left_out).cloned();
        let runs = of_name(T::of(&self.running), name).is_some();
        if matches!(change, Change::Put { only_new: true, .. }) && runs {
            return Err(Refused::exists(T::KIND, name));
        }
        let wanted = wanted(change, name, before.as_ref())?;
        if T::KIND == TableKind::Network && wanted.is_none() {
            self.check_unused(name)?;
        }
        let file = self.propose(name, wanted.as_ref())?;
        // Checked: names of users became numbers.
        let after = of_name(T::of(&file.added), name);
        let what = self.what(change, before.as_ref(), after)?;
        if what == Done::Nothing {
            return Ok(Changed {
                what,
                done: Vec::new(),
                failed: Vec::new(),
            });
        }
        let Outcome {
            mut done, mut failed, ..
        } = self.settle::<T>(file, name)?;
        if what == Done::Removed && !runs {
            done.push(format!("{} {name} is removed; it did not run", T::KIND));
        }
        if failed.is_empty() || what == Done::Removed {
            done.push(self.keep());
        } else {
            failed.extend(self.put_back(name, before.as_ref()));
            failed.dedup();
        }
        match failed.as_slice() {
            [] => Ok(Changed { what, done, failed }),
            failed => Err(Refused::failed(failed.join("; "))),
        }
    }

    /// Errors: ports are of that network.
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
            ports => Err(Refused::in_use(network, ports)),
        }
    }

    /// What a change comes to. The guests of a network stay connected, whatever changes of it.
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
        let begins: Vec<String> = keys
            .iter()
            .filter(|key| T::KIND == TableKind::Port && !before.value.is_live(key))
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

    /// Has the helper check it.
    fn propose<T: NamedTable>(&self, name: &str, table: Option<&Entry<T>>) -> Result<ConfigFile, Refused> {
        let mut tables = Tables::default();
        T::of_mut(&mut tables).extend(table.cloned());
        let proposed = match table {
            // Rules give nobody anything that the helper watches over, and are longer than its messages.
            Some(_) => self.requests.put(&without_rules(&tables)),
            None => self.requests.without(T::KIND, name),
        };
        let proposed = proposed.map(|file| ConfigFile {
            // The daemon runs with that of its start, whatever the helper has read since.
            daemon: self.file.daemon.clone(),
            ..self.with_rules(file, &tables)
        });
        proposed.map_err(|error| match error {
            RequestError::Refused(words) => mistake(table, &words),
            error @ RequestError::Gone(_) => Refused::failed(with_sources(&error)),
        })
    }

    /// The same with the filter rules of ports that are in no file, which only this thread has; `new`: those that come.
    pub(super) fn with_rules(&self, mut file: ConfigFile, new: &Tables) -> ConfigFile {
        for table in &mut file.added.ports {
            let known = of_name(&self.file.added.ports, &table.name);
            if let Some(known) = of_name(&new.ports, &table.name).or(known) {
                table.value.filter.rule.clone_from(&known.value.filter.rule);
            }
        }
        file
    }

    /// Puts into force what the helper has checked.
    fn settle<T: NamedTable>(&mut self, file: ConfigFile, name: &str) -> Result<Outcome, Refused> {
        let table = of_name(T::of(&file.added), name).cloned();
        let difference = self.difference(&file, Some((T::KIND, name)));
        let difference = difference.map_err(|words| mistake(table.as_ref(), &words))?;
        let mut outcome = Outcome::default();
        self.apply(file, difference, &mut outcome);
        tell("API", &outcome);
        Ok(outcome)
    }

    /// Keeps what was added for the next start; in words.
    pub(super) fn keep(&self) -> String {
        let Some(path) = &self.state else {
            return "what was added ends with the daemon: `state` below [daemon] names a file that keeps it"
                .to_owned();
        };
        let path = path.display();
        match self.requests.keep(&self.file.added) {
            Ok(()) => format!("what was added is kept in {path} for the next start"),
            Err(error) => {
                let why = with_sources(&error);
                tracing::error!("what was added is not kept in {path}: {why}");
                format!("what was added is NOT kept in {path}: {why}")
            }
        }
    }

    /// What went wrong with that, too.
    fn put_back<T: NamedTable>(&mut self, name: &str, before: Option<&Entry<T>>) -> Vec<String> {
        let proposed = self.propose(name, before);
        match proposed.and_then(|file| self.settle::<T>(file, name)) {
            Ok(outcome) => outcome.failed,
            Err(refused) => vec![refused.to_string()],
        }
    }
}

/// What a port or network is to be; `None`: gone.
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
            // What is wrong with one of these is reported without the others.
            T::named(name, keys).map_err(wrong)?;
            all.extend(keys.clone());
            Ok(Some(T::named(name, &all).map_err(wrong)?))
        }
        Change::Remove { .. } | Change::Reload | Change::ResetWorkers => there.map(|_| None),
    }
}

/// A mistake in the words of who reads a file.
fn mistake<T: NamedTable>(table: Option<&Entry<T>>, words: &str) -> Refused {
    let what = words
        .strip_prefix(ADDED)
        .and_then(|words| words.strip_prefix(": "));
    let what = what.unwrap_or(words);
    // Its name could be that of a key.
    let said = table.and_then(|table| what.strip_prefix(&format!("{} {}: ", T::KIND, table.name)));
    let key = table.and_then(|table| table.named_by(said.unwrap_or(what)));
    Refused::mistake(key, what.to_owned())
}

/// The same without filter rules.
fn without_rules(tables: &Tables) -> Tables {
    let mut tables = tables.clone();
    let ports = tables.ports.iter_mut();
    ports.for_each(|port| port.value.filter.rule.clear());
    tables
}
