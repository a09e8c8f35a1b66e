//! The command line of `mark`.

use std::net::IpAddr;

use clap::{Args, Subcommand, value_parser};
use model::config::protocol;
use steer::Flow;

pub(crate) const MARK_EXAMPLES: &str = "\
Examples:
  Frames of TCP to 10.0.0.5 port 443, from anywhere, have the mark 7 (a service):
    vhost-af-xdp mark set eth1 7 --protocol tcp --destination 10.0.0.5 --destination-port 443
  Those of one flow to it have the mark 8:
    vhost-af-xdp mark set eth1 8 --protocol tcp --source 192.0.2.9 --source-port 40000 \\
        --destination 10.0.0.5 --destination-port 443
  Allow only these frames to an added port (other ports: rules in the file):
    vhost-af-xdp port set vm1 to-guest-default=deny rule='direction=to-guest action=allow mark=7'
  All marks of eth1:
    vhost-af-xdp mark list eth1";

#[derive(Debug, Subcommand)]
pub(crate) enum MarkCommand {
    /// Set the mark of a flow, or of all flows to a service; it replaces an earlier mark
    #[command(after_help = MARK_EXAMPLES)]
    Set {
        #[command(flatten)]
        at: MarkedInterface,
        /// The mark, 1 to 4294967295, as in mark= of a rule
        #[arg(value_name = "MARK", value_parser = value_parser!(u32).range(1..))]
        mark: u32,
        #[command(flatten)]
        flow: FlowArgs,
    },
    /// Remove the mark of a flow or a service
    #[command(after_help = MARK_EXAMPLES)]
    Remove {
        #[command(flatten)]
        at: MarkedInterface,
        #[command(flatten)]
        flow: FlowArgs,
    },
    /// List all marks of an interface
    List {
        #[command(flatten)]
        at: MarkedInterface,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove all marks of an interface
    Clear {
        #[command(flatten)]
        at: MarkedInterface,
    },
}

/// Where the marks are.
#[derive(Debug, Args)]
pub(crate) struct MarkedInterface {
    /// The interface
    #[arg(value_name = "IFNAME")]
    pub(crate) interface: String,
}

impl MarkCommand {
    /// Errors: options that exclude each other, or missing ones.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        match self {
            Self::Set { flow, .. } | Self::Remove { flow, .. } => flow.flow().map(drop),
            Self::List { .. } | Self::Clear { .. } => Ok(()),
        }
    }
}

/// A flow, identified by its packets, or a service.
#[derive(Debug, Args)]
pub(crate) struct FlowArgs {
    /// tcp, udp, sctp, icmp, icmpv6 and others by their names, or a number
    #[arg(long, value_name = "PROTOCOL", value_parser = protocol)]
    protocol: u8,
    /// Source address [default: anywhere; the destination is a service then]
    #[arg(long, value_name = "ADDRESS")]
    source: Option<IpAddr>,
    /// Source port, for tcp, udp and sctp
    #[arg(long, value_name = "PORT", requires = "source")]
    source_port: Option<u16>,
    /// Destination address
    #[arg(long, value_name = "ADDRESS")]
    destination: IpAddr,
    /// Destination port, for tcp, udp and sctp
    #[arg(long, value_name = "PORT")]
    destination_port: Option<u16>,
}

/// Protocols with ports.
const WITH_PORTS: [u8; 3] = [6, 17, 132];

impl FlowArgs {
    /// Errors: options that exclude each other, or missing ones, with the remedy.
    pub(crate) fn flow(&self) -> anyhow::Result<Flow> {
        let has_ports = WITH_PORTS.contains(&self.protocol);
        let given = [
            ("--source-port", self.source_port),
            ("--destination-port", self.destination_port),
        ];
        let named = given.iter().find(|(_, port)| port.is_some());
        if let (false, Some((option, _))) = (has_ports, named) {
            anyhow::bail!(
                "{option}: only flows of tcp, udp and sctp have ports that are compared: leave it out"
            );
        }
        if has_ports && self.destination_port.is_none() {
            anyhow::bail!("--destination-port: missing: a flow of this protocol is identified by its ports");
        }
        if let (true, Some(source), None) = (has_ports, self.source, self.source_port) {
            anyhow::bail!(
                "--source-port: missing: a flow comes from one port of {source}; for a service, leave out --source"
            );
        }
        if let Some(source) = self.source
            && source.is_ipv4() != self.destination.is_ipv4()
        {
            let destination = self.destination;
            anyhow::bail!(
                "--source {source}, --destination {destination}: one is IPv4, the other IPv6: give two of a kind"
            );
        }
        if let Some(source) = self.source
            && source.is_unspecified()
        {
            anyhow::bail!("--source {source}: this means anywhere: leave it out");
        }
        Ok(Flow {
            protocol: self.protocol,
            from: self.source.map(|source| (source, self.source_port.unwrap_or(0))),
            to: (self.destination, self.destination_port.unwrap_or(0)),
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flow: FlowArgs,
    }

    fn flow(line: &str) -> anyhow::Result<Flow> {
        let words = std::iter::once("mark").chain(line.split_whitespace());
        Line::try_parse_from(words)?.flow.flow()
    }

    #[test]
    fn flows_and_services_are_told_apart_by_their_source() {
        let service = flow("--protocol udp --destination fd00::1 --destination-port 53").expect("a service");
        assert_eq!((service.protocol, service.from), (17, None));
        assert_eq!(service.to, ("fd00::1".parse().expect("an address"), 53));
        let one = flow("--protocol 1 --source 10.0.0.1 --destination 10.0.0.2").expect("a flow");
        assert_eq!((one.from.expect("said").1, one.to.1), (0, 0));
    }

    #[test]
    fn what_no_packet_is_of_is_refused_by_the_name_of_the_option() {
        for (line, word) in [
            (
                "--protocol icmp --destination 10.0.0.1 --destination-port 1",
                "--destination-port: only",
            ),
            (
                "--protocol tcp --destination 10.0.0.1",
                "--destination-port: missing",
            ),
            (
                "--protocol tcp --source 10.0.0.2 --destination 10.0.0.1 --destination-port 1",
                "--source-port: missing",
            ),
            ("--protocol icmp --source fd00::1 --destination 10.0.0.1", "IPv6"),
            (
                "--protocol icmp --source 0.0.0.0 --destination 10.0.0.1",
                "anywhere",
            ),
            ("--protocol nothing --destination 10.0.0.1", "--protocol"),
        ] {
            let said = flow(line).expect_err(line).to_string();
            assert!(said.contains(word), "{line}: {said}");
        }
    }
}
