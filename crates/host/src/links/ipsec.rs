//! IPsec policies (XFRM), which packets by AF_XDP do not pass.

use std::io;

use netlink_bindings::utils::find_attr;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::netlink_socket;

/// `XFRM_MSG_GETSPDINFO`, `XFRM_MSG_NEWSPDINFO`, `XFRMA_SPD_INFO` (include/uapi/linux/xfrm.h).
const GET_INFO: u16 = 0x25;
const NEW_INFO: u16 = 0x24;
const INFO: u16 = 1;
/// Bytes of a message before attributes: `struct nlmsghdr`, and flags.
const HEAD_BYTES: usize = 16 + 4;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;

/// Why packets do not leave by AF_XDP if there are policies.
pub const BYPASSED: &str = "the host has IPsec policies (`ip xfrm policy`), which its packets would bypass";

/// Checks that the network namespace has no IPsec policies. Needs CAP_NET_ADMIN there (`xfrm_user_rcv_msg`,
/// net/xfrm/xfrm_user.c).
///
/// # Errors
/// There are some, or the kernel does not tell: in words.
pub fn check() -> Result<(), String> {
    match has_policies() {
        Ok(false) => Ok(()),
        Ok(true) => Err(BYPASSED.to_owned()),
        Err(error) => Err(format!("the kernel does not list IPsec policies: {error}")),
    }
}

/// Whether the network namespace has IPsec policies, of whatever direction; not those of single sockets.
///
/// # Errors
/// An error of the kernel.
pub fn has_policies() -> io::Result<bool> {
    let socket = match netlink_socket(Some(rustix::net::netlink::XFRM)) {
        // The kernel has no IPsec.
        Err(error) if error.raw_os_error() == Some(Errno::PROTONOSUPPORT.raw_os_error()) => return Ok(false),
        socket => socket?,
    };
    let mut message = (HEAD_BYTES as u32).to_ne_bytes().to_vec();
    message.extend([GET_INFO, REQUEST].map(u16::to_ne_bytes).concat());
    message.resize(HEAD_BYTES, 0);
    // The kernel answers during send(2).
    send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0; 256];
    let (bytes, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    let answer = &answer[..bytes];
    let unknown = || io::Error::from(io::ErrorKind::InvalidData);
    let body = answer.get(HEAD_BYTES..).ok_or_else(unknown)?;
    if answer[4..6] != NEW_INFO.to_ne_bytes() {
        // The code of NLMSG_ERROR is where flags are.
        let code = answer[16..]
            .first_chunk()
            .map_or(0, |code| i32::from_ne_bytes(*code));
        return Err(io::Error::from_raw_os_error(-code));
    }
    // Numbers of policies: in, out, forward; then those of sockets.
    let counts = find_attr(body, INFO)
        .and_then(|counts| counts.get(..12))
        .ok_or_else(unknown)?;
    Ok(counts.iter().any(|&byte| byte != 0))
}

#[cfg(test)]
mod tests {
    use testkit::netns::NetNs;

    use super::*;

    #[test]
    fn policies_of_the_namespace_are_seen() {
        testkit::require!(Root);
        let ns = NetNs::new("ipsec");
        let has_some = || ns.enter(|| has_policies().expect("it is asked"));
        for direction in ["in", "out", "fwd"] {
            assert!(!has_some());
            let policy = ["src", "192.0.2.1", "dst", "192.0.2.2", "dir", direction];
            ns.ip(&[&["xfrm", "policy", "add"], &policy[..], &["action", "block"]].concat());
            assert!(has_some(), "{direction}");
            ns.ip(&[&["xfrm", "policy", "delete"], &policy[..]].concat());
        }
    }
}
