//! Attaches a loaded XDP program to an interface in a chosen mode, and explains why it failed.
//!
//! It queries first whether a program is attached already, for a better error message.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use xsk::Netdevice;

use crate::error::{AttachError, KernelRefusal, with_sources};
use crate::foreign::program_on;
use crate::link::{self, Attached};
use crate::mode::{Mode, ModeRequest};
use crate::netlink::refusal_of;

/// The interface for a program, and the program's kind.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) ifindex: u32,
    pub(crate) interface: String,
    pub(crate) frags: bool,
}

impl Target {
    /// Finds the interface.
    pub(crate) fn find(ifindex: u32, frags: bool) -> Result<Self, AttachError> {
        let device = Netdevice::by_index(ifindex).map_err(|_| AttachError::NoSuchInterface { ifindex })?;
        let interface = device.name().to_owned();
        Ok(Self {
            ifindex,
            interface,
            frags,
        })
    }

    /// Finds the interface, and refuses one that has a program.
    pub(crate) fn check(ifindex: u32, frags: bool) -> Result<Self, AttachError> {
        let target = Self::find(ifindex, frags)?;
        match program_on(ifindex) {
            Some(program) => Err(AttachError::Foreign {
                interface: target.interface,
                held: program.held(ifindex),
                program,
            }),
            None => Ok(target),
        }
    }

    /// Attaches the loaded `program` as requested.
    pub(crate) fn attach(
        &self,
        program: BorrowedFd<'_>,
        id: u32,
        request: ModeRequest,
    ) -> Result<Attached, AttachError> {
        let attached = |link, mode, fallback| Attached {
            link,
            program: id,
            stays: false,
            mode,
            fallback,
        };
        let (first, instead) = match request {
            ModeRequest::Xdp => (Mode::Native, Some(Mode::Skb)),
            ModeRequest::Native => (Mode::Native, None),
            ModeRequest::Skb => (Mode::Skb, None),
            ModeRequest::Tap => (Mode::Tap, None),
            ModeRequest::Auto => (Mode::Native, Some(Mode::Tap)),
        };
        match (self.attach_in(program, first), instead) {
            (Ok(link), _) => Ok(attached(link, first, None)),
            (Err(error), Some(instead)) if error.is_worth_a_fallback() => {
                let native = with_sources(&error);
                match self.attach_in(program, instead) {
                    Ok(link) => Ok(attached(link, instead, Some(native))),
                    Err(skb) => Err(AttachError::Neither {
                        native,
                        skb: Box::new(skb),
                    }),
                }
            }
            (Err(error), _) => Err(error),
        }
    }

    fn attach_in(&self, program: BorrowedFd<'_>, mode: Mode) -> Result<OwnedFd, AttachError> {
        if mode == Mode::Tap {
            // In tap mode the program is not attached.
            return program.try_clone_to_owned().map_err(AttachError::Config);
        }
        link::create(program, self.ifindex, mode).map_err(|errno| self.explain(program, mode, errno))
    }

    fn explain(&self, program: BorrowedFd<'_>, mode: Mode, errno: io::Error) -> AttachError {
        let interface = self.interface.clone();
        let code = errno.raw_os_error().unwrap_or(0);
        match code {
            libc::ENODEV => {
                return AttachError::NoSuchInterface {
                    ifindex: self.ifindex,
                };
            }
            libc::EPERM | libc::EACCES => {
                let source = KernelRefusal { errno, message: None };
                return AttachError::NotPermitted { interface, source };
            }
            // Another process attached a program in the meantime.
            libc::EBUSY | libc::EEXIST => {
                if let Some(program) = program_on(self.ifindex) {
                    let held = program.held(self.ifindex);
                    return AttachError::Foreign {
                        interface,
                        program,
                        held,
                    };
                }
            }
            _ => {}
        }
        let message = refusal_of(program, self.ifindex, mode);
        let says_mtu = message
            .as_ref()
            .is_some_and(|text| text.to_ascii_lowercase().contains("mtu"));
        let source = KernelRefusal { errno, message };
        if code == libc::ERANGE || says_mtu {
            let mtu = Netdevice::by_index(self.ifindex)
                .and_then(|device| device.mtu())
                .unwrap_or(0);
            return AttachError::MtuTooLarge {
                interface,
                mtu,
                mode,
                frags: self.frags,
                source,
            };
        }
        AttachError::Refused {
            interface,
            mode,
            source,
        }
    }
}
