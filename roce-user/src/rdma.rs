//! Which RDMA devices stand on an interface.

use std::{fs, path::Path};

const CLASS: &str = "/sys/class/infiniband";

/// RDMA devices on an interface.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Devices {
    /// Soft-RoCE devices: their packets pass the kernel's hooks.
    pub soft: Vec<String>,
    /// Hardware devices: their packets bypass the kernel, so XDP and tc never see them.
    pub hardware: Vec<String>,
}

/// The RDMA devices of the interface `name`.
pub fn devices(name: &str) -> Devices {
    devices_in(Path::new(CLASS), name)
}

fn devices_in(class: &Path, name: &str) -> Devices {
    let mut found = Devices::default();
    let Ok(entries) = fs::read_dir(class) else { return found };
    for entry in entries.flatten() {
        let path = entry.path();
        let device = entry.file_name().to_string_lossy().into_owned();
        // rxe and siw name their interface in `parent`; hardware has a PCI device instead.
        match fs::read_to_string(path.join("parent")) {
            Ok(parent) if parent.trim() == name => found.soft.push(device),
            Ok(_) => {}
            Err(_) if names_interface(&path, name) => found.hardware.push(device),
            Err(_) => {}
        }
    }
    found.soft.sort();
    found.hardware.sort();
    found
}

/// Whether a GID of any port of the device belongs to the interface.
fn names_interface(device: &Path, name: &str) -> bool {
    let Ok(ports) = fs::read_dir(device.join("ports")) else { return false };
    ports.flatten().any(|port| {
        fs::read_dir(port.path().join("gid_attrs/ndevs"))
            .is_ok_and(|gids| gids.flatten().any(|gid| fs::read_to_string(gid.path()).is_ok_and(|n| n.trim() == name)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_and_hardware_devices_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        file("rxe0/parent", "eth0\n");
        file("rxe1/parent", "eth1\n");
        file("mlx5_0/ports/1/gid_attrs/ndevs/0", "eth0\n");
        let found = devices_in(dir.path(), "eth0");
        assert_eq!(found.soft, ["rxe0"]);
        assert_eq!(found.hardware, ["mlx5_0"]);
        assert_eq!(devices_in(&dir.path().join("none"), "eth0"), Devices::default());
    }
}
