//! The control path: what decides which frames may flow where.
//!
//! A [`port`](port::Port) is one guest's network device: a vhost-user socket on one side, queues of an
//! [`interface`] on the other. A [`session`] is one connection of a VMM to a port; it turns what
//! the VMM negotiates into lanes ([`lanes`]) and gives them to workers. [`serve`] starts all of
//! it, [`steering`] says where programs and sockets come from, [`steward::links`] tells of the interfaces, [`status`] shows it.
//!
//! All state of a port sits behind one lock that only this port's control threads take; [`shown`] is what is seen of it
//! without. Nothing in here runs per frame.

pub(crate) mod afxdp_plugin;
pub(crate) mod alarm;
pub(crate) mod announce;
pub(crate) mod attend;
pub(crate) mod config;
pub(crate) mod control_socket;
pub(crate) mod demand;
pub(crate) mod external;
pub(crate) mod features;
pub(crate) mod files;
pub(crate) mod front;
pub(crate) mod handler;
pub(crate) mod interface;
pub(crate) mod keeper;
pub(crate) mod kept;
pub(crate) mod lanes;
pub(crate) mod listener;
pub(crate) mod memory;
pub(crate) mod nudge;
pub(crate) mod peer;
pub(crate) mod port;
pub(crate) mod queues;
pub(crate) mod registration;
pub(crate) mod seldom;
pub(crate) mod serve;
pub(crate) mod session;
pub(crate) mod shown;
pub(crate) mod sigbus;
pub(crate) mod status;
pub(crate) mod status_view;
pub(crate) mod steering;
pub(crate) mod visit;
pub(crate) mod vring;
pub(crate) mod watchdog;
