//! The loop that lets events happen.

use std::time::Instant;

use roce_common::dcqcn::{Params, cp};

use super::{
    events::{Event, Events, Packet},
    flow::{Counts, Flow, NEVER, nanos},
    network::{Network, PS_PER_NS, Transmitter},
    outcome::{Outcome, outcome},
    random::Random,
    scenario::{Marking, Pfc, Scenario},
    stats::{BINS, bin_ps},
};

/// Limits of a link in the switch, in bytes.
#[derive(Clone, Copy)]
struct Ingress {
    pfc: Pfc,
    /// What it may hold in all; one byte more is a drop.
    most: u64,
}

/// A simulation under way.
pub(super) struct Simulation<'a> {
    pub(super) s: &'a Scenario,
    pub(super) params: Params,
    pub(super) now: u64,
    pub(super) events: Events,
    pub(super) random: Random,
    pub(super) net: Network,
    pub(super) flows: Vec<Flow>,
    pub(super) transmitters: Vec<Transmitter>,
    ingress: Option<Ingress>,
    pub(super) warmup: u64,
    pub(super) timeout: u64,
    pub(super) bin_ps: u64,
    pub(super) handled: u64,
    /// Before and after the warm-up.
    pub(super) drops: [u64; 2],
    pub(super) last_drop: u64,
    /// Packets accepted, by flow and bin.
    pub(super) accepted: Vec<u32>,
    /// Completion times of messages asked for after the warm-up, picoseconds.
    pub(super) completions: Vec<u64>,
    /// Of the joining flow: packets accepted in each of its increase periods.
    pub(super) join_periods: Vec<u32>,
}

/// Runs `scenario` to its end.
///
/// # Errors
/// What [`Scenario::check`] says.
pub fn run(scenario: &Scenario) -> Result<Outcome, String> {
    scenario.check()?;
    let begun = Instant::now();
    let mut simulation = Simulation::new(scenario);
    simulation.run();
    Ok(outcome(&simulation, begun.elapsed()))
}

impl<'a> Simulation<'a> {
    pub(super) fn new(s: &'a Scenario) -> Self {
        let net = Network::new(s);
        let flows: Vec<Flow> = (0..s.flows)
            .map(|i| {
                let links = net.paths[i as usize].len() as u64 + 1;
                Flow::new(s, i % s.hosts, links * net.link_ps)
            })
            .collect();
        let quickest = s.host_link.bytes_per_sec().max(s.link.bytes_per_sec());
        // Until a pause takes hold, the link delivers for the way there and back, and the packet that has begun.
        let headroom = 2 * net.link_ps / PS_PER_NS * quickest / 1_000_000_000 + 3 * u64::from(s.packet);
        let mut simulation = Self {
            s,
            // Without a loop nothing is compared with these.
            params: s.params.unwrap_or(Params::paper(s.link)),
            now: 0,
            events: Events::default(),
            random: Random::new(s.seed),
            transmitters: vec![Transmitter::default(); net.hosts.len() + net.ports.len()],
            ingress: s.pfc.map(|pfc| Ingress { pfc, most: pfc.xoff + headroom }),
            warmup: s.warmup.0 * PS_PER_NS,
            timeout: s.timeout.0 * PS_PER_NS,
            bin_ps: bin_ps(s),
            handled: 0,
            drops: [0; 2],
            last_drop: 0,
            accepted: vec![0; flows.len() * BINS],
            completions: Vec::new(),
            join_periods: Vec::new(),
            net,
            flows,
        };
        for flow in 0..s.flows {
            let at = simulation.start_of(flow);
            simulation.events.push(at, Event::Message(flow));
        }
        simulation
    }

    /// Evenly over the stagger, within a packet time of each other at least: no two clocks start alike.
    fn start_of(&mut self, flow: u32) -> u64 {
        if flow + 1 == self.s.flows
            && let Some(join) = self.s.join
        {
            return join.0 * PS_PER_NS;
        }
        let even = self.s.stagger.0 * PS_PER_NS / u64::from(self.s.flows) * u64::from(flow);
        even + self.random.up_to(self.net.hosts[0].packet_ps)
    }

