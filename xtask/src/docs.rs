//! ARCHITECTURE.md names every counter, every reason and every map. The names are read from the sources, since xtask is
//! built without the crates that hold them.

const ARCHITECTURE: &str = include_str!("../../ARCHITECTURE.md");

/// What stands between `before` and `after`, wherever both are in one line.
fn between<'a>(text: &'a str, before: &str, after: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| Some(line.split_once(before)?.1.split_once(after)?.0)).collect()
}

/// The names that ARCHITECTURE.md does not have.
fn missing<'a>(names: &[&'a str], as_written: impl Fn(&str) -> String) -> Vec<&'a str> {
    names.iter().copied().filter(|name| !ARCHITECTURE.contains(&as_written(name))).collect()
}

#[test]
fn every_counter_and_reason_is_described() {
    let counters = between(include_str!("../../roce-common/src/abi/counters.rs"), " = \"", "\",");
    assert!(counters.contains(&"not_roce") && counters.len() > 30, "{counters:?}");
    assert_eq!(missing(&counters, |name| format!("`{name}`")), [""; 0]);
    let reasons = between(include_str!("../../roce-common/src/wire/parse.rs"), " => \"", "\",");
    assert!(reasons.contains(&"bad_length"), "{reasons:?}");
    assert_eq!(missing(&reasons, |name| format!("| `{name}` |")), [""; 0]);
}

#[test]
fn every_map_is_in_the_catalogue() {
    let maps = between(include_str!("../../roce-ebpf/src/maps.rs"), "pub(crate) static ", ":");
    assert!(maps.contains(&"FLOWS") && maps.len() > 10, "{maps:?}");
    assert_eq!(missing(&maps, |name| format!("\n| {name} |")), [""; 0]);
}
