//! perftest and rping, bounded in time.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;

use super::{Fabric, Node};
use crate::lab::Netns;

/// How long a server may take until it listens.
const LISTENING: Duration = Duration::from_secs(15);
/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// 4.096 µs · 2^19 = 2.1 s: with the default, 67 ms, packets are repeated without a loss where a queue is slow, and on 6.1 anyhow.
const TIMEOUT: u8 = 19;
/// Each run has a port of its own, so that an old server never answers.
static NEXT_PORT: AtomicU16 = AtomicU16::new(18_600);

/// One program of perftest with its options.
#[derive(Clone, Debug)]
pub struct Perf {
    tool: &'static str,
    args: Vec<String>,
    ipv6: bool,
    by_cm: bool,
    timeout: u8,
    limit: Duration,
}

/// What it said.
#[derive(Clone, PartialEq, Debug)]
pub struct PerfResult {
    /// The numbers of its last result line. Of a bandwidth test: bytes, iterations, peak and mean MiB/s, million messages/s.
    pub columns: Vec<f64>,
    /// How long the client ran, connecting included.
    pub time: Duration,
}

impl PerfResult {
    /// Mean payload rate of a bandwidth test, bits per second.
    pub fn bits_per_sec(&self) -> f64 {
        self.columns.get(3).copied().unwrap_or(0.0) * 8.0 * 1_048_576.0
    }
}

impl Perf {
    /// `tool` is for instance `ib_write_bw`.
    pub fn new(tool: &'static str) -> Self {
        Self { tool, args: Vec::new(), ipv6: false, by_cm: false, timeout: TIMEOUT, limit: LIMIT }
    }

    /// Adds options, separated by blanks, that both ends get.
    #[must_use]
    pub fn args(mut self, args: &str) -> Self {
        self.args.extend(args.split_ascii_whitespace().map(str::to_owned));
        self
    }

    /// Over IPv6.
    #[must_use]
    pub fn ipv6(mut self, ipv6: bool) -> Self {
        self.ipv6 = ipv6;
        self
    }

    /// Connects by the RDMA connection manager (`-R`).
    #[must_use]
    pub fn by_cm(mut self) -> Self {
        self.by_cm = true;
        self
    }

    /// Another ACK timeout: 4.096 µs · 2^`exponent`.
    #[must_use]
    pub fn timeout(mut self, exponent: u8) -> Self {
        self.timeout = exponent;
        self
    }

    /// Another limit than a minute.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs it from `client` to `server`, to its end.
    ///
    /// # Errors
    /// With what it said, when an end fails or takes too long.
    pub fn run(&self, fabric: &Fabric, client: usize, server: usize) -> Result<PerfResult> {
        self.start(fabric, client, server)?.wait()
    }

    /// Starts both ends.
    ///
    /// # Errors
    /// When the server does not listen.
    pub fn start(&self, fabric: &Fabric, client: usize, server: usize) -> Result<Running> {
        self.serve(fabric, client, server)?.connect()
    }

    /// Starts the server alone: of several transfers that are to begin at once, all servers go first.
    ///
    /// # Errors
    /// When it does not listen.
    pub fn serve(&self, fabric: &Fabric, client: usize, server: usize) -> Result<Served> {
        let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
        let (client, server) = (&fabric.nodes[client], &fabric.nodes[server]);
        let (mut at_server, mut at_client) = (self.command(server, port)?, self.command(client, port)?);
        if self.by_cm {
            at_server.args(["--bind_source_ip", &server.address(self.ipv6).to_string()]);
            at_client.args(["--bind_source_ip", &client.address(self.ipv6).to_string()]);
            at_client.arg(server.address(self.ipv6).to_string());
        } else {
            at_client.arg(fabric.side_address(server).to_string());
        }
        let log = |end: &str| PathBuf::from(format!("/run/{}-{port}-{end}", self.tool));
        let running = Running {
            name: format!("{} {}", self.tool, self.args.join(" ")),
            server: End::start(&mut at_server, log("server"))?,
            client: None,
            begin: Instant::now(),
            limit: self.limit,
        };
        if self.by_cm {
            // It listens in the kernel's connection manager, which shows nowhere but in time.
            thread::sleep(Duration::from_millis(700));
        } else if !wait_listening(&server.port.ns, port)? {
            bail!("{} does not listen: {}", running.name, running.server.said());
        }
        Ok(Served { running, client: at_client, log: log("client") })
    }

    fn command(&self, node: &Node, port: u16) -> Result<Command> {
        let mut command = node.port.ns.command(self.tool);
        let (gid, timeout) = (node.gid_index(self.ipv6)?.to_string(), self.timeout.to_string());
        command.args(["-F", "-d", &node.device, "-x", &gid, "-p", &port.to_string()]).args(&self.args);
        // UD and UC wait for no ACK and refuse the option.
        if !self.args.iter().any(|arg| arg == "UD" || arg == "UC") {
            command.args(["-u", &timeout]);
        }
        if self.by_cm {
            command.arg("-R");
        }
        Ok(command)
    }
}

/// A server that waits for its client.
#[derive(Debug)]
pub struct Served {
    running: Running,
    client: Command,
    log: PathBuf,
}

impl Served {
    /// Starts the client.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn connect(mut self) -> Result<Running> {
        self.running.begin = Instant::now();
        self.running.client = Some(End::start(&mut self.client, self.log)?);
        Ok(self.running)
    }
}

