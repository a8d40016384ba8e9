//! A recording as a pcapng file.

use std::io::{self, Write};

use roce_common::{abi::Direction, units::Nanos};

use super::{Recording, Settings, Trigger};
use crate::{
    events::Wall,
    pcapng::{ETHERNET, Packet, Statistics, Way, Writer},
};

/// Writes a recording of an interface.
///
/// # Errors
/// When `out` takes no more.
pub(super) fn write(out: impl Write, iface: &str, s: &Settings, recording: &Recording, wall: Wall) -> io::Result<()> {
    let mut writer = Writer::new(out, &summary(s, recording))?;
    let interface = writer.interface(ETHERNET, iface, s.snaplen)?;
    let mut shown = Shown::default();
    for (i, packet) in recording.packets.iter().enumerate() {
        let head = &packet.head;
        writer.packet(&Packet {
            interface,
            unix_ns: wall.unix_ns(Nanos(head.time_ns)),
            wire_len: head.wire_len,
            bytes: &packet.bytes,
            way: Some(if head.tap.direction() == Direction::Ingress { Way::In } else { Way::Out }),
            lost_before: packet.lost_before,
            comments: &shown.comments(recording, i),
        })?;
    }
    let time = |p: Option<&super::Captured>| wall.unix_ns(p.map_or(recording.trigger.time, |p| Nanos(p.head.time_ns)));
    writer.statistics(&Statistics {
        interface,
        span_ns: (time(recording.packets.first()), time(recording.packets.last())),
        received: recording.packets.len() as u64 + recording.lost(),
        dropped: recording.lost(),
        comment: &lost(recording),
    })?;
    writer.finish()?;
    Ok(())
}

fn summary(s: &Settings, r: &Recording) -> String {
    let mut text = format!(
        "{}\n{} packets up to this, {} behind it; {} of each packet, as it came or as it left; {}",
        r.trigger,
        r.before,
        r.packets.len() - r.before,
        if s.payload { format!("at most {} bytes", s.snaplen) } else { "the headers".into() },
        lost(r),
    );
    let further = r.further.len() as u64 + r.further_unnamed;
    if further != 0 {
        text += &format!("\n{further} more happened meanwhile");
    }
    if r.passed_over != 0 {
        text += &format!("\n{} happened shortly before and were not recorded", r.passed_over);
    }
    text
}

fn lost(recording: &Recording) -> String {
    match recording.lost() {
        0 => "no packet was lost by the capture".into(),
        n => format!("{n} packets were lost by the capture, see epb_dropcount"),
    }
}

/// Which triggers have had their comment.
#[derive(Default)]
struct Shown {
    trigger: bool,
    further: Vec<bool>,
}

impl Shown {
    /// Comments of packet number `i`.
    fn comments(&mut self, recording: &Recording, i: usize) -> Vec<String> {
        self.further.resize(recording.further.len(), false);
        let (Some(packet), mut comments) = (recording.packets.get(i), Vec::new()) else { return Vec::new() };
        let is_last_before = i + 1 == recording.before;
        // The PSN of a retransmission is that of the first copy: the copy nearest to the trigger shows it.
        let nearest = |t: &Trigger| {
            t.is_shown_by(&packet.head)
                && !recording.packets.iter().skip(i + 1).any(|p| t.is_shown_by(&p.head) && p.head.time_ns <= t.time.0)
        };
        if !self.trigger && (nearest(&recording.trigger) || recording.trigger.packet.is_none() && is_last_before) {
            self.trigger = true;
            comments.push(recording.trigger.to_string());
        }
        for (done, trigger) in self.further.iter_mut().zip(&recording.further) {
            if !*done && nearest(trigger) {
                *done = true;
                comments.push(trigger.to_string());
            }
        }
        comments
    }
}