    pub(super) fn run(&mut self) {
        let end = self.s.time.0 * PS_PER_NS;
        let mut measuring = self.warmup == 0;
        while let Some((time, event)) = self.events.pop() {
            if time >= end {
                self.events.push(time, event);
                break;
            }
            self.now = time;
            if !measuring && time >= self.warmup {
                measuring = true;
                self.begin_measurement();
            }
            self.handled += 1;
            match event {
                Event::Host(host) => self.host(host),
                Event::Arrive(packet) => self.arrive(packet),
                Event::Port(port) => self.port_sent(port),
                Event::Ack { flow, psn } => self.acknowledged(flow, psn, false),
                Event::Nak { flow, psn } => self.acknowledged(flow, psn, true),
                Event::Cnp(flow) => self.control(flow, true),
                Event::Tick(flow) => self.tick(flow),
                Event::Timeout(flow) => self.ack_timer(flow),
                Event::Message(flow) => self.message(flow),
                Event::Pause { transmitter, on } => self.pause(transmitter, on),
            }
        }
        self.now = end;
        for port in &mut self.net.ports {
            if let Some(stats) = &mut port.stats {
                stats.change(end, port.bytes);
            }
        }
        let warmup = self.warmup;
        for t in self.transmitters.iter_mut().filter(|t| t.paused) {
            t.paused_ps += end - t.paused_since.max(warmup);
        }
    }

    fn begin_measurement(&mut self) {
        for port in &mut self.net.ports {
            (port.arrived, port.marked, port.sent) = (0, 0, 0);
        }
        for flow in &mut self.flows {
            flow.counts = Counts::default();
        }
        for transmitter in &mut self.transmitters {
            transmitter.paused_ps = 0;
        }
    }

    /// A host's port is free, or a flow's time has come.
    fn host(&mut self, host: u32) {
        let h = &mut self.net.hosts[host as usize];
        // The one that counts was scheduled for another time.
        if h.wake_at == self.now {
            h.wake_at = NEVER;
            self.serve(host);
        }
    }

    /// Sends what may be sent now, and sees to being called when more may.
    pub(super) fn serve(&mut self, host: u32) {
        let now = self.now;
        let h = &mut self.net.hosts[host as usize];
        if self.transmitters[host as usize].paused {
            return;
        }
        if now < h.busy_until {
            let free = h.busy_until;
            self.wake(host, free);
            return;
        }
        let (count, mut earliest, mut chosen) = (h.flows.len(), NEVER, None);
        for i in 0..count {
            let at = if h.turn + i < count { h.turn + i } else { h.turn + i - count };
            let ready = self.flows[h.flows[at] as usize].ready_at();
            if ready <= now {
                chosen = Some(at);
                break;
            }
            earliest = earliest.min(ready);
        }
        let Some(at) = chosen else {
            self.wake(host, earliest);
            return;
        };
        let flow = h.flows[at];
        h.turn = if at + 1 < count { at + 1 } else { 0 };
        h.busy_until = now + h.packet_ps;
        let free = h.busy_until;
        let psn = self.flows[flow as usize].send(now, self.timeout);
        self.arm(flow);
        let arrival = free + self.net.link_ps;
        self.events.push(arrival, Event::Arrive(Packet { flow, psn, hop: 0, ce: false }));
        // A host with one flow knows already when it sends next.
        let next = if count == 1 { self.flows[flow as usize].ready_at() } else { 0 };
        self.wake(host, free.max(next));
    }

    /// The host looks at its flows at `at`, or earlier if that was arranged.
    fn wake(&mut self, host: u32, at: u64) {
        let h = &mut self.net.hosts[host as usize];
        if at < h.wake_at {
            h.wake_at = at;
            self.events.push(at, Event::Host(host));
        }
    }

    /// What a packet came out of: a host, or the port before.
    fn transmitter_of(&self, packet: &Packet) -> usize {
        match packet.hop {
            0 => self.flows[packet.flow as usize].host as usize,
            hop => self.net.hosts.len() + self.net.paths[packet.flow as usize][usize::from(hop) - 1] as usize,
        }
    }

