//! Running other programs: where their output goes, what their end means, and who hears Ctrl-C.

use std::{
    ffi::OsStr,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::AsFd as _,
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicI32, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use nix::{
    sys::signal::{self, Signal},
    unistd::{Pid, Uid},
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

/// Why xtask stops early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Wrong usage or an environment that lacks something: exit code 2.
    Environment(anyhow::Error),
    /// A program that had to succeed ended with this exit code, having said why.
    Child(u8),
}

impl From<anyhow::Error> for Stop {
    fn from(e: anyhow::Error) -> Self {
        Self::Environment(e)
    }
}

/// A line for the person at the terminal, on stderr. A closed stderr is no reason to stop.
pub(crate) fn say(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "xtask: {text}");
}

/// A line of a result, on stdout. A closed stdout is no reason to stop.
pub(crate) fn print(text: impl std::fmt::Display) {
    let _ = writeln!(io::stdout(), "{text}");
}

/// The program that runs now, or, negative, its process group where it has its own; 0 = none.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// From here on xtask outlives the program it runs: SIGINT, SIGTERM and SIGHUP end the program, and xtask ends with it,
/// after it has cleaned up. While no program runs they end xtask.
pub(crate) fn outlive_children() -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("installing signal handlers")?;
    thread::spawn(move || {
        for number in signals.forever() {
            match CHILD.load(Ordering::SeqCst) {
                0 => std::process::exit(128 + number),
                // The terminal has sent Ctrl-C to the program too.
                child if child > 0 && number == SIGINT && in_foreground() => {}
                child => {
                    if let Ok(signal) = Signal::try_from(number) {
                        // Fails when it has just ended, or is sudo's, which gets the terminal's signals itself.
                        let _ = signal::kill(Pid::from_raw(child), signal);
                    }
                }
            }
        }
    });
    Ok(())
}

/// Whether our process group is the one its terminal sends Ctrl-C to.
fn in_foreground() -> bool {
    std::fs::read_to_string("/proc/self/stat").is_ok_and(|stat| foreground(&stat))
}

/// proc_pid_stat(5): behind the name in parentheses stand state, ppid, pgrp, session, tty_nr, tpgid.
fn foreground(stat: &str) -> bool {
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let mut fields = fields.split_ascii_whitespace();
    let pgrp = fields.nth(2);
    let tpgid = fields.nth(2);
    pgrp.is_some() && pgrp == tpgid
}

/// A program that could not be started, in words.
fn not_started(command: &Command, e: &io::Error) -> anyhow::Error {
    let program = command.get_program().to_string_lossy();
    if e.kind() == io::ErrorKind::NotFound {
        anyhow!("{program} is not installed or not in PATH")
    } else {
        anyhow!("{program} cannot be started: {e}")
    }
}

/// Starts the program; it counts as running until [`wait`].
fn spawn(command: &mut Command, target: impl Fn(i32) -> i32) -> anyhow::Result<Child> {
    let child = command.spawn().map_err(|e| not_started(command, &e))?;
    CHILD.store(target(child.id().cast_signed()), Ordering::SeqCst);
    Ok(child)
}

fn wait(child: &mut Child) -> anyhow::Result<ExitStatus> {
    let status = child.wait().context("waiting for a program");
    CHILD.store(0, Ordering::SeqCst);
    status
}

/// The exit code of a program as a shell reports it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

/// Runs the program to its end with our stdin, stdout and stderr.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<u8> {
    let mut child = spawn(command, |pid| pid)?;
    wait(&mut child).map(code)
}

/// Runs a program whose stdout is chatter: it goes to stderr, so that our stdout holds results only.
pub(crate) fn run_aside(command: &mut Command) -> anyhow::Result<u8> {
    let stderr = io::stderr().as_fd().try_clone_to_owned().context("duplicating stderr")?;
    run(command.stdout(stderr).stdin(Stdio::null()))
}

/// [`run_aside`] for a program without which there is no going on.
pub(crate) fn must(command: &mut Command) -> Result<(), Stop> {
    match run_aside(command)? {
        0 => Ok(()),
        code => Err(Stop::Child(code)),
    }
}

