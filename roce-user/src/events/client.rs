//! The reader's side of the socket.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
};

use anyhow::{Context as _, Result, anyhow, bail};
use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use serde_json::Value;

use super::{Request, address, control};
use crate::netlink::LinkInfo;

/// One line of an agent.
#[derive(Clone, PartialEq, Debug)]
pub enum Item {
    /// An event, as the agent wrote it.
    Event(String),
    /// What they amount to.
    Story(Value),
    /// This many events were gone before they could be read.
    Lost(u64, String),
}

/// The events of one agent. Ends where the agent says so.
#[derive(Debug)]
pub struct Events {
    iface: String,
    lines: BufReader<UnixStream>,
    ended: bool,
}

/// Asks the agent of an interface of the calling thread's network namespace; `None` where none runs.
///
/// # Errors
/// The socket is not an agent's that may be believed, or it cannot be spoken to.
pub fn connect(link: &LinkInfo, request: &Request) -> Result<Option<Events>> {
    let iface = link.name.clone();
    let mut stream = match address(link.index).and_then(|a| UnixStream::connect_addr(&a)) {
        Ok(stream) => stream,
        Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("{iface}: cannot ask its agent for events")),
    };
    // Anybody can bind an abstract name.
    let peer = getsockopt(&stream.as_fd(), PeerCredentials).context("cannot tell who serves events")?;
    if peer.uid() != 0 && peer.uid() != geteuid().as_raw() {
        bail!("{iface}: process {} of user {} serves its events and is not believed: stop it", peer.pid(), peer.uid());
    }
    let asked = format!("{}\n", serde_json::to_string(request)?);
    match stream.write_all(asked.as_bytes()) {
        // It may have refused us already; then it has said why.
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            return Err(e).with_context(|| format!("{iface}: cannot ask its agent for events"));
        }
        _ => {}
    }
    Ok(Some(Events { iface, lines: BufReader::new(stream), ended: false }))
}

/// The agents among the interfaces.
///
/// # Errors
/// See [`connect`].
pub fn agents(links: &[LinkInfo], request: &Request) -> Result<Vec<Events>> {
    links.iter().filter_map(|link| connect(link, request).transpose()).collect()
}

impl Events {
    fn next_item(&mut self) -> Result<Option<Item>> {
        let iface = &self.iface;
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => bail!("{iface}: its agent is gone"),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => bail!("{iface}: its agent is gone"),
            Err(e) => return Err(e).with_context(|| format!("{iface}: cannot read its agent's events")),
        }
        let line = line.trim_end();
        let value: Value =
            serde_json::from_str(line).map_err(|_| anyhow!("{iface}: its agent says what is no JSON: {line}"))?;
        match value["kind"].as_str() {
            Some(control::END) => Ok(None),
            Some(control::LOST) => Ok(Some(Item::Lost(value["lost"].as_u64().unwrap_or(0), line.into()))),
            Some(control::STORY) => Ok(Some(Item::Story(value))),
            Some(control::REFUSED) => bail!("{iface}: its agent refuses: {}", value["text"].as_str().unwrap_or("")),
            _ => Ok(Some(Item::Event(line.into()))),
        }
    }
}

impl Iterator for Events {
    type Item = Result<Item>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let item = self.next_item();
        self.ended = !matches!(item, Ok(Some(_)));
        item.transpose()
    }
}

/// What the events of an interface amount to so far, as its agent says: an object with `flows` and `findings`. `None` where no
/// agent runs.
///
/// # Errors
/// See [`connect`].
pub fn story(link: &LinkInfo) -> Result<Option<Value>> {
    let Some(mut events) = connect(link, &Request { story: true, ..Request::default() })? else { return Ok(None) };
    match events.next_item()? {
        Some(Item::Story(story)) => Ok(Some(story)),
        other => bail!("{}: its agent says something else than what it was asked: {other:?}", link.name),
    }
}