    /// A packet reaches a switch: it is marked, queued or dropped.
    fn arrive(&mut self, mut packet: Packet) {
        let (now, bytes) = (self.now, u64::from(self.s.packet));
        let index = self.net.paths[packet.flow as usize][usize::from(packet.hop)];
        let transmitter = self.transmitter_of(&packet);
        let port = &mut self.net.ports[index as usize];
        port.arrived += 1;
        match self.s.marking {
            Marking::Departure => {}
            Marking::Arrival => {
                let depth = port.bytes;
                self.mark(&mut packet, depth);
            }
            Marking::Virtual => {
                let limit_bytes = u32::try_from(self.s.queue_bytes).unwrap_or(u32::MAX);
                let queue = cp::Queue { bytes_per_sec: port.rate.bytes_per_sec(), limit_bytes };
                let arrival = queue.arrive(port.empty_at_ns, nanos(now).0, self.s.packet);
                port.empty_at_ns = arrival.empty_at_ns;
                self.mark(&mut packet, arrival.depth_bytes);
            }
        }
        let port = &mut self.net.ports[index as usize];
        port.marked += u64::from(packet.ce);
        let full = match self.ingress {
            None => port.bytes + bytes > self.s.queue_bytes,
            Some(ingress) => self.transmitters[transmitter].held + bytes > ingress.most,
        };
        if full {
            self.drops[usize::from(now >= self.warmup)] += 1;
            self.last_drop = now;
            return;
        }
        if let Some(ingress) = self.ingress {
            let t = &mut self.transmitters[transmitter];
            t.held += bytes;
            if t.held > ingress.pfc.xoff && !t.told {
                t.told = true;
                let transmitter = transmitter as u32;
                self.events.push(now + self.net.link_ps, Event::Pause { transmitter, on: true });
            }
        }
        port.bytes += bytes;
        // What goes straight on never waited.
        if (port.sending.is_some() || port.bytes > bytes)
            && let Some(stats) = &mut port.stats
        {
            stats.change(now, port.bytes);
        }
        port.queue.push_back(packet);
        self.start_port(index);
    }

    #[inline]
    fn mark(&mut self, packet: &mut Packet, depth: u64) {
        let p = &self.params;
        // Most packets find less than Kmin, and need no random number.
        if self.s.params.is_some() && depth > u64::from(p.kmin) {
            packet.ce |= cp::mark(depth, p.kmin, p.kmax, p.pmax, self.random.next_u32());
        }
    }

    /// Begins to send the head of a port, unless it is busy or paused.
    fn start_port(&mut self, index: u32) {
        let now = self.now;
        let port = &mut self.net.ports[index as usize];
        if port.sending.is_some() || self.transmitters[self.net.hosts.len() + index as usize].paused {
            return;
        }
        let Some(mut packet) = port.queue.pop_front() else { return };
        // A packet marked when it leaves is compared with what waited until now, itself included.
        let depth = port.bytes;
        port.bytes -= u64::from(self.s.packet);
        if let Some(stats) = &mut port.stats {
            stats.change(now, port.bytes);
        }
        self.events.push(now + port.packet_ps, Event::Port(index));
        if self.s.marking == Marking::Departure {
            let before = packet.ce;
            self.mark(&mut packet, depth);
            self.net.ports[index as usize].marked += u64::from(packet.ce && !before);
        }
        self.net.ports[index as usize].sending = Some(packet);
    }

    /// A port has sent its packet.
    fn port_sent(&mut self, index: u32) {
        let (now, bytes) = (self.now, u64::from(self.s.packet));
        let port = &mut self.net.ports[index as usize];
        let Some(mut packet) = port.sending.take() else { return };
        port.sent += 1;
        self.start_port(index);
        if let Some(ingress) = self.ingress {
            let transmitter = self.transmitter_of(&packet);
            let t = &mut self.transmitters[transmitter];
            t.held -= bytes;
            if t.held <= ingress.pfc.xon && t.told {
                t.told = false;
                let transmitter = transmitter as u32;
                self.events.push(now + self.net.link_ps, Event::Pause { transmitter, on: false });
            }
        }
        packet.hop += 1;
        let at = now + self.net.link_ps;
        if usize::from(packet.hop) < self.net.paths[packet.flow as usize].len() {
            self.events.push(at, Event::Arrive(packet));
        } else {
            // Nothing but this port's packets reaches the responder of a flow, so it can act ahead of time.
            self.deliver(&packet, at);
        }
    }

    fn pause(&mut self, transmitter: u32, on: bool) {
        let (now, warmup) = (self.now, self.warmup);
        let t = &mut self.transmitters[transmitter as usize];
        if t.paused == on {
            return;
        }
        t.paused = on;
        if on {
            t.paused_since = now;
            return;
        }
        t.paused_ps += now - t.paused_since.max(warmup).min(now);
        match (transmitter as usize).checked_sub(self.net.hosts.len()) {
            None => self.serve(transmitter),
            Some(port) => self.start_port(port as u32),
        }
    }
}
