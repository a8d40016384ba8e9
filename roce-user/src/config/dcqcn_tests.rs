use std::path::Path;

use clap::Parser;
use proptest::prelude::*;
use roce_common::dcqcn::params;

use super::*;
use crate::config::{FileConfig, Settings};

const LINK: Rate = Rate::from_bits_per_sec(10_000_000_000);
const PACKET: u32 = 1_098;

fn parse(text: &str) -> Result<Dcqcn> {
    Ok(FileConfig::parse(&format!("[dcqcn]\n{text}"), Path::new("roce.toml"))?.dcqcn)
}

fn presets(link: Rate) -> [(Preset, Params); 3] {
    [
        (Preset::Soft, Params::soft(Fabric::new(link, PACKET))),
        (Preset::Paper, Params::paper(link)),
        (Preset::Nvidia, Params::nvidia(link)),
    ]
}

/// What is printed reads back as the same constants, on whatever link.
fn reads_back(preset: Preset, params: &Params) -> Result<()> {
    let printed = Dcqcn::of(preset, params).to_toml();
    let file = FileConfig::parse(&printed, Path::new("roce.toml"))?;
    let read = file.dcqcn.params(params.rp.line, 64)?;
    ensure!(read == *params, "{printed}\n{read:#?}\n{params:#?}");
    // Every key but the one that only the soft preset derives from.
    ensure!(printed.lines().count() == Dcqcn::KEYS.len(), "{printed}");
    ensure!(file.dcqcn.to_toml() == printed, "{printed}");
    Ok(())
}

