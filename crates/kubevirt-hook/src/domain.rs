//! Adds vhost-user interfaces to a domain of libvirt (<https://libvirt.org/formatdomain.html>).
//!
//! The text is changed at a few places only, so what KubeVirt and other sidecars wrote stays as it is, with elements and
//! namespaces that this program does not know. Each change parses the text again: a domain has some kilobytes.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;

use anyhow::Context as _;
use roxmltree::{Document, Node};

/// A vhost-user interface of a domain.
#[derive(Debug)]
pub(crate) struct VhostUser<'a> {
    /// The name of the VM's interface. It becomes libvirt's alias, by which KubeVirt finds the interface again.
    pub(crate) name: &'a str,
    pub(crate) mac: &'a str,
    /// The port's socket, as QEMU sees it.
    pub(crate) socket: &'a Path,
    pub(crate) model: &'static str,
    /// Queue pairs.
    pub(crate) queues: Option<u16>,
    pub(crate) pci_address: Option<PciAddress>,
    pub(crate) boot_order: Option<u32>,
    pub(crate) acpi_index: Option<u32>,
    pub(crate) is_down: bool,
}

/// A PCI address, written as 0000:02:03.0: domain, bus, slot, function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PciAddress {
    domain: u16,
    bus: u8,
    slot: u8,
    function: u8,
}

impl PciAddress {
    /// # Errors
    /// `text` is none.
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        let parts = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.split(':');
            let address = Self {
                domain: u16::from_str_radix(parts.next()?, 16).ok()?,
                bus: u8::from_str_radix(parts.next()?, 16).ok()?,
                slot: u8::from_str_radix(parts.next()?, 16)
                    .ok()
                    .filter(|slot| *slot < 32)?,
                function: function.parse().ok().filter(|function| *function < 8)?,
            };
            parts.next().is_none().then_some(address)
        };
        parts().with_context(|| format!("PCI address {text:?} is not of the form DDDD:BB:SS.F"))
    }
}

/// The domain with this interface, and with memory that the vhost-user backend can map. An interface with the same alias
/// is replaced.
///
/// # Errors
/// The domain is no domain.
pub(crate) fn with_interface(domain: &str, interface: &VhostUser<'_>) -> anyhow::Result<String> {
    let domain = with_shared_memory(domain)?;
    let document = parsed(&domain)?;
    let devices =
        child(document.root_element(), "devices").context("virt-launcher sent a domain without <devices>")?;
    let alias = format!("ua-{}", interface.name);
    let present = devices.children().find(|node| {
        node.has_tag_name("interface")
            && child(*node, "alias").and_then(|its| its.attribute("name")) == Some(&alias)
    });
    let xml = interface.to_xml(&alias);
    Ok(match present {
        Some(present) => replaced(&domain, present.range(), &xml),
        None => appended(&domain, devices, &xml),
    })
}

impl VhostUser<'_> {
    fn to_xml(&self, alias: &str) -> String {
        let mut xml = String::from("<interface type=\"vhostuser\">");
        element(&mut xml, "mac", &[("address", self.mac)]);
        let socket = self.socket.to_string_lossy();
        start(
            &mut xml,
            "source",
            &[("type", "unix"), ("path", &socket), ("mode", "client")],
        );
        // The port's daemon may restart under the guest.
        xml += "><reconnect enabled=\"yes\" timeout=\"1\"/></source>";
        element(&mut xml, "model", &[("type", self.model)]);
        let queues = self.queues.map(|queues| queues.to_string());
        let mut driver = vec![("rx_queue_size", "1024"), ("tx_queue_size", "1024")];
        driver.extend(queues.as_deref().map(|queues| ("queues", queues)));
        element(&mut xml, "driver", &driver);
        if let Some(PciAddress {
            domain,
            bus,
            slot,
            function,
        }) = self.pci_address
        {
            let [domain, bus, slot] =
                [u32::from(domain), bus.into(), slot.into()].map(|part| format!("{part:#x}"));
            let function = format!("{function:#x}");
            let parts = [
                ("domain", &*domain),
                ("bus", &bus),
                ("slot", &slot),
                ("function", &function),
            ];
            element(&mut xml, "address", &[&[("type", "pci")], &parts[..]].concat());
        }
        if let Some(order) = self.boot_order {
            element(&mut xml, "boot", &[("order", &order.to_string())]);
        }
        if let Some(index) = self.acpi_index {
            element(&mut xml, "acpi", &[("index", &index.to_string())]);
        }
        if self.is_down {
            element(&mut xml, "link", &[("state", "down")]);
        }
        element(&mut xml, "alias", &[("name", alias)]);
        xml + "</interface>"
    }
}

