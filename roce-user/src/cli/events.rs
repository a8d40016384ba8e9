//! `roce events`: from another shell, while an agent runs.

use std::{
    io::{self, Write as _},
    sync::mpsc::{self, SyncSender},
    thread,
};

use anyhow::{Result, anyhow, bail};

use crate::{
    events::{EventLine, Events, Item, Kind, Request, agents},
    netlink::{Netlink, require_link},
};

/// Lines of several agents that wait to be printed.
const WAITING: usize = 1_024;

const EXAMPLES: &str = "\
Events are held by the agent (`roce run`), the newest 2,048 of every kind. Nothing is shown of the time before it started.

Examples:
  roce events                                 what happened recently, on every interface with an agent
  roce events --follow                        that, and what happens from now on
  roce events --follow --kind gap,nak         loss only
  roce events --iface eth0 --json | jq .psn   JSON lines, schema 1 (docs/events.md)

Exit codes: 0 fine, 2 no agent runs, not permitted, or the agent went away.";

/// Arguments of `roce events`.
#[derive(clap::Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct EventsArgs {
    /// Go on with what happens from now on, until stopped or the agent ends
    #[arg(long, short)]
    follow: bool,
    /// Only this interface
    #[arg(long, value_name = "IF")]
    iface: Option<String>,
    /// Only these kinds
    #[arg(long, value_name = "KIND", value_delimiter = ',', ignore_case = true)]
    kind: Vec<Kind>,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

/// Prints the events of every agent of this network namespace.
pub(super) fn events(args: &EventsArgs) -> Result<()> {
    let links = match &args.iface {
        Some(name) => vec![require_link(name)?],
        None => Netlink::open()?.links()?,
    };
    let request = Request { follow: args.follow, kinds: args.kind.clone(), story: false };
    let readers = agents(&links, &request)?;
    if readers.is_empty() {
        let place = args.iface.as_ref().map_or_else(|| "in this network namespace".into(), |n| format!("on {n}"));
        bail!("no agent runs {place}: start `roce run --iface …` first");
    }
    if args.follow { follow(readers, args.json) } else { recent(readers, args.json) }
}

/// What all agents hold, in the order of time.
fn recent(readers: Vec<Events>, json: bool) -> Result<()> {
    let mut items = Vec::new();
    for reader in readers {
        let mut time = 0;
        for item in reader {
            let item = item?;
            if let Item::Event(line) = &item {
                time = serde_json::from_str::<EventLine>(line).map_or(time, |e| e.time_ns);
            }
            items.push((time, item));
        }
    }
    items.sort_by_key(|(time, _)| *time);
    items.into_iter().try_for_each(|(_, item)| print(&item, json))
}

/// What all agents tell, as it comes.
fn follow(readers: Vec<Events>, json: bool) -> Result<()> {
    let (to, from) = mpsc::sync_channel(WAITING);
    for reader in readers {
        let to: SyncSender<Result<Item>> = to.clone();
        thread::Builder::new()
            .name("roce-events".into())
            // Whoever prints is gone: so are we, soon.
            .spawn(move || reader.map(|item| to.send(item)).find(Result::is_err))
            .map_err(|e| anyhow!("cannot start a thread: {e}"))?;
    }
    drop(to);
    from.into_iter().try_for_each(|item| print(&item?, json))
}

fn print(item: &Item, json: bool) -> Result<()> {
    let text = match item {
        Item::Event(line) | Item::Lost(_, line) if json => line.clone(),
        // Of a newer agent, perhaps.
        Item::Event(line) => serde_json::from_str(line).map_or_else(|_| line.clone(), |e: EventLine| e.to_string()),
        Item::Story(story) => story.to_string(),
        Item::Lost(lost, _) => format!("… {lost} events were gone before they could be read"),
    };
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    // Another program may wait for it.
    out.flush()?;
    Ok(())
}
