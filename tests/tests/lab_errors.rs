//! Bad input and machines that lack something: one line that names it, exit code 2, and nothing stays attached. Needs root.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use aya::programs::XdpMode;
use roce_tests::{
    lab::{Netns, Pair, Port, Traces, connect as cable, roce, run_roce},
    needs_root,
    run::{AgentProcess, AgentRole},
};
use roce_user::dataplane::Object;

/// A quiet interface `a` to be refused on.
struct Bed {
    pair: Pair,
    traces: Traces,
}

impl Bed {
    fn new() -> Self {
        let pair = Pair::new(1500).unwrap();
        let traces = Traces::before(&pair.a.port).unwrap();
        Self { pair, traces }
    }

    fn port(&self) -> &Port {
        &self.pair.a.port
    }

    fn ns(&self) -> &Netns {
        &self.pair.a.port.ns
    }

    /// `roce` refuses these arguments and says all of this in its one line.
    fn refuses(&self, args: &[&str], says: &[&str]) {
        let begin = Instant::now();
        self.is_refusal(&run_roce(self.ns(), args).unwrap(), &format!("{args:?}"), says);
        assert!(begin.elapsed() < Duration::from_secs(5), "{args:?}");
    }

    fn is_refusal(&self, output: &Output, what: &str, says: &[&str]) {
        is_refusal(output, what, says);
        assert_eq!(self.traces.left().unwrap(), [""; 0], "{what}");
    }

    /// The same with `run --iface a` before the arguments.
    fn run_refuses(&self, args: &[&str], says: &[&str]) {
        self.refuses(&[&["run", "--iface", "a", "--duration", "0.3"], args].concat(), says);
    }

