//! `docs/facts.md` describes every field that the captures give.

use std::{collections::BTreeSet, fs, path::Path};

use roce_user::inspect;
use serde_json::Value;

/// Paths of the fields of an object; what is counted by name or number, and the fields of a spread, are left out.
fn fields(prefix: &str, value: &Value, out: &mut BTreeSet<String>) {
    for (name, value) in value.as_object().into_iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let counted = ["opcodes", "message_sizes.by_size"].contains(&path.as_str());
        if value.is_object() && !counted && value.get("count").is_none() {
            fields(&path, value, out);
        } else {
            out.insert(path);
        }
    }
}

#[test]
fn every_field_of_the_facts_is_described() {
    let text = include_str!("../../docs/facts.md");
    let mut seen = BTreeSet::new();
    let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures");
    for entry in fs::read_dir(captures).expect("tests/captures") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|e| e == "pcap") {
            let report = serde_json::to_value(inspect::report(&path).expect("report")).expect("JSON");
            for flow in report["flows"].as_array().expect("flows") {
                fields("", &flow["facts"], &mut seen);
            }
        }
    }
    // An object without members is no field.
    let missing: Vec<_> = seen.iter().filter(|f| *f != "recovery_ns" && !text.contains(&format!("`{f}`"))).collect();
    assert!(missing.is_empty() && seen.len() > 12, "{missing:?} of {seen:?}");
}
