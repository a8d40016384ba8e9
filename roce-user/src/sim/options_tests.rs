use super::*;

#[test]
fn counts_are_numbers_lists_and_ranges() {
    let counts = |text: &str| text.parse::<Counts>().map(|c| c.0);
    assert_eq!(counts("8").unwrap(), [8]);
    assert_eq!(counts("2..64").unwrap(), [2, 4, 8, 16, 32, 64]);
    assert_eq!(counts("3..10").unwrap(), [3, 4, 8, 10]);
    assert_eq!(counts("5..5").unwrap(), [5]);
    assert_eq!(counts("2, 8").unwrap(), [2, 8]);
    for wrong in ["", "64..2", "2..", "a..b", "2..99999999999", "-1", "2,,4"] {
        assert!(counts(wrong).unwrap_err().contains("2..64"), "{wrong}");
    }
}

#[test]
fn sizes_are_packets_or_bytes() {
    for (text, size) in [
        ("64", Size::Packets(64)),
        ("1000b", Size::Bytes(1_000)),
        ("200k", Size::Bytes(200_000)),
        ("1.5m", Size::Bytes(1_500_000)),
        ("1G", Size::Bytes(1_000_000_000)),
    ] {
        assert_eq!(text.parse::<Size>().unwrap(), size);
    }
    assert_eq!(Size::Packets(64).bytes(1_000), 64_000);
    for wrong in ["", "k", "-1", "1e9b", "nan", "64 packets", "-5k"] {
        assert!(wrong.parse::<Size>().unwrap_err().contains("is not a size"), "{wrong}");
    }
}

#[test]
fn defaults_follow_the_preset() {
    let job = |preset| Options { preset: Some(List(vec![preset])), ..Options::default() }.jobs().unwrap().remove(0);
    let soft = job(Preset::Soft).scenario;
    assert_eq!((soft.queue_bytes, soft.window, soft.ack_every), (64_000, 64, 16));
    assert_eq!((soft.delay, soft.jitter), (Nanos::from_micros(20), Nanos::from_micros(50)));
    assert_eq!(soft.marking, Marking::Virtual);
    let paper = job(Preset::Paper).scenario;
    assert_eq!((paper.queue_bytes, paper.window), (12_000_000, 0));
    assert_eq!((paper.delay, paper.jitter), (Nanos::from_micros(4), Nanos(0)));
    assert_eq!((paper.time, paper.warmup), (Nanos::from_millis(200), Nanos::from_millis(100)));
    assert_eq!(paper.marking, Marking::Departure);
    // The soft constants follow the delay that is simulated.
    let far = Options { delay: Some(List(vec![Span(Nanos::from_millis(2))])), ..Options::default() };
    assert!(far.jobs().unwrap()[0].scenario.params.unwrap().rp.timer > soft.params.unwrap().rp.timer);
}

#[test]
fn nonsense_is_refused_with_what_is_allowed() {
    let refused = |o: Options| format!("{:#}", o.jobs().unwrap_err());
    let none = Options::default();
    assert!(refused(Options { flows: Some(Counts(vec![0])), ..none.clone() }).contains("flows must be 1 to 65536"));
    assert!(
        refused(Options { warmup: Some(Span(Nanos(u64::MAX))), ..none.clone() }).contains("warmup must be shorter")
    );
    assert!(refused(Options { seeds: Some(0), ..none.clone() }).contains("seeds = 0"));
    assert!(refused(Options { packet: Some(1), ..none.clone() }).contains("packet must be 64 to 16384"));
    assert!(refused(Options { queue: Some(Size::Packets(0)), ..none.clone() }).contains("two packets"));
    assert!(refused(Options { load: Some(f64::NAN), ..none.clone() }).contains("load"));
    assert!(refused(Options { pfc_xoff: Some(Size::Packets(4)), ..none.clone() }).contains("need pfc"));
    let many = Options { flows: Some(Counts((1..=2_000).collect())), ..none };
    assert!(refused(many).contains("more than 1000 runs"));
}
