//! Connection management between two hosts of the lab: messages that rxe's hosts exchanged, with other numbers in them.

use std::{fs::File, io::BufReader, path::Path, thread, time::Duration};

use anyhow::{Context, Result, bail};
use pcap_file::pcap::PcapReader;
use roce_common::{
    psn::Psn,
    units::Qpn,
    wire::{Bth, Deth, Opcode, Verdict, emit, parse},
};

use crate::{forge::Forger, lab::HostPort};

/// Where in a MAD the message begins.
const BODY: usize = 24;
/// A frame with a MAD is shorter.
const BUFFER: usize = 512;
/// A message takes less than this.
const TRAVEL: Duration = Duration::from_millis(20);
/// The Q_Key of QP1.
const GSI_QKEY: u32 = 0x8001_0000;

/// What a connection is made with. The numbers of the two sides: who asks, and who answers.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Communication IDs.
    pub ids: [u32; 2],
    /// Queue pairs.
    pub qpns: [u32; 2],
    /// Starting PSNs.
    pub psns: [u32; 2],
    /// How often the peer may repeat after RNR NAKs, 0 to 7.
    pub rnr_retries: [u8; 2],
    /// Path MTU in bytes, one of the five.
    pub pmtu: u16,
    /// Exponent of the ACK timeout.
    pub ack_timeout: u8,
    /// Retries, 0 to 7.
    pub retries: u8,
}

/// Two hosts that manage a connection.
#[derive(Debug)]
pub struct Management {
    /// From who asks, and from who answers.
    sides: [Forger; 2],
    /// REQ, REP, RTU, DREQ and DREP as rxe sent them.
    messages: Vec<Vec<u8>>,
    terms: Terms,
}

impl Management {
    /// Nothing is sent yet.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn new(asks: &HostPort, answers: &HostPort, terms: Terms) -> Result<Self> {
        let forger = |from: &HostPort, to: &HostPort| -> Result<Forger> {
            let mut forger = Forger::new(from, to.address(false))?;
            forger.path.tos = 0;
            Ok(forger)
        };
        Ok(Self { sides: [forger(asks, answers)?, forger(answers, asks)?], messages: recorded()?, terms })
    }

    /// Asks.
    ///
    /// # Errors
    /// The path MTU is none, or the message no frame.
    pub fn request(&self) -> Result<()> {
        let t = &self.terms;
        let Some(code) = (1..=5u8).find(|code| 128 << code == t.pmtu) else { bail!("{} is no path MTU", t.pmtu) };
        let mut mad = self.messages[0].clone();
        let body = &mut mad[BODY..];
        put(body, 0, t.ids[0]);
        put24(body, 32, t.qpns[0]);
        put24(body, 44, t.psns[0]);
        body[47] = body[47] & !7 | t.retries;
        body[50] = code << 4 | body[50] & 8 | t.rnr_retries[0];
        body[95] = t.ack_timeout << 3 | body[95] & 7;
        self.send(0, &mad)
    }

    /// Grants.
    ///
    /// # Errors
    /// See [`Management::request`].
    pub fn reply(&self) -> Result<()> {
        let t = &self.terms;
        let mut mad = self.messages[1].clone();
        let body = &mut mad[BODY..];
        put(body, 0, t.ids[1]);
        put(body, 4, t.ids[0]);
        put24(body, 12, t.qpns[1]);
        put24(body, 20, t.psns[1]);
        body[27] = body[27] & 0x1f | t.rnr_retries[1] << 5;
        self.send(1, &mad)
    }

    /// Says that it is ready.
    ///
    /// # Errors
    /// See [`Management::request`].
    pub fn ready(&self) -> Result<()> {
        self.asker_says(2)
    }

    /// Asks, grants, and says that it is ready.
    ///
    /// # Errors
    /// See [`Management::request`].
    pub fn connect(&self) -> Result<()> {
        self.request()?;
        self.reply()?;
        self.ready()
    }

    /// Refuses, for this reason.
    ///
    /// # Errors
    /// See [`Management::request`].
    pub fn reject(&self, reason: u16) -> Result<()> {
        // Its head is that of a DREP; none was recorded.
        let mut mad = self.messages[4].clone();
        mad[16..18].copy_from_slice(&[0, 0x12]);
        let body = &mut mad[BODY..];
        put(body, 0, 0);
        put(body, 4, self.terms.ids[0]);
        put(body, 8, reason.into());
        self.send(1, &mad)
    }

    /// Who asked ends it, and the other agrees.
    ///
    /// # Errors
    /// See [`Management::request`].
    pub fn disconnect(&self) -> Result<()> {
        self.asker_says(3)?;
        let mut mad = self.messages[4].clone();
        put(&mut mad[BODY..], 0, self.terms.ids[1]);
        put(&mut mad[BODY..], 4, self.terms.ids[0]);
        self.send(1, &mad)
    }

    /// An RTU or a DREQ.
    fn asker_says(&self, message: usize) -> Result<()> {
        let mut mad = self.messages[message].clone();
        let body = &mut mad[BODY..];
        put(body, 0, self.terms.ids[0]);
        put(body, 4, self.terms.ids[1]);
        if message == 3 {
            put24(body, 8, self.terms.qpns[1]);
        }
        self.send(0, &mad)
    }

    fn send(&self, side: usize, mad: &[u8]) -> Result<()> {
        let forger = &self.sides[side];
        let ext = emit::Ext { deth: Some(Deth { qkey: GSI_QKEY, src_qp: Qpn::GSI }), ..emit::Ext::default() };
        let bth = Bth::new(Opcode::UD_SEND_ONLY, Qpn::GSI, Psn::new(0));
        let mut frame = [0; BUFFER];
        let n = emit::frame(&forger.path, &bth, &ext, mad, &mut frame).context("a MAD makes a frame")?;
        forger.send(&frame[..n]);
        // It arrives before the answer to it leaves.
        thread::sleep(TRAVEL);
        Ok(())
    }
}

/// The MADs of `rxe-cm-rping.pcap`, which are the five messages in their order.
fn recorded() -> Result<Vec<Vec<u8>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures/rxe-cm-rping.pcap");
    let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut reader = PcapReader::new(BufReader::new(file))?;
    let mut mads = Vec::new();
    while let Some(frame) = reader.next_packet() {
        let frame = frame?.data;
        if let Verdict::Roce(packet) = parse(&frame[..])
            && packet.bth.dest_qp == Qpn::GSI
        {
            let at = packet.payload_offset();
            mads.push(frame[at..at + usize::from(packet.payload_len)].to_vec());
        }
    }
    let attributes: Vec<u8> = mads.iter().map(|mad| mad[17]).collect();
    if attributes != [0x10, 0x13, 0x14, 0x15, 0x16] {
        bail!("{} has the messages {attributes:x?}", path.display());
    }
    Ok(mads)
}

fn put(body: &mut [u8], at: usize, value: u32) {
    body[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn put24(body: &mut [u8], at: usize, value: u32) {
    body[at..at + 3].copy_from_slice(&value.to_be_bytes()[1..]);
}
