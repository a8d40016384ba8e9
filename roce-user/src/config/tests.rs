use clap::ValueEnum;
use roce_common::{
    abi,
    dcqcn::{Fabric, ONE},
};

use super::*;

fn rate(text: &str) -> Result<u64, String> {
    parse_rate(text).map(Rate::bits_per_sec)
}

#[test]
fn rates() {
    for (text, bits) in [
        ("100m", 100_000_000),
        ("25g", 25_000_000_000),
        ("1.5gbit", 1_500_000_000),
        ("40000000", 40_000_000),
        ("64Kbit", 64_000),
        (" 2.5 Gbit/s ", 2_500_000_000),
        ("0.8t", 800_000_000_000),
        ("10mbps", 10_000_000),
    ] {
        assert_eq!(rate(text), Ok(bits), "{text}");
    }
    for (text, why) in [
        ("0", "zero"),
        ("0.0g", "zero"),
        ("100", "unit"),
        ("9999", "unit"),
        ("2t", "no such link"),
        ("99999999999999999999999g", "no such link"),
        ("-5m", "not a rate"),
        ("", "not a rate"),
        ("m", "not a rate"),
        (".", "not a rate"),
        ("1e9", "not a rate"),
        ("inf", "not a rate"),
        ("nan", "not a rate"),
        ("1..5g", "not a rate"),
        ("fast", "not a rate"),
        ("10µ", "not a rate"),
    ] {
        let error = rate(text).expect_err(text);
        assert!(error.contains(why) && error.contains(text.trim()), "{text}: {error}");
    }
}

#[test]
fn times() {
    assert_eq!(parse_time("50us"), Ok(Nanos(50_000)));
    assert_eq!(parse_time("1.5 ms"), Ok(Nanos(1_500_000)));
    assert_eq!(parse_time("1s"), Ok(Nanos::SECOND));
    assert_eq!(parse_time("700ns"), Ok(Nanos(700)));
    for text in ["5", "0s", "s", "-1s", "2h", "4000s", "1e3s"] {
        assert!(parse_time(text).is_err(), "{text}");
    }
}

fn parse(text: &str) -> Result<FileConfig> {
    FileConfig::parse(text, Path::new("roce.toml"))
}

#[test]
fn an_error_names_the_file_the_line_and_the_key() {
    for (text, parts) in [
        ("role = \"host\"\ncolour = 3\n", &["roce.toml:2", "unknown field", "`colour`"][..]),
        ("role = \"router\"\n", &["roce.toml:1", "role", "`router`", "observe"]),
        ("\nlink_rate = \"0\"\n", &["roce.toml:2", "link_rate", "zero"]),
        ("link_rate = -1\n", &["roce.toml:1", "link_rate", "below zero"]),
        ("failsafe = 50\n", &["roce.toml:1", "failsafe", "50us"]),
        ("queue_bytes = \"lots\"\n", &["roce.toml:1", "queue_bytes"]),
        ("role = \n", &["roce.toml:1"]),
        ("role = \"host\"\nrole = \"cp\"\n", &["roce.toml:2", "duplicate key"]),
    ] {
        let error = format!("{:#}", parse(text).expect_err(text));
        assert_eq!(error.lines().count(), 1, "{error}");
        for part in parts {
            assert!(error.contains(part), "{text:?}: {error} lacks {part}");
        }
    }
    let missing = FileConfig::load(Path::new("/nonexistent/roce.toml")).expect_err("no such file");
    assert!(format!("{missing:#}").contains("/nonexistent/roce.toml"));
}

#[test]
fn the_command_line_wins_over_the_file() -> Result<()> {
    let file = parse("role = \"observe\"\nlink_rate = \"1g\"\ndata_dscp = 24\n")?;
    let line = FileConfig { role: Some(Role::Host), ..FileConfig::default() };
    let s = Settings::new(line, file, Some(Rate::from_bits_per_sec(10_000_000_000)))?;
    assert_eq!((s.role, s.link_rate.bits_per_sec(), s.data_dscp.get()), (Role::Host, 1_000_000_000, 24));
    assert!(s.link_rate_given);
    Ok(())
}

#[test]
fn defaults() -> Result<()> {
    let detected = Rate::from_bits_per_sec(25_000_000_000);
    let s = Settings::new(FileConfig::default(), FileConfig::default(), Some(detected))?;
    assert_eq!((s.role, s.link_rate, s.link_rate_given), (Role::Host, detected, false));
    assert_eq!((s.data_dscp.get(), s.cnp_dscp.get(), s.data_priority, s.cnp_priority), (26, 48, 3, 6));
    assert_eq!((s.dscp_policy, s.ecn_policy, s.guard), (Policy::Fill, Policy::Fill, Guard::Auto));
    assert_eq!((s.failsafe, s.sample_every, s.ack_timeout), (Nanos::SECOND, 64, None));
    assert_eq!((s.ingress, s.pacer, s.bpffs.as_path()), (None, None, Path::new("/sys/fs/bpf")));
    assert_eq!(s.params, Params::soft(Fabric::new(detected, DEFAULT_PACKET_BYTES)));
    let unknown = Settings::new(FileConfig::default(), FileConfig::default(), None)?;
    assert_eq!(unknown.link_rate.bits_per_sec(), 10_000_000_000);
    Ok(())
}