#[test]
fn a_printed_set_reads_back_as_itself() -> Result<()> {
    for mbps in [50, 100, 1_000, 2_500, 10_000, 25_000, 40_000, 100_000] {
        for (preset, params) in presets(Rate::from_bits_per_sec(mbps * 1_000_000)) {
            reads_back(preset, &params)?;
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_valid_set_reads_back_as_itself(
        (line, most, least) in (1_250u64..200_000_000_000, 0u64..=100, 0u64..=100),
        (g, alpha, usage, pmax) in (1u32..=ONE, 1u32..=ONE, 0u32..=ONE, 1u32..=ONE),
        times in prop::array::uniform6(1u64..=3_600_000_000_000),
        (bytes, f, gd, kept) in (0u64..1 << 40, 1u32..=1_000, 8u32..=16, 0u32..=99),
        (kmin, width) in (0u32..1 << 31, 0u32..1 << 31),
        flags: [bool; 5],
    ) {
        let rate = Rate::from_bytes_per_sec;
        let ceiling = (line * most / 100).max(1);
        let min = (ceiling * least / 100).max(1);
        let p = Params {
            rp: params::RpParams {
                line: rate(line),
                max_rate: rate(if flags[0] { ceiling } else { 0 }),
                min_rate: rate(min),
                g,
                initial_alpha: alpha,
                alpha_update: if flags[1] { params::AlphaUpdate::AtCnp } else { params::AlphaUpdate::EveryPeriod },
                alpha_timer: Nanos(times[0]),
                gd,
                least_kept_percent: kept,
                monitor: Nanos(times[1] - 1),
                first_cnp_rate: rate(if flags[2] { 0 } else { min }),
                clamp_target: flags[3],
                clamp_target_after_timer: flags[4],
                fast_recovery: f,
                boundary: if flags[2] { params::Boundary::Below } else { params::Boundary::UpTo },
                timer: Nanos(times[2]),
                byte_period: bytes,
                additive: rate(min),
                hyper: rate(ceiling),
                start_rate: rate(if flags[1] { 0 } else { ceiling }),
                start_additive: rate(if flags[0] { 0 } else { ceiling }),
                start_periods: f,
                usage,
                idle_restart: Nanos(if usage == 0 { 0 } else { times[3] - 1 }),
            },
            cnp_interval: Nanos(times[4] - 1),
            held_back_marks: if flags[3] { params::HeldBackMarks::Dropped } else { params::HeldBackMarks::Answered },
            kmin,
            kmax: kmin + width,
            pmax,
        };
        prop_assert_eq!(p.validate(), Ok(()));
        prop_assert!(reads_back(Preset::Soft, &p).is_ok(), "{:?}", reads_back(Preset::Soft, &p));
    }
}

#[test]
fn what_an_adapter_shows_can_be_pasted() -> Result<()> {
    // The numbers of /sys/class/net/<if>/ecn/roce_rp, in the adapter's units.
    let adapter = parse(
        r#"preset = "nvidia"
rpg_time_reset = 300
rpg_byte_reset = 32767
rpg_threshold = 1
rpg_max_rate = 0
rpg_ai_rate = 5
rpg_hai_rate = 50
rpg_gd = 11
rpg_min_dec_fac = 50
rpg_min_rate = 1
rate_to_set_on_first_cnp = 0
clamp_tgt_rate = 0
clamp_tgt_rate_ati = 1
dce_tcp_g = 1019
dce_tcp_rtt = 1
rate_reduce_monitor_period = 4
initial_alpha_value = 1023
min_time_between_cnps = 4
"#,
    )?;
    let mut expected = Params::nvidia(LINK);
    expected.rp.byte_period = 32_767;
    assert_eq!(adapter.params(LINK, PACKET)?, expected);
    Ok(())
}

#[test]
fn values_may_carry_units() -> Result<()> {
    let p = parse(
        r#"preset = "paper"
rpg_time_reset = "1.5ms"
dce_tcp_rtt = 55.5
rpg_ai_rate = "500k"
rpg_hai_rate = 2.5
start_rate = "1g"
clamp_tgt_rate = true
alpha_update = "every-period"
threshold_boundary = "up-to"
min_time_between_cnps = "40us"
"#,
    )?
    .params(LINK, PACKET)?;
    assert_eq!((p.rp.timer, p.rp.alpha_timer), (Nanos(1_500_000), Nanos(55_500)));
    assert_eq!((p.rp.additive.bits_per_sec(), p.rp.hyper.bits_per_sec()), (500_000, 2_500_000));
    assert_eq!(p.rp.start_rate.bits_per_sec(), 1_000_000_000);
    assert_eq!((p.rp.alpha_update, p.rp.boundary), (params::AlphaUpdate::EveryPeriod, params::Boundary::UpTo));
    assert_eq!((p.cnp_interval, p.rp.monitor), (Nanos(40_000), Nanos(20_000)), "the monitor period makes room");
    Ok(())
}

#[test]
fn the_soft_set_follows_the_delay_it_is_told() -> Result<()> {
    let told = parse("feedback_delay = \"2ms\"")?.params(LINK, PACKET)?;
    let fabric = Fabric { feedback: Nanos::from_millis(2), ..Fabric::new(LINK, PACKET) };
    assert_eq!(told, Params::soft(fabric));
    assert!(told.rp.timer > Params::soft(Fabric::new(LINK, PACKET)).rp.timer);
    Ok(())
}

#[test]
fn only_what_somebody_wrote_contradicts() -> Result<()> {
    // Above the start rate the preset would choose, below its minimum: the preset gives way.
    let p = parse("rpg_min_rate = \"9g\"")?.params(LINK, PACKET)?;
    assert_eq!(p.rp.start_rate.bits_per_sec(), 9_000_000_000);
    let p = parse("rpg_max_rate = \"1m\"")?.params(LINK, PACKET)?;
    assert_eq!((p.rp.min_rate, p.rp.start_rate), (p.rp.max_rate, p.rp.max_rate));
    let p = parse("rpg_ai_rate = \"9g\"")?.params(LINK, PACKET)?;
    assert_eq!(p.rp.hyper, p.rp.additive);
    let p = parse("least_usage = 0.0")?.params(LINK, PACKET)?;
    assert_eq!(p.rp.idle_restart, Nanos(0));
    Ok(())
}

#[test]
fn what_cannot_be_is_refused_with_key_value_and_reason() {
    for (text, parts) in [
        ("rpg_time_reset = 0", &["rpg_time_reset = \"0ns\"", "above 0"][..]),
        ("dce_tcp_rtt = \"0us\"", &["dce_tcp_rtt", "above 0"]),
        ("rpg_time_reset = \"2h\"", &["roce.toml:2", "rpg_time_reset", "`2h`", "not a time"]),
        ("rpg_time_reset = \"3601s\"", &["roce.toml:2", "rpg_time_reset", "hour"]),
        ("rpg_threshold = 0", &["rpg_threshold = 0", "1 to 1000"]),
        ("rpg_gd = 7", &["rpg_gd = 7", "8 to 16"]),
        ("rpg_gd = -1", &["roce.toml:2", "rpg_gd"]),
        ("rpg_min_dec_fac = 100", &["rpg_min_dec_fac = 100", "no CNP would cut"]),
        ("rpg_ai_rate = 0", &["rpg_ai_rate = \"0bit\"", "above 0"]),
        ("rpg_ai_rate = \"5x\"", &["roce.toml:2", "rpg_ai_rate", "`5x`", "Mb/s"]),
        ("rpg_ai_rate = \"2t\"", &["roce.toml:2", "rpg_ai_rate", "no such link"]),
        ("rpg_ai_rate = 10\nrpg_hai_rate = 5", &["rpg_hai_rate = \"5m\"", "at least rpg_ai_rate"]),
        ("rpg_min_rate = \"20g\"", &["rpg_min_rate = \"20g\"", "link rate"]),
        ("rpg_max_rate = \"20g\"", &["rpg_max_rate = \"20g\"", "link rate"]),
        ("rpg_max_rate = \"1g\"\nrpg_min_rate = \"2g\"", &["rpg_min_rate = \"2g\"", "rpg_max_rate"]),
        ("start_rate = \"1bit\"", &["roce.toml:2", "start_rate", "less than a byte"]),
        ("start_rate = \"80bit\"", &["start_rate = \"80bit\"", "rpg_min_rate"]),
        ("start_rate = \"20g\"", &["start_rate = \"20g\"", "rpg_max_rate"]),
        ("rpg_ai_rate = 10\nstart_ai_rate = 5", &["start_ai_rate = \"5m\"", "at least rpg_ai_rate"]),
        ("start_periods = 1001", &["start_periods = 1001", "0 to 1000"]),
        ("rate_to_set_on_first_cnp = \"20g\"", &["rate_to_set_on_first_cnp", "rpg_max_rate"]),
        ("dce_tcp_g = 1024", &["dce_tcp_g = 1024.0", "below 1024"]),
        ("dce_tcp_g = 1025", &["dce_tcp_g = 1025", "0 to 1024"]),
        ("initial_alpha_value = 0", &["initial_alpha_value = 0.0", "above 0"]),
        ("initial_alpha_value = nan", &["initial_alpha_value", "NaN", "0 to 1024"]),
        ("clamp_tgt_rate = 2", &["roce.toml:2", "clamp_tgt_rate", "neither true nor false"]),
        ("alpha_update = \"often\"", &["roce.toml:2", "alpha_update", "`often`", "every-period"]),
        ("kmin = 9\nkmax = 8", &["kmin = 9", "at most kmax"]),
        ("kmin = 4294967296", &["roce.toml:2", "kmin"]),
        ("pmax = 1.5", &["pmax = 1.5", "0 to 1"]),
        ("pmax = 0.0", &["pmax = 0.0", "above 0"]),
        ("pmax = nan", &["pmax", "0 to 1"]),
        ("least_usage = 2.0", &["least_usage = 2", "0 to 1"]),
        ("least_usage = 0.0\nidle_restart = \"1s\"", &["idle_restart = \"1s\"", "least_usage"]),
        ("preset = \"paper\"\nfeedback_delay = 5", &["feedback_delay = \"5us\"", "paper", "soft"]),
        ("timer = 5", &["roce.toml:2", "`timer` is now `rpg_time_reset`"]),
        ("role = \"cp\"", &["roce.toml:2", "`role` belongs to the top"]),
        ("rpg_time = 5", &["roce.toml:2", "unknown field", "`rpg_time`", "rpg_time_reset"]),
    ] {
        let error = match parse(text) {
            Ok(dcqcn) => dcqcn.params(LINK, PACKET).expect_err(text),
            Err(error) => error,
        };
        let error = format!("{error:#}");
        assert_eq!(error.lines().count(), 1, "{error}");
        for part in parts {
            assert!(error.contains(part), "{text:?}: {error} lacks {part}");
        }
    }
}

#[test]
fn former_keys_name_their_successors() {
    for (old, new) in [
        ("min_rate = \"1m\"", "`rpg_min_rate` in the table [dcqcn]"),
        ("cnp_interval = \"1ms\"", "`min_time_between_cnps` in the table [dcqcn]"),
        ("g = 0.1", "`dce_tcp_g`"),
        ("cnp_priority = 6", "`cnp_802p_prio`"),
        ("preset = \"paper\"", "`preset` belongs into the table [dcqcn]"),
        ("rpg_ai_rate = 5", "belongs into the table [dcqcn]"),
    ] {
        let error = FileConfig::parse(&format!("\n{old}\n"), Path::new("roce.toml")).expect_err(old);
        let error = format!("{error:#}");
        assert!(error.starts_with("roce.toml:2: ") && error.contains(new), "{old}: {error}");
    }
}

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    dcqcn: Dcqcn,
}

#[test]
fn the_command_line_has_the_same_names_and_wins() -> Result<()> {
    let line = CommandLine::try_parse_from([
        "roce",
        "--preset=paper",
        "--rpg-ai-rate=7",
        "--dce-tcp-g=1008",
        "--clamp-tgt-rate=0",
        "--rpg-time-reset=1ms",
    ])?;
    let file = FileConfig::parse("[dcqcn]\nrpg_ai_rate = 5\nrpg_hai_rate = 70\n", Path::new("roce.toml"))?;
    let settings = Settings::new(FileConfig { dcqcn: line.dcqcn, ..FileConfig::default() }, file, Some(LINK))?;
    let rp = settings.params.rp;
    assert_eq!((rp.additive.bits_per_sec(), rp.hyper.bits_per_sec()), (7_000_000, 70_000_000));
    assert_eq!((rp.g, rp.timer, rp.clamp_target), (ONE / 64, Nanos::from_millis(1), false));
    assert_eq!(settings.preset, Preset::Paper);
    assert!(CommandLine::try_parse_from(["roce", "--rpg-gd=many"]).is_err());
    Ok(())
}

/// The table of docs/dcqcn.md: every key, and what the presets set it to.
#[test]
fn the_documentation_has_every_key_and_the_presets_values() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/dcqcn.md");
    let text = std::fs::read_to_string(path)?;
    let value = |preset, params: &Params, key: &str| {
        let all = Dcqcn::of(preset, params).to_toml();
        let line = all.lines().find_map(|l| l.strip_prefix(&format!("{key} = ")));
        line.unwrap_or("").trim_matches('"').to_owned()
    };
    let paper = Params::paper(Rate::from_bits_per_sec(40_000_000_000));
    let nvidia = Params::nvidia(Rate::from_bits_per_sec(100_000_000_000));
    for key in Dcqcn::KEYS.iter().filter(|k| **k != "preset") {
        let row = text.lines().find(|l| l.starts_with(&format!("| `{key}` |")));
        let row = row.ok_or_else(|| anyhow!("docs/dcqcn.md has no row for {key}"))?;
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells[4], value(Preset::Paper, &paper, key), "{key}, paper");
        assert_eq!(cells[5], value(Preset::Nvidia, &nvidia, key), "{key}, nvidia");
    }
    Ok(())
}