/// A client and a server that run.
#[derive(Debug)]
pub struct Running {
    name: String,
    server: End,
    client: Option<End>,
    begin: Instant,
    limit: Duration,
}

impl Running {
    /// Waits for both ends.
    ///
    /// # Errors
    /// With what it said, when an end fails or takes too long; both are gone then.
    pub fn wait(mut self) -> Result<PerfResult> {
        let mut client = self.client.take().context("the client was not started")?;
        let end = self.begin + self.limit;
        let done = client.wait(end)?;
        let time = self.begin.elapsed();
        let text = client.said();
        if done != Some(true) {
            let how =
                if done.is_none() { format!("not done after {:.0} s", time.as_secs_f64()) } else { "failed".into() };
            bail!("{} {how}: {}; server: {}", self.name, last(&text), last(&self.server.said()));
        }
        if self.server.wait(end.max(Instant::now() + Duration::from_secs(5)))? != Some(true) {
            bail!("{}: the server failed: {}", self.name, last(&self.server.said()));
        }
        let columns = columns(&text).with_context(|| format!("{} gives no result: {}", self.name, last(&text)))?;
        Ok(PerfResult { columns, time })
    }

    /// Whether both still run.
    ///
    /// # Errors
    /// When a process cannot be asked.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.server.child.try_wait()?.is_none()
            && self.client.as_mut().is_some_and(|client| matches!(client.child.try_wait(), Ok(None))))
    }
}

/// `ib_write_bw` prints a header that starts with `#bytes`, and below it the numbers.
fn columns(text: &str) -> Option<Vec<f64>> {
    let mut lines = text.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let header = lines.next()?;
    let _ = header;
    let numbers: Vec<f64> = lines.next()?.split_ascii_whitespace().map_while(|n| n.parse().ok()).collect();
    (numbers.len() >= 4).then_some(numbers)
}

/// The end of what a program said, in one line.
fn last(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("---")).collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}

/// A process with its output in a file.
#[derive(Debug)]
struct End {
    child: Child,
    log: PathBuf,
}

impl End {
    fn start(command: &mut Command, log: PathBuf) -> Result<Self> {
        let file = File::create(&log).with_context(|| format!("writing {}", log.display()))?;
        command.stdin(Stdio::null()).stderr(file.try_clone()?).stdout(file);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe {
            // perftest polls. At the priority of rxe's workers it leaves 7.3 on one CPU 17 Mb/s.
            command
                .pre_exec(|| Errno::result(libc::setpriority(libc::PRIO_PROCESS, 0, 19)).map(drop).map_err(Into::into));
        }
        let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self { child, log })
    }

    /// Whether it ended well; `None` when it did not end before `end`, and was killed.
    fn wait(&mut self, end: Instant) -> Result<Option<bool>> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status.success()));
            }
            if Instant::now() > end {
                self.child.kill()?;
                self.child.wait()?;
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn said(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // It may have ended long ago.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether somebody listens on a TCP port of a namespace before long.
fn wait_listening(ns: &Netns, port: u16) -> Result<bool> {
    let wanted = format!(":{port:04X}");
    let end = Instant::now() + LISTENING;
    while Instant::now() < end {
        let listens = ns.run(|| {
            let table = |file: &str| fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
            let listens = |line: &str| {
                let mut fields = line.split_ascii_whitespace();
                // sl, local address, remote address, state: 0A is LISTEN.
                fields.nth(1).is_some_and(|local| local.ends_with(&wanted)) && fields.nth(1) == Some("0A")
            };
            Ok(["tcp", "tcp6"].iter().any(|file| table(file).lines().any(listens)))
        })?;
        if listens {
            return Ok(true);
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(false)
}

/// `rping`, which connects by the connection manager and then reads and writes: `count` rounds of `size` bytes.
///
/// # Errors
/// With what it said, when an end fails or takes too long.
pub fn rping(fabric: &Fabric, client: usize, server: usize, ipv6: bool, count: u32, size: u32) -> Result<()> {
    let (client, server) = (&fabric.nodes[client], &fabric.nodes[server]);
    let (from, to) = (client.address(ipv6).to_string(), server.address(ipv6).to_string());
    let (count, size) = (count.to_string(), size.to_string());
    let common = ["-C", &count, "-S", &size, "-a", &to];
    let mut serve = server.port.ns.command("rping");
    let mut server = End::start(serve.arg("-s").args(common), "/run/rping-server".into())?;
    thread::sleep(Duration::from_millis(700));
    let mut ask = client.port.ns.command("rping");
    let mut client = End::start(ask.arg("-c").args(common).args(["-I", &from]), "/run/rping-client".into())?;
    let end = Instant::now() + Duration::from_secs(30);
    if client.wait(end)? != Some(true) {
        bail!("rping failed: {}; server: {}", last(&client.said()), last(&server.said()));
    }
    // The server says that the client has gone away as if that were an error.
    server.wait(end)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_below_their_header() {
        let text = "---\n #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]\n\
                     65536      100              0.00               31.50  \t\t   0.000504\n---\n";
        let columns = columns(text).unwrap();
        assert_eq!(columns[..4], [65_536.0, 100.0, 0.0, 31.5]);
        let result = PerfResult { columns, time: Duration::ZERO };
        assert!((result.bits_per_sec() - 31.5 * 8.0 * 1_048_576.0).abs() < 1.0);
        assert_eq!(super::columns("Couldn't connect\n"), None);
        assert_eq!(last("a\n---\nb\n\n c \n"), "a | b | c");
    }
}