#[test]
fn every_key_can_be_set() -> Result<()> {
    let text = r#"
role = "cp"
link_rate = 100_000_000
ingress = "xdp-generic"
pacer = "htb"
packet_bytes = 1082
data_dscp = 3
cnp_dscp = 46
data_priority = 4
cnp_802p_prio = 7
dscp_policy = "force"
ecn_policy = "keep"
queue_bytes = 70000
cp_at = "ingress"
cp_class = [{ dscp = [26], share = 0.5 }]
ack_timeout = 14
failsafe = "2s"
sample_every = 16
guard = "on"
busy_poll = true
bpffs = "/run/bpf"

[dcqcn]
preset = "soft"
feedback_delay = "1ms"
min_time_between_cnps = "4ms"
rate_reduce_monitor_period = "1ms"
kmin = 5000
kmax = 40000
pmax = 0.25
dce_tcp_g = 960
dce_tcp_rtt = "7ms"
alpha_update = "at-cnp"
initial_alpha_value = 512
rpg_time_reset = "6ms"
rpg_byte_reset = 1000000
rpg_threshold = 3
threshold_boundary = "up-to"
rpg_max_rate = "90m"
rpg_min_rate = "1m"
rpg_ai_rate = "100k"
rpg_hai_rate = "500k"
rpg_gd = 10
rpg_min_dec_fac = 40
held_back_marks = "dropped"
rate_to_set_on_first_cnp = "50m"
clamp_tgt_rate = false
clamp_tgt_rate_after_time_inc = false
start_rate = "10m"
start_ai_rate = "2m"
start_periods = 30
least_usage = 0.25
idle_restart = "3s"
"#;
    assert!(FileConfig::KEYS.iter().chain(Dcqcn::KEYS).all(|key| text.contains(&format!("\n{key} = "))));
    let s = Settings::new(FileConfig::default(), parse(text)?, None)?;
    assert_eq!(
        (s.role, s.ingress, s.pacer, s.preset),
        (Role::Cp, Some(Ingress::XdpGeneric), Some(Pacer::Htb), Preset::Soft)
    );
    let p = s.params;
    assert_eq!((p.cnp_interval, p.rp.monitor), (Nanos::from_millis(4), Nanos::from_millis(1)));
    assert_eq!((p.kmin, p.kmax, p.pmax, s.queue_bytes), (5_000, 40_000, ONE / 4, 70_000));
    assert_eq!((p.rp.g, p.rp.timer, p.rp.alpha_timer), (ONE / 16, Nanos::from_millis(6), Nanos::from_millis(7)));
    assert_eq!((p.rp.additive.bits_per_sec(), p.rp.hyper.bits_per_sec()), (100_000, 500_000));
    assert_eq!((p.rp.initial_alpha, p.rp.byte_period, p.rp.fast_recovery), (ONE / 2, 1_000_000, 3));
    assert_eq!((p.rp.max_rate.bits_per_sec(), p.rp.min_rate.bits_per_sec()), (90_000_000, 1_000_000));
    assert_eq!(
        (p.rp.gd, p.rp.least_kept_percent, p.rp.clamp_target, p.rp.clamp_target_after_timer),
        (10, 40, false, false)
    );
    assert_eq!((p.rp.first_cnp_rate.bits_per_sec(), p.rp.start_rate.bits_per_sec()), (50_000_000, 10_000_000));
    assert_eq!((p.rp.usage, p.rp.idle_restart), (ONE / 4, Nanos::from_millis(3_000)));
    assert_eq!((s.cnp_priority, s.data_priority), (7, 4));
    assert_eq!((s.ack_timeout, s.core().ack_timeout, s.core().pairs.sample_every), (Some(14), Some(14), 16));
    Ok(())
}

#[test]
fn nonsense_is_refused_with_its_name() -> Result<()> {
    for (text, word) in [
        ("role = \"cp\"", "link-rate"),
        ("data_dscp = 64", "data_dscp"),
        ("cnp_dscp = 200", "cnp_dscp"),
        ("link_rate = \"1g\"\n[dcqcn]\nrpg_min_rate = \"20g\"", "rpg_min_rate = \"20g\""),
        ("[dcqcn]\nheld_back_marks = \"answered\"", "held_back_marks"),
        ("queue_bytes = 5", "queue_bytes"),
        ("packet_bytes = 0", "packet_bytes"),
        ("ack_timeout = 0", "ack_timeout"),
        ("ack_timeout = 32", "ack_timeout"),
        ("sample_every = 3", "sample_every"),
        ("failsafe = \"1ms\"", "failsafe"),
        ("bpffs = \"bpf\"", "bpffs"),
    ] {
        let error = Settings::new(FileConfig::default(), parse(text)?, None).expect_err(text);
        assert!(format!("{error:#}").contains(word), "{text}: {error:#}");
    }
    Ok(())
}

#[test]
fn choices_have_the_same_names_everywhere() {
    assert_eq!(Ingress::XdpGeneric.to_string(), "xdp-generic");
    assert_eq!(<Role as ValueEnum>::from_str("observe", false), Ok(Role::Observe));
    assert_eq!(abi::Pacer::from(Pacer::Htb), abi::Pacer::Htb);
    assert_eq!(abi::Role::from(Role::Cp), abi::Role::Cp);
    assert_eq!(abi::IngressMode::from(Ingress::XdpGeneric), abi::IngressMode::XdpGeneric);
    assert_eq!(abi::MarkPolicy::from(Policy::Force), abi::MarkPolicy::Force);
}