/// The domain with guest memory that other processes can map: a memfd, and shared. Huge pages stay huge pages, and a
/// file stays a file. A cell of a NUMA topology and a memory device may have an access of their own, which would win.
fn with_shared_memory(domain: &str) -> anyhow::Result<String> {
    let mut domain = with_memory_backing(domain, "access", |_| false, "<access mode=\"shared\"/>")?;
    let mappable = |source: Node<'_, '_>| matches!(source.attribute("type"), Some("file" | "memfd"));
    domain = with_memory_backing(&domain, "source", mappable, "<source type=\"memfd\"/>")?;
    while let Some(place) = private_access(&domain)? {
        domain = replaced(&domain, place, "shared");
    }
    Ok(domain)
}

/// The domain whose `<memoryBacking>` has `element`, called `name`, unless it has one that `keep` accepts.
fn with_memory_backing(
    domain: &str,
    name: &str,
    keep: impl Fn(Node<'_, '_>) -> bool,
    element: &str,
) -> anyhow::Result<String> {
    let document = parsed(domain)?;
    let root = document.root_element();
    let Some(backing) = child(root, "memoryBacking") else {
        return Ok(appended(
            domain,
            root,
            &format!("<memoryBacking>{element}</memoryBacking>"),
        ));
    };
    Ok(match child(backing, name) {
        Some(present) if keep(present) => domain.to_owned(),
        Some(present) => replaced(domain, present.range(), element),
        None => appended(domain, backing, element),
    })
}

/// Where the access of a NUMA cell or memory device is that is not shared.
fn private_access(domain: &str) -> anyhow::Result<Option<Range<usize>>> {
    let document = parsed(domain)?;
    let mut accesses = document
        .descendants()
        .filter_map(|node| match node.tag_name().name() {
            "cell" => node.attribute_node("memAccess"),
            "memory" => node.attribute_node("access"),
            _ => None,
        });
    Ok(accesses
        .find(|access| access.value() != "shared")
        .map(|access| access.range_value()))
}

fn parsed(domain: &str) -> anyhow::Result<Document<'_>> {
    Document::parse(domain).context("virt-launcher sent a domain that is no XML")
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// `text`, whose document has the element `parent`, with one more child at its end.
fn appended(text: &str, parent: Node<'_, '_>, xml: &str) -> String {
    let Range { start, end } = parent.range();
    match text[start..end].strip_suffix("/>") {
        Some(open) => {
            let name = parent.tag_name().name();
            replaced(text, start + open.len()..end, &format!(">{xml}</{name}>"))
        }
        None => {
            let close = start + text[start..end].rfind("</").unwrap_or(0);
            replaced(text, close..close, xml)
        }
    }
}

fn replaced(text: &str, place: Range<usize>, by: &str) -> String {
    [&text[..place.start], by, &text[place.end..]].concat()
}

/// Adds an element without children.
fn element(xml: &mut String, name: &str, attributes: &[(&str, &str)]) {
    start(xml, name, attributes);
    *xml += "/>";
}

