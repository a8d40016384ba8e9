//! The options of `roce-lab run`, read and bounded.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use crate::{
    endpoint::ack_timeout,
    units::{format_rate, parse_rate},
};

/// As typed; [`RunArgs::check`] makes [`Options`] of them.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Sending hosts, 1 to 64
    #[arg(long, default_value = "4", allow_hyphen_values = true)]
    pub senders: String,
    /// Queue pairs per sending host, 1 to 64
    #[arg(long, default_value = "1", allow_hyphen_values = true)]
    pub qps: String,
    /// Rate of the switch's port to the receiver, 1m to 10g
    #[arg(long, default_value = "100m", allow_hyphen_values = true)]
    pub link: String,
    /// Packets that port's queue holds, 1 to 100000
    #[arg(long, default_value = "64", allow_hyphen_values = true)]
    pub queue: String,
    /// Seconds of traffic in each of the two passes, 1 to 3600
    #[arg(long, default_value = "10", allow_hyphen_values = true)]
    pub time: String,
    /// Path MTU: 256, 512, 1024, 2048 or 4096
    #[arg(long, default_value = "1024", allow_hyphen_values = true)]
    pub pmtu: String,
    /// ACK timeout exponent of the queue pairs (4.096 µs · 2^t), 8 to 24; by default the smallest from 14 on that is
    /// four times what all packets in flight take on the link
    #[arg(long, allow_hyphen_values = true)]
    pub timeout: Option<String>,
    /// How the hosts of the pass with the loop pace: htb, or edt where the kernel has the fq qdisc
    #[arg(long, default_value = "htb", allow_hyphen_values = true)]
    pub pacer: String,
    /// Run the traffic over IPv6
    #[arg(long)]
    pub ipv6: bool,
    /// Which hook of the agents does the ingress work: xdp, xdp-generic or tc [default: the agent's choice]
    #[arg(long, value_name = "HOOK")]
    pub ingress: Option<String>,
    /// End with one JSON object as the last line on stdout
    #[arg(long)]
    pub json: bool,
    /// The roce program; `none` runs the endpoints alone, once, to see the lab itself [default: beside roce-lab]
    #[arg(long, value_name = "PATH")]
    pub roce: Option<String>,
}

/// Where the dataplane comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// No agents: endpoints only.
    None,
    /// This program.
    Program(PathBuf),
}

/// How the hosts pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pacer {
    /// HTB classes.
    Htb,
    /// Departure times.
    Edt,
}

impl Pacer {
    /// As `roce run --pacer` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Htb => "htb",
            Self::Edt => "edt",
        }
    }
}

/// Checked options.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sending hosts.
    pub senders: u8,
    /// Queue pairs per sending host.
    pub qps: u32,
    /// Bottleneck in bits per second, Ethernet headers counted.
    pub link: u64,
    /// Queue length in packets.
    pub queue: u32,
    /// Traffic time of each pass.
    pub time: Duration,
    /// Path MTU.
    pub pmtu: u16,
    /// ACK timeout.
    pub timeout: Duration,
    /// The hosts' pacer.
    pub pacer: Pacer,
    /// Traffic over IPv6.
    pub ipv6: bool,
    /// The agents' ingress hook, where it is not their own choice.
    pub ingress: Option<String>,
    /// JSON at the end.
    pub json: bool,
    /// The dataplane.
    pub agent: Agent,
}

impl RunArgs {
    /// Reads and bounds every option.
    ///
    /// # Errors
    /// One line that names the option, the value and what is allowed.
    pub fn check(&self) -> Result<Options, String> {
        let senders = number("--senders", &self.senders, 1, 64)? as u8;
        let qps = number("--qps", &self.qps, 1, 64)? as u32;
        let link = parse_rate(&self.link).map_err(|e| format!("--link: {e}"))?;
        if !(1_000_000..=10_000_000_000).contains(&link) {
            return Err(format!("--link {}: must be 1m to 10g", self.link));
        }
        let queue = number("--queue", &self.queue, 1, 100_000)? as u32;
        let time = match self.time.parse::<f64>() {
            Ok(s) if (1.0..=3600.0).contains(&s) => Duration::from_secs_f64(s),
            _ => return Err(format!("--time {}: must be 1 to 3600 seconds", self.time)),
        };
        let pmtu = match self.pmtu.as_str() {
            "256" | "512" | "1024" | "2048" | "4096" => self.pmtu.parse().unwrap_or(1024),
            other => return Err(format!("--pmtu {other}: must be 256, 512, 1024, 2048 or 4096")),
        };
        let flows = u64::from(senders) * u64::from(qps);
        let timeout = match &self.timeout {
            Some(t) => ack_timeout(number("--timeout", t, 8, 24)? as u32),
            None => default_timeout(flows, queue, pmtu, link),
        };
        if let Some(other) = self.ingress.as_deref().filter(|i| !["xdp", "xdp-generic", "tc"].contains(i)) {
            return Err(format!("--ingress {other}: must be xdp, xdp-generic or tc"));
        }
        let pacer = match self.pacer.as_str() {
            "htb" => Pacer::Htb,
            "edt" => Pacer::Edt,
            other => return Err(format!("--pacer {other}: must be htb or edt")),
        };
        let agent = match self.roce.as_deref() {
            Some("none") => Agent::None,
            Some(path) => Agent::Program(existing(path.into())?),
            None => Agent::Program(existing(beside_us())?),
        };
        let (ipv6, ingress, json) = (self.ipv6, self.ingress.clone(), self.json);
        Ok(Options { senders, qps, link, queue, time, pmtu, timeout, pacer, ipv6, ingress, json, agent })
    }
}

