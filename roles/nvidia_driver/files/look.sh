# Prints what decides about GPU software on a machine, one fact per line, and changes nothing. Needs no root.
# $1: folder in which the kernel lists PCI devices. $2: a folder instead of /, for tests.
pci=${1:-/sys/bus/pci/devices} root=${2:-}
. "$root/etc/os-release"
echo "release $ID ${VERSION_CODENAME:-}"
kernel=$(uname -r)
echo "kernel $kernel"
echo "cpu $(sed -n '/^flags/{s/.*: //p;q}' "$root/proc/cpuinfo")"
# PCI class 03 is a display or 3D controller, 0680 an NVSwitch.
for device in "$pci"/*; do
  read -r vendor < "$device/vendor" || continue
  read -r class < "$device/class" || continue
  read -r id < "$device/device" || continue
  case "$vendor $class" in
    "0x10de 0x03"*) echo "gpu ${id#0x}" ;;
    "0x10de 0x0680"*) echo "switch ${id#0x}" ;;
  esac
done 2> /dev/null
# Without a driver that works, nvidia-smi prints an error instead.
if version=$(cat "$root/sys/module/nvidia/version" 2> /dev/null); then
  echo "loaded $version"
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | sed -n 's/^[0-9.]*$/capability &/p'
fi
grep -q '^nouveau ' "$root/proc/modules" && echo nouveau
# The fifth byte of the variable.
secure=$(od -An -t u1 -j 4 -N 1 "$root"/sys/firmware/efi/efivars/SecureBoot-* 2> /dev/null)
if [ "${secure:-0}" -eq 1 ]; then
  enrolled=no
  # Keys with which DKMS signs modules on Debian and on Ubuntu.
  for key in "$root/var/lib/dkms/mok.pub" "$root/var/lib/shim-signed/mok/MOK.der"; do
    mokutil --test-key "$key" 2> /dev/null | grep -q 'already enrolled' && enrolled=yes
  done
  echo "secureboot $enrolled"
fi
# A machine without package lists cannot say whether there are headers.
if [ -e "$root/lib/modules/$kernel/build" ]; then
  echo "headers installed"
elif apt-cache show "linux-headers-$kernel" > /dev/null 2>&1; then
  echo "headers available"
elif apt-cache show libc6 > /dev/null 2>&1; then
  echo "headers missing"
fi
apt-mark showhold 2> /dev/null | grep -E '^(nvidia|libnvidia|libcuda|cuda-driver|linux-headers)' | sed 's/^/held /'
exit 0
