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
        ("timer = 50\n", &["roce.toml:1", "timer", "50us"]),
        ("kmin = \"lots\"\n", &["roce.toml:1", "kmin"]),
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
preset = "paper"
packet_bytes = 1082
data_dscp = 3
cnp_dscp = 46
data_priority = 4
cnp_priority = 7
dscp_policy = "force"
ecn_policy = "keep"
cnp_interval = "4ms"
kmin = 5000
kmax = 40000
pmax = 0.25
queue_bytes = 70000
g = 0.0625
timer = "6ms"
alpha_timer = "7ms"
byte_period = 1000000
additive_rate = "100k"
hyper_rate = "500k"
min_rate = "1m"
ack_timeout = 14
failsafe = "2s"
sample_every = 16
guard = "on"
busy_poll = true
bpffs = "/run/bpf"
"#;
    assert!(FileConfig::KEYS.iter().all(|key| text.contains(&format!("\n{key} = "))));
    let s = Settings::new(FileConfig::default(), parse(text)?, None)?;
    assert_eq!(
        (s.role, s.ingress, s.pacer, s.preset),
        (Role::Cp, Some(Ingress::XdpGeneric), Some(Pacer::Htb), Preset::Paper)
    );
    let p = s.params;
    assert_eq!((p.cnp_interval, p.rp.monitor), (Nanos::from_millis(4), Nanos::from_millis(2)));
    assert_eq!((p.kmin, p.kmax, p.pmax, s.queue_bytes), (5_000, 40_000, ONE / 4, 70_000));
    assert_eq!((p.rp.g, p.rp.timer, p.rp.alpha_timer), (ONE / 16, Nanos::from_millis(6), Nanos::from_millis(7)));
    assert_eq!((p.rp.additive.bits_per_sec(), p.rp.hyper.bits_per_sec()), (100_000, 500_000));
    assert_eq!((s.ack_timeout, s.core().ack_timeout, s.core().pairs.sample_every), (Some(14), Some(14), 16));
    Ok(())
}

#[test]
fn nonsense_is_refused_with_its_name() -> Result<()> {
    for (text, word) in [
        ("role = \"cp\"", "link-rate"),
        ("data_dscp = 64", "data_dscp"),
        ("cnp_dscp = 200", "cnp_dscp"),
        ("pmax = 1.5", "pmax"),
        ("pmax = nan", "pmax"),
        ("g = 0.0", "g must"),
        ("kmin = 9\nkmax = 8", "kmin"),
        ("min_rate = \"20g\"\nlink_rate = \"1g\"", "min_rate"),
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
