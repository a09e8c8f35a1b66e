//! Options of `vhost-af-xdp serve`.

/// Where frames lie while they are with the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// `--memory copy`.
    Copy,
    /// `--memory send-direct`.
    SendDirect,
    /// `--memory direct`.
    Direct,
    /// `--memory copy`, where frames come by a tap: `--mode tap`.
    Tap,
}

impl Placement {
    /// As the option has it, or that of the mode.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::SendDirect => "send-direct",
            Self::Direct => "direct",
            Self::Tap => "tap",
        }
    }
}

/// How the steering program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `--mode auto`.
    Auto,
    /// `--mode xdp`.
    Xdp,
    /// `--mode native`.
    Native,
    /// `--mode skb`.
    Skb,
    /// `--mode tap`.
    Tap,
}

impl Mode {
    /// As the option has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Xdp => "xdp",
            Self::Native => "native",
            Self::Skb => "skb",
            Self::Tap => "tap",
        }
    }
}

/// What a daemon may do, and where its queues come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Privilege {
    /// Nothing; a steward leases queues to it.
    Leased,
    /// Nothing, and it has no queues.
    Nobody,
    /// Everything.
    Root,
}

impl Privilege {
    /// This one, unless `TESTKIT_STEWARD=0` says root.
    fn or_root(self) -> Self {
        match std::env::var("TESTKIT_STEWARD").as_deref() {
            Ok("0") => Self::Root,
            _ => self,
        }
    }
}

/// Options of `serve`, without the socket.
#[derive(Clone, Debug)]
#[must_use]
pub struct Serve {
    args: Vec<String>,
    pub(super) privilege: Privilege,
}

impl Serve {
    /// With an interface, by AF_XDP, without privileges: its queues are leased from a steward. `TESTKIT_STEWARD=0`: as
    /// root, without one.
    pub fn interface(name: &str) -> Self {
        let serve = Self {
            args: vec!["--ifname".to_owned(), name.to_owned()],
            privilege: Privilege::Leased.or_root(),
        };
        serve.mode(Mode::Xdp)
    }

    /// With what a file says, by AF_XDP where it says no mode, without privileges: queues are leased from a steward.
    pub fn file() -> Self {
        Self {
            args: Vec::new(),
            privilege: Privilege::Leased.or_root(),
        }
    }

    /// With the null NIC, without privileges.
    pub fn null() -> Self {
        Self {
            args: vec!["--null".to_owned()],
            privilege: Privilege::Nobody.or_root(),
        }
    }

    /// Queues are leased from a steward, whatever `TESTKIT_STEWARD` says.
    pub fn leased(mut self) -> Self {
        self.privilege = Privilege::Leased;
        self
    }

    /// Started by root, without a steward, whatever `TESTKIT_STEWARD` says.
    pub fn by_root(mut self) -> Self {
        self.privilege = Privilege::Root;
        self
    }

    /// With queues of a steward, or started by root.
    pub fn leased_if(self, leased: bool) -> Self {
        match leased {
            true => self.leased(),
            false => self.by_root(),
        }
    }

    /// With a cable between two ports, without privileges.
    pub fn cable(name: &str) -> Self {
        Self {
            args: vec!["--cable".to_owned(), name.to_owned()],
            privilege: Privilege::Nobody.or_root(),
        }
    }

    /// One more option, with its value. Another mode takes the place of the one before.
    pub fn with(mut self, option: &str, value: impl Into<String>) -> Self {
        let mode = self.args.iter().position(|arg| arg == "--mode");
        if let Some(at) = mode.filter(|_| option == "--mode") {
            self.args.drain(at..at + 2);
        }
        self.args.extend([option.to_owned(), value.into()]);
        self
    }

    /// One more option that has no value.
    pub fn flag(mut self, option: &str) -> Self {
        self.args.push(option.to_owned());
        self
    }

    /// `--memory`.
    pub fn placement(self, placement: Placement) -> Self {
        match placement {
            Placement::Tap => self.mode(Mode::Tap),
            _ => self.with("--memory", placement.name()),
        }
    }

    /// `--mode`.
    pub fn mode(self, mode: Mode) -> Self {
        self.with("--mode", mode.name())
    }

    /// `--offload`: `all`, `none`, or names joined by commas.
    pub fn offload(self, list: &str) -> Self {
        self.with("--offload", list)
    }

    /// The options, as they go on the command line.
    pub fn args(&self) -> &[String] {
        &self.args
    }
}
