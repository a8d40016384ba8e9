//! The text format that Prometheus reads: a family of samples at a time, each with its help and type.

use std::fmt;

/// What a family's numbers mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A value that rises and falls.
    Gauge,
    /// A count that only rises while its source lives.
    Counter,
}

#[derive(Debug)]
struct Family {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    samples: Vec<(String, f64)>,
}

/// Samples to be shown; families in the order of their first samples.
#[derive(Debug, Default)]
pub struct Exposition(Vec<Family>);

impl Exposition {
    /// Adds a sample. The help and kind of a family's first sample count.
    pub fn add(&mut self, (name, kind, help): (&'static str, Kind, &'static str), labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
        let sample = (labels.join(","), value);
        match self.0.iter_mut().find(|f| f.name == name) {
            Some(family) => family.samples.push(sample),
            None => self.0.push(Family { name, help, kind, samples: vec![sample] }),
        }
    }
}

impl fmt::Display for Exposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for family in &self.0 {
            let kind = match family.kind {
                Kind::Gauge => "gauge",
                Kind::Counter => "counter",
            };
            writeln!(f, "# HELP {} {}\n# TYPE {} {kind}", family.name, family.help, family.name)?;
            for (labels, value) in &family.samples {
                writeln!(f, "{}{{{labels}}} {value}", family.name)?;
            }
        }
        Ok(())
    }
}

/// A label's value as it stands between quotes: names of interfaces may hold anything but a slash and white space.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_told_once_and_labels_are_escaped() {
        let mut e = Exposition::default();
        let depth = ("roce_cp_queue_bytes", Kind::Gauge, "Bytes in the virtual queue now.");
        let marked = ("roce_cp_marked_packets_total", Kind::Counter, "Packets made CE.");
        e.add(depth, &[("iface", "eth0"), ("class", "0")], 1_082.0);
        e.add(marked, &[("iface", "eth0"), ("class", "0")], 1e10);
        e.add(depth, &[("iface", "a\"b\\c"), ("class", "1")], 0.25);
        assert_eq!(
            e.to_string(),
            "# HELP roce_cp_queue_bytes Bytes in the virtual queue now.\n\
             # TYPE roce_cp_queue_bytes gauge\n\
             roce_cp_queue_bytes{iface=\"eth0\",class=\"0\"} 1082\n\
             roce_cp_queue_bytes{iface=\"a\\\"b\\\\c\",class=\"1\"} 0.25\n\
             # HELP roce_cp_marked_packets_total Packets made CE.\n\
             # TYPE roce_cp_marked_packets_total counter\n\
             roce_cp_marked_packets_total{iface=\"eth0\",class=\"0\"} 10000000000\n"
        );
    }
}
