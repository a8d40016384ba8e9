//! Attaching to an interface, all or nothing.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use aya::{
    Ebpf,
    programs::{
        LinkOrder, ProgramError, SchedClassifier, TcAttachType, Xdp, XdpError, XdpMode,
        links::{FdLink, LinkError, PinnedLink},
        tc::{SchedClassifierLink, TcAttachOptions},
    },
    util::KernelVersion,
};
use roce_common::abi::{CAPTURE_RING_BYTES, CAPTURE_RING_UNUSED, Config, Flags, IngressMode};

use super::{
    Instance, Maps, Object, Pins, detach,
    detach::Removed,
    environment,
    pins::{LINK_TC_EGRESS, LINK_TC_INGRESS, LINK_XDP},
};
use crate::netlink::{LinkInfo, Netlink};

/// TCX, which orders programs and whose links can be pinned, came with Linux 6.6.
const TCX_SINCE: KernelVersion = KernelVersion::new(6, 6, 0);

/// What to attach and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// The interface.
    pub link: LinkInfo,
    /// Where the BPF filesystem is mounted.
    pub bpffs: PathBuf,
    /// Which hook tracks the ingress tap.
    pub ingress: IngressMode,
    /// The configuration; its ingress and readiness flags are set here.
    pub config: Config,
}

/// Programs attached to an interface. Detaches everything when dropped, unless told to [`Attachment::keep`] it.
pub struct Attachment {
    /// The maps.
    pub maps: Maps,
    /// aya's handle of the object: ring buffers and the HTB filter are taken from it.
    pub ebpf: Ebpf,
    /// What an earlier agent had left, already removed.
    pub stale: Option<Removed>,
    /// How the tc programs are attached: `tcx` or `clsact`.
    pub tc_hook: &'static str,
    ifindex: u32,
    pins: Pins,
    unpinned: Vec<SchedClassifierLink>,
    keep: bool,
    _instance: Instance,
}

impl Attachment {
    /// Leaves programs, maps and pins in place when this process ends.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Detaches and reports what could not be removed.
    ///
    /// # Errors
    /// When a pin cannot be removed.
    pub fn detach(mut self) -> Result<()> {
        self.unpinned.clear();
        self.keep = true;
        detach::remove_clsact(&self.pins, self.ifindex)?;
        self.pins.remove().map(drop)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if self.keep {
            // A filter that is dropped is detached.
            self.unpinned.drain(..).for_each(std::mem::forget);
        } else {
            self.unpinned.clear();
            let gone = detach::remove_clsact(&self.pins, self.ifindex);
            if let Err(error) = gone.and_then(|()| self.pins.remove().map(drop)) {
                log::error!("{error:#}");
            }
        }
    }
}

/// Removes the pins of an attachment that did not become whole, and its clsact.
struct Unwind<'a>(Option<&'a Pins>, u32);

impl Drop for Unwind<'_> {
    fn drop(&mut self) {
        if let Some(pins) = self.0
            && let Err(error) = detach::remove_clsact(pins, self.1).and_then(|()| pins.remove())
        {
            log::error!("{error:#}");
        }
    }
}

/// Loads the programs and attaches them: egress first, since it takes what ingress sends; it stands first in its hook.
///
/// # Errors
/// What is missing, in the way or refused; nothing stays attached then.
pub fn attach(options: &Options) -> Result<Attachment> {
    let link = &options.link;
    environment::check(&options.bpffs)?;
    Pins::refuse_other_versions(&options.bpffs)?;
    let instance = Instance::take(&link.name, link.index)?;
    let stale = detach::detach_stale(&options.bpffs, link.index)?;
    if options.ingress != IngressMode::Tc {
        refuse_foreign_xdp(link, stale.is_some())?;
    }

    let captures = options.config.capture_bytes != 0;
    let capture_ring = if captures { CAPTURE_RING_BYTES } else { CAPTURE_RING_UNUSED };
    let mut object = Object::load_with(capture_ring, options.ingress != IngressMode::Tc)?;
    let pins = Pins::of(&options.bpffs, link.index)?;
    let mut unwind = Unwind(Some(&pins), link.index);
    pins.create()?;
    object.pin_maps(&pins)?;
    let mut maps = Maps::take(&mut object.ebpf)?;
    let mut config = options.config;
    config.ifindex = link.index;
    config.flags &= !(Flags::EGRESS_READY | Flags::TC_INGRESS);
    if options.ingress == IngressMode::Tc {
        config.flags |= Flags::TC_INGRESS;
    }
    maps.set_config(config)?;

    let tcx = KernelVersion::current().context("cannot tell the kernel's version")? >= TCX_SINCE;
    if !tcx {
        make_clsact(link, &pins)?;
    }
    let mut unpinned = Vec::new();
    attach_tc(&mut object, "roce_tc_egress", link, TcAttachType::Egress, tcx, &pins, LINK_TC_EGRESS, &mut unpinned)?;
    config.flags |= Flags::EGRESS_READY;
    maps.set_config(config)?;
    attach_tc(&mut object, "roce_tc_ingress", link, TcAttachType::Ingress, tcx, &pins, LINK_TC_INGRESS, &mut unpinned)?;
    match options.ingress {
        IngressMode::Xdp => attach_xdp(object.xdp("roce_xdp")?, link, XdpMode::Driver, &pins)?,
        IngressMode::XdpGeneric => attach_xdp(object.xdp("roce_xdp")?, link, XdpMode::Skb, &pins)?,
        IngressMode::Tc => {}
    }
    unwind.0 = None;
    drop(unwind);
    Ok(Attachment {
        maps,
        ebpf: object.ebpf,
        stale,
        tc_hook: if tcx { "tcx" } else { "clsact" },
        ifindex: link.index,
        pins,
        unpinned,
        keep: false,
        _instance: instance,
    })
}