/// Runs the program, gives each line of its stdout to `line`, and ends it after `limit`. Returns its exit code, or
/// `None` when the limit ended it.
pub(crate) fn run_lines(
    command: &mut Command,
    limit: Duration,
    mut line: impl FnMut(&[u8]),
) -> anyhow::Result<Option<u8>> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    // Its own group, so that what it started ends with it and cannot hold the pipe open. Not with sudo, which may have
    // to ask for a password at the terminal.
    let grouped = is_root();
    if grouped {
        command.process_group(0);
    }
    let target = move |pid: i32| if grouped { -pid } else { pid };
    let mut child = spawn(command, target)?;
    let pid = Pid::from_raw(target(child.id().cast_signed()));
    let stdout = child.stdout.take().context("the program has no stdout")?;
    let (done, watched) = std::sync::mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        let late = watched.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        if late {
            // Fails when it has just ended.
            let _ = signal::kill(pid, Signal::SIGKILL);
        }
        late
    });
    let mut reader = BufReader::new(stdout);
    let mut buffer = Vec::new();
    // A read error is the end of the output, like its end.
    while reader.read_until(b'\n', &mut buffer).is_ok_and(|n| n > 0) {
        line(&buffer);
        buffer.clear();
    }
    let status = wait(&mut child)?;
    drop(done);
    let late = watchdog.join().unwrap_or(false);
    Ok((!late).then(|| code(status)))
}

/// Returns the stdout of a program without which there is no going on; its stderr is ours.
pub(crate) fn must_output(command: &mut Command) -> Result<Vec<u8>, Stop> {
    let mut child = spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()), |pid| pid)?;
    let mut output = Vec::new();
    let read = child.stdout.take().map_or(Ok(0), |mut stdout| stdout.read_to_end(&mut output));
    let status = wait(&mut child)?;
    if !status.success() {
        return Err(Stop::Child(code(status)));
    }
    read.context("reading the output of a program")?;
    Ok(output)
}

/// Runs a short program for its stdout; its stderr is shown only when it fails.
pub(crate) fn capture(command: &mut Command) -> anyhow::Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).output().map_err(|e| not_started(command, &e))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        let program = command.get_program().to_string_lossy().into_owned();
        Err(anyhow!("{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// Where a program is: in PATH, or in the directories of system programs, which an ordinary user's PATH may lack.
pub(crate) fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(Into::into))
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// Whether we are root.
pub(crate) fn is_root() -> bool {
    Uid::effective().is_root()
}

/// A command that runs `program` as root: itself, or through sudo with our environment.
pub(crate) fn as_root(program: impl AsRef<OsStr>) -> anyhow::Result<Command> {
    if is_root() {
        return Ok(Command::new(program));
    }
    if find("sudo").is_none() {
        return Err(anyhow!(
            "{} must run as root, this is an ordinary user, and sudo is not installed: \
             repeat the command as root (su -c '…'), or install sudo",
            Path::new(program.as_ref()).display()
        ));
    }
    let mut command = Command::new("sudo");
    command.arg("-E").arg("--").arg(program);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(run(Command::new("sh").args(["-c", "exit 7"])).expect("sh"), 7);
        assert_eq!(run(Command::new("sh").args(["-c", "kill -KILL $$"])).expect("sh"), 137);
        let missing = run(&mut Command::new("/nowhere/at-all")).expect_err("there is no such program");
        assert_eq!(missing.to_string(), "/nowhere/at-all is not installed or not in PATH");
    }

    #[test]
    fn lines_arrive_whole_and_the_limit_ends_a_program() {
        let mut lines = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; printf two; exit 3"]);
        let code = run_lines(&mut command, Duration::from_secs(60), |l| lines.push(l.to_vec())).expect("sh");
        assert_eq!((code, lines), (Some(3), vec![b"one\n".to_vec(), b"two".to_vec()]));
        let mut sleep = Command::new("sleep");
        assert_eq!(run_lines(sleep.arg("60"), Duration::from_millis(50), |_| {}).expect("sleep"), None);
    }

    #[test]
    fn the_foreground_is_read_behind_a_name_with_blanks_and_parentheses() {
        assert!(foreground("12 (a) b) (c) S 1 12 12 34816 12 4194304 0"));
        assert!(!foreground("12 (xtask) S 1 12 12 34816 99 4194304 0"));
        assert!(!foreground("12 (xtask) S 1 12 12 0 -1 4194304 0"));
        assert!(!foreground("nonsense"));
    }

    #[test]
    fn programs_are_found_by_name() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program-of-ours").is_none());
    }
}
