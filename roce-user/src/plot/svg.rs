//! The document itself.

use std::fmt::Write as _;

use super::{
    Panel, Series, Style,
    axis::{Scale, label, scales},
};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 45.0;
/// Legend entries that fit beside a panel; what is beyond is drawn and not named.
const LEGEND: usize = 14;

/// Colours that stay apart for most eyes (Okabe and Ito), used in turn.
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31"];

const CSS: &str = "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.axis,.tick{stroke:#444}.grid{stroke:#ddd}\
.level{stroke:#888;stroke-dasharray:5 4}.line,.steps{fill:none;stroke-width:1.3}.cross{fill:none;stroke-width:1.5}";

pub(super) fn document(panels: &[Panel]) -> String {
    let height = HEIGHT * panels.len().max(1) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\">\n\
         <style>{CSS}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for (i, panel) in panels.iter().enumerate() {
        draw(&mut out, panel, HEIGHT * i as f64);
    }
    out.push_str("</svg>\n");
    out
}

// Writing to a string cannot fail, so the results of `write!` below say nothing.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => { let _infallible = writeln!($out, $($arg)*); };
}

fn draw(out: &mut String, panel: &Panel, offset: f64) {
    let (left, right, top, bottom) = (LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM);
    let (x, y) = scales(panel, (left, right, top, bottom));
    put!(out, "<g transform=\"translate(0 {offset})\">");
    put!(out, "<text class=\"title\" x=\"{left}\" y=\"18\">{}</text>", escape(&panel.title));
    for tick in x.ticks() {
        if let Some(px) = x.pixel(tick) {
            put!(out, "<path class=\"grid\" d=\"M{px:.1} {top}V{bottom}\"/>");
            put!(out, "<text x=\"{px:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>", bottom + 16.0, label(tick));
        }
    }
    for tick in y.ticks() {
        if let Some(py) = y.pixel(tick) {
            put!(out, "<path class=\"grid\" d=\"M{left} {py:.1}H{right}\"/>");
            put!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", left - 6.0, py + 4.0, label(tick));
        }
    }
    put!(out, "<path class=\"axis\" fill=\"none\" d=\"M{left} {top}V{bottom}H{right}\"/>");
    let middle = (left + right) / 2.0;
    put!(out, "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>", bottom + 35.0, escape(&panel.x.label));
    let (ty, label_y) = ((top + bottom) / 2.0, escape(&panel.y.label));
    put!(out, "<text transform=\"translate(14 {ty}) rotate(-90)\" text-anchor=\"middle\">{label_y}</text>");
    for (name, level) in &panel.levels {
        if let Some(py) = y.pixel(*level) {
            put!(out, "<path class=\"level\" d=\"M{left} {py:.1}H{right}\"/>");
            put!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>", right - 4.0, py - 4.0, escape(name));
        }
    }
    let mut named = 0;
    for (i, series) in panel.series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        points(out, series, colour, &x, &y);
        if !series.name.is_empty() && named < LEGEND {
            let row = top + 8.0 + 16.0 * named as f64;
            put!(out, "<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"4\" fill=\"{colour}\"/>", right + 10.0, row - 2.0);
            put!(out, "<text x=\"{}\" y=\"{}\">{}</text>", right + 27.0, row + 4.0, escape(&series.name));
            named += 1;
        }
    }
    put!(out, "</g>");
}

fn points(out: &mut String, series: &Series, colour: &str, x: &Scale, y: &Scale) {
    let pixels = series.points.iter().map(|&(a, b)| Some((x.pixel(a)?, y.pixel(b)?)));
    match series.style {
        Style::Line | Style::Steps => {
            let (class, steps) = if series.style == Style::Line { ("line", false) } else { ("steps", true) };
            let (mut path, mut pen_down) = (String::new(), false);
            for point in pixels {
                // A point left out lifts the pen.
                let Some((px, py)) = point else {
                    pen_down = false;
                    continue;
                };
                let _infallible = match (pen_down, steps) {
                    (false, _) => write!(path, "M{px:.1} {py:.1}"),
                    (true, false) => write!(path, "L{px:.1} {py:.1}"),
                    (true, true) => write!(path, "H{px:.1}V{py:.1}"),
                };
                pen_down = true;
            }
            if !path.is_empty() {
                put!(out, "<path class=\"{class}\" stroke=\"{colour}\" d=\"{path}\"/>");
            }
        }
        Style::Dots => {
            for (px, py) in pixels.flatten() {
                put!(out, "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"1.8\" fill=\"{colour}\"/>");
            }
        }
        Style::Crosses => {
            let mut path = String::new();
            for (px, py) in pixels.flatten() {
                let (l, t) = (px - 3.5, py - 3.5);
                let _infallible = write!(path, "M{l:.1} {t:.1}l7 7m0-7l-7 7");
            }
            if !path.is_empty() {
                put!(out, "<path class=\"cross\" stroke=\"{colour}\" d=\"{path}\"/>");
            }
        }
    }
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            // XML has no control characters.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