/// An XDP program that is not ours stays: one interface has room for one.
fn refuse_foreign_xdp(link: &LinkInfo, detached_ours: bool) -> Result<()> {
    let now = if detached_ours { crate::netlink::require_link(&link.name)?.xdp_prog } else { link.xdp_prog };
    match now {
        Some(id) => bail!(
            "{}: another XDP program (id {id}) is attached and is not replaced: use --ingress tc, or detach it first",
            link.name
        ),
        None => Ok(()),
    }
}

/// Before TCX the tc programs are filters of a clsact qdisc: somebody's, or ours, which then goes with us.
fn make_clsact(link: &LinkInfo, pins: &Pins) -> Result<()> {
    let name = &link.name;
    match Netlink::open()?.hook_qdisc(link.index)?.as_deref() {
        None => {
            aya::programs::tc::qdisc_add_clsact(name)
                .map_err(|e| anyhow!("{name}: cannot add the clsact qdisc: {}", innermost(&e)))?;
            pins.note_clsact()
        }
        Some("clsact") => Ok(()),
        // It takes an egress program without a word, and runs it on ingress.
        Some(kind) => bail!(
            "{name}: its {kind} qdisc has no egress hook, and this kernel has no other (Linux 6.6 has): replace it by clsact (tc qdisc del dev {name} {kind}; tc qdisc add dev {name} clsact)"
        ),
    }
}

#[expect(clippy::too_many_arguments, reason = "a local helper of one function")]
fn attach_tc(
    object: &mut Object,
    program: &str,
    link: &LinkInfo,
    hook: TcAttachType,
    tcx: bool,
    pins: &Pins,
    pin: &str,
    unpinned: &mut Vec<SchedClassifierLink>,
) -> Result<()> {
    let name = &link.name;
    let prog: &mut SchedClassifier = object.tc(program)?;
    let options = if tcx {
        TcAttachOptions::TcxOrder(LinkOrder::first())
    } else {
        TcAttachOptions::Netlink(aya::programs::tc::NlOptions::default())
    };
    let id = prog
        .attach_with_options(name, hook, options)
        .map_err(|e| anyhow!("{name}: cannot attach {program}: {}", innermost(&e)))?;
    let attached = prog.take_link(id).with_context(|| format!("{name}: cannot keep {program} attached"))?;
    if tcx {
        let fd: FdLink = attached.try_into().map_err(|e: LinkError| anyhow!("{name}: {program}: {e}"))?;
        pin_link(fd, &pins.path(pin))?;
    } else {
        unpinned.push(attached);
    }
    Ok(())
}

fn attach_xdp(xdp: &mut Xdp, link: &LinkInfo, mode: XdpMode, pins: &Pins) -> Result<()> {
    let name = &link.name;
    let id = xdp.attach_to_if_index(link.index, mode).map_err(|e| xdp_error(name, mode, &e))?;
    let attached = xdp.take_link(id).with_context(|| format!("{name}: cannot keep roce_xdp attached"))?;
    let fd: FdLink = attached.try_into().map_err(|e: LinkError| anyhow!("{name}: roce_xdp: {e}"))?;
    pin_link(fd, &pins.path(LINK_XDP))
}

fn pin_link(link: FdLink, path: &Path) -> Result<()> {
    let pinned: PinnedLink = link.pin(path).with_context(|| format!("cannot pin {}", path.display()))?;
    drop(pinned);
    Ok(())
}

fn xdp_error(name: &str, mode: XdpMode, error: &ProgramError) -> anyhow::Error {
    let errno = match error {
        ProgramError::XdpError(XdpError::NetlinkError(_)) => None,
        ProgramError::SyscallError(e) => e.io_error.raw_os_error(),
        _ => None,
    };
    match (errno, mode) {
        (Some(libc::EBUSY | libc::EEXIST), _) => {
            anyhow!("{name}: another XDP program is attached and is not replaced: use --ingress tc, or detach it first")
        }
        (Some(libc::EOPNOTSUPP | libc::ERANGE | libc::EINVAL), XdpMode::Driver) => anyhow!(
            "{name}: its driver has no native XDP for this configuration ({}): use --ingress xdp-generic or --ingress tc",
            innermost(error)
        ),
        _ => anyhow!("{name}: cannot attach roce_xdp: {}", innermost(error)),
    }
}

/// The cause that names what the kernel said.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut at = error;
    while let Some(source) = at.source() {
        at = source;
    }
    at.to_string()
}