impl Options {
    /// Bytes of a full data frame, Ethernet header to ICRC.
    pub fn frame(&self) -> u64 {
        let ip = if self.ipv6 { 40 } else { 20 };
        14 + ip + 8 + 12 + u64::from(self.pmtu) + 4
    }

    /// What the bottleneck can carry as payload, in bits per second.
    pub fn payload_capacity(&self) -> f64 {
        self.link as f64 * f64::from(self.pmtu) / self.frame() as f64
    }

    /// The lab in one line.
    pub fn describe(&self) -> String {
        format!(
            "{} senders × {} QP → switch port {}, {} packets → receiver; {} s, PMTU {}, ACK timeout {} ms",
            self.senders,
            self.qps,
            format_rate(self.link as f64),
            self.queue,
            self.time.as_secs_f64(),
            self.pmtu,
            self.timeout.as_millis()
        )
    }
}

/// The smallest exponent from rxe's usual 14 on whose time is four times what the packets of every flow's socket and of
/// the queue take on the link: pacing must not look like loss, and a flow may be slowed to a quarter of its share.
fn default_timeout(flows: u64, queue: u32, pmtu: u16, link: u64) -> Duration {
    let bits = (flows * 65 + u64::from(queue)) * (u64::from(pmtu) + 90) * 8;
    let drain = Duration::from_secs_f64(bits as f64 / link as f64);
    (14..=24).map(ack_timeout).find(|t| *t >= 4 * drain).unwrap_or(ack_timeout(24))
}

fn number(option: &str, text: &str, min: u64, max: u64) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!("{option} {text}: must be a whole number from {min} to {max}")),
    }
}

fn beside_us() -> PathBuf {
    std::env::current_exe().ok().map_or_else(|| "roce".into(), |exe| exe.with_file_name("roce"))
}

fn existing(path: PathBuf) -> Result<PathBuf, String> {
    if path.is_file() {
        // Commands run elsewhere than here would resolve a bare name along PATH.
        Ok(path.canonicalize().unwrap_or(path))
    } else {
        Err(format!(
            "--roce {}: no such program (build it with `cargo build -p roce-user`, or use `none`)",
            path.display()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> RunArgs {
        RunArgs {
            senders: "4".into(),
            qps: "1".into(),
            link: "100m".into(),
            queue: "64".into(),
            time: "10".into(),
            pmtu: "1024".into(),
            timeout: None,
            pacer: "htb".into(),
            ipv6: false,
            ingress: None,
            json: false,
            roce: Some("none".into()),
        }
    }

    #[test]
    fn defaults_pass_and_absurd_values_are_named() {
        let o = args().check().unwrap();
        assert_eq!((o.link, o.frame(), o.timeout), (100_000_000, 1082, ack_timeout(15)));
        assert_eq!(o.pacer, Pacer::Htb);
        type Change = fn(&mut RunArgs, String);
        let fields: [(&str, Change, &[&str]); 8] = [
            ("--senders", |a, v| a.senders = v, &["0", "-1", "65", "x", "1.5", ""]),
            ("--qps", |a, v| a.qps = v, &["0", "1000000"]),
            ("--link", |a, v| a.link = v, &["0", "1", "-5m", "100t", "1000g"]),
            ("--queue", |a, v| a.queue = v, &["0", "99999999999999999999"]),
            ("--time", |a, v| a.time = v, &["0", "-1", "nan", "inf", "1e9", "soon"]),
            ("--pacer", |a, v| a.pacer = v, &["", "off", "EDT"]),
            ("--pmtu", |a, v| a.pmtu = v, &["0", "1000", "8192"]),
            ("--ingress", |a, v| a.ingress = Some(v), &["", "clsact"]),
        ];
        for (name, set, values) in fields {
            for value in values {
                let mut a = args();
                set(&mut a, (*value).into());
                let e = a.check().unwrap_err();
                assert!(e.starts_with(name) && !e.contains('\n'), "{value:?}: {e}");
            }
        }
    }
}
