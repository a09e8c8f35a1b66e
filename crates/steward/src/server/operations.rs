//! The table of privileged operations: everything that the steward does for the processes that connect to it.
//!
//! Each request of the protocol has one row: what the steward checks first, what it does, how that is undone, and what
//! limits a user that repeats the request. The code in a row serves the request: the compiler rejects a request without
//! a row. docs/operations.md is generated from the rows.
//!
//! For all of them: a message is checked as a whole first ([`Malformed`](steward_protocol::Malformed)), a rule of the
//! policy has to be for the connection's user, a user has one request a round, and requests and connections are limited
//! ([`limits`](super::connections::limits), [`admission`](super::connections::admission)). Everything ends with the
//! connection, or when a new policy does not allow it ([`Server::end`], [`reload`](super::reload)). If the steward
//! dies, the next one undoes it ([`restore`](super::journal::restore)).
//!
//! [`Server::end`]: super::Server

use steer::TapTo;

use super::connections::connection::{By, Held};
use super::interface::Interface;
use super::job::Pending;
use super::{Answered, Server, no_lease};
use steward_protocol::{Answer, Refusal, Request};

/// A row of the table.
#[derive(Debug)]
pub struct Operation {
    /// Name of the request.
    pub name: &'static str,
    /// Who does it.
    pub by: By,
    /// What is checked before.
    pub checks: &'static str,
    /// What is done.
    pub does: &'static str,
    /// What undoes it; the end of the lease always does. `–`: there is nothing to undo.
    pub undone: &'static str,
    /// What limits it. Units are those of [`DeviceChange`](super::connections::limits::DeviceChange).
    pub limit: &'static str,
}

/// Makes [`OPERATIONS`], [`by`], [`act`] and [`begin`] from the rows.
macro_rules! operations {
    ($server:ident, $number:ident, $request:ident;
     Steward { $($name:ident $pattern:tt [$checks:literal $does:literal $undone:literal $limit:literal] => $act:expr;)* }
     Jobs { $($by:ident $job:ident $job_pattern:tt
        [$job_checks:literal $job_does:literal $job_undone:literal $job_limit:literal] => $begin:expr;)* }) => {
        /// The table.
        pub const OPERATIONS: &[Operation] = &[
            $(operations!(row $name Steward $checks $does $undone $limit),)*
            $(operations!(row $job $by $job_checks $job_does $job_undone $job_limit),)*
        ];

        /// Who serves a request.
        pub(super) fn by(request: &Request) -> By {
            match request {
                $(Request::$name { .. } => By::Steward,)*
                $(Request::$job { .. } => By::$by,)*
            }
        }

        /// Serves a request that the steward itself serves.
        pub(super) fn act($server: &mut Server, $number: u64, $request: &Request) -> Answered {
            match $request {
                $(operations!(pattern $name $pattern) => $act,)*
                _ => Err(no_lease()),
            }
        }

        /// Starts the child that serves a request.
        pub(super) fn begin($server: &mut Server, $number: u64, $request: &Request) -> Result<Pending, Refusal> {
            match $request {
                $(operations!(pattern $job $job_pattern) => $begin,)*
                _ => Err(no_lease()),
            }
        }
    };
    (row $name:ident $by:ident $checks:literal $does:literal $undone:literal $limit:literal) => {
        Operation {
            name: stringify!($name),
            by: By::$by,
            checks: $checks,
            does: $does,
            undone: $undone,
            limit: $limit,
        }
    };
    (pattern $name:ident ()) => { Request::$name };
    (pattern $name:ident (_)) => { Request::$name(_) };
    (pattern $name:ident ($inner:ident)) => { Request::$name($inner) };
    (pattern $name:ident { $($field:tt)* }) => { Request::$name { $($field)* } };
}

