//! The interfaces of a capture, which are its taps.

use crate::inspect::link::{LinkLayer, Unsupported};

/// More interfaces than any machine has; a file that describes more is damaged.
pub(in crate::inspect) const MOST: usize = 4_096;
/// Longest name shown.
const MOST_NAME: usize = 64;

struct Interface {
    name: String,
    link: Result<LinkLayer, Unsupported>,
    /// Packets of the current file that could not be read for their link type, and the number of the first.
    unread: u64,
    first_unread: u64,
    /// The section that described it last.
    section: u64,
}

/// The interfaces of one capture, or of several that are read as one. A section or file that describes an interface of a
/// name that one before it has described means the same interface. Without names it is the place in the file that counts.
#[derive(Default)]
pub(in crate::inspect) struct Interfaces {
    all: Vec<Interface>,
    /// Those without a name, in the order in which files describe them.
    nameless: Vec<u32>,
    /// How many of these the current file has described.
    nameless_of_file: usize,
    /// Sections so far.
    sections: u64,
}

impl Interfaces {
    /// Another file begins.
    pub(super) fn start_file(&mut self) {
        self.nameless_of_file = 0;
        for interface in &mut self.all {
            interface.unread = 0;
        }
        self.start_section();
    }

    /// Another section of the file begins.
    pub(super) fn start_section(&mut self) {
        self.sections += 1;
    }

    /// Takes the next interface that the file describes; its number. The error: there are too many.
    pub(super) fn add(&mut self, name: &str, link: Result<LinkLayer, Unsupported>) -> Result<u32, String> {
        // Names are shown on terminals.
        let name: String =
            name.trim_end_matches('\0').chars().take(MOST_NAME).map(|c| if c.is_control() { '?' } else { c }).collect();
        let section = self.sections;
        let known = if name.is_empty() {
            self.nameless_of_file += 1;
            self.nameless.get(self.nameless_of_file - 1).map(|&number| number as usize)
        } else {
            self.all.iter().position(|i| i.name == name && i.section != section)
        };
        if let Some(number) = known
            && let Some(interface) = self.all.get_mut(number)
        {
            interface.link = link;
            interface.section = section;
            return Ok(number as u32);
        }
        let number = self.all.len();
        if number >= MOST {
            return Err(format!("more than {MOST} interfaces"));
        }
        if name.is_empty() {
            self.nameless.push(number as u32);
        }
        let name = if name.is_empty() { number.to_string() } else { name };
        self.all.push(Interface { name, link, unread: 0, first_unread: 0, section });
        Ok(number as u32)
    }

    /// What packets of the interface start with. Where that is not understood, the packet, whose number in the file is
    /// `packet`, is noted.
    pub(super) fn link_of(&mut self, number: u32, packet: u64) -> Option<LinkLayer> {
        let interface = self.all.get_mut(number as usize)?;
        if interface.link.is_err() {
            if interface.unread == 0 {
                interface.first_unread = packet;
            }
            interface.unread += 1;
        }
        interface.link.as_ref().ok().copied()
    }

    /// Packets of the current file that could not be read for their link type.
    pub(super) fn unread(&self) -> u64 {
        self.all.iter().map(|i| i.unread).sum()
    }

    /// What was not read for its link type, in words; `None` where everything was.
    pub(super) fn unreadable(&self) -> Option<String> {
        let texts: Vec<_> = self
            .all
            .iter()
            .filter(|i| i.unread > 0)
            .filter_map(|i| {
                let unsupported = i.link.as_ref().err()?;
                Some(format!(
                    "interface {}: {unsupported}; {} of its packets were not read, the first is packet {}",
                    i.name, i.unread, i.first_unread
                ))
            })
            .collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    /// The name of an interface.
    pub(super) fn name(&self, number: u32) -> &str {
        self.all.get(number as usize).map_or("", |i| &i.name)
    }

    /// The names, by number.
    pub(in crate::inspect) fn names(&self) -> Vec<String> {
        self.all.iter().map(|i| i.name.clone()).collect()
    }
}
