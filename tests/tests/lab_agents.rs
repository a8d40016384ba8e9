//! How roce-lab deals with its agents, good and bad, shown with scripts in their place. Needs root.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use roce_tests::needs_root;
use serde_json::Value;

/// An agent that attaches nothing, says what the real one says, and writes its process id to `$0.pids`.
const GOOD: &str = r#"#!/bin/sh
echo $$ >> "$0.pids"
echo "$@" >> "$0.args"
role=observe
case "$*" in *'--role host'*) role=host;; *'--role cp'*) role=cp;; esac
summary() {
  echo '{"schema":1,"kind":"summary","iface":"'$3'","role":"'$role'","counters":{"ingress":{"np_cnp_sent":3},"egress":{"ce_marked":40}},"control":{"rp_handled":2,"rp_ignored":0},"flows":[{"tap":"'$3'/ingress","src":"10.66.1.1","dst":"10.66.200.1","dest_qp":256,"space":"request","missing_psns":7,"lost":5,"lost_again":1,"retransmitted":9},{"tap":"'$3'/egress","src":"10.66.1.1","dst":"10.66.200.1","dest_qp":256,"space":"request","retransmitted":9}]}'
  exit 0
}
trap 'summary "$@"' INT TERM
echo 'a line that is not JSON'
echo '{"schema":1,"kind":"ready"}'
while :; do
  echo '{"schema":1,"kind":"flows","flows":[]}'
  sleep 0.2
done
"#;

struct Script {
    dir: tempfile::TempDir,
}

impl Script {
    fn new(text: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut file = fs::File::create(dir.path().join("roce")).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("roce")
    }

    fn lab(&self, seconds: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_roce-lab"));
        command.args(["run", "--time", seconds, "--senders", "2", "--json", "--roce"]).arg(self.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self) -> Output {
        self.lab("1").output().unwrap()
    }

    /// Agents that were started and still run.
    fn left_over(&self) -> Vec<i32> {
        let pids = fs::read_to_string(self.dir.path().join("roce.pids")).unwrap_or_default();
        pids.lines()
            .filter_map(|l| l.parse().ok())
            .filter(|pid| {
                // A process id may have been used again; ours has the script's path on its command line.
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                String::from_utf8_lossy(&line).contains(&*self.path().to_string_lossy())
            })
            .collect()
    }
}

#[test]
fn summaries_become_the_two_sides() {
    needs_root!();
    let script = Script::new(GOOD);
    let output = script.run();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    let json: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    for side in ["without", "with"] {
        let s = &json[side];
        // Two senders and the receiver are hosts; each says the same.
        for (name, want) in [
            ("missing_psns", 7),
            ("lost", 5),
            ("lost_again", 1),
            ("retransmitted", 18),
            ("ce", 40),
            ("cnp", 9),
            ("rp_handled", 6),
            ("rp_ignored", 0),
            ("np_unpaired", 0),
        ] {
            assert_eq!(s[name].as_u64(), Some(want), "{side}.{name}: {s}");
        }
        for name in ["goodput_bps", "offered_bps", "switch_drops", "switch_drops_second_half", "queue_bytes_p50"] {
            assert!(s[name].is_u64(), "{side}.{name}");
        }
        assert!(s["jain"].is_f64());
    }
    let args = fs::read_to_string(script.dir.path().join("roce.args")).unwrap();
    let count = |text: &str| args.lines().filter(|l| l.contains(text)).count();
    assert_eq!((count("--role observe"), count("--role host"), count("--role cp")), (4, 3, 1), "{args}");
    assert_eq!(count("--link-rate 100000000"), 8, "{args}");
    assert_eq!((count("--role host --json --link-rate 100000000 --pacer htb"), count("--pacer off")), (3, 5), "{args}");
    assert_eq!(script.left_over(), [0; 0]);
}

#[test]
fn an_agent_that_cannot_attach_is_quoted() {
    needs_root!();
    let script = Script::new("#!/bin/sh\necho $$ >> \"$0.pids\"\necho 'error: no bpffs' >&2\nexit 2\n");
    let output = script.run();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("error: no bpffs") && stderr.contains("--iface"), "{stderr}");
    assert!(output.stdout.is_empty());
    assert_eq!(script.left_over(), [0; 0]);
}

#[test]
fn an_agent_that_dies_during_the_run_ends_it() {
    needs_root!();
    let script = Script::new(
        "#!/bin/sh\necho $$ >> \"$0.pids\"\necho '{\"kind\":\"ready\"}'\nsleep 0.5\necho gone >&2\nexit 1\n",
    );
    let output = script.run();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("gone"), "{stderr}");
    assert_eq!(script.left_over(), [0; 0]);
}

/// Waits until the lab has started its agents, sends it `signal`, and waits until nothing of it is left.
fn interrupted_by(signal: Signal) -> Option<i32> {
    let script = Script::new(GOOD);
    let mut lab = script.lab("60").spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while script.left_over().len() < 4 {
        assert!(Instant::now() < end, "the agents did not start");
        thread::sleep(Duration::from_millis(20));
    }
    kill(Pid::from_raw(lab.id() as i32), signal).unwrap();
    let status = lab.wait().unwrap();
    while !script.left_over().is_empty() {
        assert!(Instant::now() < end + Duration::from_secs(10), "agents are left: {:?}", script.left_over());
        thread::sleep(Duration::from_millis(20));
    }
    status.code()
}

#[test]
fn a_signal_ends_everything() {
    needs_root!();
    assert_eq!(interrupted_by(Signal::SIGINT), Some(130));
    assert_eq!(interrupted_by(Signal::SIGTERM), Some(130));
    // Killed, the lab can do nothing; its agents get SIGTERM from the kernel.
    assert_eq!(interrupted_by(Signal::SIGKILL), None);
}