operations! { server, number, request;
    Steward {
    Lease (wanted) [
        "policy; the queues are free"
        "XDP program, filter, NIC rules"
        "lease ends"
        "`at-most`, 128 units"
    ] => server.lease(number, wanted);
    Resume { token } [
        "token; same user; policy"
        "the lease of a previous steward goes on"
        "lease ends"
        "one lease a connection"
    ] => server.resume(number, token);
    Keep { token } [
        "the lease has no token"
        "records the token for the next steward"
        "lease ends"
        "once a lease"
    ] => server.keep(number, token);
    Zcrx (_) [
        "policy: flows; free, no XDP"
        "header split; not in RSS"
        "rings closed"
        "`at-most`, 4 units"
    ] => server.lease_by_part(number, request);
    Leases { after } [
        "own leases only, root: all"
        "lists one lease"
        "–"
        "requests"
    ] => Ok(server.next_lease(number, *after).into());
    Stations { changes } [
        "policy; no other's address"
        "whose frames the network gets"
        "`Stations`"
        "1,024 a network"
    ] => server.change_stations(number, 0, changes);
    Groups () [
        "the lease is a network's"
        "hands over its multicast ring"
        "kept for the user"
        "requests"
    ] => server.groups(number);
    Host { has } [
        "policy: `host`"
        "tap between network and host"
        "new policy"
        "16 units"
    ] => server.network_tap(number, TapTo::Host, *has, 1);
    Uplink { has, queues } [
        "tap mode; addresses as for `Stations`"
        "tap between lease and interface"
        "new policy"
        "16 units"
    ] => server.uplink_tap(number, *has, *queues);
    Behind { after } [
        "it has the tap of `Host`"
        "lists stations behind the bridge"
        "–"
        "requests"
    ] => server.behind(number, *after);
    Advertise { changes } [
        "policy; own stations; tunnel at a bridge"
        "FDB entries, neighbours"
        "`Advertise`"
        "4,096 a network"
    ] => server.advertise(number, changes);
    Tunnel { share, device } [
        "policy: `network` for the device, too"
        "tunnel of the program, rtnetlink sockets"
        "lease ends"
        "requests"
    ] => server.tunnel(number, *share, device);
    TunnelStations { share, changes } [
        "the device's network has them"
        "whose frames it gets"
        "`TunnelStations`"
        "1,024 a network"
    ] => server.change_stations(number, *share, changes);
    Vteps { share, changes } [
        "the lease is a network's"
        "hosts whose packets it takes"
        "`Vteps`"
        "16,384 a network"
    ] => server.change_vteps(number, *share, changes);
    DropUnknown { share } [
        "the lease is a network's"
        "packets of other hosts are dropped"
        "`Tunnel`"
        "–"
    ] => server.drop_unknown(number, *share);
    SendTap { queue, only_with_tso } [
        "the queue is the lease's"
        "tap that sends from that queue"
        "lease ends"
        "one a queue, 2 units"
    ] => server.send_tap(number, *queue, *only_with_tso);
    Hints (wanted) [
        "masked by the policy's `hints`"
        "XDP program that writes them"
        "`Hints`, after 5 s"
        "8 units"
    ] => server.ask_for_hints(number, *wanted);
    Facts () [
        "it has a lease"
        "reports the interface"
        "–"
        "requests"
    ] => on_lease(server, number, |interface, held| Ok(Answer::Facts(interface.facts_for(&held.wanted.range()))));
    Activate { queue, conf } [
        "the queue is the lease's; VLANs are visible"
        "frames to its socket"
        "`Deactivate`"
        "requests"
    ] => on_lease(server, number, |interface, held| {
        interface.activate(held.check(*queue)?, *conf).map(|()| Answer::Done)
    });
    Deactivate { queue } [
        "the queue is the lease's"
        "frames to the host"
        "`Activate`"
        "requests"
    ] => on_lease(server, number, |interface, held| {
        interface.deactivate(held.check(*queue)?).map(|()| Answer::Done)
    });
    Counters { queue } [
        "the queue is the lease's"
        "reports the program's counters"
        "–"
        "requests"
    ] => on_lease(server, number, |interface, held| {
        interface.counters(held.check(*queue)?).map(Answer::Counters)
    });
    }
    Jobs {
    Child Bind { queue, flags, wait_ms } [
        "its memory is registered"
        "binds the socket, hands it over"
        "socket closed"
        "job; 60 s"
    ] => server.bind(number, *queue, *flags, *wait_ms);
    Child Await { queue, wait_ms } [
        "the queue is the lease's"
        "waits until no socket has it"
        "–"
        "job; 60 s"
    ] => server.await_free(number, *queue, *wait_ms);
    ChildWithFiles Register { queue, umem, rings } [
        "tmpfs or hugetlbfs, all pages exist"
        "pins memory for a new socket"
        "socket closed"
        "`memlock`, job"
    ] => server.register(number, *queue, umem, rings);
    ChildWithFiles Share { queue, wait_ms, cookie, rings } [
        "socket was bound here for the user"
        "socket with that memory"
        "socket closed"
        "`memlock`, job; 60 s"
    ] => server.share(number, (*queue, *wait_ms), *cookie, rings);
    ChildWithFiles ZcrxRegister (_) [
        "same process; as `Register`"
        "rules; rings get it"
        "lease, rings closed"
        "`memlock`, 4 units, job"
    ] => server.begin_by_part(number, request);
    ChildWithFiles Netkit (wanted) [
        "policy; by the child: owner of the namespace"
        "netkit there, with the queue"
        "lease ends"
        "4 units, job"
    ] => server.begin_netkit(number, wanted);
    }
}

/// Handles a request about the interface of a lease.
fn on_lease(
    server: &Server,
    number: u64,
    act: impl FnOnce(&Interface, &Held) -> Result<Answer, Refusal>,
) -> Answered {
    let (_, held, interface) = server.lessee(number)?;
    act(interface, held).map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::LINGER;
    use crate::server::connections::limits::DeviceChange;

    /// The compiler compares the rows with the requests.
    #[test]
    fn each_row_names_check_work_undo_and_limit_as_the_code_has_them() {
        let changes = [
            ("Lease", DeviceChange::Program),
            ("Zcrx", DeviceChange::NicSetUp),
            ("Host", DeviceChange::NetworkTap),
            ("Uplink", DeviceChange::NetworkTap),
            ("SendTap", DeviceChange::SendTap),
            ("Hints", DeviceChange::Hints),
            ("ZcrxRegister", DeviceChange::NicSetUp),
            ("Netkit", DeviceChange::NicSetUp),
        ];
        for row in OPERATIONS {
            let cells = [row.checks, row.does, row.undone, row.limit];
            assert!(cells.iter().all(|cell| !cell.is_empty()), "{row:?}");
            // Without a change there is nothing to undo.
            let reports = ["lists ", "reports ", "waits "]
                .iter()
                .any(|verb| row.does.starts_with(verb));
            assert_eq!(row.undone == "–", reports, "{row:?}");
            assert_eq!(row.by != By::Steward, row.limit.contains("job"), "{row:?}");
            let change = changes.iter().find(|(name, _)| *name == row.name);
            let units = change.map(|(_, change)| format!("{} units", change.cost(LINGER)));
            match units {
                Some(units) => assert!(row.limit.contains(&units), "{row:?}: {units}"),
                None => assert!(!row.limit.contains("units"), "{row:?}"),
            }
        }
    }
}
