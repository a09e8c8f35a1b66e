//! Filter rules of ports, as tables of a file, and frames that they are about.

use std::net::Ipv4Addr;

use crate::frame::{ipv4, udp_ports};

/// Where datagrams of these tests go.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// Tables of rules of a guest's port, each as words `key=value`.
///
/// # Panics
/// If they are no such words.
pub fn tables(guest: usize, list: &[&str]) -> String {
    let line = |word: &str| {
        let (key, value) = word.split_once('=').expect("key=value");
        format!("{key} = \"{value}\"\n")
    };
    let table = |words: &&str| {
        let lines: String = words.split(' ').map(line).collect();
        format!("[[port.vm{guest}.rule]]\n{lines}")
    };
    list.iter().map(table).collect()
}

/// A frame of at least 60 bytes.
pub fn framed(to: [u8; 6], from: [u8; 6], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &from, &ethertype.to_be_bytes(), packet].concat();
    frame.resize(frame.len().max(60), 0);
    frame
}

/// UDP over IPv4 to [`HOST`] and a port.
pub fn udp(to: [u8; 6], from: [u8; 6], source: Ipv4Addr, port: u16) -> Vec<u8> {
    framed(
        to,
        from,
        0x0800,
        &ipv4(source, HOST, 17, &udp_ports([1024, port])),
    )
}
