//! `vhost-af-xdp mark`: reads and changes the marks of flows in the table of an interface's XDP program.
//!
//! It accesses the program's table directly, which root may: no daemon takes part, and it makes no difference whether a
//! steward, a daemon or the library loaded the program. Marks exist as long as programs of ours are on the interface,
//! so they can be set only after the first one is attached.

use model::config::protocol_name;
use std::net::IpAddr;

use anyhow::{Context, bail};
use host::links::Link;
use serde::Serialize;
use serde_json::json;
use steer::{Flow, InterfaceMarks};

use crate::cli::mark::MarkCommand;
use crate::output::print;
use client::text::tree::tree;

/// A flow that has a mark, as `mark list --json` prints it.
#[derive(Debug, Serialize)]
struct Marked {
    mark: u32,
    protocol: String,
    /// Null: any source; this is a service.
    source: Option<IpAddr>,
    source_port: Option<u16>,
    destination: IpAddr,
    destination_port: u16,
}

impl Marked {
    fn new((flow, mark): (Flow, u32)) -> Self {
        let (destination, destination_port) = flow.to;
        Self {
            mark,
            protocol: protocol_name(flow.protocol),
            source: flow.from.map(|(address, _)| address),
            source_port: flow.from.map(|(_, port)| port),
            destination,
            destination_port,
        }
    }
}

/// Runs the command `mark`.
/// Errors: what failed, with the remedy.
pub(crate) fn run(command: &MarkCommand) -> anyhow::Result<()> {
    match command {
        MarkCommand::Set { at, mark, flow } => {
            let set = marks_of(&at.interface)?.set(&flow.flow()?, *mark);
            set.with_context(|| at.interface.clone())?;
        }
        MarkCommand::Remove { at, flow } => {
            let interface = &at.interface;
            let removed = marks_of(interface)?.remove(&flow.flow()?);
            if !removed.with_context(|| interface.clone())? {
                bail!(
                    "{interface}: this flow has no mark: `vhost-af-xdp mark list {interface}` lists those that have one"
                );
            }
        }
        MarkCommand::Clear { at } => {
            let marks = marks_of(&at.interface)?;
            for (flow, _) in marks.all() {
                marks.remove(&flow).with_context(|| at.interface.clone())?;
            }
        }
        MarkCommand::List { at, json } => {
            let all = marks_of(&at.interface)?.all();
            let all: Vec<Marked> = all.into_iter().map(Marked::new).collect();
            let text = match json {
                true => serde_json::to_string_pretty(&all)? + "\n",
                false => tree(&json!({ "marks": all }))?,
            };
            print(&text)?;
        }
    }
    Ok(())
}

/// The marks of the XDP program on an interface of this network namespace.
fn marks_of(interface: &str) -> anyhow::Result<InterfaceMarks> {
    let link = Link::by_name(interface)?;
    InterfaceMarks::of(link.index).with_context(|| interface.to_owned())
}
