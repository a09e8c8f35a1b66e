//! A simulated NIC for tests: it records requests in their order, and refuses one, or lets the steward die at one.
#![allow(missing_docs, reason = "for tests")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;

use super::{Known, Nic, Rule, Steering, Table, Target};

/// Addresses of stations.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// A NIC in memory: it acts as a driver does, and fails where the test sets that.
#[derive(Debug, Clone, Default)]
pub struct Played {
    pub size: u32,
    pub special: bool,
    pub rules: BTreeMap<u32, Rule>,
    pub contexts: BTreeMap<u32, Vec<u32>>,
    /// The main table; empty: the driver does not report it.
    pub main: Vec<u32>,
    pub has_contexts: bool,
    /// Calls so far that change something, and the one that fails.
    pub calls: u32,
    /// How often its rules were read.
    pub reads: Cell<u32>,
    pub fails_at: Option<u32>,
    pub fails_from_then_on: bool,
    pub changes: Vec<String>,
    /// It reports success for removals, and removes nothing.
    pub lies: bool,
    /// It changes the rules that it gets.
    pub widens: bool,
}

/// A context that was there before.
pub fn theirs() -> BTreeMap<u32, Vec<u32>> {
    [(1, vec![0, 1])].into()
}

impl Played {
    pub fn new() -> Self {
        Self {
            size: 8,
            has_contexts: true,
            contexts: theirs(),
            ..Self::default()
        }
    }

    pub fn of_size(size: u32, special: bool) -> Self {
        Self {
            size,
            special,
            ..Self::new()
        }
    }

    pub fn with_main_table(self, table: &[u32]) -> Self {
        Self {
            main: table.to_vec(),
            ..self
        }
    }

    pub fn main_table(&self) -> &[u32] {
        &self.main
    }

    fn call(&mut self, what: String) -> io::Result<()> {
        self.calls += 1;
        let fails = |at: u32| at == self.calls || (self.fails_from_then_on && at < self.calls);
        if self.fails_at.is_some_and(fails) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        self.changes.push(what);
        Ok(())
    }
}

impl Steering for Played {
    fn table(&self) -> io::Result<Table> {
        self.reads.set(self.reads.get() + 1);
        if self.size == 0 {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let known = |(&location, rule): (&u32, &Rule)| Known {
            location,
            rule: Some(*rule),
            target: Some(rule.target),
            text: rule.to_string(),
        };
        Ok(Table {
            size: self.size,
            special: self.special,
            rules: self.rules.iter().map(known).collect(),
        })
    }

    fn indirection(&self, context: u32) -> io::Result<Vec<u32>> {
        match context {
            0 if self.main.is_empty() => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
            0 => Ok(self.main.clone()),
            other => self.spread(other),
        }
    }

    fn contexts(&self) -> io::Result<Vec<u32>> {
        match self.has_contexts {
            true => Ok(self.contexts.keys().copied().collect()),
            false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        }
    }

    fn spread(&self, context: u32) -> io::Result<Vec<u32>> {
        Ok(self.contexts[&context].clone())
    }
}

impl Nic for Played {
    fn insert(&mut self, rule: &Rule, location: Option<u32>) -> io::Result<u32> {
        assert_eq!(location.is_none(), self.special);
        let location = location.unwrap_or(self.rules.len() as u32 + 1000);
        self.call(format!("insert {rule} to {} at {location}", rule.target))?;
        let mut rule = *rule;
        if self.widens {
            rule.vlan = None;
        }
        let before = self.rules.insert(location, rule);
        assert_eq!(before, None, "a rule was overwritten");
        Ok(location)
    }

    fn delete(&mut self, location: u32) -> io::Result<()> {
        self.call(format!("delete {location}"))?;
        if !self.lies {
            let is_there = self.rules.remove(&location).is_some();
            assert!(is_there, "nothing is there");
        }
        Ok(())
    }

    fn set_indirection(&mut self, table: &[u32]) -> io::Result<()> {
        self.call(format!("table of {table:?}"))?;
        self.main = table.to_vec();
        Ok(())
    }

    fn create_context(&mut self, queues: &[u32]) -> io::Result<u32> {
        self.call(format!("context of {queues:?}"))?;
        let context = self.contexts.keys().max().unwrap_or(&0) + 1;
        self.contexts.insert(context, queues.to_vec());
        Ok(context)
    }

    fn delete_context(&mut self, context: u32) -> io::Result<()> {
        self.call(format!("delete context {context}"))?;
        let used = self
            .rules
            .values()
            .any(|rule| rule.target == Target::Context(context));
        assert!(!used, "a rule points at it");
        self.contexts.remove(&context);
        Ok(())
    }
}
