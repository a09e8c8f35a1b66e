//! Settings of a driver by the ethtool ioctl, which need CAP_NET_ADMIN (`dev_ethtool`, net/ethtool/ioctl.c).
#![allow(unsafe_code)]

use std::io;

use host::nic::abi::{self, RxFh, RxNfc, command};
use host::nic::{Ethtool, INDIRECTION_MAX, Rule, Target};
use zerocopy::{FromBytes, IntoBytes};

use super::Nic;

/// Executes a command that changes something.
fn set(driver: &Ethtool, bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: each caller passes the structure of its command, with as many entries behind it as the structure says.
    // Any bytes are valid for these structures.
    unsafe { driver.command(bytes) }
}

impl Nic for Ethtool {
    fn insert(&mut self, rule: &Rule, location: Option<u32>) -> io::Result<u32> {
        let context = match rule.target {
            Target::Context(context) => context,
            Target::Queue(_) => 0,
        };
        let mut request = RxNfc::new(command::SRXCLSRLINS);
        request.fs = rule.spec();
        request.fs.location = location.unwrap_or(abi::LOCATION_ANY);
        request.rule_cnt = context;
        set(self, request.as_mut_bytes())?;
        Ok(request.fs.location)
    }

    fn delete(&mut self, location: u32) -> io::Result<()> {
        let mut request = RxNfc::new(command::SRXCLSRLDEL);
        request.fs.location = location;
        set(self, request.as_mut_bytes())
    }

    fn set_indirection(&mut self, table: &[u32]) -> io::Result<()> {
        let size = u32::try_from(table.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut bytes = RxFh::with_table(command::SRSSH, 0, size);
        bytes.extend(table.iter().flat_map(|queue| queue.to_ne_bytes()));
        set(self, &mut bytes)
    }

    fn create_context(&mut self, queues: &[u32]) -> io::Result<u32> {
        let size = self.indirection_size(0)?;
        if size == 0 || size > INDIRECTION_MAX || queues.is_empty() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let table = queues.iter().cycle().take(size as usize);
        let mut bytes = RxFh::with_table(command::SRSSH, abi::CONTEXT_ALLOC, size);
        bytes.extend(table.flat_map(|queue| queue.to_ne_bytes()));
        set(self, &mut bytes)?;
        let (head, _) = RxFh::read_from_prefix(&bytes).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(head.rss_context)
    }

    fn delete_context(&mut self, context: u32) -> io::Result<()> {
        // A table without entries deletes the context (`ethtool_set_rxfh`, net/ethtool/ioctl.c).
        set(self, RxFh::new(command::SRSSH, context).as_mut_bytes())
    }
}