    fn run_works(&self, args: &[&str]) {
        let all = [&["run", "--iface", "a", "--duration", "0.3", "--json"], args].concat();
        let output = run_roce(self.ns(), &all).unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A shell line run in the interface's namespace and a mount namespace of its own; `$0` is `roce`.
    fn in_own_mounts(&self, line: &str) -> Output {
        self.ns().command("unshare").args(["--mount", "sh", "-ec", line]).arg(roce()).output().unwrap()
    }
}

fn is_refusal(output: &Output, what: &str, says: &[&str]) {
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{what}: {stderr}{stdout}");
    assert_eq!(stderr.lines().count(), 1, "{what}: {stderr}");
    assert!(stderr.starts_with("roce: ") || stderr.starts_with("error: "), "{what}: {stderr}");
    for word in says {
        assert!(stderr.contains(word), "{what}: {word:?} is missing in {stderr}");
    }
    assert_eq!(stdout, "", "{what}");
}

/// The program where every user may run it.
fn for_everybody() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("roce");
    fs::copy(roce(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    (dir, program)
}

fn has(tool: &str) -> bool {
    let there = Command::new(tool).arg("--version").output().is_ok();
    if !there {
        println!("SKIP {tool} is not installed");
    }
    there
}

#[test]
fn interfaces_that_cannot_be() {
    needs_root!();
    let bed = Bed::new();
    bed.refuses(&["run", "--iface", "nosuch0"], &["interface nosuch0 does not exist", "have: a"]);
    bed.refuses(&["run", "--iface", "lo"], &["interface lo is the loopback"]);
    bed.refuses(&["run", "--iface", "a,a"], &["interface a is named twice"]);
    bed.refuses(&["run", "--iface", "a,nosuch0"], &["interface nosuch0 does not exist"]);
    bed.refuses(&["run", "--iface", "a-name-far-too-long-for-any-interface"], &["does not exist"]);
    bed.refuses(&["run", "--iface", ""], &["interface"]);
    bed.refuses(&["run"], &["--iface"]);
    bed.ns().ip(&["link add gone0 type veth peer name gone1", "link del gone0"]).unwrap();
    bed.refuses(&["run", "--iface", "gone0"], &["interface gone0 does not exist"]);
    for verb in ["flows", "detach"] {
        bed.refuses(&[verb, "--iface", "nosuch0"], &["interface nosuch0 does not exist"]);
    }
    bed.refuses(&["flows", "--iface", "a"], &["nothing is attached on a"]);
}

#[test]
fn without_capabilities() {
    needs_root!();
    if !has("setpriv") {
        return;
    }
    let bed = Bed::new();
    let (_dir, program) = for_everybody();
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let drops: [(&[&str], &[&str]); 4] = [
        (&nobody, &["missing CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF", "sudo"]),
        (&["--bounding-set=-all"], &["missing CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF"]),
        (&["--bounding-set=-net_admin"], &["missing CAP_NET_ADMIN:"]),
        (&["--bounding-set=-sys_admin,-bpf"], &["missing CAP_BPF:"]),
    ];
    for (drop, says) in drops {
        for verb in [&["run", "--iface", "a", "--duration", "0.3"][..], &["flows"], &["detach"]] {
            let output = bed.ns().command("setpriv").args(drop).arg(&program).args(verb).output().unwrap();
            bed.is_refusal(&output, &format!("{drop:?} {verb:?}"), says);
        }
    }
}

#[test]
fn without_bpffs_or_btf() {
    needs_root!();
    let bed = Bed::new();
    for verb in ["run --iface a --duration 0.3", "flows", "detach"] {
        let no_bpffs = bed.in_own_mounts(&format!("mount -t tmpfs none /sys/fs/bpf; exec \"$0\" {verb}"));
        bed.is_refusal(&no_bpffs, verb, &["no BPF filesystem at /sys/fs/bpf", "mount -t bpf bpf /sys/fs/bpf"]);
        let no_btf = bed.in_own_mounts(&format!("mount -t tmpfs none /sys/kernel/btf; exec \"$0\" {verb}"));
        bed.is_refusal(&no_btf, verb, &["/sys/kernel/btf/vmlinux is missing", "CONFIG_DEBUG_INFO_BTF"]);
    }
    bed.run_refuses(&["--bpffs", "/nonexistent/bpf"], &["/nonexistent/bpf does not exist"]);
    bed.run_refuses(&["--bpffs", "relative"], &["bpffs must be an absolute path"]);
}

#[test]
fn a_second_agent() {
    needs_root!();
    let bed = Bed::new();
    let args = ["--pacer".to_owned(), "htb".to_owned()];
    let mut agent = AgentProcess::start(&roce(), bed.ns(), "a", AgentRole::Host, &args).unwrap();
    agent.wait_ready().unwrap();
    let attached = bed.traces.now().unwrap();
    for args in [&["run", "--iface", "a", "--duration", "0.3"][..], &["detach"], &["detach", "--iface", "a"]] {
        let output = run_roce(bed.ns(), args).unwrap();
        is_refusal(&output, &format!("{args:?}"), &["another roce agent is running on a", "stop it first"]);
        assert_eq!(bed.traces.now().unwrap(), attached, "the first one keeps everything");
    }
    assert!(agent.is_running());
    assert!(agent.stop().unwrap().success());
    assert_eq!(bed.traces.left().unwrap(), [""; 0]);
}

#[test]
fn a_foreign_xdp_program_stays() {
    needs_root!();
    let bed = Bed::new();
    let index = bed.port().index;
    for mode in [XdpMode::Driver, XdpMode::Skb] {
        let mut foreign = Object::load_for_benchmark().unwrap();
        let id = bed.ns().run(|| Ok(foreign.xdp("baseline_empty")?.attach_to_if_index(index, mode)?)).unwrap();
        let attached = bed.traces.now().unwrap();
        assert!(attached.len() == 1 && attached[0].contains("xdp"), "{attached:?}");
        for ingress in ["xdp", "xdp-generic"] {
            let args = ["run", "--iface", "a", "--duration", "0.3", "--ingress", ingress];
            let output = run_roce(bed.ns(), &args).unwrap();
            is_refusal(&output, ingress, &["a: another XDP program", "is not replaced", "--ingress tc"]);
            assert_eq!(bed.traces.now().unwrap(), attached, "it is as it was");
        }
        // The way out that the message names.
        bed.run_works(&["--ingress", "tc"]);
        assert_eq!(bed.traces.now().unwrap(), attached);
        foreign.xdp("baseline_empty").unwrap().detach(id).unwrap();
    }
    assert_eq!(bed.traces.left().unwrap(), [""; 0]);
}

#[test]
fn a_foreign_root_qdisc_stays() {
    needs_root!();
    for qdisc in ["tbf rate 1gbit burst 100k latency 50ms", "htb default 1", "pfifo limit 77"] {
        let pair = Pair::new(1500).unwrap();
        pair.a.port.ns.tc(&[format!("qdisc add dev a root handle 1: {qdisc}")]).unwrap();
        let traces = Traces::before(&pair.a.port).unwrap();
        let bed = Bed { pair, traces };
        let kind = qdisc.split(' ').next().unwrap();
        let says =
            [&format!("a: its root qdisc {kind} 1:"), "is not replaced", "--pacer off", "tc qdisc del dev a root"];
        bed.run_refuses(&["--pacer", "htb"], &says);
        bed.run_refuses(&["--pacer", "edt"], &says);
        bed.run_refuses(&[], &says);
        bed.run_works(&["--pacer", "off"]);
        bed.run_works(&["--role", "observe"]);
        assert_eq!(bed.traces.left().unwrap(), [""; 0], "the qdisc stays");
    }
}

#[test]
fn what_one_interface_refuses_no_other_keeps() {
    needs_root!();
    let bed = Bed::new();
    let (second, _far) = cable(2, 1500, (bed.ns(), "a2"), (&bed.pair.b.port.ns, "b2")).unwrap();
    bed.ns().tc(&["qdisc add dev a2 root handle 1: pfifo"]).unwrap();
    let there = Traces::before(&second).unwrap();
    for pacer in [&["--pacer", "htb"][..], &[]] {
        let args = [&["run", "--iface", "a,a2", "--duration", "0.3"], pacer].concat();
        bed.refuses(&args, &["a2: its root qdisc pfifo 1:"]);
        assert_eq!(there.left().unwrap(), [""; 0]);
    }
}

#[test]
fn edt_without_fq() {
    needs_root!();
    let bed = Bed::new();
    if bed.ns().tc(&["qdisc add dev a root fq"]).is_ok() {
        println!("SKIP this kernel has fq");
        return;
    }
    bed.run_refuses(&["--pacer", "edt"], &["a: this kernel has no fq qdisc", "--pacer htb"]);
    // Without a wish the pacer that works is taken.
    bed.run_works(&[]);
    assert_eq!(bed.traces.left().unwrap(), [""; 0]);
}

#[test]
fn configurations_that_make_no_sense() {
    needs_root!();
    let bed = Bed::new();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("roce.toml");
    let name = file.to_str().unwrap();
    for (text, says) in [
        ("role = \"host\"\nlink_speed = \"1g\"\n", [":2:", "link_speed"]),
        ("[pacing]\nrate = 1\n", [":1:", "pacing"]),
        ("sample_every = \"often\"\n", [":1:", "sample_every"]),
        ("role = \"router\"\n", [":1:", "router"]),
        ("[dcqcn]\npmax = 1.5\n", ["pmax", "1.5"]),
        ("pmax = 0.5\n", ["pmax", "[dcqcn]"]),
        ("data_dscp = 64\n", ["data_dscp", "64"]),
        ("data_dscp = 999\n", ["data_dscp", "999"]),
        ("failsafe = \"1ms\"\n", ["failsafe", "100 ms"]),
        ("failsafe = 1\n", ["failsafe", "unit"]),
        ("link_rate = 0\n", ["link_rate", "zero"]),
        ("ack_timeout = 32\n", ["ack_timeout", "32"]),
        ("role = \n", [":1:", "role"]),
        ("\u{0}\u{1}garbage", [":1:", "roce.toml"]),
    ] {
        fs::write(&file, text).unwrap();
        bed.run_refuses(&["--config", name], &says);
    }
    fs::write(&file, [0xff, 0xfe, 0x00]).unwrap();
    bed.run_refuses(&["--config", name], &["cannot read", name]);
    bed.run_refuses(&["--config", "/nonexistent/roce.toml"], &["cannot read /nonexistent/roce.toml"]);
    bed.run_refuses(&["--config", dir.path().to_str().unwrap()], &["cannot read", "directory"]);
}

#[test]
fn options_that_make_no_sense() {
    needs_root!();
    let bed = Bed::new();
    for value in ["0", "0g", "1", "-5", "fast", "1e9", "inf", "99999999g", ""] {
        bed.refuses(&["run", "--iface", "a", &format!("--link-rate={value}")], &["--link-rate", value]);
    }
    for value in ["0", "-1", "nan", "inf", "1e300", "soon", ""] {
        bed.refuses(&["run", "--iface", "a", &format!("--duration={value}")], &["--duration", value]);
    }
    bed.run_refuses(&["--role", "cp"], &["role cp needs --link-rate"]);
    bed.run_refuses(&["--role", "router"], &["--role", "router"]);
    bed.run_refuses(&["--pacer", "tbf"], &["--pacer", "tbf"]);
    bed.run_refuses(&["--ingress", "dpdk"], &["--ingress", "dpdk"]);
    bed.run_refuses(&["--data-dscp", "64"], &["data_dscp", "64"]);
    bed.run_refuses(&["--data-dscp", "256"], &["--data-dscp", "256"]);
    bed.run_refuses(&["--failsafe", "0s"], &["--failsafe", "0s"]);
    bed.run_refuses(&["--frobnicate"], &["--frobnicate"]);
    bed.refuses(&["frobnicate"], &["frobnicate"]);

    let lab = std::env::var_os("ROCE_LAB_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_roce-lab").into());
    for (option, values) in [
        ("--link", &["0", "1", "-1", "fast", "999999g"][..]),
        ("--queue", &["0", "-1", "99999999999", "x"]),
        ("--senders", &["0", "-1", "65", "1000000", "two"]),
        ("--time", &["0", "-1", "nan", "inf", "1e9"]),
    ] {
        for value in values {
            let output = Command::new(&lab).args(["run", "--roce", "none", option, value]).output().unwrap();
            is_refusal(&output, &format!("roce-lab {option} {value}"), &[option, value]);
        }
    }
}

fn capture(path: &Path, link: pcap_file::DataLink, frames: &[&[u8]], snaplen: usize) {
    let header = pcap_file::pcap::PcapHeader { datalink: link, ..Default::default() };
    let mut writer = pcap_file::pcap::PcapWriter::with_header(fs::File::create(path).unwrap(), header).unwrap();
    for frame in frames {
        let kept = &frame[..frame.len().min(snaplen)];
        writer.write_packet(&pcap_file::pcap::PcapPacket::new(Duration::ZERO, frame.len() as u32, kept)).unwrap();
    }
}

#[test]
fn files_that_cannot_be_inspected() {
    needs_root!();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = |name: &str| dir.path().join(name);
    let inspect = |file: &Path| Command::new(roce()).args(["inspect", "--json"]).arg(file).output().unwrap();
    let refuses = |file: &Path, says: &str| {
        let name = file.file_name().unwrap().to_str().unwrap();
        is_refusal(&inspect(file), name, &[name, says]);
    };
    refuses(&path("missing.pcap"), "No such file");
    refuses(dir.path(), "directory");
    fs::write(path("empty.pcap"), "").unwrap();
    refuses(&path("empty.pcap"), "empty");
    fs::write(path("text.pcap"), "not a capture at all\n").unwrap();
    refuses(&path("text.pcap"), "not a capture");
    fs::write(path("header.pcap"), [0xd4, 0xc3, 0xb2, 0xa1, 2]).unwrap();
    refuses(&path("header.pcap"), "header");
    capture(&path("wlan.pcap"), pcap_file::DataLink::IEEE802_11, &[&[0; 60]], 60);
    refuses(&path("wlan.pcap"), "link type");
    is_refusal(&Command::new(roce()).arg("inspect").output().unwrap(), "no file", &["FILE"]);

    // Cut within the headers: counted, not refused, and a finding.
    let real = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures/rxe-write-rc.pcap");
    let frames = roce_tests::replay::read(&real).unwrap();
    let frames: Vec<&[u8]> = frames.iter().map(|f| &f.bytes[..]).collect();
    capture(&path("short.pcap"), pcap_file::DataLink::ETHERNET, &frames, 50);
    let output = inspect(&path("short.pcap"));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), report["frames"].as_u64()), (Some(1), Some(frames.len() as u64)));
    let whole: serde_json::Value = serde_json::from_slice(&inspect(&real).stdout).unwrap();
    assert_eq!(report["malformed"]["truncated_capture"], whole["rocev2"], "{report}");

    if has("setpriv") {
        fs::copy(&real, path("secret.pcap")).unwrap();
        fs::set_permissions(path("secret.pcap"), fs::Permissions::from_mode(0o600)).unwrap();
        let (_dir, program) = for_everybody();
        let mut nobody = Command::new("setpriv");
        nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program).arg("inspect");
        let output = nobody.arg(path("secret.pcap")).output().unwrap();
        is_refusal(&output, "unreadable", &["secret.pcap", "Permission denied"]);
    }
}

#[test]
fn nobody_reads_the_output() {
    needs_root!();
    let bed = Bed::new();
    let mut agent = AgentProcess::start(&roce(), bed.ns(), "a", AgentRole::Observe, &[]).unwrap();
    agent.wait_ready().unwrap();
    let real = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures/rxe-write-rc.pcap");
    let real = real.to_str().unwrap();
    let far = &bed.pair.b.port;
    let quiet = Traces::before(far).unwrap();
    for args in [
        &["inspect", real][..],
        &["inspect", "--json", real, real],
        &["flows"],
        &["flows", "--json"],
        &["--help"],
        &["run", "--iface", "b", "--json", "--pacer", "htb"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ns = if args[0] == "run" { &far.ns } else { bed.ns() };
        let mut child =
            ns.command(roce()).args(args).stdout(writer).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let begin = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if begin.elapsed() > Duration::from_secs(5) {
                child.kill().unwrap();
                panic!("{args:?} runs on");
            }
            thread::sleep(Duration::from_millis(10));
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""), "{args:?}");
    }
    assert_eq!(quiet.left().unwrap(), [""; 0]);
    assert!(agent.stop().unwrap().success());
    assert_eq!(bed.traces.left().unwrap(), [""; 0]);
}