/// Adds the start of an element, all but its closing bracket.
fn start(xml: &mut String, name: &str, attributes: &[(&str, &str)]) {
    *xml += "<";
    *xml += name;
    for (key, value) in attributes {
        let value = value
            .replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('"', "&quot;");
        let _ = write!(xml, " {key}=\"{value}\"");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As virt-launcher writes it, shortened.
    const DOMAIN: &str = r#"<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">
  <name>default_vm1</name>
  <memory unit="b">268435456</memory>
  <metadata><kubevirt xmlns="http://kubevirt.io"><uid>u</uid></kubevirt></metadata>
  <devices>
    <interface type="ethernet"><alias name="ua-default"></alias></interface>
  </devices>
  <qemu:commandline><qemu:arg value="-foo"></qemu:arg></qemu:commandline>
</domain>"#;

    const INTERFACE: &str = concat!(
        r#"<interface type="vhostuser"><mac address="52:54:00:00:00:01"/>"#,
        r#"<source type="unix" path="/run/a.sock" mode="client"><reconnect enabled="yes" timeout="1"/></source>"#,
        r#"<model type="virtio-non-transitional"/><driver rx_queue_size="1024" tx_queue_size="1024"/>"#,
        r#"<alias name="ua-blue"/></interface>"#
    );

    fn interface() -> VhostUser<'static> {
        VhostUser {
            name: "blue",
            mac: "52:54:00:00:00:01",
            socket: Path::new("/run/a.sock"),
            model: "virtio-non-transitional",
            queues: None,
            pci_address: None,
            boot_order: None,
            acpi_index: None,
            is_down: false,
        }
    }

    #[test]
    fn only_the_interface_and_shared_memory_are_added() {
        let backing = r#"<memoryBacking><access mode="shared"/><source type="memfd"/></memoryBacking>"#;
        let expected = DOMAIN
            .replace("  </devices>", &format!("  {INTERFACE}</devices>"))
            .replace("</domain>", &format!("{backing}</domain>"));
        assert_eq!(with_interface(DOMAIN, &interface()).unwrap(), expected);
    }

    #[test]
    fn interface_that_is_there_is_replaced() {
        let once = with_interface(DOMAIN, &interface()).unwrap();
        assert_eq!(with_interface(&once, &interface()).unwrap(), once);
        let moved = VhostUser {
            socket: Path::new("/run/b.sock"),
            ..interface()
        };
        assert_eq!(
            with_interface(&once, &moved).unwrap(),
            once.replace("a.sock", "b.sock")
        );
    }

    #[test]
    fn all_that_a_vm_can_ask_for_is_set() {
        let interface = VhostUser {
            queues: Some(4),
            pci_address: Some(PciAddress::parse("0000:02:1f.7").unwrap()),
            boot_order: Some(1),
            acpi_index: Some(101),
            is_down: true,
            socket: Path::new("/run/a&b\".sock"),
            ..interface()
        };
        let xml = with_interface(DOMAIN, &interface).unwrap();
        for part in [
            r#"tx_queue_size="1024" queues="4"/>"#,
            r#"<address type="pci" domain="0x0" bus="0x2" slot="0x1f" function="0x7"/>"#,
            r#"<boot order="1"/>"#,
            r#"<acpi index="101"/>"#,
            r#"<link state="down"/>"#,
            r#"path="/run/a&amp;b&quot;.sock""#,
        ] {
            assert!(xml.contains(part), "{part} is not in {xml}");
        }
    }

    #[test]
    fn memory_becomes_shared_and_keeps_its_kind() {
        for (before, after) in [
            (
                "<memoryBacking/>",
                r#"<memoryBacking><access mode="shared"/><source type="memfd"/></memoryBacking>"#,
            ),
            (
                r#"<memoryBacking><hugepages/><access mode="private"/></memoryBacking>"#,
                r#"<memoryBacking><hugepages/><access mode="shared"/><source type="memfd"/></memoryBacking>"#,
            ),
            (
                r#"<memoryBacking><source type="file"></source></memoryBacking>"#,
                r#"<memoryBacking><source type="file"></source><access mode="shared"/></memoryBacking>"#,
            ),
            (
                r#"<memoryBacking><source type="anonymous"/></memoryBacking>"#,
                r#"<memoryBacking><source type="memfd"/><access mode="shared"/></memoryBacking>"#,
            ),
            (
                r#"<memoryBacking><access mode="shared"/><source type="memfd"/></memoryBacking><cpu><numa>
                   <cell id="0" memAccess="private"/><cell id="1"/><cell id="2" memAccess='private'/></numa></cpu>
                   <memory model="virtio-mem" access="private"/>"#,
                r#"<memoryBacking><access mode="shared"/><source type="memfd"/></memoryBacking><cpu><numa>
                   <cell id="0" memAccess="shared"/><cell id="1"/><cell id="2" memAccess='shared'/></numa></cpu>
                   <memory model="virtio-mem" access="shared"/>"#,
            ),
        ] {
            let domain = |part: &str| format!("<domain>{part}<devices/></domain>");
            assert_eq!(with_shared_memory(&domain(before)).unwrap(), domain(after));
        }
    }

    #[test]
    fn what_is_no_domain_is_refused() {
        for (domain, message) in [
            ("", "no XML"),
            ("<domain>", "no XML"),
            ("<domain/>", "without <devices>"),
        ] {
            let error = with_interface(domain, &interface()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn pci_addresses_are_checked() {
        for text in [
            "",
            "0000:00:00",
            "0000:00:20.0",
            "0000:00:1f.8",
            "0:0:0:0.0",
            "10000:00:00.0",
            "0000:gg:00.0",
        ] {
            let error = PciAddress::parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
