//! The messages of RDMA netlink. Behind the netlink header attributes follow at once.

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable as _, NetlinkDeserializable, NetlinkHeader, NetlinkPayload, NetlinkSerializable,
    NlaBuffer, NlasIterator,
};
use roce_common::{psn::Psn, units::Qpn};

use super::{Owner, QpState, QpType, QueuePair};

// Of rdma/rdma_netlink.h.
const RDMA_NL_NLDEV: u16 = 5;
const CLIENT_SHIFT: u16 = 10;
const OP_MASK: u16 = (1 << CLIENT_SHIFT) - 1;
const CMD_GET: u16 = 1;
const CMD_PORT_GET: u16 = 5;
const CMD_RES_QP_GET: u16 = 10;
const ATTR_DEV_INDEX: u16 = 1;
const ATTR_DEV_NAME: u16 = 2;
const ATTR_PORT_STATE: u16 = 12;
const ATTR_RES_QP: u16 = 19;
const ATTR_RES_QP_ENTRY: u16 = 20;
const ATTR_RES_LQPN: u16 = 21;
const ATTR_RES_RQPN: u16 = 22;
const ATTR_RES_RQ_PSN: u16 = 23;
const ATTR_RES_SQ_PSN: u16 = 24;
const ATTR_RES_TYPE: u16 = 26;
const ATTR_RES_STATE: u16 = 27;
const ATTR_RES_PID: u16 = 28;
const ATTR_RES_KERN_NAME: u16 = 29;
const ATTR_NDEV_INDEX: u16 = 50;

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Command {
    /// The devices.
    Devices,
    /// The ports of one.
    Ports,
    /// The queue pairs of one.
    QueuePairs,
}

impl Command {
    const fn number(self) -> u16 {
        let op = match self {
            Self::Devices => CMD_GET,
            Self::Ports => CMD_PORT_GET,
            Self::QueuePairs => CMD_RES_QP_GET,
        };
        RDMA_NL_NLDEV << CLIENT_SHIFT | op
    }
}

/// What the kernel answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    Device { index: u32, name: String },
    Port { device: u32, ifindex: Option<u32> },
    QueuePairs { device: u32, qps: Vec<QueuePair> },
}

/// A message, either way.
#[derive(Debug)]
pub(super) struct RdmaMessage {
    kind: u16,
    request: Vec<DefaultNla>,
    answer: Option<Answer>,
}

impl RdmaMessage {
    /// A request, of one device where there is one.
    pub(super) fn request(command: Command, device: Option<u32>) -> Self {
        let request =
            device.map(|index| DefaultNla::new(ATTR_DEV_INDEX, index.to_ne_bytes().to_vec())).into_iter().collect();
        Self { kind: command.number(), request, answer: None }
    }

    /// What it says, where it is an answer that is of interest here.
    pub(super) fn into_answer(self) -> Option<Answer> {
        self.answer
    }
}

impl NetlinkSerializable for RdmaMessage {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.request.as_slice().buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        self.request.as_slice().emit(buffer);
    }
}

impl NetlinkDeserializable for RdmaMessage {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let kind = header.message_type;
        Ok(Self { kind, request: Vec::new(), answer: parse(kind, payload)? })
    }
}

impl From<RdmaMessage> for NetlinkPayload<RdmaMessage> {
    fn from(message: RdmaMessage) -> Self {
        Self::InnerMessage(message)
    }
}

/// Parses the attributes of an answer; `None` for one that says nothing of interest.
///
/// # Errors
/// Attributes that do not fit into what encloses them, or a number of another size than the kernel gives it.
pub(super) fn parse(kind: u16, payload: &[u8]) -> Result<Option<Answer>, DecodeError> {
    if kind >> CLIENT_SHIFT != RDMA_NL_NLDEV {
        return Ok(None);
    }
    let (mut index, mut name, mut ifindex, mut qps, mut is_port) = (None, None, None, Vec::new(), false);
    for attribute in NlasIterator::new(payload) {
        let attribute = attribute?;
        match attribute.kind() {
            ATTR_DEV_INDEX => index = Some(number(&attribute)?),
            ATTR_DEV_NAME => name = Some(text(&attribute)),
            ATTR_PORT_STATE => is_port = true,
            ATTR_NDEV_INDEX => ifindex = Some(number(&attribute)?),
            ATTR_RES_QP => {
                for entry in NlasIterator::new(attribute.value()) {
                    let entry = entry?;
                    if entry.kind() == ATTR_RES_QP_ENTRY {
                        qps.extend(queue_pair(entry.value())?);
                    }
                }
            }
            _ => {}
        }
    }
    let Some(device) = index else { return Ok(None) };
    Ok(match kind & OP_MASK {
        // The answer about a single port has the type of one about a device (`nldev_port_get_doit`).
        CMD_GET | CMD_PORT_GET if is_port => Some(Answer::Port { device, ifindex }),
        CMD_GET => name.map(|name| Answer::Device { index: device, name }),
        CMD_RES_QP_GET => Some(Answer::QueuePairs { device, qps }),
        _ => None,
    })
}

/// A queue pair; `None` where number, type or state is missing.
fn queue_pair(entry: &[u8]) -> Result<Option<QueuePair>, DecodeError> {
    let (mut lqpn, mut rqpn, mut rq_psn, mut sq_psn) = (None, None, None, None);
    let (mut qp_type, mut state, mut owner) = (None, None, Owner::Unknown);
    for attribute in NlasIterator::new(entry) {
        let attribute = attribute?;
        match attribute.kind() {
            ATTR_RES_LQPN => lqpn = Some(number(&attribute)?),
            ATTR_RES_RQPN => rqpn = Some(number(&attribute)?),
            ATTR_RES_RQ_PSN => rq_psn = Some(number(&attribute)?),
            ATTR_RES_SQ_PSN => sq_psn = Some(number(&attribute)?),
            ATTR_RES_TYPE => qp_type = Some(QpType::from_number(byte(&attribute)?)),
            ATTR_RES_STATE => state = Some(QpState::from_number(byte(&attribute)?)),
            ATTR_RES_PID => owner = Owner::Process(number(&attribute)?),
            ATTR_RES_KERN_NAME => owner = Owner::Kernel(text(&attribute)),
            _ => {}
        }
    }
    let (Some(lqpn), Some(qp_type), Some(state)) = (lqpn, qp_type, state) else { return Ok(None) };
    Ok(Some(QueuePair {
        lqpn: Qpn::new(lqpn),
        rqpn: rqpn.map(Qpn::new),
        qp_type,
        state,
        rq_psn: rq_psn.map(Psn::new),
        sq_psn: sq_psn.map(Psn::new),
        owner,
    }))
}

fn wrong_size(attribute: &NlaBuffer<&[u8]>, want: usize) -> DecodeError {
    format!("attribute {} has {} bytes instead of {want}", attribute.kind(), attribute.value_length()).into()
}

fn number(attribute: &NlaBuffer<&[u8]>) -> Result<u32, DecodeError> {
    attribute.value().try_into().map(u32::from_ne_bytes).map_err(|_| wrong_size(attribute, 4))
}

fn byte(attribute: &NlaBuffer<&[u8]>) -> Result<u8, DecodeError> {
    match attribute.value() {
        [byte] => Ok(*byte),
        _ => Err(wrong_size(attribute, 1)),
    }
}

/// A string, up to its final zero.
fn text(attribute: &NlaBuffer<&[u8]>) -> String {
    let bytes = attribute.value().split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}
